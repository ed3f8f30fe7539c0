"""Prefill and decode on separate replicas, by hand: blocks of 4 tokens, a step takes 1 s, a link moves a block a second."""

from __future__ import annotations

from typing import Any

import pytest
import serving_runs
from scripted import Keep
from serving_runs import BLOCK_BYTES, Witness, tables, workload
from split_runs import INFINITE, run
from test_invariants import same

from simcore.errors import ConfigError, PolicyError
from simcore.models import serving
from simcore.models.decision_points import Admission, Refuse, ReplicaRouting
from simcore.models.engine import EngineSettings
from simcore.models.executor import SimulatedExecutor
from simcore.models.facts import Admitted, FlowEnded, TurnArrived, TurnEnded
from simcore.models.failures import Clients
from simcore.models.serving import Deployment, Policies, RunResult
from simcore.policies.admission.fcfs import Fcfs
from simcore.policies.replica_routing.least_loaded import LeastLoaded
from simcore.policies.replica_routing.prefix_aware import PrefixAware
from simcore.policies.replica_routing.round_robin import RoundRobin
from simcore.policies.replica_routing.session_affinity import SessionAffinity
from simcore.policies.retention.lru import Lru

COLUMNS = ["prefill_ended", "loaded_tokens", "reload_time", "first_token", "ended"]


def at(time: float, prompt: int, output: int = 1, **more: Any) -> dict[str, Any]:
    return {"at": time, "prompt": prompt, "output": output, **more}


def row(result: RunResult, i: int = 0) -> tuple[float, ...]:
    return tuple(result.requests[COLUMNS].iloc[i])


def pushes(result: RunResult) -> list[tuple[float, int, int, float, float]]:
    """(begin, replica, request, blocks, seconds) of each push, in order of their ends."""
    return [(time - seconds, replica, request, size / BLOCK_BYTES, seconds) for time, replica, _, request, size, seconds
            in result.tables["transfers"].itertuples(index=False)]


def routed(result: RunResult) -> list[tuple[float, int, int]]:
    found = result.decisions[result.decisions["kind"] == "replica_routing"]
    return list(found[["time", "request", "replica"]].itertuples(index=False, name=None))


def fixed(answer: Any) -> Any:
    """A router that always answers so, or what a function of the turn says."""

    class Fixed(ReplicaRouting):
        def route(self, turn: Any, replicas: Any, now: float) -> Any:
            return answer(turn) if callable(answer) else answer

    return Fixed


# --- one request ------------------------------------------------------------------------------------------------------


def test_a_request_is_prefilled_pushed_and_decoded() -> None:
    """10 tokens: prefilled by 1; 3 blocks at 2 a second and the latency of 0.25 s, by 2.75; its 3 tokens 1 s each."""
    result = run(workload([at(0.0, 10, 3)]), push=2.0, push_latency=0.25)
    assert row(result) == (1.0, 9, 1.75, 3.75, 5.75)
    assert pushes(result) == [(1.0, 1, 0, 3, 1.75)]
    assert result.token_times(0).tolist() == [3.75, 4.75, 5.75]
    r = result.requests.iloc[0]
    assert (r["replica"], r["prefill_replica"], r["admitted"], r["queue_time"], r["service"]) == (1, 0, 0.0, 0.0, 4.0)
    assert (r["cached_tokens"], r["cached_tokens_all"], r["preemptions"]) == (0, 9, 0)
    s = result.summary
    assert (s["pushes"], s["bytes_pushed"], s["mean_push_time"]) == (1, 3 * BLOCK_BYTES, 1.75)
    assert (s["prefill_utilization"], s["decode_utilization"]) == (1 / 5.75, 3 / 5.75)
    assert s["total_output_tokens"] == 3 and s["gpus"] == 2 and s["computed_tokens"] == 10 + 3
    assert result.tables["transfers"]["direction"].tolist() == ["push"]
    asked = run(workload([at(0.0, 10, 3)]), push=2.0, push_latency=0.25, path="planned")
    assert asked.speed["why_not_planned"] == ["cluster.prefill_replicas: prompts go from replica to replica inside the run"]
    same(result, asked)
    program = result.programs.iloc[0]
    parts = [program[part] for part in ("queueing", "prefill", "decode", "tool", "reload")]
    assert parts == [0.0, 1.0, 3.0, 0.0, 1.75] and program["jct"] == 5.75


def test_a_request_of_one_token_has_it_from_the_decode_replica() -> None:
    assert row(run(workload([at(0.0, 4)]))) == (1.0, 3, 1.0, 3.0, 3.0)


