"""Continuum by hand: its objective on the published numbers, its cold start, and each rule of pins on a tiny system."""

from __future__ import annotations

from math import exp, inf
from typing import Any

import numpy as np
import pytest
from small_systems import Played, after, engine, first, pin, program_of, room, site, tool_ran, turn, waited
from tool_seconds import CD

from simcore.experiments.run import build_policies
from simcore.experiments.study import Study
from simcore.models.decision_points import Extend, Pin, Release
from simcore.policies.retention._estimates import Durations, Memoryfulness, SlidingMean
from simcore.policies.retention._rebuild import RebuildTime, least_squares, profile_points
from simcore.policies.retention.continuum import Continuum


def durations(values: Any) -> Durations:
    made = Durations()
    for value in values:
        made.add(value)
    return made


def started(**options: Any) -> Continuum:
    """At work where 1000 tokens take 1 s to compute."""
    made = Continuum(**options)
    made.start(site(), np.random.default_rng(0))
    return made


# --- the objective --------------------------------------------------------------------------------------------------


def test_of_two_durations_the_shorter_is_worth_waiting_for() -> None:
    assert durations([1.0, 4.0]).best_ttl(3.0) == 1.0  # 0.5 * 3 - 1 = 0.5; 3 - 4 = -1


@pytest.mark.parametrize(
    ("benefit", "ttl"),
    [(0.5, 0.135), (3, 0.183), (5, 0.183), (10, 0.242), (50, 0.242), (100, 2.212), (150, 3.382), (200, 14.361)],
)
def test_the_papers_cd_durations(benefit: float, ttl: float) -> None:
    assert len(CD) == 98 and durations(CD).best_ttl(benefit) == ttl


def test_ties_go_to_the_shorter_and_a_negative_benefit_pins_nothing() -> None:
    assert durations([1.0]).best_ttl(1.0) == 0.0  # 1 - 1 = 0
    assert durations([1.0, 2.0]).best_ttl(2.0) == 0.0  # 0.5 * 2 - 1 = 2 - 2 = 0
    assert durations([2.0, 4.0]).best_ttl(8.0) == 4.0
    assert durations([0.1]).best_ttl(-5.0) == 0.0 == Durations().best_ttl(9.0)


def test_durations_of_no_time_count_for_a_pin_of_no_time() -> None:
    assert durations([0.0, 0.0, 0.0, 4.0]).best_ttl(1.0) == 0.0
    assert durations([0.0, 0.1, 4.0]).best_ttl(1.0) == 0.1


def test_the_objective_is_maximised_exactly() -> None:
    random = np.random.default_rng(5)
    for _ in range(200):
        values = random.choice([0.0, 0.1, 0.5, 1.0, 2.0, 7.0, *random.random(200)], random.integers(1, 150)).tolist()
        benefit = float(random.choice([0.01, 0.3, 1.0, 5.0, 100.0]))
        made, best = durations(values), (0.0, 0.0)
        for tau in [0.0, *sorted(set(values))]:
            gain = sum(v <= tau for v in values) / len(values) * benefit - tau
            best = (gain, tau) if gain > best[0] else best
        assert made.best_ttl(benefit) == best[1]


def test_default_ttl_is_the_optimum_for_unit_exponential_durations() -> None:
    policy = started(ttl_default="lnB")
    assert policy.ttl("grep", 3.0) == pytest.approx(1.0986, abs=5e-5)
    assert policy.ttl("grep", 1.0) == 0.0 == policy.ttl("grep", 0.5)
    assert policy.ttl("grep", exp(2)) == pytest.approx(2.0) and policy.ttl("grep", 7.389) == pytest.approx(2.0, abs=1e-4)


# --- what it learns -------------------------------------------------------------------------------------------------


def test_memoryfulness() -> None:
    eta = Memoryfulness()
    assert eta.value == 1.0
    eta.add(1)
    assert eta.value == 1.0  # one k only
    eta = Memoryfulness(start=0.3)
    assert eta.value == 0.3
    eta.add(3)  # (1, 2), (2, 1), (3, 0)
    assert eta.value == 1.0


@pytest.mark.parametrize(
    ("draw", "expected"),
    [(lambda r: np.rint(r.normal(10.9, 2.1, 50_000)), 0.82), (lambda r: np.rint(r.normal(6.3, 2.3, 50_000)), 0.59),
     (lambda r: r.geometric(1 / 10.9, 50_000), 0.0), (lambda r: np.rint(np.exp(r.normal(1, 1.5, 50_000))), -0.6)],
)
def test_memoryfulness_of_distributions(draw: Any, expected: float) -> None:
    eta = Memoryfulness()
    for turns in draw(np.random.default_rng(1)).tolist():
        eta.add(max(1, int(turns)))
    assert eta.value == pytest.approx(expected, abs=0.02) if expected >= 0 else eta.value < 0


