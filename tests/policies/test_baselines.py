"""The policies that Continuum is compared with, its released variant and its clairvoyant bound, by hand."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
from small_systems import Played, after, engine, first, pin, room, site, tool_ran, turn, waited

from simcore.models.decision_points import Extend, Pin, Release, Swap, Unpin
from simcore.models.facts import PinDropped
from simcore.policies.admission.program_fcfs import ProgramFcfs
from simcore.policies.retention.clairvoyant import Clairvoyant
from simcore.policies.retention.continuum_released import ContinuumReleased
from simcore.policies.retention.infercept import Infercept
from simcore.policies.retention.preserve_until_return import PreserveUntilReturn
from simcore.policies.retention.static_ttl import StaticTtl


def started(policy: Any, **more: Any) -> Any:
    policy.start(site(**more), np.random.default_rng(0))
    return policy


# --- program FCFS -----------------------------------------------------------------------------------------------------


def test_program_fcfs_serves_the_older_programs_turn_though_it_came_later() -> None:
    rows = [first(0), first(1, at=0.5, prompt=4, output=9), first(2, at=5.0), after(0, 0, 5.0)]
    assert Played(rows, admission=ProgramFcfs, settings={"max_num_seqs": 1}).admitted() == [0.0, 1.0, 11.0, 10.0]
    assert Played(rows, settings={"max_num_seqs": 1}).admitted() == [0.0, 1.0, 10.0, 11.0]


def test_program_fcfs_serves_preempted_turns_first() -> None:
    turns = [turn(id=i, preempted=i == 2, program_arrival=float(i)) for i in (2, 1, 0)]
    assert [t.id for t in sorted(turns, key=lambda t: ProgramFcfs().key(t, 0.0))] == [2, 0, 1]


# --- constants --------------------------------------------------------------------------------------------------------


def test_static_ttl_pins_for_a_constant_time_whatever_the_tool() -> None:
    policy = StaticTtl(3.0)
    assert policy.at_turn_end(turn(next_tool="pytest"), engine(1.0)) == Pin(4.0)
    assert policy.at_turn_end(turn(next_tool=None), engine(1.0)) == Release()
    assert StaticTtl(0.0).at_turn_end(turn(), engine(1.0)) == Release()
    assert StaticTtl(inf).at_turn_end(turn(), engine(1.0)) == Pin(inf)
    with pytest.raises(ValueError, match="allowed"):
        StaticTtl(-1.0)


@pytest.mark.parametrize(("seconds", "cached"), [(1.0, 0), (5.0, 8)])
def test_a_pin_that_lasts_saves_the_prefix_from_strangers(seconds: float, cached: int) -> None:
    """Program 0's two blocks of seven are free from 1 or 2 on; the second stranger takes five, those free longest first."""
    rows = [first(0), first(1, at=2.0, prompt=20), first(2, at=3.5, prompt=20), after(0, 0, 4.0)]
    played = Played(rows, admission=ProgramFcfs, retention=lambda: StaticTtl(seconds), blocks=7)
    assert played.cached()[3] == cached


def test_preserve_until_return_keeps_a_pin_as_long_as_the_tool_runs() -> None:
    played = Played([first(0), after(0, 0, 500.0)], retention=PreserveUntilReturn)
    assert played.pinned() == [(0, "inf")] and played.unpinned() == [(501.0, 0, "consumed")]


def test_preserve_until_return_makes_room_newest_program_first() -> None:
    rows = [*(first(p, at=0.1 * p) for p in range(3)), first(3, at=3.5, prompt=15), *(after(p, p, 50.0) for p in range(3))]
    played = Played(rows, retention=PreserveUntilReturn, blocks=7)
    assert played.unpinned()[:2] == [(3.5, 2, "room"), (3.5, 1, "room")]


# --- the released variant ---------------------------------------------------------------------------------------------


def test_the_release_pins_two_seconds_unless_the_tools_mean_is_longer() -> None:
    policy = ContinuumReleased()
    pinned = Pin(3.0, "turn_end")
    assert policy.at_turn_end(turn(), engine(1.0)) == pinned  # no history
    tool_ran(policy, 3.9)
    assert policy.at_turn_end(turn(), engine(1.0)) == Release()
    tool_ran(policy, 0.1)
    assert policy.at_turn_end(turn(), engine(1.0)) == pinned  # a mean of 2.0 s is not more than 2.0
    tool_ran(policy, 9.0, "pytest")
    assert policy.at_turn_end(turn(), engine(1.0)) == pinned
    assert policy.at_turn_end(turn(next_tool=None), engine(1.0)) == Release()
    assert policy.at_turn_end(turn(is_last=True), engine(1.0)) == Release()


