"""What routers see when replicas are down, and when what they see is old."""

from __future__ import annotations

from typing import Any

import pytest
from failing_runs import event, run
from serving_runs import workload

from simcore.models.decision_points import ReplicaRouting
from simcore.models.serving import RunResult
from simcore.policies.replica_routing.least_loaded import LeastLoaded
from simcore.policies.replica_routing.prefix_aware import PrefixAware
from simcore.policies.replica_routing.round_robin import RoundRobin
from simcore.policies.replica_routing.session_affinity import SessionAffinity

ROUTERS: list[Any] = [RoundRobin, LeastLoaded, lambda: LeastLoaded("tokens"), PrefixAware, SessionAffinity]


def decisions(result: RunResult) -> list[tuple[float, str, int, int, str]]:
    return list(result.decisions.itertuples(index=False, name=None))


def at(time: float, output: int = 1, prompt: int = 4, **more: Any) -> dict[str, Any]:
    return {"at": time, "prompt": prompt, "output": output, **more}


class Looking(ReplicaRouting):
    """Always the first of those it is shown; remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def route(self, turn: Any, replicas: Any, now: float) -> int:
        self.seen.append((now, [(v.id, v.as_of, v.outstanding, v.num_running, v.cached_tokens(turn)) for v in replicas]))
        return replicas[0].id


def looked(rows: list[dict[str, Any]], **options: Any) -> list[Any]:
    router = Looking()
    run(workload(rows), router=lambda: router, **options)
    return router.seen


# --- up and down ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", ROUTERS)
def test_built_in_routers_choose_among_those_that_are_up(router: Any) -> None:
    rows = [at(0.5 * k, program=k % 4, turn=k // 4) for k in range(16)]
    events = [event(at=1.2, kill=1, lasts=2.0), event(at=2.2, drain=2, lasts=1.0), event(at=5.1, kill=0)]
    result = run(workload(rows), replicas=3, router=router, events=events)
    routed = [(time, replica) for time, kind, replica, _, _ in decisions(result) if kind == "replica_routing"]
    away = {0: (5.1, 99.0), 1: (1.2, 3.2), 2: (2.2, 3.2)}
    assert len(routed) == 16 and all(not away[r][0] <= time < away[r][1] for time, r in routed)
    assert {r for _, r in routed if r in (1, 2)} == {1, 2}


def test_a_router_is_shown_those_that_are_up_under_their_own_numbers() -> None:
    seen = looked([at(0.0), at(2.0), at(4.0), at(6.0)], replicas=3, events=[
        event(at=1.0, kill=0, lasts=4.0), event(at=3.0, drain=1, lasts=1.5)])
    assert [(now, [view[0] for view in views]) for now, views in seen] == [
        (0.0, [0, 1, 2]), (2.0, [1, 2]), (4.0, [2]), (6.0, [0, 1, 2])]


def test_those_that_wait_at_the_router_go_first_come_first_served_when_a_replica_is_back() -> None:
    """At 3 replica 1 is back; at 5 the arrival comes before replica 0 does."""
    seen = looked([at(1.0), at(1.5), at(2.0), at(5.0)], replicas=2, events=[
        event(at=0.5, kill=0, lasts=4.5), event(at=0.5, kill=1, lasts=2.5)])
    assert [(now, [view[:3] for view in views]) for now, views in seen] == [
        (3.0, [(1, 3.0, 0)]), (3.0, [(1, 3.0, 1)]), (3.0, [(1, 3.0, 2)]), (5.0, [(1, 5.0, 0)])]


def test_a_session_moves_when_its_replica_dies_and_stays_where_it_went() -> None:
    rows = [at(2.0 * k, program=0, turn=k) for k in range(5)]
    result = run(workload(rows), replicas=2, router=SessionAffinity, events=[event(at=3.0, kill=0, lasts=2.0)])
    assert result.requests["replica"].tolist() == [0, 0, 1, 1, 1]


def test_the_numbers_of_a_restarted_replica_are_those_of_its_new_engine() -> None:
    rows = [at(0.0, 9, 12, ids=[1, 2, 3]), at(1.5, 9, 12, ids=[1, 2, 3]), at(4.0, 1, 12, ids=[1, 2, 3])]
    seen = looked(rows, events=[event(at=2.0, kill=0, lasts=1.0)])
    assert [views for _, views in seen] == [
        [(0, 0.0, 0, 0, 0)], [(0, 1.5, 1, 1, 8)], [(0, 4.0, 0, 0, 0)]]


# --- old numbers ------------------------------------------------------------------------------------------------------


def test_what_a_router_sees_is_at_most_so_old_and_moves_only_when_it_is_taken_anew() -> None:
    rows = [at(time, 9, 12, ids=[1, 2, 3]) for time in (0.0, 1.5, 1.9, 2.0, 3.5, 4.0)]
    live, old = (looked(rows, settings={"max_num_seqs": 16}, view_delay=delay) for delay in (0.0, 2.0))
    assert [views[0] for _, views in live] == [
        (0, 0.0, 0, 0, 0), (0, 1.5, 1, 1, 8), (0, 1.9, 2, 1, 8), (0, 2.0, 3, 1, 8), (0, 3.5, 4, 4, 8), (0, 4.0, 5, 4, 8)]
    assert [views[0] for _, views in old] == [
        (0, 0.0, 0, 0, 0), (0, 0.0, 0, 0, 0), (0, 0.0, 0, 0, 0), (0, 2.0, 3, 1, 8), (0, 2.0, 3, 1, 8), (0, 4.0, 5, 4, 8)]


def test_old_numbers_send_all_to_one_replica() -> None:
    """The herd: until the next copy, the replica that was the emptiest is taken for the emptiest."""
    rows = [at(0.0, 30), *(at(1.0 + 0.1 * k, 30) for k in range(6))]

    class Lowest(ReplicaRouting):
        def route(self, turn: Any, replicas: Any, now: float) -> int:
            return min(replicas, key=lambda view: (view.outstanding, view.id)).id

    live, old = (run(workload(rows), replicas=3, router=Lowest, view_delay=delay).requests["replica"].tolist()
                 for delay in (0.0, 0.5))
    assert live == [0, 1, 2, 0, 1, 2, 0]
    # Copies at 0, 1.0 (after the first: 1 is the emptiest) and 1.5 (five have gone to 1: now it is 2).
    assert old == [0, 1, 1, 1, 1, 1, 2]


def test_a_copy_has_all_that_a_view_has() -> None:
    """Right after it was taken, every property is that of the live view."""
    names = [name for name in dir(LiveNames) if not name.startswith("_")]

    class Comparing(ReplicaRouting):
        checked = 0

        def route(self, turn: Any, replicas: Any, now: float) -> int:
            from simcore.models.views import ReplicaView

            for view in replicas:
                live = ReplicaView(view._replica)
                assert view.as_of == now
                for name in names:
                    assert getattr(view, name) == getattr(live, name), name
                assert view.cached_tokens(turn) == live.cached_tokens(turn)
                Comparing.checked += 1
            return replicas[turn.id % len(replicas)].id

    rows = [at(1.0 * k, 3, 16, ids=[k % 3, 10 + k % 3, 20, 30]) for k in range(30)]
    run(workload(rows), replicas=2, router=Comparing, view_delay=0.5, blocks=12,
        settings={"kv_offloading_size": 8.0, "kv_offloading_backend": "native"})
    assert Comparing.checked == 60 and len(names) == 13


class LiveNames:
    """The properties of a ReplicaView, by name."""

    free_blocks = num_running = num_waiting = num_loading = running_tokens = waiting_tokens = 0
    to_host_bytes = from_host_bytes = pinned_blocks = id = role = now = outstanding = 0


def test_the_list_of_properties_is_complete() -> None:
    from simcore.models.views import ReplicaView

    names = {n for kind in ReplicaView.__mro__ for n, value in vars(kind).items() if isinstance(value, property)}
    assert names == {name for name in dir(LiveNames) if not name.startswith("_")} | {"as_of"}
