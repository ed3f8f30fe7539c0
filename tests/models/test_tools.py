"""Tools with and without slots: when calls return, what they wait, and what the table says about them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isnan
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from simcore.errors import ConfigError
from simcore.models.tools import TOOL_COLUMNS, Tools
from simcore.simulation import BOUNDARY, Simulation

Asked = tuple[float, list[tuple[int, float]], float]  # time, calls, extra


def returns(asked: Sequence[Asked], slots: dict[str, int] | None, names: tuple[str, ...] = ("shell", "web")) -> Any:
    """(when the turn of each request came back, in which order they did, the tools, the simulation)."""
    sim = Simulation()
    tools = Tools(sim, slots, names)
    back: dict[int, float] = {}

    def done(i: int) -> None:
        back[i] = sim.now

    for i, (time, calls, extra) in enumerate(asked):
        sim.at(time, tools.call, BOUNDARY, id=i, args=(i, calls, extra, done, (i,)))
    sim.run_until()
    return [back[i] for i in range(len(asked))], list(back), tools, sim


def test_two_slots_four_calls() -> None:
    times, _, tools, _ = returns([(0.0, [(0, 10.0)], 0.0)] * 4, {"shell": 2})
    assert times == [10.0, 10.0, 20.0, 20.0]
    shell = tools.frame(20.0).iloc[0]
    assert (shell["calls"], shell["slots"], shell["longest_queue"]) == (4, 2, 2)
    assert (shell["busy_seconds"], shell["wait_seconds"], shell["mean_wait"], shell["utilization"]) == (40.0, 20.0, 5.0, 1.0)


def test_first_come_first_served_even_if_a_later_call_is_shorter() -> None:
    asked: list[Asked] = [(0.0, [(0, 5.0)], 0.0), (1.0, [(0, 10.0)], 0.0), (2.0, [(0, 1.0)], 0.0), (3.0, [(1, 1.0)], 0.0)]
    times, order, tools, _ = returns(asked, {"shell": 1})
    assert times == [5.0, 15.0, 16.0, 4.0]  # the last asks for another tool
    assert order == [3, 0, 1, 2]
    assert tools.frame(16.0)["wait_seconds"].tolist() == [4.0 + 13.0, 0.0]
    assert tools.frame(16.0)["longest_queue"].tolist() == [2, 0]


def test_a_slot_that_is_free_now_is_taken_without_a_wait() -> None:
    times, _, tools, _ = returns([(0.0, [(0, 5.0)], 0.0), (5.0, [(0, 5.0)], 0.0), (20.0, [(0, 0.0)], 0.0)], {"shell": 1})
    assert times == [5.0, 10.0, 20.0]
    assert tools.frame(20.0)["longest_queue"][0] == 0 and tools.frame(20.0)["mean_wait"][0] == 0.0


def test_calls_side_by_side_return_with_the_last_of_them() -> None:
    """Request 0 calls one shell and two webs at 0; request 1 at 1 waits for the only web until 4 + 3."""
    asked: list[Asked] = [(0.0, [(0, 2.0), (1, 4.0), (1, 3.0)], 0.5), (1.0, [(1, 1.0), (0, 1.0)], 0.0)]
    assert returns(asked, None)[0] == [4.5, 2.0]
    assert returns(asked, {"web": 1})[0] == [7.5, 8.0]


def test_no_call_is_a_wait_of_extra() -> None:
    assert returns([(1.0, [], 2.5)], {"shell": 1})[0] == [3.5]


@given(st.floats(0, 1e6), st.floats(0, 1e4))
def test_one_call_is_now_plus_gap_to_the_last_bit(now: float, gap: float) -> None:
    for slots in (None, {"shell": 1}):
        assert returns([(now, [(0, gap)], 0.0)], slots)[0] == [now + gap]
        assert returns([(now, [], gap)], slots)[0] == [now + gap]


@pytest.mark.parametrize("slots", [None, {"shell": 1, "web": 2}])
def test_one_event_a_turn(slots: dict[str, int] | None) -> None:
    asked: list[Asked] = [(float(k), [(0, 3.0), (1, 2.0), (1, 9.0)], 0.1) for k in range(7)]
    assert returns(asked, slots)[3].events == 2 * len(asked)  # the asking itself is an event of the test


def test_turns_that_come_back_at_one_instant_come_by_id() -> None:
    asked: list[Asked] = [(2.0, [(0, 3.0)], 0.0), (0.0, [(0, 5.0)], 0.0), (1.0, [(1, 2.0)], 2.0), (4.0, [], 1.0)]
    times, order, _, _ = returns(asked, None)
    assert times == [5.0] * 4 and order == [0, 1, 2, 3]


def test_table_with_a_tool_that_nobody_called_and_one_without_limit() -> None:
    _, _, tools, _ = returns([(0.0, [(1, float(s))], 0.0) for s in range(1, 101)], {"shell": 3})
    table = tools.frame(200.0)
    assert list(table) == list(TOOL_COLUMNS) and table["tool"].tolist() == ["shell", "web"]
    shell, web = table.iloc[0], table.iloc[1]
    assert shell["calls"] == 0 and shell["utilization"] == 0.0 and isnan(shell["mean_wait"]) and isnan(shell["p50_seconds"])
    assert (web["slots"], web["mean_seconds"], web["p50_seconds"], web["busy_seconds"]) == (0, 50.5, 50.5, 5050.0)
    assert web["p99_seconds"] == np.percentile(np.arange(1, 101), 99) and isnan(web["utilization"])
    assert not len(Tools(Simulation(), None, ()).frame(1.0))


def test_a_run_that_is_cut_counts_up_to_the_cut() -> None:
    """One slot: 0-10, 10-20 (asked at 0), 20-30 (asked at 4); cut at 12."""
    _, _, tools, _ = returns([(0.0, [(0, 10.0)], 0.0), (0.0, [(0, 10.0)], 0.0), (4.0, [(0, 10.0)], 0.0)], {"shell": 1})
    shell = tools.frame(12.0, cut_at=12.0).iloc[0]
    assert (shell["busy_seconds"], shell["wait_seconds"], shell["utilization"]) == (12.0, 10.0 + 8.0, 1.0)
    assert (shell["calls"], shell["mean_seconds"], shell["longest_queue"]) == (3, 10.0, 2)


@pytest.mark.parametrize(
    ("slots", "names", "message"),
    [({"shel": 1}, ("shell", "web"), "tools: found 'shel': allowed: the workload's tools: shell, web"),
     ({"shell": 1}, (), "tools: found 'shell': allowed: none: the workload names no tools"),
     ({"shell": 0}, ("shell",), "tools: shell: found 0: allowed: a whole number, at least 1"),
     ({"shell": 1.5}, ("shell",), "tools: shell: found 1.5"),
     ({"shell": True}, ("shell",), "tools: shell: found True")],
)
def test_slots_that_are_refused(slots: dict[str, Any], names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Tools(Simulation(), slots, names)


SECONDS = st.sampled_from([0.0, 0.1, 0.25, 0.7, 1.0, 3.0, 10.0])
TURN = st.tuples(SECONDS, st.lists(st.tuples(st.integers(0, 1), SECONDS), max_size=4), SECONDS)


@given(st.lists(TURN, max_size=12), st.integers(1, 3), st.none() | st.integers(1, 3))
def test_against_simpy_resources(turns: list[Asked], shells: int, webs: int | None) -> None:
    """The same turns as processes that queue for SimPy's own first-come-first-served resources."""
    clock = np.cumsum([after for after, _, _ in turns]).tolist()
    asked = [(at, calls, extra) for at, (_, calls, extra) in zip(clock, turns, strict=True)]
    slots = {"shell": shells} | ({"web": webs} if webs else {})
    env = simpy.Environment()
    resources = [simpy.Resource(env, shells), simpy.Resource(env, webs or 1000)]
    expected = []

    def tool_call(resource: simpy.Resource, seconds: float, ends: list[float]) -> Any:
        with resource.request() as slot:
            yield slot
            yield env.timeout(seconds)
            ends.append(env.now)

    for at, calls, extra in asked:
        ends = [at]
        expected.append((ends, extra))
        for tool, seconds in calls:
            simpy.events.Process(env, _after(env, at, tool_call(resources[tool], seconds, ends)))
    env.run()
    assert returns(asked, slots)[0] == [max(ends) + extra for ends, extra in expected]


def _after(env: simpy.Environment, time: float, story: Any) -> Any:
    """Start the story at an absolute time: the first timeout is from 0, which loses no bit."""
    yield env.timeout(time)
    yield from story