def test_the_releases_pin_lives_until_the_next_turn_ends_or_it_expires() -> None:
    released = {"admission": ContinuumReleased, "retention": None}
    played = Played([first(0), after(0, 0, 1.5, output=1)], **released)  # type: ignore[arg-type]
    assert played.unpinned() == [(3.5, 0, "consumed")]  # at 3.0 the turn runs; the step ends at 3.5, and so does the turn
    played = Played([first(0), after(0, 0, 2.5)], **released)  # type: ignore[arg-type]
    assert played.unpinned() == [(3.0, 0, "expired")]
    rows = [first(0), first(1, at=0.5, prompt=4, output=5), after(0, 0, 1.5, output=2)]
    played = Played(rows, settings={"max_num_seqs": 1}, **released)  # type: ignore[arg-type]
    assert (3.0, "retention", 0, "extend until inf") in played.decisions
    assert played.admitted()[2] == 6.0 and played.unpinned() == [(8.0, 0, "consumed")]


def test_the_release_orders_by_pin_and_program_alone() -> None:
    states = [(False, False, 1.0), (False, True, 3.0), (True, False, 9.0), (False, True, 2.0), (True, True, 5.0)]
    turns = [turn(id=i, preempted=preempted, pinned=pinned, program_arrival=arrival)
             for i, (preempted, pinned, arrival) in enumerate(states)]
    assert [t.id for t in sorted(turns, key=lambda t: ContinuumReleased().key(t, 0.0))] == [3, 1, 4, 0, 2]


def test_the_release_makes_room_only_where_nothing_else_could_the_latest_expiry_first() -> None:
    pins = [pin(0, since=5.0), pin(1, since=7.0), pin(2, since=6.0, until=inf)]  # the last one extended
    rule = ContinuumReleased().make_room
    assert list(rule(room(1), pins, engine(num_running=1))) == []
    assert list(rule(room(1), pins, engine(num_running=0))) == [1, 2, 0]
    assert list(rule(room(9, "decode"), pins, engine(num_running=2))) == []
    assert list(rule(room(9, "decode"), pins, engine(num_running=1))) == [1, 2, 0]


def test_in_the_release_a_waiting_request_lets_pins_be_while_anything_runs() -> None:
    """Program 0's pin holds 2 of 6 blocks from 1 to 5, a stranger 2 until 3.5; the head needs 4 from 2 on."""
    rows = [first(0), first(1, at=0.5, prompt=5, output=2), first(2, at=2.0, prompt=15), after(0, 0, 30.0)]
    played = Played(rows, admission=lambda: ContinuumReleased(4.0), retention=None, blocks=5,
                    settings={"room_order": "rows_first"})
    assert played.admitted()[:3] == [0.0, 1.0, 3.0] and played.unpinned()[0] == (3.0, 0, "room")


def test_the_release_preempts_the_newest_program_that_is_not_on_its_last_turn() -> None:
    running = [turn(id=0, program_arrival=3.0, is_last=False), turn(id=1, program_arrival=5.0, is_last=True),
               turn(id=2, program_arrival=4.0, is_last=None)]
    policy = ContinuumReleased()
    assert policy.victim(running, 1, engine()).id == 2
    assert policy.victim(running[1:2], 1, engine()).id == 1
    last = [turn(id=i, program_arrival=float(i), is_last=True) for i in (2, 9, 4)]
    assert policy.victim(last, 1, engine()).id == 9


# --- InferCept --------------------------------------------------------------------------------------------------------


def test_infercept_preserves_at_the_call_and_discards_when_waiting_wastes_more() -> None:
    """2000 tokens take 2 s to compute, in two steps; the others hold 3000 tokens. Discarding wastes 2 * 2000 / 2 + 2 * 1 *
    3000 = 8000 token-seconds, what preserving wastes in 4 s."""
    policy = started(Infercept())
    assert policy.at_turn_end(turn(2000), engine(10.0, running_tokens=3000)) == Pin(inf)
    kept = [pin(0, since=10.0, tokens=2000)]
    assert policy.review(kept, engine(13.9, running_tokens=3000)) == []
    assert policy.review(kept, engine(14.1, running_tokens=3000)) == [Unpin(0)]
    assert policy.review(kept, engine(14.1, running_tokens=4000)) == []
    assert policy.review(kept, engine(11.1, running_tokens=0)) == [Unpin(0)]  # nobody would be held up
    returned = [pin(0, since=10.0, tokens=2000, next_turn_waiting=True)]
    assert policy.review(returned, engine(99.0, running_tokens=0)) == []
    assert policy.at_turn_end(turn(2000, next_tool=None), engine()) == Release()


