"""The tools that programs call between turns: how many calls of each run at once, and how long calls wait for a slot."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heappush, heapreplace
from math import inf, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from simcore.errors import ConfigError
from simcore.recorder import Table
from simcore.simulation import TOOL_RETURN, Simulation

if TYPE_CHECKING:
    import pandas as pd

# Times in s. `slots`: 0 = as many calls at once as are asked for; then `utilization` is NaN.
TOOL_COLUMNS = {
    "tool": "string", "slots": "int64", "calls": "int64", "mean_seconds": "float64", "p50_seconds": "float64",
    "p99_seconds": "float64", "busy_seconds": "float64", "wait_seconds": "float64", "mean_wait": "float64",
    "longest_queue": "int64", "utilization": "float64",
}


class Tools:
    """The tools of a run. All calls of one tool share its slots, first come, first served.

    How long a call runs comes from the workload, so it is the same under every policy; only its wait for a slot is not.
    At one instant calls are served in the order in which they are made, and turns come back in the order of their ids.
    """

    def __init__(self, sim: Simulation, slots: Mapping[str, int] | None, names: tuple[str, ...]) -> None:
        """`slots`: tool -> calls that run at once (>= 1); a tool left out has no limit. `names`: the workload's tools.

        Raises ConfigError for a tool that the workload does not name and for a number of slots that is none.
        """
        slots = slots or {}
        for name, count in slots.items():
            if name not in names:
                known = f"the workload's tools: {', '.join(names)}" if names else "none: the workload names no tools"
                raise ConfigError("tools", found=name, allowed=known)
            if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
                raise ConfigError("tools", name, found=count, allowed="a whole number, at least 1")
        self.sim = sim
        self._tools = [_Tool(name, int(slots.get(name, 0))) for name in names]
        self.limited = bool(slots)

    def call(
        self, request_id: int, calls: Sequence[tuple[int, float]], extra: float, done: Callable[..., Any],
        args: tuple[Any, ...] = (),
    ) -> None:
        """Make `calls` (index into the tools' names, s) side by side now, and call `done(*args)` by one event of the
        request, `extra` seconds after the last of them has returned (from now, if there are none)."""
        now = back = self.sim.now
        for tool, seconds in calls:
            back = max(back, self._tools[tool].call(now, seconds))
        self.sim.at(back + extra, done, TOOL_RETURN, id=request_id, args=args)

    def frame(self, duration: float, cut_at: float = inf) -> pd.DataFrame:
        """One row a tool, in the workload's order (see TOOL_COLUMNS). `duration`: of the run, s; `cut_at`: the horizon,
        if it cut the run: calls count from when they were made, busy and waiting seconds up to the cut."""
        table = Table("tools", TOOL_COLUMNS)
        for tool in self._tools:
            table.append(tool.row(duration, cut_at))
        return table.frame()


class _Tool:
    """One tool. Service is first come, first served and a call's seconds are known when it is made, so that its start is
    known too: when the earliest slot is free. Nothing has to be scheduled for it."""

    __slots__ = ("asked", "free_at", "longest", "name", "seconds", "slots", "started", "waiting")

    def __init__(self, name: str, slots: int) -> None:
        self.name = name
        self.slots = slots
        self.free_at: list[float] = []  # heap: when each slot that was ever used is free
        self.waiting: deque[float] = deque()  # starts of the calls that wait, ascending
        self.longest = 0
        self.asked, self.started, self.seconds = array("d"), array("d"), array("d")  # of each call; s

    def call(self, now: float, seconds: float) -> float:
        """Make a call; when it returns (s)."""
        start = now if not self.slots else self._slot(now, seconds)
        self.asked.append(now)
        self.started.append(start)
        self.seconds.append(seconds)
        return start + seconds

    def _slot(self, now: float, seconds: float) -> float:
        """Take the slot that is free first; from when on (s)."""
        free_at, waiting = self.free_at, self.waiting
        if len(free_at) < self.slots:
            heappush(free_at, now + seconds)
            return now
        start = max(now, free_at[0])
        heapreplace(free_at, start + seconds)
        while waiting and waiting[0] <= now:
            waiting.popleft()
        if start > now:
            waiting.append(start)
            self.longest = max(self.longest, len(waiting))
        return start

    def row(self, duration: float, cut_at: float) -> tuple[Any, ...]:
        """Its values for TOOL_COLUMNS."""
        seconds = np.array(self.seconds)
        started = np.minimum(self.started, cut_at)
        busy = float((np.minimum(np.array(self.started) + seconds, cut_at) - started).sum())
        waited = float((started - np.array(self.asked)).sum())
        calls = len(seconds)
        p50, p99 = np.percentile(seconds, (50, 99)).tolist() if calls else (nan, nan)
        return (
            self.name, self.slots, calls, float(seconds.mean()) if calls else nan, p50, p99, busy, waited,
            waited / calls if calls else nan, self.longest,
            busy / (self.slots * duration) if self.slots and duration > 0 else nan,
        )
