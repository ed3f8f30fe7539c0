"""A policy of one's own on the map: what a reader writes in thirty lines."""

from collections.abc import Iterable, Sequence
from math import inf

from simcore.models.decision_points import Admission, Extend, Pin, Release, Retention, Room
from simcore.models.views import Engine, Pinned, Turn


class ToolThenPerson(Admission, Retention):
    """Programs in order of arrival. After a tool call the KV is pinned for a while, after anything else it is released:
    tools return within seconds, people do not. The programs that came last lose their pins first, where nothing runs."""

    room_when = "idle"

    def __init__(self, seconds: float = 30.0) -> None:
        self.seconds = seconds

    def key(self, turn: Turn, now: float) -> tuple:
        return (not turn.preempted, turn.program_arrival)

    def at_turn_end(self, turn: Turn, engine: Engine) -> Release | Pin:
        return Pin(engine.now + self.seconds) if turn.next_tool == "tool" else Release()

    def review(self, pins: Sequence[Pinned], engine: Engine) -> Iterable[Extend]:
        return [Extend(pin.program, inf) for pin in pins if pin.next_turn_waiting]

    def make_room(self, room: Room, pins: Sequence[Pinned], engine: Engine) -> Iterable[int]:
        own = room.head.program
        return [pin.program for pin in sorted(pins, key=lambda pin: (pin.program == own, -pin.program_arrival))]
