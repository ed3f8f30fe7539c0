"""Clients that give up, replicas that die, drain and restart: small cases worked out by hand, and queues of known answer.

A step takes 1 s in all that follows, a block has 4 tokens, and a prompt of 4 tokens with n output tokens takes n s alone.
"""

from __future__ import annotations

from math import exp, isnan
from typing import Any

import numpy as np
import pytest
from failing_runs import event, run
from scripted import NEXT_TURN, TURN, Keep
from serving_runs import Witness, tables, workload
from test_routing_failures import decisions
from test_workers import programs

from simcore.errors import ConfigError, PolicyError
from simcore.models.decision_points import ReplicaRouting
from simcore.models.engine import EngineSettings
from simcore.models.facts import TurnEnded
from simcore.models.failures import Clients, check_events
from simcore.models.serving import Deployment, Policies, RunResult, serve
from simcore.policies.admission.fcfs import Fcfs
from simcore.policies.replica_routing.least_loaded import LeastLoaded
from simcore.policies.replica_routing.round_robin import RoundRobin
from simcore.policies.retention.lru import Lru
from simcore.randomness import generator
from simcore.traces.workload import Source, build


def at(time: float, output: int = 5, prompt: int = 4, **more: Any) -> dict[str, Any]:
    return {"at": time, "prompt": prompt, "output": output, **more}


def play(rows: list[dict[str, Any]], **options: Any) -> RunResult:
    return run(workload(rows), **options)


def ends(result: RunResult) -> list[tuple[str, int, float]]:
    """(status, attempts, end) of each request."""
    table = result.requests
    return list(zip(table["status"], table["attempts"], table["ended"], strict=True))


# --- kills ----------------------------------------------------------------------------------------------------------


def test_a_killed_request_starts_again_when_its_replica_is_back() -> None:
    """Killed at 2.5; sent again at 3.5, when nobody is up; the replica is back at 5.5, and 5 steps later it ends."""
    result = play([at(0.0)], clients=Clients(retries=2), events=[event(at=2.5, kill=0, lasts=3.0)])
    assert ends(result) == [("finished", 2, 10.5)]
    row = result.requests.iloc[0]
    assert (row.arrival, row.ttft, row.e2e, row.cached_tokens) == (0.0, 6.5, 10.5, 0)
    summary = result.summary
    # 4 + 1 + 1 tokens were computed (the last of them never came), then 4 + 4.
    assert (summary["aborted_tokens"], summary["computed_tokens"]) == (6, 14)
    assert summary["availability"] == pytest.approx([1 - 3 / 10.5])
    assert (summary["retried"], summary["attempts"], summary["killed"], summary["failed"]) == (1, 2, 0, 0)
    assert decisions(result) == [
        (0.0, "replica_routing", 0, 0, "replica 0"), (2.5, "event", 0, -1, "killed for 3 s"),
        (2.5, "abort", 0, 0, "replica 0 was killed"), (5.5, "event", 0, -1, "up"),
        (5.5, "replica_routing", 0, 0, "replica 0"), (10.5, "retention", 0, 0, "lru")]


def test_a_killed_request_goes_to_another_replica() -> None:
    """Sent again at 3.5 to replica 1, beside the request there, which has 4 steps of 6 left."""
    result = play([at(0.0), at(1.5, 6)], replicas=2, clients=Clients(retries=1), events=[event(at=2.5, kill="replica0")])
    assert ends(result) == [("finished", 2, 8.5), ("finished", 1, 7.5)]
    assert result.requests["replica"].tolist() == [1, 1]
    assert result.summary["availability"] == pytest.approx([2.5 / 8.5, 1.0])


def test_without_a_retry_a_killed_request_has_failed_and_what_waits_for_it_is_cancelled() -> None:
    rows = [at(0.0, program=0), {"after": [0], "gap": 1.0, "prompt": 4, "output": 1, "program": 0, "turn": 1},
            {"after": [1], "gap": 1.0, "prompt": 4, "output": 1, "program": 0, "turn": 2}]
    result = play(rows, events=[event(at=2.5, kill=0, lasts=1.0)])
    assert ends(result) == [("failed", 1, 2.5), ("cancelled", 0, 2.5), ("cancelled", 0, 2.5)]
    assert result.requests["reason"].tolist() == [
        "replica 0 was killed", "waits for request 0, which failed", "waits for request 1, which was cancelled"]
    assert result.requests["generated_tokens"].tolist() == [2, 0, 0]
    assert (result.summary["killed"], result.summary["cancelled"], result.summary["failed"]) == (1, 2, 3)


