"""Every turn that calls a tool is pinned until its program's next turn is admitted, however long that takes."""

from __future__ import annotations

from math import inf

from simcore.models.decision_points import Pin, Release, Swap
from simcore.models.views import Engine, Turn
from simcore.policies.retention._pinning import Pinning


class PreserveUntilReturn(Pinning):
    """The opposite null of `lru`: pins give way only when room is needed, the newest program's first."""

    def at_turn_end(self, turn: Turn, engine: Engine) -> Release | Pin | Swap:
        return Release() if self.called_tool(turn) is None else Pin(inf)