def test_memoryfulness_is_the_correlation() -> None:
    turns = [3, 1, 8, 5, 5]
    eta = Memoryfulness()
    for n in turns:
        eta.add(n)
    pairs = np.array([(k, n - k) for n in turns for k in range(1, n + 1)])
    assert eta.value == pytest.approx(-np.corrcoef(pairs.T)[0, 1])


def test_queueing_delay_counts_the_last_returning_turns_without_a_pin() -> None:
    policy = started(t_window=2)
    assert policy.benefit(5.0) == 5.0  # T starts at 0
    waited(policy, 100.0)  # a program's first turn
    tool_ran(policy, 1.0)
    waited(policy, 100.0, had_pin=True)
    assert policy.benefit(5.0) == 5.0
    for seconds in (1.0, 2.0, 6.0):
        tool_ran(policy, 1.0)
        waited(policy, seconds)
        waited(policy, 100.0, resumed=True)
    assert policy.benefit(5.0) == 5.0 + 4.0  # the mean of 2 and 6, eta = 1
    for _ in range(2):
        program_of(policy, 3)
    program_of(policy, 1)
    assert policy.benefit(0.0) < 4.0
    assert SlidingMean(3).value == 0.0


def test_a_heavy_tail_of_turns_may_leave_no_benefit() -> None:
    policy = started(eta_start=-0.5)
    tool_ran(policy, 0.1)
    waited(policy, 10.0)
    assert policy.benefit(0.5) == -4.5


def test_cold_start_has_three_tiers() -> None:
    policy = started(history=3)
    for seconds in (0.1, 0.1, 5.0):
        tool_ran(policy, seconds, "grep" if seconds < 1 else "pytest")
    assert policy.ttl("grep", 0.3) == 2.0  # |S| = 3 is not more than 3
    tool_ran(policy, 5.0, "pytest")
    assert policy.ttl("grep", 0.15) == 0.0 == policy.ttl("never seen", 0.15)  # pooled: half within 0.1 s, 0.075 - 0.1 < 0
    assert policy.ttl("grep", 0.3) == 0.1
    for _ in range(2):
        tool_ran(policy, 0.1, "grep")
    assert policy.ttl("grep", 0.15) == 0.1  # its own four, all within 0.1 s
    assert policy.ttl("pytest", 0.2) == 0.1  # two of its own, 5 s each: pooled, 4 of 6 within 0.1 s


def test_turns_without_a_tool_or_known_to_be_the_last_are_not_pinned() -> None:
    policy = started()
    assert policy.at_turn_end(turn(), engine(3.0)) == Pin(5.0)
    assert policy.at_turn_end(turn(next_tool=None), engine(3.0)) == Release()
    assert policy.at_turn_end(turn(is_last=True), engine(3.0)) == Release()
    anything = started(tools_only=False)
    assert anything.at_turn_end(turn(next_tool=None), engine(3.0)) == Pin(5.0)
    assert anything.at_turn_end(turn(next_tool=None, is_last=True), engine(3.0)) == Release()
    assert started(ttl_default="fixed:0").at_turn_end(turn(), engine(3.0)) == Release()
    tool_ran(policy, 1.0, None)
    tool_ran(anything, 1.0, None)
    assert (policy._all_tools.count, anything._all_tools.count) == (0, 1)


@pytest.mark.parametrize("wrong", [
    {"history": -1}, {"t_window": 0}, {"ttl_default": "2.0"}, {"ttl_default": "fixed:-1"}, {"ttl_default": "fixed:inf"},
    {"ttl_default": "ln"}, {"eta_start": 2.0}, {"yields": "never"},
])
def test_a_wrong_parameter_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        Continuum(**wrong)


# --- the time to rebuild a context ------------------------------------------------------------------------------------


def test_prefill_is_profiled_once_and_fitted() -> None:
    asked: list[int] = []

    def prefill(tokens: int) -> float:
        asked.append(tokens)
        return 0.01 + 2e-5 * tokens + 3e-10 * tokens**2

    rebuild = RebuildTime(site(prefill))
    assert asked == [1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000]
    for tokens in (1, 500, 70_126):
        assert rebuild.seconds(turn(tokens)) == pytest.approx(0.01 + 2e-5 * tokens + 3e-10 * tokens**2)
    assert len(asked) == 8


