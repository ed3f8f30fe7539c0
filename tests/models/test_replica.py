"""Replica and cluster on the clock: refusals, watchdog, horizon, cancelled dependents, overlap, order within an instant."""

from __future__ import annotations

from math import inf, isnan
from typing import Any

import pytest
from serving_runs import Witness, run, tables, workload

from simcore.errors import NoProgress
from simcore.models.batch import Batch
from simcore.models.decision_points import Admission, Pin, ReplicaRouting, Retention
from simcore.models.engine import EngineSettings
from simcore.models.executor import SimulatedExecutor
from simcore.models.facts import ProgramEnded, StepEnded, Woken
from simcore.models.replica import Replica
from simcore.models.request import Request
from simcore.models.scheduler import Scheduler
from simcore.policies.admission.fcfs import Fcfs
from simcore.policies.admission.priority import Priority
from simcore.policies.retention.lru import Lru
from simcore.simulation import Simulation


def one(prompt: int, output: int, **options: Any) -> Any:
    return run(workload([{"at": 1.0, "prompt": prompt, "output": output}]), **options).requests.iloc[0]


# --- what can never fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "output", "status"),
    [(12, 5, "finished"), (12, 6, "refused"), (16, 1, "finished"), (17, 1, "refused"), (1, 16, "finished"),
     (1, 17, "refused")],
)
def test_prompt_and_output_but_for_the_last_token_must_fit_the_pool(prompt: int, output: int, status: str) -> None:
    """4 usable blocks of 4 tokens hold 16; the KV of the last token is never written."""
    row = one(prompt, output, blocks=4)
    assert row.status == status
    if status == "refused":
        assert row.reason == "needs 5 KV blocks; the replica has 4"
        assert row.ended == 1.0 and isnan(row.admitted) and row.generated_tokens == 0


@pytest.mark.parametrize(("prompt", "generated"), [(19, 1), (18, 2), (15, 5), (20, None)])
def test_a_prompt_must_be_shorter_than_max_model_len_which_cuts_the_output(prompt: int, generated: int | None) -> None:
    row = one(prompt, 50, blocks=5, max_model_len=20)
    assert row.status == ("refused" if generated is None else "finished")
    assert row.generated_tokens == (generated or 0)
    if generated is None:
        assert row.reason == "prompt of 20 tokens; max_model_len is 20"


@pytest.mark.parametrize(("prompt", "output", "status"), [(60, 5, "finished"), (60, 6, "refused"), (65, 1, "refused")])
def test_without_chunked_prefill_a_request_must_fit_one_step(prompt: int, output: int, status: str) -> None:
    row = one(prompt, output, settings={"enable_chunked_prefill": False, "max_num_batched_tokens": 64})
    assert row.status == status and ("without chunked prefill" in row.reason) == (status == "refused")


def test_a_refused_request_leaves_no_trace_on_the_others() -> None:
    rows = [{"at": 0.0, "prompt": 9, "output": 4}, {"at": 0.5, "prompt": 900, "output": 1},
            {"at": 0.5, "prompt": 5, "output": 3}]
    with_it = run(workload(rows), blocks=10).requests.drop(1)
    without = run(workload([rows[0], rows[2]]), blocks=10).requests
    for column in ("admitted", "first_token", "ended", "service"):
        assert with_it[column].tolist() == without[column].tolist()


def test_what_waits_for_a_refused_request_is_cancelled_however_long_the_chain() -> None:
    n = 3000  # more turns than Python has frames
    rows: list[dict[str, Any]] = [{"at": 2.0, "prompt": 900, "output": 1, "program": 0}]
    rows += [{"after": [i], "gap": 1.0, "prompt": 1, "output": 1, "program": 0, "turn": i + 1} for i in range(n)]
    ended: list[Any] = []

    class Listening(Admission):
        observes = (ProgramEnded,)

        def observe(self, fact: Any) -> None:
            ended.append(fact)

    requests = run(workload(rows, ends_known=True), blocks=10, admission=Listening).requests
    assert requests["status"].tolist() == ["refused"] + ["cancelled"] * n
    assert requests["reason"][1] == "waits for request 0, which was refused"
    assert requests["reason"][n] == f"waits for request {n - 1}, which was cancelled"
    assert (requests["ended"] == 2.0).all() and requests["arrival"][1:].isna().all()
    assert [(f.now, f.program) for f in ended] == [(2.0, 0)]


def test_a_request_that_waits_for_a_refused_and_a_finished_one_is_cancelled_once() -> None:
    rows = [
        {"at": 0.0, "prompt": 4, "output": 3, "program": 0}, {"at": 0.0, "prompt": 900, "output": 1, "program": 0},
        {"after": [0, 1], "gap": 1.0, "prompt": 4, "output": 1, "program": 0, "turn": 1},
    ]
    requests = run(workload(rows), blocks=10).requests
    assert requests["status"].tolist() == ["finished", "refused", "cancelled"]
    assert requests["ended"].tolist() == [3.0, 0.0, 0.0]


