"""An illegal decision ends the run and names policy, time and decision; nothing is silently repaired."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any

import pytest
from scripted import STRANGER, TURN, odd
from serving_runs import run, workload

from simcore.errors import PolicyError
from simcore.models.decision_points import Admission, Extend, Pin, Refuse, Release, ReplicaRouting, Retention, Swap, Unpin
from simcore.models.facts import Admitted


def retention(**methods: Any) -> type:
    return odd(Retention, **methods)


def admission(**methods: Any) -> type:
    return odd(Admission, **methods)


def router(**methods: Any) -> type:
    return odd(ReplicaRouting, **methods)


def forever(turn: Any, engine: Any) -> Pin:
    return Pin(3.0)


ILLEGAL = {
    "pin in the past": (1.0, "Pin", {"retention": retention(at_turn_end=lambda t, e: Pin(0.5))}),
    "pin until now": (1.0, "Pin", {"retention": retention(at_turn_end=lambda t, e: Pin(e.now))}),
    "pin until NaN": (1.0, "Pin", {"retention": retention(at_turn_end=lambda t, e: Pin(nan))}),
    "pin consumed by what": (1.0, "never", {"retention": retention(at_turn_end=lambda t, e: Pin(9.0, "never"))}),
    "release how": (1.0, "Release", {"retention": retention(at_turn_end=lambda t, e: Release("last"))}),
    "swap without a tier": (1.0, "no lower tier", {"retention": retention(at_turn_end=lambda t, e: Swap("dram"))}),
    "no answer at turn end": (1.0, "None", {"retention": retention(at_turn_end=lambda t, e: None)}),
    "review names a stranger": (3.0, "Unpin", {
        "retention": retention(at_turn_end=forever, review=lambda p, e: [Unpin(77)])}),
    "review unpins twice": (3.0, "Unpin", {
        "retention": retention(at_turn_end=forever, review=lambda p, e: [Unpin(0), Unpin(0)])}),
    "extend into the past": (3.0, "Extend", {
        "retention": retention(at_turn_end=forever, review=lambda p, e: [Extend(0, e.now)])}),
    "review swaps": (3.0, "allowed: Unpin, Extend", {
        "retention": retention(at_turn_end=forever, review=lambda p, e: [Swap("dram")])}),
    "room names a stranger": (2.0, "77", {
        "retention": retention(at_turn_end=forever, make_room=lambda r, p, e: [77])}),
    "accept says yes": (0.0, "True", {"admission": admission(accept=lambda t, e: True)}),
    "key is a number": (0.0, "1.5", {"admission": admission(key=lambda t, n: 1.5)}),
    "key is NaN": (0.0, "nan", {"admission": admission(key=lambda t, n: (nan,))}),
    "quantum of none": (0.0, "limit", {"admission": admission(limit=lambda r: 0)}),
    "wake-up in the past": (0.0, "next_wakeup", {"admission": admission(next_wakeup=lambda n: n)}),
    "wake-up at NaN": (0.0, "next_wakeup", {"retention": retention(next_wakeup=lambda n: nan)}),
    "rekey names who runs": (0.0, "rekey", {
        "admission": lambda: type("Odd", (Admission,), {"observes": (Admitted,), "rekey": lambda s, f: [f.request]})()}),
    "route out of range": (0.0, "route", {"router": router(route=lambda t, r, n: 1)}),
    "route below range": (0.0, "route", {"router": router(route=lambda t, r, n: -1)}),
    "route to a pair": (0.0, "(0, 0)", {"router": router(route=lambda t, r, n: (0, 0))}),
    "route to a truth": (0.0, "False", {"router": router(route=lambda t, r, n: False)}),
    "router wakes in the past": (0.0, "next_wakeup", {"router": router(next_wakeup=lambda n: n)}),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_decision_ends_the_run_and_names_policy_time_and_decision(name: str) -> None:
    time, words, policies = ILLEGAL[name]
    with pytest.raises(PolicyError) as error:
        run(workload([TURN, STRANGER]), blocks=4, **policies)
    assert error.value.time == time
    assert f"policy Odd at t={time:.6f} s" in str(error.value) and words in str(error.value)


@pytest.mark.parametrize("answer", [lambda running, waiting: waiting, lambda running, waiting: running[0].id,
                                    lambda running, waiting: None])
def test_a_victim_that_does_not_run_is_an_error(answer: Callable[[Any, Any], Any]) -> None:
    class Odd(Admission):
        def accept(self, turn: Any, engine: Any) -> None:
            self.last = turn

        def victim(self, running: Any, blocks: int, engine: Any) -> Any:
            assert blocks == 1 and engine.free_blocks == 0
            return answer(running, self.last)

    rows = [{"at": at, "prompt": 4, "output": 9} for at in (0.0, 0.0, 0.1)]
    with pytest.raises(PolicyError, match=r"policy Odd at t=1\.0+ s: victim answered"):
        run(workload(rows), blocks=3, admission=Odd)


def test_refuse_ends_the_request_with_the_policys_reason() -> None:
    picky = admission(accept=lambda turn, engine: Refuse("too long") if turn.context_tokens > 10 else None)
    requests = run(workload([TURN, STRANGER]), admission=picky).requests
    assert requests["status"].tolist() == ["finished", "refused"] and requests["reason"].tolist() == ["", "too long"]
    assert requests["ended"][1] == 2.0