def test_profiles_of_short_contexts() -> None:
    assert profile_points(1500) == [375, 750, 1500] and profile_points(2) == [1, 2] and profile_points(1) == [1]
    assert least_squares([0.5, 1.0], [1.0, 2.0]) == pytest.approx([0.0, 2.0]) and least_squares([1.0], [4.0]) == [4.0]


def test_what_a_lower_tier_holds_is_loaded_and_the_rest_computed() -> None:
    rebuild = RebuildTime(site(lambda tokens: 1e-3 * tokens, reload_seconds=lambda tokens: 1e-5 * tokens))
    assert rebuild.seconds(turn(2000, lower_tier_tokens=2000)) == pytest.approx(0.02)
    assert rebuild.seconds(turn(2000, lower_tier_tokens=500)) == pytest.approx(0.005 + 1.5)
    assert rebuild.seconds(turn(2000, lower_tier_tokens=0)) == pytest.approx(2.0)  # its copy was evicted
    without = RebuildTime(site(lambda tokens: 1e-3 * tokens, reload_seconds=lambda tokens: None))
    assert without.seconds(turn(2000)) == pytest.approx(2.0)


# --- pins -------------------------------------------------------------------------------------------------------------


def play(rows: list[dict[str, Any]], **options: Any) -> Played:
    """Under Continuum with its default TTL of 2 s (or `ttl`)."""
    policy = {"ttl_default": f"fixed:{options.pop('ttl', 2.0)}"} | options.pop("policy", {})
    return Played(rows, admission=lambda: Continuum(**policy), retention=None, **options)


def test_one_object_serves_queue_and_retention_if_it_is_named_under_retention() -> None:
    study = Study(
        workload={"generate": {"requests": 1, "rate": 1, "input_tokens": 1, "output_tokens": 1}}, model="qwen3-8b",  # type: ignore
        policies={"retention": {"name": "continuum", "t_window": 7}})  # type: ignore[arg-type]
    policies = build_policies(study, None)  # type: ignore[arg-type]
    admission = policies.admission(0)
    assert type(admission) is Continuum and policies.retention(0, admission) is admission


def test_a_pin_is_consumed_at_admission_not_at_arrival() -> None:
    """The next turn arrives at 2.5 and waits for the slot until 4; a stranger's blocks do not reach its own."""
    rows = [first(0), first(1, at=0.5, prompt=4, output=3), after(0, 0, 1.5)]
    played = play(rows, settings={"max_num_seqs": 1}, ttl=10)
    assert played.admitted() == [0.0, 1.0, 4.0]
    assert played.unpinned() == [(4.0, 0, "consumed")] and played.cached()[2] == 8


def test_a_pin_whose_next_turn_does_not_come_expires() -> None:
    played = play([first(0), after(0, 0, 2.5)])
    assert played.pinned() == [(0, "3.0")] and played.unpinned() == [(3.0, 0, "expired")]
    assert played.cached() == [0, 8]  # released, not wiped


def test_an_expired_pin_holds_on_while_the_next_turn_waits() -> None:
    """Pinned until 3. The next turn is there at 2.5 and gets the slot at 6 only; a third program wants all blocks at 2."""
    rows = [first(0), first(1, at=0.5, prompt=4, output=5), first(2, at=2.0, prompt=12), after(0, 0, 1.5)]
    played = play(rows, settings={"max_num_seqs": 1}, blocks=6)
    assert (3.0, "retention", 0, "extend until inf") in played.decisions
    assert played.unpinned() == [(6.0, 0, "consumed")]
    assert played.admitted() == [0.0, 1.0, 7.0, 6.0] and played.cached()[3] == 8


def test_review_extends_only_those_whose_next_turn_waits() -> None:
    pins = [pin(0, next_turn_waiting=True), pin(1), pin(2, next_turn_waiting=True, until=11.0)]
    assert Continuum().review(pins, engine(10.0)) == [Extend(0, inf)]


def test_the_deadlock_rule_drops_pins_of_the_newest_programs_until_the_head_fits() -> None:
    rows = [*(first(p, at=0.1 * p) for p in range(3)), first(3, at=3.5, prompt=15), *(after(p, p, 50.0) for p in range(3))]
    played = play(rows, ttl=40, blocks=7)
    # At 3.5 the pins hold 6 of 7 blocks and the head needs 4: program 2's and then 1's pin go.
    assert played.unpinned()[:2] == [(3.5, 2, "room"), (3.5, 1, "room")]
    assert played.admitted()[3] == 3.5 and (41.0, 0, "expired") in played.unpinned()


