"""The clock: absolute times to the last bit, and the order within one instant."""

import math

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from simcore.simulation import ARRIVAL, BOUNDARY, FLOW_END, TIMER, TOOL_RETURN, Simulation

ALL_RANKS = (FLOW_END, TOOL_RETURN, ARRIVAL, TIMER, BOUNDARY)
ranks = st.sampled_from(ALL_RANKS)
ids = st.integers(-3, 3) | st.integers(0, 2**40)
entries = st.tuples(st.sampled_from([0.0, 0.1, 0.30000000000000004, 7.0]), ranks, ids)


def order_of_running(scheduled):
    sim, ran = Simulation(), []
    for number, (time, rank, id) in enumerate(scheduled):
        sim.at(time, lambda *entry: ran.append((sim.now, *entry)), rank, id=id, args=(rank, id, number))
    sim.run_until()
    return ran


@given(st.lists(entries))
def test_by_time_then_rank_then_id_then_order_of_scheduling(scheduled):
    ran = order_of_running(scheduled)
    assert ran == sorted((*entry, number) for number, entry in enumerate(scheduled))


@given(st.lists(entries, unique=True), st.randoms(use_true_random=False))
def test_order_does_not_depend_on_the_order_of_scheduling(scheduled, random):
    shuffled = random.sample(scheduled, len(scheduled))
    assert [entry[:-1] for entry in order_of_running(scheduled)] == [entry[:-1] for entry in order_of_running(shuffled)]


def test_ids_of_numpy_order_like_those_of_python():
    # 2**20 shifted by 44 bits leaves nothing of an int64; the id must not be shifted as one.
    sim, ran = Simulation(), []
    for id in np.array([2**20, 3, 2**40, 1]):
        sim.at(1.0, ran.append, id=id, args=(int(id),))
    sim.run_until()
    assert ran == [1, 3, 2**20, 2**40]


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_at_keeps_the_last_bit_of_the_time(first, second):
    first, second = sorted((first, second))
    sim, seen = Simulation(), []
    sim.at(first, lambda: sim.at(second, lambda: seen.append(sim.now)))
    sim.run_until()
    assert seen == [second]


def test_a_timeout_may_lose_the_last_bit_which_is_why_there_is_at():
    sim = Simulation()
    sim.at(0.2, lambda: sim.timeout(0.9 - 0.2))
    sim.run()
    assert sim.now != 0.9


def test_a_call_at_the_same_instant_with_a_lower_rank_runs_next():
    sim, ran = Simulation(), []
    sim.at(1.0, lambda: (ran.append("timer"), sim.at(1.0, ran.append, FLOW_END, args=("flow",))), TIMER)
    sim.at(1.0, ran.append, TIMER, id=1, args=("timer 1",))
    sim.at(1.0, ran.append, BOUNDARY, args=("boundary",))
    sim.run_until()
    assert ran == ["timer", "flow", "timer 1", "boundary"]
    assert sim.now == 1.0


def test_a_cancelled_call_neither_runs_nor_moves_the_clock_nor_counts():
    sim, ran = Simulation(), []
    late = sim.at(100.0, ran.append, args=("late",))
    sim.at(1.0, late.cancel)
    sim.run_until()
    assert (ran, sim.now, sim.events) == ([], 1.0, 1)


def test_cancel_within_the_instant_and_twice_and_after_running():
    sim, ran = Simulation(), []
    victim = sim.at(1.0, ran.append, BOUNDARY, args=("victim",))
    ended = sim.at(0.5, ran.append, args=("ended",))
    sim.at(1.0, lambda: (victim.cancel(), victim.cancel(), ended.cancel()), TIMER)
    sim.run_until()
    assert ran == ["ended"]


@pytest.mark.parametrize("time", [0.9999999999999999, -1.0, -math.inf, math.inf, math.nan])
def test_a_time_in_the_past_or_not_finite_is_refused(time):
    sim = Simulation()
    sim.at(1.0, lambda: None)
    sim.run_until()
    with pytest.raises(ValueError, match="cannot schedule at"):
        sim.at(time, lambda: None)
    with pytest.raises(ValueError, match="cannot schedule at"):
        sim.moment(time)
    assert sim.peek() == math.inf  # nothing of it is left in the queue


@pytest.mark.parametrize("rank", [-1, 0, 1, 7, math.nan])
def test_a_rank_that_is_not_ours_is_refused(rank):
    with pytest.raises(ValueError, match="rank"):
        Simulation().at(1.0, lambda: None, rank)


@pytest.mark.parametrize("id", [1.5, "1", None])
def test_an_id_that_is_not_an_integer_is_refused(id):
    with pytest.raises(TypeError):
        Simulation().at(1.0, lambda: None, id=id)


def test_run_until_runs_what_lies_on_the_horizon_and_stops_the_clock_there():
    sim, ran = Simulation(), []
    for time in (1.0, 2.0, 2.0000000000000004):
        sim.at(time, ran.append, args=(time,))
    sim.run_until(2.0)
    assert (ran, sim.now) == ([1.0, 2.0], 2.0)
    sim.run_until(2.0)  # nothing new, and no complaint
    assert ran == [1.0, 2.0]
    sim.run_until()
    assert (ran, sim.now) == ([1.0, 2.0, 2.0000000000000004], 2.0000000000000004)


def test_the_clock_stands_at_the_horizon_if_it_cut_the_run_else_at_the_last_event():
    sim = Simulation()
    sim.at(1.0, lambda: None)
    sim.at(9.0, lambda: None)
    sim.run_until(5.0)
    assert sim.now == 5.0
    sim.run_until(50.0)
    assert sim.now == 9.0


