"""The replica with the longest cached prefix, if that is worth it; else the least loaded one."""

from collections.abc import Sequence
from typing import Literal

from simcore.models.views import ReplicaView, Turn, entrances
from simcore.policies.replica_routing.least_loaded import LeastLoaded


class PrefixAware(LeastLoaded):
    """Most cached tokens if that is at least `threshold` of the prompt, else least loaded (by `by`). Without the
    threshold a first block that all prompts share would send everything to one replica."""

    def __init__(self, threshold: float = 0.1, by: Literal["requests", "tokens"] = "requests") -> None:
        super().__init__(by)
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold = {threshold!r}; allowed: a share of the prompt in (0, 1]")
        self.threshold = threshold

    def route(self, turn: Turn, replicas: Sequence[ReplicaView], now: float) -> int:
        replicas = entrances(replicas)
        cached = [replica.cached_tokens(turn) for replica in replicas]
        most = max(cached)
        if most < self.threshold * turn.context_tokens:
            return super().route(turn, replicas, now)
        best = [replica for replica, tokens in zip(replicas, cached, strict=True) if tokens == most]
        return super().route(turn, best, now)