@pytest.mark.parametrize(("yields", "admitted"), [("blocked", 2.0), ("deadlock", 3.0)])
def test_a_blocked_request_takes_pins_at_once_or_only_when_nothing_runs(yields: str, admitted: float) -> None:
    """Program 0's pin holds 2 of 5 blocks from 1 on, program 1's turn one from 1 until 3; program 2 needs 4 from 1.5 on."""
    rows = [first(0), first(1, at=0.5, prompt=2, output=2), first(2, at=1.5, prompt=15), after(0, 0, 30.0)]
    played = play(rows, ttl=20, blocks=5, policy={"yields": yields})
    assert played.admitted()[:3] == [0.0, 1.0, admitted] and played.unpinned()[0] == (admitted, 0, "room")


def test_the_heads_own_pin_is_spared_though_it_is_the_newest() -> None:
    rows = [first(0), first(1, at=0.1), after(1, 1, 1.0, prompt=20), after(0, 0, 50.0)]
    played = play(rows, ttl=40, blocks=6)
    # Program 1's next turn needs 5 blocks and finds 2; program 0's pin holds 2 of the other 4.
    assert played.unpinned()[:2] == [(3.0, 0, "room"), (3.0, 1, "consumed")] and played.cached()[2] == 8


def test_a_pin_that_the_next_prompt_does_not_match_cannot_block_it_for_ever() -> None:
    rows = [first(0), after(0, 0, 1.0, prompt=20) | {"ids": [7, 8, 9, 10, 11]}]
    played = play(rows, ttl=40, blocks=6)
    assert played.unpinned() == [(2.0, 0, "room")] and played.admitted() == [0.0, 2.0]


def test_who_makes_room() -> None:
    pins = [pin(p, next_turn_waiting=p == 3) for p in range(4)]
    rule = Continuum().make_room
    assert rule(room(2), pins, engine(num_running=1)) == [3, 1, 0]
    assert rule(room(2), pins, engine(num_running=0)) == [3, 1, 0, 2]
    assert rule(room(2, "decode"), pins, engine(num_running=2)) == [3, 1, 0]
    assert rule(room(2, "decode"), pins, engine(num_running=1)) == [3, 1, 0, 2]
    calm = Continuum(yields="deadlock").make_room
    assert calm(room(2), pins, engine(num_running=1)) == () and calm(room(2), pins, engine()) == [3, 1, 0, 2]
    assert calm(room(2, "decode"), pins, engine(num_running=2)) == [3, 1, 0]  # that is the engine's room_order to say
    assert Continuum(spare_waiting=True).make_room(room(2), pins, engine(num_running=1)) == [1, 0, 3]


def growing(blocks: int) -> Played:
    """A long turn runs alone from 2 to 14 and grows. Behind it wait a turn of the older program 1, which has no pin, and
    one of program 2, which has one."""
    rows = [first(1), first(2, at=0.1), first(3, at=0.2, output=12), after(0, 1, 3.0, tool=-1), after(1, 2, 3.0)]
    return play(rows, settings={"max_num_seqs": 1}, ttl=50, blocks=blocks)


def test_a_waiter_whose_pin_is_dropped_goes_back_to_its_programs_place() -> None:
    roomy, tight = growing(20), growing(6)
    assert roomy.unpinned() == [(14.0, 2, "consumed")] and roomy.admitted()[3:] == [15.0, 14.0]
    assert tight.unpinned() == [(11.0, 2, "room")] and tight.admitted()[3:] == [14.0, 15.0]


def test_preempted_turns_come_first_then_pinned_ones_then_older_programs() -> None:
    states = [(False, False, 1.0), (False, True, 3.0), (True, False, 9.0), (False, True, 2.0), (False, False, 0.0)]
    turns = [turn(id=i, preempted=preempted, pinned=pinned, program_arrival=arrival)
             for i, (preempted, pinned, arrival) in enumerate(states)]
    assert [t.id for t in sorted(turns, key=lambda t: Continuum().key(t, 0.0))] == [2, 3, 1, 4, 0]


def test_a_tool_that_is_known_is_waited_for_as_long_as_it_takes() -> None:
    """Two seconds while three durations are not yet known, then half a second: what it always took. The last turn's tool
    takes longer."""
    rows = [first(0), *(after(k - 1, 0, 0.5 if k < 6 else 3.0, prompt=8 + 4 * k, turn=k) for k in range(1, 7))]
    played = play(rows, policy={"history": 2}, settings={"max_num_batched_tokens": 400})  # PR = 1 s, whatever the length
    assert played.pinned() == [(0, "3.0"), (1, "4.5"), (2, "6.0"), (3, "6.0"), (4, "7.5"), (5, "9.0")]
    assert played.unpinned() == [*((1.5 * k, 0, "consumed") for k in range(1, 6)), (9.0, 0, "expired")]