# --- runs that do not end by themselves -----------------------------------------------------------------------------


def test_the_watchdog_names_the_requests_of_a_run_in_which_decisions_bring_no_token() -> None:
    class Restless(Admission):
        observes = (Woken,)

        def next_wakeup(self, now: float) -> float:
            return now + 0.001

    class Hoarder(Retention):
        def at_turn_end(self, turn: Any, engine: Any) -> Pin:
            return Pin(inf)

    rows = [{"at": 0.0, "prompt": 8, "output": 1}, {"at": 2.0, "prompt": 16, "output": 1}]
    with pytest.raises(NoProgress, match=r"replica 0 at t=.*no output token; running requests \[\], waiting requests \[1\]"):
        run(workload(rows), blocks=4, admission=Restless, retention=Hoarder)


def test_the_watchdog_ends_vllms_own_livelock() -> None:
    """Without the replica's check, a request longer than the pool preempts itself for ever once gate and cache are off."""

    class Trusting(Replica):
        def never_fits(self, request: Request) -> str:
            return ""

    settings = EngineSettings(
        block_size=4, enable_prefix_caching=False, scheduler_reserve_full_isl=False, max_num_batched_tokens=8)
    sim = Simulation()
    replica = Trusting(sim, 0, Scheduler(settings, 4, Fcfs(), Lru()), SimulatedExecutor(tables()))
    request = Request(7, 30, 1, keys=list(range(7)))
    sim.at(0.0, replica.submit, args=(request, 0.0))
    with pytest.raises(NoProgress, match=r"(running|waiting) requests \[7\]"):
        sim.run_until(inf)


def test_a_router_that_keeps_waking_does_not_keep_a_stuck_run_alive() -> None:
    class Restless(ReplicaRouting):
        def next_wakeup(self, now: float) -> float:
            return now + 1.0

    class Hoarder(Retention):
        def at_turn_end(self, turn: Any, engine: Any) -> Pin:
            return Pin(inf)

    rows = [{"at": 0.0, "prompt": 8, "output": 1}, {"at": 2.0, "prompt": 16, "output": 1}]
    requests = run(workload(rows), blocks=4, router=Restless, retention=Hoarder).requests
    assert requests["status"].tolist() == ["finished", "unfinished"]


def test_the_horizon_lists_what_has_not_ended() -> None:
    rows = [
        {"at": 0.0, "prompt": 4, "output": 2}, {"at": 0.0, "prompt": 4, "output": 9},
        {"at": 1.0, "prompt": 4, "output": 9}, {"at": 50.0, "prompt": 4, "output": 1},
        {"after": [1], "gap": 1.0, "prompt": 4, "output": 1},
    ]
    result = run(workload(rows), settings={"max_num_seqs": 2}, horizon=4.5)
    requests = result.requests
    assert requests["status"].tolist() == ["finished", *["unfinished"] * 4]
    assert requests["generated_tokens"].tolist() == [2, 4, 2, 0, 0]
    assert requests["reason"][1] == "still in the system at the horizon"
    assert requests["reason"][3] == requests["reason"][4] == "had not arrived when the run ended"
    assert requests["ended"].isna().tolist() == [False, True, True, True, True]
    assert result.token_times(2).tolist() == [3.0, 4.0]
    assert result.summary["completed"] == 1 and result.summary["unfinished"] == 4
    # Rates are over the 4.5 s that were simulated, and the step under way at the horizon has brought nothing yet.
    assert result.summary["duration"] == 4.5 and result.summary["utilization"] == 4 / 4.5
    assert result.summary["output_throughput"] == 2 / 4.5  # as vllm bench serve: tokens of finished requests


def test_an_event_at_the_horizon_itself_still_happens() -> None:
    rows = [{"at": 0.0, "prompt": 4, "output": 3}]
    assert run(workload(rows), horizon=3.0).requests["status"].tolist() == ["finished"]


# --- the order within one instant -----------------------------------------------------------------------------------


def test_an_arrival_at_the_very_time_a_step_ends_is_in_the_next_batch() -> None:
    seen = Witness()
    run(workload([{"at": 0.0, "prompt": 4, "output": 4}, {"at": 2.0, "prompt": 4, "output": 1}]), witness=seen)
    assert seen.batches[2][:2] == (2.0, [0, 1])


