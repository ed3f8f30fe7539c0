"""vLLM's priority policy: smaller `priority` first, then arrival; the victim is the least important, newest request."""

from collections.abc import Sequence

from simcore.models.decision_points import Admission
from simcore.models.views import Engine, Running, Turn


class Priority(Admission):
    def key(self, turn: Turn, now: float) -> tuple:
        return (turn.priority, turn.arrival)

    def victim(self, running: Sequence[Running], blocks: int, engine: Engine) -> Running:
        return max(running, key=lambda request: (request.priority, request.arrival, request.id))
