"""Each request to the replica with the least outstanding work."""

from collections.abc import Sequence
from typing import Literal

from simcore.models.decision_points import ReplicaRouting
from simcore.models.views import ReplicaView, Turn, entrances


class LeastLoaded(ReplicaRouting):
    """`by`: "requests" counts outstanding requests (as most gateways do), "tokens" the known tokens they hold or need.
    Ties go to the replica that was chosen longest ago, so that an idle cluster is used evenly."""

    def __init__(self, by: Literal["requests", "tokens"] = "requests") -> None:
        if by not in ("requests", "tokens"):
            raise ValueError(f"by = {by!r}; allowed: requests, tokens")
        self.by = by
        self._chosen_at: dict[int, int] = {}
        self._calls = 0

    def route(self, turn: Turn, replicas: Sequence[ReplicaView], now: float) -> int:
        self._calls += 1
        offered = entrances(replicas)
        chosen = min(offered, key=lambda replica: (self._load(replica), self._chosen_at.get(replica.id, 0), replica.id))
        self._chosen_at[chosen.id] = self._calls
        return chosen.id

    def _load(self, replica: ReplicaView) -> int:
        return replica.outstanding if self.by == "requests" else replica.running_tokens + replica.waiting_tokens