@pytest.mark.parametrize("replicas", [1, 2])
def test_so_is_a_turn_without_gap_that_the_step_end_itself_sets_off(replicas: int) -> None:
    """Requests 0 and 1 run in lockstep; 2 follows 0 at once. With two replicas, 2 comes back from replica 1's step end
    (decided after replica 0's in id order) to replica 0, where 1 runs."""

    class Fixed(ReplicaRouting):
        def route(self, turn: Any, views: Any, now: float) -> int:
            return 1 if replicas == 2 and turn.id == 0 else 0

    rows = [
        {"at": 0.0, "prompt": 4, "output": 2, "program": 0}, {"at": 0.0, "prompt": 4, "output": 5, "program": 1},
        {"after": [0], "gap": 0.0, "prompt": 4, "output": 1, "program": 0, "turn": 1},
    ]
    requests = run(workload(rows), replicas=replicas, router=Fixed).requests
    assert requests["arrival"][2] == requests["admitted"][2] == 2.0 and requests["ended"][2] == 3.0


def test_arrivals_at_one_instant_are_served_in_the_order_of_their_ids() -> None:
    seen = Witness()
    run(workload([{"at": 1.0, "prompt": 2, "output": 1} for _ in range(6)]), witness=seen, settings={"max_num_seqs": 4})
    assert [ids for _, ids, _ in seen.batches] == [[0, 1, 2, 3], [4, 5]]


def test_a_victim_that_asked_for_itself_does_not_leave_the_replica_idle() -> None:
    """0.19.0, priority, 3 blocks: at t=5 the first running request lacks a third block and is itself the victim, which
    ends the pass without a batch. The other has 3 of its 5 tokens and must go on at t=5."""
    rows = [{"at": 0.0, "prompt": 4, "output": 6, "priority": 9}, {"at": 2.0, "prompt": 2, "output": 5, "priority": 1}]
    seen = Witness()
    result = run(workload(rows), blocks=3, settings={"version": "0.19.0"}, admission=Priority, witness=seen)
    assert [(now, ids) for now, ids, _ in seen.batches if 4 < now < 6] == [(5.0, []), (5.0, [1])]
    assert result.requests["ended"].tolist() == [8.0, 7.0] and result.requests["preemptions"].tolist() == [1, 0]


# --- the host's time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "device"), [(0.25, 1.0), (1.0, 0.25), (0.5, 0.5)])
def test_asynchronous_scheduling_shows_only_the_longer_of_host_and_device_time(host: float, device: float) -> None:
    rows = [{"at": 0.0, "prompt": 4, "output": 20}]
    gaps = {}
    for asynchronous in (False, True):
        result = run(workload(rows), cost=tables(device), step_overhead=host, settings={"async_scheduling": asynchronous})
        assert result.token_times(0)[0] == host + device  # the first step hides nothing
        gaps[asynchronous] = set(result.itls(0)[2:].tolist())
        assert result.summary["utilization"] == pytest.approx(20 * device / result.requests["e2e"][0])
    assert gaps == {False: {host + device}, True: {max(host, device)}}


def test_sequences_cost_host_time_too() -> None:
    executor = SimulatedExecutor(tables(1.0), step_overhead=0.1, sequence_overhead=0.01)
    done = executor.start(Batch(0, counts=[1, 1, 1], before=[0, 0, 0], samples=[True] * 3), 5.0)
    assert done.ends == pytest.approx(6.13) and done.device_seconds == 1.0


# --- the steps table ------------------------------------------------------------------------------------------------


def test_step_samples_are_taken_at_step_ends_no_closer_than_asked() -> None:
    rows = [{"at": 0.0, "prompt": 6, "output": 9}, {"at": 2.5, "prompt": 3, "output": 2}]
    every = run(workload(rows)).steps
    assert every["time"].tolist() == [float(k) for k in range(1, 10)]
    assert every["tokens"].tolist() == [6, 1, 1, 4, 2, 1, 1, 1, 1]
    assert every["sequences"].tolist() == [1, 1, 1, 2, 2, 1, 1, 1, 1]
    assert every["running"].tolist() == [1, 1, 1, 2, 1, 1, 1, 1, 0]
    assert every["free_blocks"].tolist() == [98, 98, 98, 96, 97, 97, 97, 96, 100]
    assert every["step"].tolist() == list(range(9))
    some = run(workload(rows), sample_every=2.5).steps
    assert some["time"].tolist() == [1.0, 4.0, 7.0]
    none = run(workload(rows), sample_every=inf)
    assert len(none.steps) == 1 and none.summary["steps"] == 9


def test_step_facts_are_told_to_who_asks() -> None:
    told: list[Any] = []

    class Counting(Admission):
        observes = (StepEnded,)

        def observe(self, fact: Any) -> None:
            told.append((fact.now, fact.replica, fact.seconds, fact.tokens, fact.running, fact.waiting))

    run(workload([{"at": 0.0, "prompt": 4, "output": 2}, {"at": 0.5, "prompt": 4, "output": 1}]),
        settings={"max_num_seqs": 1}, admission=Counting)
    assert told == [(1.0, 0, 1.0, 4, 1, 1), (2.0, 0, 1.0, 1, 0, 1), (3.0, 0, 1.0, 4, 0, 0)]