def test_a_step_that_ends_at_the_very_time_of_a_kill_brings_nothing() -> None:
    result = play([at(0.0, 1)], events=[event(at=1.0, kill=0)])
    assert ends(result) == [("failed", 1, 1.0)] and len(result.step_ends[0]) == 0


def test_a_kill_takes_all_that_is_on_the_replica_and_its_cache() -> None:
    """One runs, one waits; the third comes after: it finds none of the prompt that the first one had computed."""
    rows = [at(0.0, 9, 8, ids=[1, 2]), at(0.5, 3), at(8.0, 1, 12, ids=[1, 2])]
    seen = Witness()
    result = play(rows, settings={"max_num_seqs": 1}, witness=seen, events=[event(at=3.5, kill=0, lasts=2.0)])
    assert ends(result) == [("failed", 1, 3.5), ("failed", 1, 3.5), ("finished", 1, 9.0)]
    assert result.requests["cached_tokens"].tolist()[2] == 0
    assert len(seen.schedulers) == 2


def test_a_killed_replica_keeps_its_number_and_its_steps_go_on() -> None:
    """Three tokens from the second engine: their times are found in the replica's steps, after those of the first."""
    result = play([at(0.0, 9), at(5.0, 3)], events=[event(at=2.5, kill=0, lasts=1.0)])
    assert result.token_times(1).tolist() == [6.0, 7.0, 8.0] and result.step_ends[0].tolist() == [1.0, 2.0, 6.0, 7.0, 8.0]


def test_a_kill_of_a_replica_that_is_down_says_anew_when_it_is_back() -> None:
    """Drained at 0 and down until 5, unless killed at 1 for 6 s."""
    drain = event(at=0.0, drain=0, lasts=5.0)
    assert ends(play([at(0.5, 1)], events=[drain])) == [("finished", 1, 6.0)]
    assert ends(play([at(0.5, 1)], events=[drain, event(at=1.0, kill=0, lasts=6.0)])) == [("finished", 1, 8.0)]
    assert ends(play([at(0.5, 1)], events=[drain, event(at=1.0, kill=0, lasts=1.0)])) == [("finished", 1, 3.0)]
    assert ends(play([at(0.5, 1)], events=[drain, event(at=1.0, kill=0)])) == [("failed", 1, 1.0)]


def test_what_waits_for_a_replica_fails_if_none_comes_back() -> None:
    rows = [at(3.0, program=0), {"after": [0], "gap": 1.0, "prompt": 4, "output": 1, "program": 0, "turn": 1}]
    result = play(rows, events=[event(at=1.0, kill=0)], clients=Clients(retries=5))
    assert ends(result) == [("failed", 1, 3.0), ("cancelled", 0, 3.0)]
    assert result.requests["reason"][0] == "no replica was up when the run ended"
    assert result.requests["replica"][0] == -1


def test_a_horizon_cuts_an_outage() -> None:
    """At 4 the first request waits for its retry, the second for a replica, the third has not come."""
    clients = Clients(retries=1, backoff=9.0)
    rows = [at(0.0), at(3.0), at(5.0)]
    result = play(rows, events=[event(at=2.0, kill=0, lasts=9.0)], clients=clients, horizon=4.0)
    assert result.requests["status"].tolist() == ["unfinished", "failed", "unfinished"]
    assert result.summary["availability"] == [0.5]


def test_a_request_on_its_way_to_a_replica_that_dies_is_lost() -> None:
    class Slow(RoundRobin):
        decision_seconds = 1.0

    for clients, expected in ((None, ("failed", 1, 1.0)), (Clients(retries=1), ("finished", 2, 4.0))):
        result = play([at(0.0, 1)], router=Slow, replicas=2, clients=clients, events=[event(at=0.5, kill=0)])
        assert ends(result) == [expected]  # sent again at 2, there at 3
    gone = play([at(0.0, 1)], router=Slow, clients=Clients(timeout=0.5))
    assert ends(gone) == [("timed_out", 1, 0.5)] and gone.summary["computed_tokens"] == 0