def test_what_was_cancelled_beyond_the_horizon_does_not_count_as_cut():
    sim = Simulation()
    sim.at(1.0, sim.at(9.0, lambda: None).cancel)
    sim.run_until(5.0)
    assert (sim.now, sim.peek()) == (1.0, math.inf)


@pytest.mark.parametrize("horizon", [0.5, -math.inf, math.nan])
def test_a_horizon_in_the_past_would_turn_the_clock_back(horizon):
    sim = Simulation()
    sim.at(1.0, lambda: None)
    sim.at(2.0, lambda: None)
    sim.run_until(1.0)
    with pytest.raises(ValueError, match="cannot run until"):
        sim.run_until(horizon)
    assert sim.now == 1.0


follow_ups = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1 / 3, 2.0]), ranks, st.booleans()), max_size=3)


@given(st.lists(follow_ups, max_size=25), st.floats(0, 5))
def test_the_clock_never_goes_back(story, horizon):
    """Callbacks, SimPy timeouts and cancellations in any mix; each callback takes the next page of the story."""
    sim, pages, seen = Simulation(), iter(story), []

    def turn_page(*_):
        seen.append(sim.now)
        for delay, rank, cancelled in next(pages, ()):
            call = sim.at(sim.now + delay, turn_page, rank)
            if cancelled:
                call.cancel()
                sim.timeout(delay).callbacks.append(turn_page)

    turn_page()
    sim.run_until(horizon)
    seen.append(sim.now)
    sim.run_until()
    assert seen == sorted(seen)
    assert sim.peek() == math.inf


def test_simpy_processes_timeouts_and_resources_work_beside_callbacks():
    sim, log = Simulation(), []
    desk = simpy.Resource(sim, capacity=1)

    def customer(name, patience):
        yield sim.timeout(1.0)
        with desk.request() as turn:
            got = yield turn | sim.timeout(patience)
            log.append((sim.now, name, turn in got))
            if turn in got:
                yield sim.timeout(5.0)
        return name

    first, second = sim.process(customer("first", 1.0)), sim.process(customer("second", 2.0))
    sim.at(1.0, lambda: log.append((sim.now, "callback", True)))
    assert sim.run(until=first & second).todict() == {first: "first", second: "second"}
    # At 1.0 SimPy's own events come before any callback.
    assert log == [(1.0, "first", True), (1.0, "callback", True), (3.0, "second", False)]


def test_simpy_run_until_a_number_still_stops_before_that_time():
    sim, ran = Simulation(), []
    sim.at(2.0, ran.append, FLOW_END, args=("at 2",))
    sim.run(until=2)
    assert (ran, sim.now) == ([], 2)
    sim.run()
    assert ran == ["at 2"]


def test_moment_wakes_a_process_at_the_absolute_time_in_the_order_of_its_rank():
    sim, log = Simulation(), []

    def waits(name, rank, id):
        yield sim.moment(0.7, rank, id=id)
        log.append((sim.now, name))

    sim.at(0.7, lambda: log.append((sim.now, "boundary")), BOUNDARY)
    for name, rank, id in (("arrival 2", ARRIVAL, 2), ("arrival 1", ARRIVAL, 1), ("tool", TOOL_RETURN, 9)):
        sim.process(waits(name, rank, id))
    sim.at(0.7, lambda: log.append((sim.now, "timer")), TIMER)
    sim.at(0.1, lambda: None)
    sim.run_until()
    assert log == [(0.7, name) for name in ("tool", "arrival 1", "arrival 2", "timer", "boundary")]


def test_moment_in_a_condition_and_under_an_interrupt():
    sim, log = Simulation(), []

    def either():
        early, late = sim.moment(1.0), sim.moment(5.0)
        got = yield early | late
        log.append((sim.now, early in got, late in got))
        yield early  # over already: no waiting
        try:
            yield late
        except simpy.Interrupt as interrupt:
            log.append((sim.now, interrupt.cause))

    process = sim.process(either())
    sim.at(3.0, process.interrupt, args=("enough",))
    sim.run_until()
    assert log == [(1.0, True, False), (3.0, "enough")]


def test_an_exception_in_a_process_or_a_callback_comes_out_as_it_was_raised():
    error = KeyError("lost", 3)

    def fails():
        yield sim.timeout(2.0)
        raise error

    sim = Simulation()
    sim.process(fails())
    with pytest.raises(KeyError) as caught:
        sim.run_until()
    assert caught.value is error
    assert sim.now == 2.0

    def raises():
        raise error

    sim.at(4.0, raises)
    with pytest.raises(KeyError) as caught:
        sim.run()
    assert caught.value is error


def test_an_exception_that_another_process_handles_does_not_end_the_run():
    sim, log = Simulation(), []

    def fails():
        yield sim.moment(1.0)
        raise RuntimeError("no luck")

    def watches():
        try:
            yield sim.process(fails())
        except RuntimeError as error:
            log.append(str(error))

    sim.process(watches())
    sim.run_until()
    assert log == ["no luck"]


def test_a_draw_depends_on_seed_and_names_alone():
    one, two = Simulation(seed=7), Simulation(seed=7)
    two.draw("other", 1)
    two.at(3.0, lambda: None)
    two.run_until()
    assert one.draw("tool", 5) == two.draw("tool", 5)
    assert one.draw("tool", 5) != Simulation(seed=8).draw("tool", 5)
