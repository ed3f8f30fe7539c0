"""Each request to the next replica in turn, whatever its load or cache."""

from collections.abc import Sequence

from simcore.models.decision_points import ReplicaRouting
from simcore.models.views import ReplicaView, Turn, entrances


class RoundRobin(ReplicaRouting):
    def __init__(self) -> None:
        self._next = 0

    def route(self, turn: Turn, replicas: Sequence[ReplicaView], now: float) -> int:
        offered = entrances(replicas)
        chosen = offered[self._next % len(offered)]
        self._next += 1
        return chosen.id