def test_policies_of_a_dead_engine_are_dead_and_the_router_hears_of_the_lost() -> None:
    made: list[Keep] = []

    class Hearing(LeastLoaded):
        observes = (TurnEnded,)
        heard: list[tuple[float, int, bool]] = []  # noqa: RUF012

        def observe(self, fact: Any) -> None:
            self.heard.append((fact.now, fact.request, fact.aborted))

    def keep() -> Keep:
        made.append(Keep())
        return made[-1]

    play([at(0.0), at(0.0, 1), at(5.0, 1)], retention=keep, router=Hearing, events=[event(at=2.5, kill=0, lasts=1.0)])
    assert [len([f for f in k.heard if isinstance(f, TurnEnded)]) for k in made] == [1, 1]
    assert Hearing.heard == [(1.0, 1, False), (2.5, 0, True), (6.0, 2, False)]


# --- clients that give up -------------------------------------------------------------------------------------------


def test_the_backoff_doubles_and_the_last_attempt_ends_the_request() -> None:
    """5 s of work and 3 s of patience: given up at 3, sent at 4, given up at 7, sent at 9, given up for good at 12."""
    result = play([at(0.0)], clients=Clients(timeout=3.0, retries=2))
    assert ends(result) == [("timed_out", 3, 12.0)]
    assert [(time, kind) for time, kind, *_ in decisions(result)] == [
        (0.0, "replica_routing"), (3.0, "abort"), (4.0, "replica_routing"), (7.0, "abort"), (9.0, "replica_routing"),
        (12.0, "abort")]
    assert result.requests["reason"][0] == "timeout: not ended after 3 s"
    # A batch under way at 3 brings a token at that very time: too late.
    assert result.requests["generated_tokens"][0] == 2 and result.token_times(0).tolist() == [10.0, 11.0]
    # 4 + 1 + 1 tokens an attempt; a prompt of one block is computed whole again.
    assert result.summary["aborted_tokens"] == result.summary["computed_tokens"] == 18


def test_a_retry_finds_what_the_attempt_before_it_left_in_the_cache() -> None:
    """Aborted at 2.5, after 9 + 1 + 1 tokens; sent again at 3.5, it finds two blocks, and has 1 + 1 + 1 to compute."""
    result = play([at(0.0, 3, 9)], clients=Clients(timeout=2.5, retries=1))
    assert ends(result) == [("timed_out", 2, 6.0)] and result.requests["cached_tokens"][0] == 8
    assert result.summary["aborted_tokens"] == 11 + 3


def test_no_token_in_time() -> None:
    """The second waits behind the first, which keeps the only place until 5; the first has had a token."""
    rows = [at(0.0), at(0.0)]
    clients = Clients(ttft_timeout=3.0)
    result = play(rows, settings={"max_num_seqs": 1}, clients=clients)
    assert ends(result) == [("finished", 1, 5.0), ("timed_out", 1, 3.0)]
    assert result.requests["reason"][1] == "ttft_timeout: no token after 3 s"
    patient = play(rows, settings={"max_num_seqs": 1}, clients=clients.model_copy(update={"retries": 1, "backoff": 1.5}))
    assert ends(patient) == [("finished", 1, 5.0), ("finished", 2, 10.0)]
    assert patient.requests["ttft"].tolist() == [1.0, 6.0]  # seen by the client: from its first attempt


def test_an_end_in_time_stops_the_clock() -> None:
    clients = Clients(timeout=5.5, ttft_timeout=1.5)
    assert ends(play([at(0.0), at(7.0)], clients=clients)) == [("finished", 1, 5.0), ("finished", 1, 12.0)]
    assert ends(play([at(0.0)], clients=Clients(timeout=5.0))) == [("timed_out", 1, 5.0)]


def test_an_abort_lets_those_who_wait_in_at_the_next_step() -> None:
    """The first holds 4 of 5 blocks until it is aborted at 2.5; the step under way ends at 3, then the second starts."""
    rows = [at(0.0, 8, 13), at(1.0, 1, 16)]
    result = play(rows, blocks=5, clients=Clients(timeout=2.5))
    assert ends(result) == [("timed_out", 1, 2.5), ("timed_out", 1, 3.5)]
    later = play([rows[0], rows[1] | {"at": 1.6}], blocks=5, clients=Clients(timeout=2.5))
    assert ends(later) == [("timed_out", 1, 2.5), ("finished", 1, 4.0)]