def test_without_prefix_caching_all_blocks_are_pushed() -> None:
    rows = [at(0.0, 8, ids=[1, 2]), at(9.0, 8, ids=[1, 2])]
    result = run(workload(rows), settings={"enable_prefix_caching": False})
    assert row(result, 1) == (10.0, 7, 2.0, 13.0, 13.0)


@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (40, 6), (130, 9)])
def test_with_an_infinitely_fast_link_the_times_are_analytic(prompt: int, output: int) -> None:
    """The prompt in chunks of 64 at 1 ms a token and 0.1 s a step, then one step a token; 0.01 s of latency."""
    cost = tables(0.1, 0.001)
    result = run(workload([at(0.0, prompt, output)]), push=INFINITE, push_latency=0.01, cost=cost)
    prefill = 0.1 * -(-prompt // 64) + 0.001 * prompt
    assert result.requests["prefill_ended"][0] == pytest.approx(prefill)
    assert result.requests["ttft"][0] == pytest.approx(prefill + 0.01 + 0.101)
    assert result.requests["e2e"][0] == pytest.approx(prefill + 0.01 + 0.101 * output)


def test_prompts_do_not_disturb_who_decodes() -> None:
    """What the split is for: on one replica a long prompt delays the others' tokens; here no gap is longer than a step."""
    rows = [at(0.0, 4, 20), at(5.5, 64, 2)]
    cost = tables(1.0, 0.1)
    alone = run(workload(rows[:1]), cost=cost, push=INFINITE)
    both = run(workload(rows), cost=cost, push=INFINITE)
    assert max(both.itls(0)) == pytest.approx(1.2) and max(alone.itls(0)) == pytest.approx(1.1)


# --- the push ---------------------------------------------------------------------------------------------------------


def test_what_the_decode_replica_has_cached_is_not_pushed() -> None:
    """The second turn repeats the first whole (10 + 3 tokens, of which 3 blocks are full): of its 5 blocks 2 are pushed; its
    prefill replica has the 2 full blocks of the first prompt alone."""
    rows = [at(0.0, 10, 3, program=0, ids=[1, 2, 3, 4], known=13),
            at(10.0, 18, 2, program=0, turn=1, ids=[1, 2, 3, 5, 6], known=18)]
    result = run(workload(rows))
    assert [push[3] for push in pushes(result)] == [3, 2]
    assert result.requests["cached_tokens"].tolist() == [0, 8] and result.requests["loaded_tokens"].tolist() == [9, 5]
    assert result.summary["prefix_cache_hit_rate"] == 8 / 28


def test_blocks_that_were_pushed_are_found_there() -> None:
    rows = [at(0.0, 9, ids=[1, 2, 3]), at(20.0, 9, ids=[1, 2, 3])]
    assert [push[3] for push in pushes(run(workload(rows)))] == [3, 1]


def test_two_pushes_at_once_share_a_link() -> None:
    """Two prompts of 2 blocks end at 1 on two prefill replicas, for one decode replica: half its link for each."""
    result = run(workload([at(0.0, 8), at(0.0, 8)]), prefill=2)
    assert pushes(result) == [(1.0, 2, 0, 2, 4.0), (1.0, 2, 1, 2, 4.0)]


def test_two_pushes_out_of_one_replica_share_its_link_and_the_shorter_leaves_it_to_the_other() -> None:
    """1 and 3 blocks from 1 on: both at half a block a second until 3, then the second alone, its other 2 by 5."""
    result = run(workload([at(0.0, 4), at(0.0, 12)]), decode=2, router=fixed(lambda turn: (0, 1 + turn.id)))
    assert pushes(result) == [(1.0, 1, 0, 1, 2.0), (1.0, 2, 1, 3, 4.0)]


def test_pushes_between_other_pairs_do_not_share() -> None:
    result = run(workload([at(0.0, 8), at(0.0, 8)]), prefill=2, decode=2, router=fixed(lambda turn: (turn.id, 2 + turn.id)))
    assert [seconds for *_, seconds in pushes(result)] == [2.0, 2.0]


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_the_decode_replica_takes_blocks_before_the_push_and_a_full_one_delays_it() -> None:
    """A pool of 4 blocks: the first request, pushed by 3, holds 2 and then 3 until its end at 8; the second, prefilled
    at 2 and of 3 blocks, waits at the head of the queue: its push begins at 8."""
    seen = Witness()
    result = run(workload([at(0.0, 8, 5), at(1.0, 12)]), blocks=10, decode_blocks=4, witness=seen)
    assert row(result, 0)[3:] == (4.0, 8.0)
    assert pushes(result) == [(1.0, 1, 0, 2, 2.0), (8.0, 1, 1, 3, 3.0)]
    assert row(result, 1) == (2.0, 11, 3.0, 12.0, 12.0)
    assert seen.counts["blocked loads"] > 0


def test_who_waits_for_room_blocks_those_behind_it() -> None:
    """The third needs one block, which is there at 3; it waits for the second, whose blocks are free at 8."""
    rows = [at(0.0, 8, 5), at(1.0, 12), at(2.0, 4)]
    begun = {request: begin for begin, _, request, *_ in pushes(run(workload(rows), blocks=10, decode_blocks=4))}
    assert begun == {0: 1.0, 1: 8.0, 2: 8.0}


def test_the_prefill_replica_holds_the_blocks_until_the_push_has_ended() -> None:
    """4 blocks of 5 are held from 1 to 5, though the prompt ended at 1: the second, of 2, is admitted at 5."""
    result = run(workload([at(0.0, 16), at(0.5, 8)]), blocks=5, decode_blocks=20)
    assert result.requests["admitted"].tolist() == [0.0, 5.0] and row(result, 1)[0] == 6.0


def test_a_preempted_request_computes_its_prompt_on_the_decode_replica() -> None:
    """Two of 8 tokens in a pool of 5 blocks: each needs a third for its first token, and only one is left."""
    seen = Witness()
    result = run(workload([at(0.0, 8, 6), at(0.0, 8, 6)]), blocks=10, decode_blocks=5, push=INFINITE, witness=seen)
    assert result.requests["status"].tolist() == ["finished"] * 2
    assert result.requests["preemptions"].tolist() == [0, 1] and result.summary["pushes"] == 2
    assert seen.computed[1] > 8 and result.requests["loaded_tokens"].tolist() == [7, 7]


# --- routing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", [RoundRobin, LeastLoaded, lambda: LeastLoaded("tokens"), PrefixAware, SessionAffinity])
def test_built_in_routers_choose_among_the_prefill_replicas(router: Any) -> None:
    rows = [at(0.3 * k, 6, 3, program=k % 3, turn=k // 3, ids=[k % 3]) for k in range(12)]
    result = run(workload(rows), prefill=2, decode=3, router=router)
    assert set(result.requests["prefill_replica"]) == {0, 1} and set(result.requests["replica"]) == {2, 3, 4}


def test_the_decode_replica_is_the_one_with_the_least_outstanding_tokens() -> None:
    """Prompts end at 1, 2 and 3. Of the first two each is alone; then replica 1 has 40 known tokens and replica 2 has 8."""
    rows = [at(0.0, 40, 9), at(1.0, 8, 9), at(2.0, 4, 9)]
    assert routed(run(workload(rows), decode=2, push=INFINITE)) == [
        (0.0, 0, 0), (1.0, 1, 0), (1.0, 0, 1), (2.0, 2, 0), (2.0, 1, 2), (3.0, 2, 2)]


def test_a_router_may_name_both_and_sees_roles_and_who_is_on_the_way() -> None:
    shown: list[Any] = []

    class Pairs(ReplicaRouting):
        def route(self, turn: Any, replicas: Any, now: float) -> tuple[int, int]:
            shown.append([(r.id, r.role, r.outstanding) for r in replicas])
            return (0, 2)

    result = run(workload([at(0.0, 4), at(0.5, 4)]), decode=2, router=Pairs)
    assert result.requests["replica"].tolist() == [2, 2]
    assert shown == [[(0, "prefill", 0), (1, "decode", 0), (2, "decode", 0)],
                     [(0, "prefill", 1), (1, "decode", 0), (2, "decode", 1)]]


def test_a_routers_decision_seconds_come_before_the_prefill() -> None:
    class Slow(ReplicaRouting):
        decision_seconds = 0.5

    assert row(run(workload([at(0.0, 4)]), router=Slow))[0] == 1.5


@pytest.mark.parametrize("answer", [1, 2, -1, True, (0, 0), (1, 2), (0, 1, 2), (0, None, 1), None, "0", (0.0, 1)])
def test_other_answers_are_illegal(answer: Any) -> None:
    with pytest.raises(PolicyError, match=r"allowed: a prefill replica, 0 \.\. 0, or \(prefill, decode\) .* 1 \.\. 1"):
        run(workload([at(0.0, 4)]), router=fixed(answer))


# --- policies, refusals, cuts -----------------------------------------------------------------------------------------


def test_policies_of_both_sides_hear_of_the_request_and_the_prefill_turn_ends_with_its_push() -> None:
    keeps: list[Keep] = []

    def keep() -> Keep:
        keeps.append(Keep(programs=set()))
        keeps[-1].observes = (TurnArrived, Admitted, TurnEnded, FlowEnded)  # type: ignore[misc, assignment]
        return keeps[-1]

    run(workload([at(0.0, 4, 2)]), retention=keep)
    heard = [[(type(fact).__name__, fact.now) for fact in k.heard] for k in keeps]
    assert heard == [
        [("TurnArrived", 0.0), ("Admitted", 0.0), ("TurnEnded", 2.0)],
        [("TurnArrived", 1.0), ("FlowEnded", 2.0), ("Admitted", 2.0), ("TurnEnded", 4.0)]]
    assert keeps[1].heard[1].link == "push" and keeps[1].heard[1].bytes == BLOCK_BYTES


def test_a_request_that_can_never_fit_is_refused_before_its_prompt_is_computed() -> None:
    result = run(workload([at(0.0, 8, 50), at(0.0, 4)]), blocks=10)
    assert result.requests["status"].tolist() == ["refused", "finished"]
    assert result.requests["ended"][0] == 0.0 and result.summary["computed_tokens"] == 4 + 1


@pytest.mark.parametrize("side", [0, 1])
def test_admission_of_either_side_may_refuse(side: int) -> None:
    made: list[Any] = []

    class Refusing(Admission):
        def __init__(self) -> None:
            self.side = len(made)
            made.append(self)

        def accept(self, turn: Any, engine: Any) -> Any:
            return Refuse("full") if self.side == side and turn.id == 0 else None

    seen = Witness()
    result = run(workload([at(0.0, 8), at(0.0, 8)]), admission=Refusing, witness=seen)
    assert result.requests["status"].tolist() == ["refused", "finished"] and result.requests["reason"][0] == "full"
    assert result.requests["ended"][0] == float(side) and result.requests["replica"][0] == side
    for replica in seen.replicas:
        assert replica.outstanding == 0 and replica.scheduler.pool.num_free == replica.scheduler.pool.usable


@pytest.mark.parametrize(("horizon", "replica", "service"), [(0.5, 0, 0.5), (1.5, 1, 1.0), (2.5, 1, 1.5)])
def test_a_run_that_is_cut_says_how_far_a_request_came(horizon: float, replica: int, service: float) -> None:
    """Being prefilled, being pushed, being decoded."""
    result = run(workload([at(0.0, 4, 5)]), horizon=horizon)
    r = result.requests.iloc[0]
    assert (r["status"], r["arrival"], r["admitted"], r["replica"], r["service"]) == (
        "unfinished", 0.0, 0.0, replica, service)


def _serve(**options: Any) -> None:
    how = {"replicas": 2, "prefill_replicas": 1, "kv_link_bandwidth": 1.0} | options.pop("how", {})
    engine = EngineSettings(**options.pop("engine", {}))
    deployment = Deployment(settings=engine, num_blocks=9, max_model_len=100, tables=tables(), host_bandwidth=1e9,
                            kv_bytes_per_token=1e3, **how)
    policies = Policies(lambda r: Fcfs(), lambda r, a: Lru(), RoundRobin)
    serving.serve(workload([at(0.0, 4)]), deployment, policies, **options)


@pytest.mark.parametrize(("options", "message"), [
    ({"how": {"prefill_replicas": 2}}, r"cluster.prefill_replicas: found 2: allowed: 1 .. 1 of 2 replicas"),
    ({"how": {"kv_link_bandwidth": 0.0}}, r"cluster.kv_link_gbps: found 0.0: allowed: .*above 0"),
    ({"how": {"kv_link_latency": -1.0}}, r"cluster.kv_link_latency: found -1.0: allowed: .*at least 0"),
    ({"engine": {"kv_offloading_size": 1.0}}, r"engine.kv_offloading_size: not simulated together .*: found 1.0: allowed"),
    ({"clients": Clients(timeout=1)}, r"clients: not simulated together with prefill_replicas: allowed: .*"),
    ({"view_delay": 1.0}, r"cluster.view_delay: not simulated together with prefill_replicas: found 1.0: .*"),
    ({"executor": lambda r: SimulatedExecutor(tables())}, r"executor: KV cannot be pushed .*"),
])
def test_what_is_not_simulated_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _serve(**options)


def test_a_cluster_of_replicas_that_do_both_takes_no_pairs() -> None:
    with pytest.raises(PolicyError, match="prefill and decode are not separate here"):
        serving_runs.run(workload([at(0.0, 4)]), replicas=2, router=fixed((0, 1)))