def test_infercept_with_a_tier_lets_go_since_a_swap_that_does_not_block_wastes_nothing() -> None:
    tier = {"reload_seconds": lambda tokens: 1e-5 * tokens}
    busy = engine(10.0, running_tokens=3000)
    assert started(Infercept(), **tier).at_turn_end(turn(2000), busy) == Swap("host")
    assert started(Infercept(), **tier).at_turn_end(turn(2000), engine()) == Swap("host")
    assert started(Infercept(), **tier).at_turn_end(turn(2000, next_tool=None), busy) == Release()
    blocking = started(Infercept(swap_blocks=True), **tier)  # 2 * 0.02 * 3000 = 120 token-seconds: preserve for 0.06 s
    assert blocking.at_turn_end(turn(2000), busy) == Pin(inf)
    assert blocking.review([pin(0, since=10.0, tokens=2000)], engine(10.05, running_tokens=3000)) == []
    assert blocking.review([pin(0, since=10.0, tokens=2000)], engine(10.07, running_tokens=3000)) == [Unpin(0)]
    assert started(Infercept(), reload_seconds=lambda tokens: None).at_turn_end(turn(2000), busy) == Pin(inf)


def test_infercept_wakes_at_its_cadence_while_it_holds_pins() -> None:
    policy = started(Infercept(cadence=0.5))
    assert policy.next_wakeup(1.0) == inf
    policy.at_turn_end(turn(2000), engine(1.0))
    assert [policy.next_wakeup(now) for now in (1.0, 1.2, 1.5, 1.6, 9.0)] == [1.5, 1.5, 2.0, 2.0, 9.5]
    policy.observe(PinDropped(9.2, 0, "expired"))
    assert policy.next_wakeup(9.2) == inf
    with pytest.raises(ValueError, match="allowed"):
        Infercept(cadence=0.0)


def test_infercept_reviews_in_a_run() -> None:
    """PR = 1 s whatever the length, nobody else runs at first: waste of discarding is 8 / 2 = 4 token-seconds, that of
    preserving 8 per second."""
    rows = [first(0), first(1, at=0.5, prompt=4, output=9), after(0, 0, 6.0)]
    played = Played(rows, retention=lambda: Infercept(cadence=0.25), settings={"max_num_batched_tokens": 400})
    assert played.pinned()[0] == (0, "inf")
    (time, program, answer) = played.unpinned()[0]
    assert (program, answer) == (0, "expired") and 1.5 < time < 7.0


def test_infercept_gives_way_only_where_nothing_runs() -> None:
    pins = [pin(0), pin(1)]
    assert list(Infercept().make_room(room(5), pins, engine(num_running=1))) == []
    assert list(Infercept().make_room(room(5), pins, engine(num_running=0))) == [1, 0]


# --- the clairvoyant bound --------------------------------------------------------------------------------------------


def test_the_clairvoyant_pins_what_returns_before_its_benefit_is_spent() -> None:
    policy = started(Clairvoyant())
    assert policy.oracle
    assert policy.at_turn_end(turn(1000, next_gap=0.9), engine()) == Pin(inf)  # PR = 1 s, T = 0
    assert policy.at_turn_end(turn(1000, next_gap=1.1), engine()) == Release()
    tool_ran(policy, 1.0)
    waited(policy, 3.0)
    assert policy.at_turn_end(turn(1000, next_gap=3.9), engine()) == Pin(inf)  # T = 3 s, eta = 1
    assert policy.at_turn_end(turn(1000, next_gap=4.1), engine()) == Release()
    assert policy.at_turn_end(turn(1000, next_gap=inf, is_last=True), engine()) == Release("first")


def test_the_clairvoyant_in_a_run() -> None:
    rows = [first(0), first(1, at=0.1), after(0, 0, 0.5), after(1, 1, 5.0)]
    played = Played(rows, admission=Clairvoyant, retention=None, settings={"max_num_batched_tokens": 400}, ends_known=False)
    assert played.pinned() == [(0, "inf")] and played.unpinned() == [(2.0, 0, "consumed")]
    assert [answer for _, _, request, answer in played.decisions if request in (2, 3)] == ["first", "first"]


@pytest.mark.parametrize("policy", [StaticTtl(), PreserveUntilReturn(), ContinuumReleased()])
def test_all_of_them_keep_an_expired_pin_whose_next_turn_waits(policy: Any) -> None:
    assert policy.review([pin(0, next_turn_waiting=True), pin(1)], engine(10.0)) == [Extend(0, inf)]