def test_an_idle_replica_looks_again_when_a_waiter_gives_up() -> None:
    """All blocks are pinned, so that nothing runs; the head gives up, and the small one behind it fits."""
    keep = Keep(until=50.0)
    rows = [TURN, at(2.0, 1, 16, program=1), at(3.5, 1, program=2)]
    result = run(workload(rows), blocks=4, retention=lambda: keep, clients=Clients(timeout=4.0))
    assert ends(result) == [("finished", 1, 1.0), ("timed_out", 1, 6.0), ("finished", 1, 7.0)]


def test_the_pin_of_its_program_goes_as_at_a_normal_end_and_retention_is_not_asked() -> None:
    keep = Keep(consumed="turn_end")
    result = run(workload([TURN, NEXT_TURN | {"output": 9}]), retention=lambda: keep, clients=Clients(timeout=3.5))
    assert ends(result) == [("finished", 1, 1.0), ("timed_out", 1, 6.5)]
    assert keep.dropped() == [(6.5, 0, "consumed")]
    assert [(f.now, f.request, f.service, f.aborted) for f in keep.heard if isinstance(f, TurnEnded)] == [
        (1.0, 0, 1.0, False), (6.5, 1, 3.5, True)]
    assert [answer for _, kind, *_, answer in decisions(result) if kind == "retention"] == ["pin until inf"]


def test_a_program_whose_client_gave_up_frees_its_worker() -> None:
    result = run(programs(2, 2, 1), clients=Clients(timeout=1.5))
    assert ends(result) == [
        ("timed_out", 1, 1.5), ("cancelled", 0, 1.5), ("timed_out", 1, 3.0), ("cancelled", 0, 3.0)]


def test_a_refused_request_is_not_sent_again() -> None:
    result = play([at(0.0, 1, 2000)], clients=Clients(retries=3))
    assert result.requests["status"].tolist() == ["refused"] and result.requests["attempts"].tolist() == [1]


def test_a_storm_of_retries_is_no_lack_of_progress() -> None:
    """4,000 steps without a token: every prompt takes 25 steps, and its client has the patience of 20."""
    result = play([at(25.0 * k, 1, 100) for k in range(160)], settings={"max_num_batched_tokens": 4},
                  clients=Clients(timeout=20.0))
    assert result.summary["timed_out"] == 160 and result.summary["total_output_tokens"] == 0


# --- drains and restarts ----------------------------------------------------------------------------------------------


def test_what_runs_on_a_draining_replica_goes_on_and_it_comes_back_cold() -> None:
    """Drains at 1 until its request ends at 5, is down until 7. The request of 2 waits at the router, and finds nothing."""
    rows = [at(0.0, 5, 8, ids=[1, 2]), at(2.0, 1, 12, ids=[1, 2])]
    result = play(rows, events=[event(at=1.0, drain=0, lasts=2.0)])
    assert ends(result) == [("finished", 1, 5.0), ("finished", 1, 8.0)]
    assert result.requests["cached_tokens"].tolist() == [0, 0]
    assert result.summary["availability"] == pytest.approx([1 - 6 / 8])
    assert [(time, answer) for time, kind, *_, answer in decisions(result) if kind == "event"] == [
        (1.0, "drains for 2 s"), (5.0, "down for 2 s"), (7.0, "up")]
    warm = play(rows, events=[event(at=9.0, drain=0)])
    assert warm.requests["cached_tokens"].tolist() == [0, 8]


def test_a_drained_replica_without_an_end_stays_away() -> None:
    result = play([at(0.0), *(at(1.0 + k, 1) for k in range(4))], replicas=2, events=[event(at=0.5, drain=0)])
    assert result.requests["replica"].tolist() == [0, 1, 1, 1, 1]
    assert result.summary["availability"] == pytest.approx([0.1, 1.0])


