"""Policies that answer as a test tells them, and the small requests on which they are tried."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from serving_runs import run, workload

from simcore.models.decision_points import Pin, Release, Retention
from simcore.models.facts import Admitted, PinDropped, Preempted, ProgramEnded, ProgramStarted, TurnArrived, TurnEnded, Woken

EVERYTHING = (ProgramStarted, ProgramEnded, TurnArrived, Admitted, TurnEnded, Preempted, PinDropped, Woken)

# A turn of 8 tokens and one output (2 blocks) that ends at t=1, and a stranger who needs the whole pool of 4.
TURN = {"at": 0.0, "prompt": 8, "output": 1, "program": 0, "ids": [0, 1]}
STRANGER = {"at": 2.0, "prompt": 16, "output": 1, "program": 1}
NEXT_TURN = {"after": [0], "gap": 2.0, "prompt": 12, "output": 2, "program": 0, "turn": 1, "ids": [0, 1, 2]}


class Keep(Retention):
    """Pins every ended turn of `programs` (None = all) until `until`; room and review as told; remembers all it hears."""

    observes = EVERYTHING

    def __init__(
        self, until: float | Callable[[Any], float] = inf, consumed: Any = "admission", programs: set[int] | None = None,
        room: Callable[[Any], list[int]] = lambda room: [], review: Callable[[Any, float], list[Any]] = lambda pins, now: [],
        wake: float = inf,
    ) -> None:
        self.until, self.consumed, self.programs, self.room, self.reviewing = until, consumed, programs, room, review
        self.wake = wake
        self.heard: list[Any] = []
        self.asked: list[Any] = []  # (what, now, ...)

    def observe(self, fact: Any) -> None:
        self.heard.append(fact)

    def at_turn_end(self, turn: Any, engine: Any) -> Any:
        if self.programs is not None and turn.program not in self.programs:
            return Release()
        return Pin(self.until(turn) if callable(self.until) else self.until, self.consumed)

    def make_room(self, room: Any, pins: Any, engine: Any) -> list[int]:
        self.asked.append((room.cause, engine.now, room.blocks, room.head.id, [p.program for p in pins]))
        return self.room(room)

    def review(self, pins: Any, engine: Any) -> list[Any]:
        self.asked.append(("review", engine.now, [p.program for p in pins]))
        return self.reviewing(pins, engine.now)

    def next_wakeup(self, now: float) -> float:
        return self.wake if self.wake > now else inf

    def dropped(self) -> list[tuple[float, int, str]]:
        return [(fact.now, fact.program, fact.cause) for fact in self.heard if isinstance(fact, PinDropped)]


def play(rows: list[dict[str, Any]], keep: Retention, *, blocks: int = 4, **options: Any) -> Any:
    columns = {key: options.pop(key) for key in ("ends_known", "tools") if key in options}
    return run(workload(rows, **columns), blocks=blocks, retention=lambda: keep, **options).requests


def odd(kind: type, **methods: Any) -> type:
    """A policy class whose methods answer as given."""

    def method(answer: Any) -> Any:
        return lambda self, *args: answer(*args)

    return type("Odd", (kind,), {name: method(answer) for name, answer in methods.items()})
