"""Autellix by hand: queues by attained service, demotion at the end of a quantum, promotion of the starving."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from small_systems import Played, after, first

from simcore.models.facts import Admitted, Preempted, ProgramEnded, TurnArrived, TurnEnded, Woken
from simcore.policies.admission.autellix import Autellix


def call(id: int, program: int, *, arrival: float = 0.0, service: float = 0.0, generated: int = 0) -> Any:
    return SimpleNamespace(id=id, program=program, arrival=arrival, service=service, generated=generated)


def arrives(policy: Autellix, id: int, program: int, now: float = 0.0) -> None:
    policy.observe(TurnArrived(now, id, program, 1.0, None))


def ran(policy: Autellix, program: int, service: float, wait: float = 0.0, id: int = 99) -> None:
    """Tell of a whole turn that ends at time 0."""
    policy.observe(TurnArrived(-service - wait, id, program, 1.0, None))
    policy.observe(Admitted(-service, id, program, wait, False, 0, False))
    policy.observe(TurnEnded(0.0, id, program, service))


def test_a_turn_starts_in_the_queue_of_what_its_program_has_had() -> None:
    policy = Autellix(queues=4, quantum=2.0, growth=2.0)  # queues from 0, 2, 6 and 14 s on
    for program, service in enumerate([0.0, 1.9, 2.0, 5.9, 6.0, 14.0, 500.0]):
        ran(policy, program, service)
    assert [policy.key(call(1, p, arrival=7.0), 8.0) for p in range(8)] == [
        (queue, 7.0) for queue in (0, 0, 1, 1, 2, 3, 3, 0)]
    policy.observe(ProgramEnded(1.0, 6))
    assert policy.key(call(1, 6), 8.0) == (0, 0.0)


def test_a_turn_goes_one_queue_down_for_each_quantum_that_it_uses() -> None:
    policy = Autellix(queues=3, quantum=2.0, growth=2.0)
    assert [policy.key(call(1, 0, service=s), 0.0)[0] for s in (0.0, 1.9, 2.0, 5.9, 6.0, 99.0)] == [0, 0, 1, 1, 2, 2]
    ran(policy, 0, 5.0)  # the second queue, whose quantum is 4 s
    assert [policy.key(call(1, 0, service=s), 0.0)[0] for s in (0.0, 3.9, 4.0, 99.0)] == [1, 1, 2, 2]


def test_a_quantum_in_tokens_is_what_is_left_of_it_at_the_turns_own_pace() -> None:
    policy = Autellix(queues=3, quantum=2.0, growth=2.0, token_seconds=0.02, least_tokens=5)
    assert policy.limit(call(1, 0)) == 100  # 2 s
    assert policy.limit(call(1, 0, service=1.0, generated=25)) == 25  # 1 s left, 0.04 s a token
    assert policy.limit(call(1, 0, service=1.99, generated=50)) == 5  # 0.01 s left
    assert policy.limit(call(1, 0, service=2.0, generated=50)) == 100  # the next quantum: 4 s
    assert policy.limit(call(1, 0, service=6.0, generated=50)) is None  # the last queue
    assert Autellix(queues=1).limit(call(1, 0)) is None


def test_in_a_run_a_long_turn_yields_to_a_fresh_program() -> None:
    """One request at a time, a token takes 1 s. Program 0 uses its 2 s at t=2; program 1 came at 1 and takes over."""
    rows = [first(0, output=6), first(1, at=1.0, output=2)]
    options: dict[str, Any] = {"settings": {"max_num_seqs": 1}}
    played = Played(rows, admission=lambda: Autellix(token_seconds=1.0, least_tokens=1), **options)
    assert played.requests["ended"].tolist() == [8.0, 4.0] and played.requests["preemptions"].tolist() == [1, 0]
    assert Played(rows, **options).requests["ended"].tolist() == [6.0, 8.0]


def test_in_a_run_the_program_that_has_had_less_goes_first() -> None:
    rows = [first(0, output=5), first(1, at=0.5, output=1), first(2, at=0.5, output=9), after(0, 0, 1.0), after(1, 1, 0.0)]
    played = Played(rows, admission=lambda: Autellix(quantum=2.0, beta=inf, least_tokens=20), settings={"max_num_seqs": 1})
    # 0 has had 5 s (queue 1) and comes back at 6, 1 has had 1 s (queue 0) and comes back at 6, too: at 15 the latter goes.
    assert played.admitted() == [0.0, 5.0, 6.0, 16.0, 15.0]


def test_a_turn_that_has_waited_long_for_what_its_program_has_had_is_promoted() -> None:
    policy = Autellix(quantum=1.0, beta=3.0)
    ran(policy, 0, service=2.0, wait=1.0)
    arrives(policy, 5, 0, now=10.0)
    assert policy.rekey(TurnArrived(10.0, 5, 0, 1.0, None)) == []
    assert policy.key(call(5, 0, arrival=10.0), 10.0) == (1, 10.0)
    assert policy.next_wakeup(10.0) == 15.0  # (1 + 5) / 2 = 3
    policy.observe(Woken(15.0))
    assert policy.rekey(Woken(15.0)) == [5] and policy.key(call(5, 0, arrival=10.0), 15.0) == (0, 10.0)
    assert policy.next_wakeup(15.0) == inf


def test_after_a_promotion_the_turns_own_times_start_anew() -> None:
    policy = Autellix(queues=3, quantum=1.0, growth=2.0, beta=1.0)
    ran(policy, 0, service=2.0)
    arrives(policy, 5, 0, now=10.0)
    policy.observe(Admitted(11.0, 5, 0, 1.0, False, 0, False))
    policy.observe(Preempted(14.0, 5, 0))  # has run 3 s, waited 1 s, its program 2 s: due at 14 + 5 - 1
    assert policy.next_wakeup(14.0) == 18.0
    assert policy.key(call(5, 0, service=3.0), 14.0)[0] == 2
    policy.observe(Woken(18.0))
    assert policy.key(call(5, 0, service=3.0), 18.0)[0] == 0
    policy.observe(Admitted(20.0, 5, 0, 6.0, False, 0, True))
    assert policy.key(call(5, 0, service=3.9), 20.9)[0] == 0 and policy.key(call(5, 0, service=4.0), 21.0)[0] == 1
    policy.observe(Preempted(21.0, 5, 0))  # 1 s of its own and 2 s of its program; 2 s waited since the promotion
    assert policy.next_wakeup(21.0) == 22.0


def test_a_turn_that_starves_when_it_comes_is_promoted_at_once() -> None:
    policy = Autellix(quantum=1.0, beta=3.0)
    ran(policy, 0, service=2.0, wait=50.0)
    arrives(policy, 5, 0, now=10.0)
    assert policy.rekey(TurnArrived(10.0, 5, 0, 1.0, None)) == [5] and policy.key(call(5, 0), 10.0)[0] == 0


def test_in_a_run_the_starving_overtake() -> None:
    """Program 0 has had 3 s when it comes back at 4; fresh programs keep the only slot until 12."""
    rows = [first(0, output=3), *(first(p, at=2.5 + p, output=1) for p in range(1, 12)), after(0, 0, 1.0)]
    options: dict[str, Any] = {"settings": {"max_num_seqs": 1}}
    patient, starved = (
        Played(rows, admission=lambda beta=beta: Autellix(quantum=2.0, beta=beta, least_tokens=9), **options).admitted()[-1]
        for beta in (inf, 1.5))
    assert starved < patient


def test_the_victim_of_a_shortage_is_in_the_lowest_queue() -> None:
    policy = Autellix(quantum=1.0)
    ran(policy, 0, service=9.0)
    running = [call(1, 0, arrival=1.0), call(2, 1, arrival=2.0), call(3, 2, arrival=3.0)]
    assert policy.victim(running, 1, None).id == 1  # type: ignore[arg-type]
    assert policy.victim(running[1:], 1, None).id == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"queues": 0}, {"quantum": 0}, {"growth": -1}, {"beta": 0}, {"token_seconds": 0},
                                   {"least_tokens": 0}])
def test_a_wrong_parameter_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        Autellix(**wrong)
