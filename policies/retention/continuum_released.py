"""Continuum as its authors released it: a pin of 2 s unless the tool's mean duration is longer, and simpler rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simcore.models.decision_points import Pin, Release, Room, Swap
from simcore.models.facts import Fact, TurnArrived
from simcore.models.views import Engine, Pinned, Running, Turn
from simcore.policies.admission._pinned_first import PinnedFirst
from simcore.policies.retention._pinning import Pinning, pin_for


class ContinuumReleased(PinnedFirst, Pinning):
    """The release `vllm-continuum` (Apache-2.0, last public commit of 5 January 2026): queue order and retention in one
    object; use it with `engine.room_order: rows_first`.

    Pins a turn for `seconds` if its tool has no history or a mean duration (s) of at most that, else not at all. The queue:
    pinned first, then by program arrival; there is no class of preempted requests. A pin lives until the program's next
    turn ends. Pins yield only where nothing else could: to a waiting request while nothing runs, to a running one that
    runs alone; the one with the latest expiry first. (The release drops one pin a step and tries again in the next, which
    takes no simulated time when nothing runs: here that is one answer.) The victim of a preemption is of the newest
    program, of those not on their last turn if there are any. Left out: a pin whose next turn began after its expiry goes
    when that turn ends, not one step later, and the release's loop that skips every second expired pin.
    """

    def __init__(self, seconds: float = 2.0, tools_only: bool = True) -> None:
        if not seconds > 0:
            raise ValueError(f"seconds = {seconds!r}; allowed: above 0")
        PinnedFirst.__init__(self)
        Pinning.__init__(self, "deadlock", tools_only)
        self.seconds = seconds
        self._history: dict[str, tuple[float, int]] = {}  # tool -> (sum of durations in s, their number)

    def observe(self, fact: Fact) -> None:
        super().observe(fact)
        if isinstance(fact, TurnArrived) and fact.gap == fact.gap and (fact.tool is not None or not self.tools_only):
            total, count = self._history.get(fact.tool or "", (0.0, 0))
            self._history[fact.tool or ""] = (total + fact.gap, count + 1)

    def key(self, turn: Turn, now: float) -> tuple:
        return (not turn.pinned, turn.program_arrival)

    def at_turn_end(self, turn: Turn, engine: Engine) -> Release | Pin | Swap:
        tool = self.called_tool(turn)
        if tool is None:
            return Release()
        total, count = self._history.get(tool, (0.0, 0))
        if count and total / count > self.seconds:
            return Release()
        return pin_for(self.seconds, engine, consumed="turn_end")

    def make_room(self, room: Room, pins: Sequence[Pinned], engine: Engine) -> Iterable[int]:
        if engine.num_running > (1 if room.cause == "decode" else 0):
            return ()
        # All pins last equally long, so the latest expiry is the latest start; `until` may have been extended since.
        return [pin.program for pin in sorted(pins, key=lambda pin: (-pin.since, -pin.program_arrival, -pin.program))]

    def victim(self, running: Sequence[Running], blocks: int, engine: Engine) -> Running:
        return max(running, key=lambda request: (not request.is_last, request.program_arrival, request.id))
