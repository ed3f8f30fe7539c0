"""The clock: SimPy's environment with absolute times and an order within one instant."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from operator import index
from typing import Any

import simpy
from simpy.core import EmptySchedule, Infinity

from simcore.randomness import Entity, uniform

# Order within one instant. SimPy's own events (process starts, plain timeouts) have priorities 0 and 1 and come first.
FLOW_END = 2
TOOL_RETURN = 3
ARRIVAL = 4
TIMER = 5
BOUNDARY = 6  # a replica's step boundary: it sees everything else that happened at this time

_SEQUENCE_BITS = 44


class Call:
    """A scheduled callback. `cancel()` takes it back; a cancelled call costs one heap entry; it does not move the clock."""

    __slots__ = ("args", "fn", "time")

    def __init__(self, time: float, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.time = time
        self.fn: Callable[..., Any] | None = fn
        self.args = args

    def cancel(self) -> None:
        self.fn = None


class Simulation(simpy.Environment):
    """A SimPy environment that can also call a function at an absolute time.

    `at` keeps the last bit of the time it is given (a SimPy timeout adds a delay and may lose it) and costs a quarter
    of an interruptible process. Processes work as in any SimPy model; use them where a story reads best.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.events = 0
        self.halted = False  # from outside: run no further event
        self._sequence = 0

    def at(self, time: float, fn: Callable[..., Any], rank: int = TIMER, *, id: int = 0, args: tuple[Any, ...] = ()) -> Call:
        """Call `fn(*args)` at `time` (seconds); within one instant by `rank`, then `id`, then order of scheduling.

        Raises ValueError for a time in the past or not finite, or a rank that is not one of this module's.
        """
        if not self._now <= time < Infinity:
            raise ValueError(f"cannot schedule at {time!r}: now is {self._now!r}")
        if not FLOW_END <= rank <= BOUNDARY:
            raise ValueError(f"rank {rank!r} is not one of FLOW_END .. BOUNDARY ({FLOW_END} .. {BOUNDARY})")
        call = Call(time, fn, args)
        self._sequence += 1
        heappush(self._queue, (time, rank, (index(id) << _SEQUENCE_BITS) | self._sequence, call))  # type: ignore[misc]
        return call

    def moment(self, time: float, rank: int = TIMER, *, id: int = 0) -> simpy.Event:
        """An event for a process to yield: it succeeds at the absolute `time`, in the order of `rank`."""
        event = self.event()
        self.at(time, self._succeed_now, rank, id=id, args=(event,))
        return event

    def draw(self, name: str, *entity: Entity) -> float:
        """A uniform float in [0, 1): a function of (seed, name, entity) alone, for draws that can only be made late."""
        return uniform(self.seed, name, *entity)

    def step(self) -> None:
        """Process the next entry of the queue. Raises EmptySchedule when there is none."""
        try:
            time, _, _, entry = heappop(self._queue)
        except IndexError:
            raise EmptySchedule() from None
        if type(entry) is Call:
            fn = entry.fn
            if fn is not None:
                self._now = time
                self.events += 1
                fn(*entry.args)
            return
        self._now = time
        self.events += 1
        callbacks, entry.callbacks = entry.callbacks, None  # type: ignore[assignment]
        for callback in callbacks:
            callback(entry)
        if not entry._ok and not hasattr(entry, "_defused"):
            raise entry._value

    def run_until(self, horizon: float = Infinity) -> None:
        """Run until nothing is left or the next entry lies after `horizon`; then the clock stands at the last event
        (or at the horizon, if it cut the run). `halted` ends it before the next event.
        Raises ValueError for a horizon in the past or NaN."""
        if not horizon >= self._now:
            raise ValueError(f"cannot run until {horizon!r}: now is {self._now!r}")
        queue, step = self._queue, self.step
        while queue and not self.halted:
            time, _, _, entry = queue[0]
            if type(entry) is not Call:
                if time > horizon:
                    self._now = horizon
                    return
                step()
                continue
            fn = entry.fn
            if fn is not None and time > horizon:
                self._now = horizon
                return
            heappop(queue)  # a cancelled call beyond the horizon falls out: it must not look like work that was cut
            if fn is not None:
                self._now = time
                self.events += 1
                fn(*entry.args)

    @staticmethod
    def _succeed_now(event: simpy.Event) -> None:
        """Run the event's callbacks within this rank, not at the end of SimPy's queue for the instant."""
        event._ok, event._value = True, None
        callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
        for callback in callbacks:
            callback(event)
