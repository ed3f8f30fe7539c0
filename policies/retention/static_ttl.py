"""Every turn that calls a tool is pinned for the same time: the best constant that an adaptive TTL has to beat."""

from __future__ import annotations

from typing import Literal

from simcore.models.decision_points import Pin, Release, Swap
from simcore.models.views import Engine, Turn
from simcore.policies.retention._pinning import Pinning, pin_for


class StaticTtl(Pinning):
    """A pin of `seconds` (inf = until the next turn; 0 = none). With `admission: program-fcfs` and 2.0 s it is Continuum's
    ablation "Static TTL" (arXiv 2511.02230, fig. 16); a sweep over `seconds` finds the best constant."""

    def __init__(
        self, seconds: float = 2.0, yields: Literal["blocked", "deadlock"] = "blocked", tools_only: bool = True
    ) -> None:
        if not seconds >= 0:
            raise ValueError(f"seconds = {seconds!r}; allowed: at least 0")
        super().__init__(yields, tools_only)
        self.seconds = seconds

    def at_turn_end(self, turn: Turn, engine: Engine) -> Release | Pin | Swap:
        return Release() if self.called_tool(turn) is None else pin_for(self.seconds, engine)
