"""Continuum (arXiv 2511.02230 v6): pins a turn's KV for a time-to-live chosen from its tool's past durations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite, log
from typing import Literal

import numpy as np

from simcore.models.decision_points import Pin, Release, Room, Swap
from simcore.models.facts import Admitted, Fact, ProgramEnded, TurnArrived, TurnEnded
from simcore.models.views import Engine, Pinned, Site, Turn
from simcore.policies.admission._pinned_first import PinnedFirst
from simcore.policies.retention._estimates import Durations, Memoryfulness, SlidingMean
from simcore.policies.retention._pinning import Pinning, pin_for
from simcore.policies.retention._rebuild import RebuildTime


class Continuum(PinnedFirst, Pinning):
    """Queue order and retention of the paper, in one object (name it under `retention` and leave `admission` out).

    A turn that calls tool f is pinned for tau* = argmax P(tau, f) * (T * eta + PR) - tau seconds (eq. 2). P: share of f's
    recorded durations (server side: end of a turn to the arrival of the next) that are <= tau; T: mean wait (s) of the last
    `t_window` returning turns that were admitted without a pin, first admissions only, 0 at first; eta: memoryfulness of
    the finished programs (heard of where the clients say that a program ends), `eta_start` before; PR: seconds to rebuild
    the context. B = T * eta + PR may be negative: then nothing is pinned.

    Cold start (section 4.2): with at most `history` durations of all tools, `ttl_default`: "fixed:SECONDS" (2.0 is the
    release's constant) or "lnB" (the optimum for durations of Exp(1) and eta = 1: ln(T + PR), 0 below 1); with at most
    `history` of f, the durations of all tools pooled. A pin is consumed when the program's next turn is admitted; an
    expired one holds on while that turn waits. Pins give way as `yields` says (see Pinning), the newest program's first;
    `spare_waiting`: those whose next turn waits after all others (the paper makes no difference). Whether pins or running
    requests yield to a decode that lacks blocks is the engine's `room_order`; the paper is silent.
    """

    observes: tuple[type[Fact], ...] = (*PinnedFirst.observes, ProgramEnded)

    def __init__(
        self, history: int = 100, t_window: int = 100, ttl_default: str = "fixed:2.0", eta_start: float = 1.0,
        yields: Literal["blocked", "deadlock"] = "blocked", spare_waiting: bool = False, tools_only: bool = True,
    ) -> None:
        if history < 0 or t_window < 1:
            raise ValueError(f"history = {history!r}, t_window = {t_window!r}; allowed: at least 0, at least 1")
        if not -1 <= eta_start <= 1:
            raise ValueError(f"eta_start = {eta_start!r}; allowed: -1 .. 1")
        PinnedFirst.__init__(self)
        Pinning.__init__(self, yields, tools_only)
        self.history = history
        self.spare_waiting = spare_waiting
        self._fixed_ttl = _parse_ttl(ttl_default)
        self._by_tool: dict[str, Durations] = {}
        self._all_tools = Durations()
        self._delay = SlidingMean(t_window)
        self._eta = Memoryfulness(eta_start)
        self._turns: dict[int, int] = {}  # program -> turns that have ended here
        self._returning: set[int] = set()  # waiting requests that are not their program's first

    def start(self, site: Site, rng: np.random.Generator) -> None:
        self._rebuild = RebuildTime(site)

    # --- what it learns ------------------------------------------------------------------------------------------------

    def observe(self, fact: Fact) -> None:
        super().observe(fact)
        if isinstance(fact, TurnArrived):
            if fact.gap == fact.gap:  # NaN: the program's first turn
                self._returning.add(fact.request)
                self._record(fact.tool, fact.gap)
        elif isinstance(fact, Admitted):
            if fact.request in self._returning:
                self._returning.remove(fact.request)
                if not fact.had_pin:  # a pin that was lost while the turn waited counts as evicted
                    self._delay.add(fact.wait)
        elif isinstance(fact, TurnEnded):
            self._turns[fact.program] = self._turns.get(fact.program, 0) + 1
        elif isinstance(fact, ProgramEnded):
            self._eta.add(self._turns.pop(fact.program, 0))

    def _record(self, tool: str | None, seconds: float) -> None:
        if tool is None:
            if self.tools_only:
                return
            tool = ""
        self._by_tool.setdefault(tool, Durations()).add(seconds)
        self._all_tools.add(seconds)

    # --- what it decides -----------------------------------------------------------------------------------------------

    def at_turn_end(self, turn: Turn, engine: Engine) -> Release | Pin | Swap:
        tool = self.called_tool(turn)
        return Release() if tool is None else pin_for(self.ttl(tool, self._rebuild.seconds(turn)), engine)

    def benefit(self, rebuild: float) -> float:
        """B = T * eta + PR, seconds of job latency that a hit saves (section 4.1, Mem(r)/M cancelled)."""
        return self._delay.value * self._eta.value + rebuild

    def ttl(self, tool: str, rebuild: float) -> float:
        """Seconds to pin a turn that calls `tool` and whose context takes `rebuild` seconds to have again."""
        if self._all_tools.count <= self.history:
            if self._fixed_ttl is not None:
                return self._fixed_ttl
            benefit = self._delay.value + rebuild  # its derivation takes eta = 1
            return log(benefit) if benefit > 1 else 0.0
        own = self._by_tool.get(tool)
        durations = own if own is not None and own.count > self.history else self._all_tools
        return durations.best_ttl(self.benefit(rebuild))

    def make_room(self, room: Room, pins: Sequence[Pinned], engine: Engine) -> Iterable[int]:
        programs = super().make_room(room, pins, engine)
        if not self.spare_waiting:
            return programs
        waiting = {pin.program for pin in pins if pin.next_turn_waiting}
        return sorted(programs, key=lambda program: program in waiting)  # stable: newest first within each group


def _parse_ttl(text: str) -> float | None:
    """Seconds of "fixed:SECONDS"; None for "lnB"."""
    if text == "lnB":
        return None
    kind, _, number = text.partition(":")
    try:
        seconds = float(number)
        if kind == "fixed" and isfinite(seconds) and seconds >= 0:
            return seconds
    except ValueError:
        pass
    raise ValueError(f"ttl_default = {text!r}; allowed: fixed:SECONDS or lnB")
