"""What all policies share that pin a turn's blocks while its tool runs: when a pin goes on, and who makes room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Literal

from simcore.models.decision_points import Extend, Pin, Release, Retention, Room, Swap, Unpin
from simcore.models.views import Engine, Pinned, Turn


class Pinning(Retention):
    """Base class; `at_turn_end` is the policy's own. The rules are Continuum's (arXiv 2511.02230, Alg. 1 and section 5.2).

    `yields`: when pins give way to a waiting request that does not fit. "blocked": whenever it does not ("when the logic
    fails to schedule a new request due to space contention"); "deadlock": only if nothing runs (the rule's purpose, and
    what the release does). Under a backlog some request is always blocked, so that the first leaves few pins alive.
    `tools_only`: pin only after a turn that names the tool it calls, as the paper does; False = also after a turn that
    names none, unless it is known to be its program's last (for traces without tool names).
    """

    def __init__(self, yields: Literal["blocked", "deadlock"] = "blocked", tools_only: bool = True) -> None:
        if yields not in ("blocked", "deadlock"):
            raise ValueError(f"yields = {yields!r}; allowed: blocked, deadlock")
        self.yields = yields
        self.room_when = "idle" if yields == "deadlock" else "blocked"
        self.tools_only = tools_only

    def called_tool(self, turn: Turn) -> str | None:
        """The tool that the ended turn calls ("" = one without a name); None = there is nothing to wait for."""
        if turn.is_last:
            return None
        tool = turn.next_tool
        return "" if tool is None and not self.tools_only else tool

    def review(self, pins: Sequence[Pinned], engine: Engine) -> Iterable[Unpin | Extend | Swap]:
        """An expired pin holds on while its program's next turn waits: that turn's admission consumes it."""
        return [Extend(pin.program, inf) for pin in pins if pin.next_turn_waiting and pin.until <= engine.now]

    def make_room(self, room: Room, pins: Sequence[Pinned], engine: Engine) -> Iterable[int]:
        if self.yields == "deadlock" and room.cause == "admission" and engine.num_running:
            return ()
        return newest_first(room, pins, engine)


def pin_for(
    seconds: float, engine: Engine, consumed: Literal["admission", "turn_end"] = "admission"
) -> Pin | Release:
    """A pin of `seconds` from now on; none if that is no time at all."""
    until = engine.now + seconds
    return Pin(until, consumed) if until > engine.now else Release()


def newest_first(room: Room, pins: Sequence[Pinned], engine: Engine) -> list[int]:
    """Programs to unpin, the newest first; one whose next turn waits loses its pin like any other. The pin of the program
    that asks is what its turn will reuse: it goes last, and only if nothing that runs could still give room (a pin that the
    prompt does not match, or its half-filled last block, would else block the replica for ever)."""
    own = room.head.program
    order = sorted((-pin.program_arrival, -pin.program) for pin in pins if pin.program != own)
    programs = [-program for _, program in order]
    runs_alone = 1 if room.cause == "decode" else 0
    if engine.num_running <= runs_alone and any(pin.program == own for pin in pins):
        programs.append(own)
    return programs