def test_a_drain_with_a_grace_period() -> None:
    """What has not ended three seconds after the drain began is killed."""
    events = [event(at=1.0, drain=0), event(at=4.0, kill=0, lasts=1.0)]
    result = play([at(0.0, 3), at(0.0, 9)], events=events, clients=Clients(retries=1))
    assert ends(result) == [("finished", 1, 3.0), ("finished", 2, 14.0)]


def test_a_rolling_restart_takes_one_replica_after_another() -> None:
    """Each drains until its request ends, is down for 2 s; the next begins when it is back."""
    result = play([at(0.0, 4), at(0.0, 10)], replicas=2, events=[event(at=1.0, rolling_restart={"down": 2.0})])
    assert [(time, replica, answer) for time, kind, replica, _, answer in decisions(result) if kind == "event"] == [
        (1.0, 0, "drains for 2 s"), (4.0, 0, "down for 2 s"), (6.0, 0, "up"), (6.0, 1, "drains for 2 s")]
    assert ends(result) == [("finished", 1, 4.0), ("finished", 1, 10.0)]


def test_rolling_restarts_wait_for_each_other_and_pass_over_who_is_down() -> None:
    rolls = [event(at=1.0, rolling_restart={"down": down}) for down in (1.0, 2.0)]
    events = [event(at=0.5, kill=1), *rolls]
    result = play([at(20.0, 1)], replicas=3, events=events)
    told = [(time, replica, answer) for time, kind, replica, _, answer in decisions(result) if kind == "event"]
    assert told == [
        (0.5, 1, "killed"), (1.0, 0, "drains for 1 s"), (1.0, 0, "down for 1 s"), (2.0, 0, "up"),
        (2.0, 1, "not drained: it is down"), (2.0, 2, "drains for 1 s"), (2.0, 2, "down for 1 s"), (3.0, 2, "up"),
        (3.0, 0, "drains for 2 s"), (3.0, 0, "down for 2 s"), (5.0, 0, "up"), (5.0, 1, "not drained: it is down"),
        (5.0, 2, "drains for 2 s"), (5.0, 2, "down for 2 s"), (7.0, 2, "up")]


def test_a_rolling_restart_goes_on_when_the_replica_it_waits_for_is_killed_for_good() -> None:
    events = [event(at=1.0, rolling_restart={"down": 1.0}), event(at=2.0, kill=0)]
    result = play([at(0.0, 9), at(0.0, 9)], replicas=2, events=events)
    told = [(time, replica, answer) for time, kind, replica, _, answer in decisions(result) if kind == "event"]
    assert told == [(1.0, 0, "drains for 1 s"), (2.0, 0, "killed"), (2.0, 1, "drains for 1 s")]


# --- what a run says, and what it refuses -----------------------------------------------------------------------------


def test_such_a_run_goes_step_by_step_and_says_why() -> None:
    result = run(workload([at(0.0)]), path="planned", clients=Clients(), events=[event(at=9.0, kill=0)], view_delay=1.0)
    assert result.speed["path"] == "step-by-step"
    assert [why.split(":")[0] for why in result.speed["why_not_planned"]] == ["clients", "events", "cluster.view_delay"]


