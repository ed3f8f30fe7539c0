"""Oracle: knows when each program returns, and pins exactly those turns for which Continuum's cost model says it pays."""

from __future__ import annotations

from math import inf
from typing import Literal

from simcore.models.decision_points import Pin, Release, Swap
from simcore.models.views import Engine, Turn
from simcore.policies.retention.continuum import Continuum


class Clairvoyant(Continuum):
    """What Continuum (arXiv 2511.02230) would gain from knowing the tool's duration: a bound within its cost model, not an
    optimum of the system (queue order, room and the benefit T * eta + PR are Continuum's own estimates).

    A turn whose next one follows after `gap` seconds is pinned until then if gap < T * eta + PR, else released; blocks of
    a program that does not return are the first to be reused. Parameters as in Continuum.
    """

    oracle = True

    def __init__(
        self, t_window: int = 100, eta_start: float = 1.0, yields: Literal["blocked", "deadlock"] = "blocked",
        spare_waiting: bool = False,
    ) -> None:
        super().__init__(t_window=t_window, eta_start=eta_start, yields=yields, spare_waiting=spare_waiting)

    def at_turn_end(self, turn: Turn, engine: Engine) -> Release | Pin | Swap:
        if turn.is_last:
            return Release("first")
        gap = turn.next_gap
        # Until it returns, not until the time told: a tool that is short of slots may take longer.
        return Pin(inf) if gap is not None and gap < self.benefit(self._rebuild.seconds(turn)) else Release()
