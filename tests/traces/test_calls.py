"""Logged calls: who waits for whom in a closed loop, pauses, tools, sub-agents, times."""

from __future__ import annotations

import numpy as np
import pytest

from simcore.traces import times
from simcore.traces.calls import Call, ToolSpan, build_calls, in_order
from simcore.traces.workload import Source, Workload

S = 10**9


def made(rows: list[tuple], clock: str = "closed-loop", tools: tuple[ToolSpan, ...] = ()) -> Workload:
    """rows: (start s, end s or None, session[, parent])."""
    calls = [Call("f:1", int(r[0] * S), None if r[1] is None else int(r[1] * S), 10, 5, *r[2:]) for r in rows]
    return build_calls(in_order(calls), Source("calls"), clock=clock, block_tokens=16, known_tokens=None, runs=None,
                       tools=tools)


def waits(w: Workload) -> list[list[int]]:
    return [w.waits(i).tolist() for i in range(len(w))]


def test_turns_wait_for_the_turn_before_and_pauses_are_the_clients() -> None:
    w = made([(100, 103, "a"), (105.5, 106, "a"), (101, 102, "b"), (106, 107, "a")])
    assert waits(w) == [[], [], [0], [2]]
    assert w.gap.tolist() == [0, 0, 2.5, 0]
    assert w.arrival[:2].tolist() == [0, 1] and np.isnan(w.arrival[2:]).all()
    assert (w.program.tolist(), w.turn.tolist()) == ([0, 1, 0, 0], [0, 0, 1, 2])


def test_calls_side_by_side_are_joined_by_the_next() -> None:
    w = made([(0, 10, "a"), (11, 14, "a"), (12, 20, "a"), (21, 22, "a")])
    assert waits(w) == [[], [0], [0], [1, 2]]
    assert w.gap.tolist() == [0, 1, 2, 1]
    w = made([(0, 10, "a"), (1, 3, "a"), (11, 12, "a")])  # the second began when nothing had ended: it comes at its time
    assert waits(w) == [[], [], [0, 1]] and w.arrival[1] == 1


def test_without_ends_or_sessions_arrivals_are_as_recorded() -> None:
    w = made([(0, None, "a"), (5, None, "a"), (7, 8, None), (9, 10, None)])
    assert waits(w) == [[], [], [], []] and w.arrival.tolist() == [0, 5, 7, 9]
    assert w.program.tolist() == [0, 0, 1, 2]
    w = made([(0, 1, "a"), (5, 6, "a")], clock="recorded")
    assert waits(w) == [[], []] and w.arrival.tolist() == [0, 5]


def test_sub_agents_begin_after_and_are_joined_by_their_agent() -> None:
    w = made([(0, 2, "main"), (3, 5, "sub", "main"), (6, 7, "sub", "main"), (9, 10, "main"), (20, 21, "main")])
    assert waits(w) == [[], [0], [1], [0, 2], [3]]
    assert set(w.program.tolist()) == {0} and w.turn.tolist() == [0, 1, 2, 3, 4]
    background = made([(0, 2, "main"), (3, 30, "sub", "main"), (4, 5, "main"), (40, 41, "main")])
    assert waits(background) == [[], [0], [0], [1, 2]]


def test_sessions_that_call_one_another_in_a_ring_are_one_program() -> None:
    w = made([(0, 1, "a", "b"), (2, 3, "b", "a"), (4, 5, "c")])
    assert w.program.tolist() == [0, 0, 1]


def test_tools_run_in_the_pause() -> None:
    tools = (ToolSpan("a", "search", int(2.5 * S), 4 * S), ToolSpan("a", "shell", 1 * S, 3 * S),
             ToolSpan("a", "late", 4 * S, 9 * S), ToolSpan("b", "search", 3 * S, 4 * S))
    w = made([(0, 2, "a"), (5, 6, "a")], tools=tools)
    assert w.tools == ("search", "shell")
    assert w.calls(1) == [(0, 1.5), (1, 1.0)]  # cut to the pause, which began at 2 s
    assert w.gap[1] == 1.5 and w.pause[1] == 3 and w.tool[1] == 0


@pytest.mark.parametrize(("value", "ns"), [
    ("2024-01-01T00:00:00Z", 1704067200 * S), ("2024-01-01 00:00:00.5", 1704067200 * S + S // 2),
    ("2024-01-01T01:00:00.123456789+01:00", 1704067200 * S + 123456789), (1704067200, 1704067200 * S),
    (1704067200.25, 1704067200 * S + S // 4), ("1704067200123", 1704067200 * S + 123 * 10**6),
    (1704067200123456, 1704067200 * S + 123456000), (1704067200123456789, 1704067200 * S + 123456789), (3.5, 3 * S + S // 2),
    ("yesterday", None), (True, None), (None, None), (-1, None), (float("nan"), None), ("2024-13-01T00:00:00", None),
    ("", None), ("1" * 99, None), ("1e999999999", None), (float("inf"), None),
])
def test_times(value: object, ns: int | None) -> None:
    assert times.nanoseconds(value) == ns


def test_durations() -> None:
    assert times.milliseconds("12.5") == 12_500_000 and times.milliseconds(12) == 12_000_000
    assert times.seconds(0.25) == S // 4 and times.seconds("-") is None and times.milliseconds([1]) is None
    assert times.seconds("1e300") is None and times.milliseconds(True) is None