@pytest.mark.parametrize(("events", "message"), [
    ([{"at": 1, "kill": 2}], r"events.0: kill: found 2: allowed: 0 .. 1 \(cluster.replicas\)"),
    ([{"at": 1, "kill": 0}, {"at": 5, "kill": 0}], r"events.1: it is killed at 1 s and away for good: found .another .*"),
    ([{"at": 5, "drain": 0}, {"at": 1, "kill": 0}], r"events.0: it is killed at 1 s and away for good: found 'another .*"),
    ([{"at": 1, "drain": 0}, {"at": 5, "drain": 0}], r"events.1: it is drained at 1 s and away for good: found 'another .*"),
    ([{"at": 1, "kill": 0, "for": 9}, {"at": 5, "drain": 0}], r"events.1: .* and away until 10 s at least: found 'ano.*"),
    ([{"at": 1, "drain": 0}, {"at": 1, "kill": 0}], r"events.1: .*: found 'another event of replica 0 at 1 s': allowed: .*"),
])
def test_events_that_cannot_be_are_refused(events: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(workload([at(0.0)]), replicas=2, events=[event(**keys) for keys in events])


def test_events_that_follow_each_other_are_none_of_these() -> None:
    roll = event(at=1, rolling_restart={"down": 1})
    check_events([event(at=2, kill=0), roll, event(at=1, kill=0, lasts=1), event(at=1, kill=1), roll], 2)
    check_events([event(at=1, drain=0), event(at=5, kill=0, lasts=1), event(at=6, drain=0)], 1)


def test_a_view_delay_that_is_none_and_real_execution_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster.view_delay: found nan"):
        run(workload([at(0.0)]), view_delay=float("nan"))
    with pytest.raises(ConfigError, match="batches that are run cannot be taken back"):
        run(workload([at(0.0)]), clients=Clients(), executor=lambda replica: None)


def test_an_answer_that_is_down_is_an_error() -> None:
    class First(ReplicaRouting):
        def route(self, turn: Any, replicas: Any, now: float) -> int:
            return 0

    with pytest.raises(PolicyError, match=r"First at t=2\.0+ s: route answered 0, which takes no requests; allowed: 1, 2"):
        run(workload([at(0.0), at(2.0)]), replicas=3, router=First, events=[event(at=1.0, kill=0)])


# --- queues of known answer -------------------------------------------------------------------------------------------


def exponential_server(n: int, load: float, seed: int, step: float = 0.05, **options: Any) -> RunResult:
    """M/M/1: Poisson arrivals; one request at a time; a service of Exp(1) seconds, in steps of `step` s."""
    random = generator(seed, "queue")
    arrival = np.cumsum(random.exponential(1 / load, n))
    tokens = np.maximum(1, np.round(random.exponential(1.0, n) / step)).astype(int)
    work = build(arrival=arrival, input_tokens=np.ones(n), output_tokens=tokens, source=Source("M/M/1"))
    replicas = options.pop("replicas", 1)
    deployment = Deployment(EngineSettings(max_num_seqs=1), replicas, 2000, 30000, tables(step))
    policies = Policies(lambda r: Fcfs(), lambda r, a: Lru(), options.pop("router", RoundRobin))
    return serve(work, deployment, policies, path="step-by-step", sample_every=1e9, **options)


def test_an_m_m_1_queue_with_impatient_clients() -> None:
    """Clients leave D after they came, served or not. The work in the system has the density f(w) = lambda p0
    exp(-(mu - lambda) w) for w < D (level crossings: what crosses D from below is cut off), so that a share of
    p0 exp(-(mu - lambda) D) is lost, with 1 / p0 = 1 + lambda (1 - exp(-(mu - lambda) D)) / (mu - lambda)."""
    load, patience, n = 0.8, 3.0, 4500
    result = exponential_server(n, load, 1, clients=Clients(timeout=patience))
    lost = (result.requests["status"] == "timed_out").to_numpy()
    decay = exp(-(1 - load) * patience)
    expected = decay / (1 + load * (1 - decay) / (1 - load))
    error = lost.reshape(30, -1).mean(axis=1).std(ddof=1) / np.sqrt(30)
    assert abs(lost.mean() - expected) < 4 * error, (lost.mean(), expected, error)
    assert abs(lost.mean() - exp(-(1 - load) * patience)) > 4 * error  # the null: P(sojourn > D) if nobody left
    assert result.requests["e2e"].max() < patience


def test_of_two_servers_one_is_left() -> None:
    """Two servers, one of which is dead from the start, are one; and that is an M/M/1 queue."""
    result = exponential_server(3000, 0.5, 2, replicas=2, router=LeastLoaded, events=[event(at=0.0, kill=0)])
    alone = exponential_server(3000, 0.5, 2)
    assert result.requests["e2e"].tolist() == alone.requests["e2e"].tolist()
    assert result.summary["availability"] == [0.0, 1.0]
    e2e = result.requests["e2e"].to_numpy()
    error = e2e.reshape(30, -1).mean(axis=1).std(ddof=1) / np.sqrt(30)
    assert abs(e2e.mean() - 1 / (1 - 0.5)) < 4 * error


def test_retries_bring_no_work_when_nobody_gives_up() -> None:
    result = exponential_server(300, 0.5, 3, clients=Clients(timeout=1e6, retries=9))
    assert result.summary["attempts"] == 300 and result.summary["aborted_tokens"] == 0
    assert not isnan(result.summary["availability"][0])
