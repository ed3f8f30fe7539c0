"""Admission while requests wait and run: moved by a wake-up, yielding after a quantum, paying for decisions."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from serving_runs import Witness, run, tables, workload

from simcore.models.decision_points import Admission, Release, ReplicaRouting, Retention
from simcore.models.facts import Woken


class Boost(Admission):
    """Moves `request` to the front when woken at `wake`; `key` counts its calls."""

    observes = (Woken,)

    def __init__(self, request: int, wake: float, same: bool = False) -> None:
        self.request, self.wake, self.same, self.boosted = request, wake, same, False

    def key(self, turn: Any, now: float) -> tuple:
        return (not (self.boosted and turn.id == self.request), turn.arrival)

    def next_wakeup(self, now: float) -> float:
        return self.wake if now < self.wake else inf

    def rekey(self, fact: Any) -> list[int]:
        assert isinstance(fact, Woken)
        self.boosted = not self.same
        return [self.request, self.request]


@pytest.mark.parametrize(("same", "order"), [(False, [0, 3, 1, 2]), (True, [0, 1, 2, 3])])
def test_rekey_moves_a_waiter(same: bool, order: list[int]) -> None:
    """Also twice at one time, and to the place where it stands."""
    rows = [{"at": 0.0, "prompt": 4, "output": 3} for _ in range(4)]
    requests = run(workload(rows), settings={"max_num_seqs": 1}, admission=lambda: Boost(3, 1.5, same)).requests
    assert requests.sort_values("admitted")["request"].tolist() == order


def test_a_used_up_quantum_yields_to_a_smaller_key_and_only_then() -> None:
    """Two requests, one place, quanta of two tokens, least generated first. At 2, request 0 has two tokens and 1 none; at
    4 both have two, and an equal key does not displace; at 6 it is two against four; at 8 four each."""

    class Rounds(Admission):
        def key(self, turn: Any, now: float) -> tuple:
            return (turn.generated,)

        def limit(self, running: Any) -> int:
            return 2

    rows = [{"at": 0.0, "prompt": 4, "output": 5}, {"at": 0.0, "prompt": 4, "output": 5}]
    seen = Witness()
    result = run(workload(rows), settings={"max_num_seqs": 1}, admission=Rounds, witness=seen)
    assert result.token_times(0).tolist() == [1, 2, 7, 8, 9]
    assert result.token_times(1).tolist() == [3, 4, 5, 6, 10]
    assert seen.counts["yields"] == 2 and seen.counts["preemptions"] == 0
    alone = Witness()
    run(workload(rows[:1]), admission=Rounds, witness=alone)
    assert alone.counts["yields"] == 0


def test_a_request_whose_last_token_is_in_flight_does_not_yield() -> None:
    """Asynchronous: at t=1 request 0 has used its quantum, but the batch that brings its last token already runs."""

    class Rounds(Admission):
        def key(self, turn: Any, now: float) -> tuple:
            return (turn.generated,)

        def limit(self, running: Any) -> int:
            return 1

    seen = Witness()
    rows = [{"at": 0.0, "prompt": 4, "output": 2}, {"at": 0.0, "prompt": 4, "output": 2}]
    settings = {"max_num_seqs": 1, "async_scheduling": True}
    result = run(workload(rows), settings=settings, admission=Rounds, witness=seen)
    assert result.token_times(0).tolist() == [1.0, 2.0] and seen.counts["yields"] == 0
    assert seen.computed == {0: 5, 1: 5}


@pytest.mark.parametrize("kind", ["admission", "retention", "router"])
def test_decisions_cost_their_simulated_time(kind: str) -> None:
    class SlowAdmission(Admission):
        decision_seconds = 0.25

        def accept(self, turn: Any, engine: Any) -> None:
            return None

        def key(self, turn: Any, now: float) -> tuple:
            return (turn.arrival,)

    class SlowRetention(Retention):
        decision_seconds = 0.25

        def at_turn_end(self, turn: Any, engine: Any) -> Release:
            return Release()

    class SlowRouter(ReplicaRouting):
        decision_seconds = 0.25

    slow = {"admission": SlowAdmission, "retention": SlowRetention, "router": SlowRouter}[kind]
    rows = [{"at": 0.0, "prompt": 4, "output": 2}, {"at": 0.0, "prompt": 4, "output": 3}]
    result = run(workload(rows), cost=tables(1.0), **{kind: slow})
    # Only what a policy answers itself costs its time.
    # admission: accept and key of both requests delay the first batch; retention: request 0's end delays the third;
    # router: both requests are on their way for as long.
    ends = {"admission": [2.0, 3.0, 4.0], "retention": [1.0, 2.0, 3.25], "router": [1.25, 2.25, 3.25]}[kind]
    assert result.token_times(1).tolist() == ends
