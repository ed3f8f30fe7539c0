"""Every request of a session to the replica that served its first; first requests to the least loaded one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simcore.models.views import ReplicaView, Site, Turn
from simcore.policies.replica_routing.least_loaded import LeastLoaded

if TYPE_CHECKING:
    import numpy as np


class SessionAffinity(LeastLoaded):
    """Needs no look into the caches, only a session id (a cookie, a header): the usual sticky routing of gateways. A session
    whose replica takes no requests moves to the least loaded one, and stays there."""

    def __init__(self, by: str = "requests") -> None:
        super().__init__(by)  # type: ignore[arg-type]
        self._home: dict[int, int] = {}
        self._all = 0  # replicas of the cluster

    def start(self, site: Site, rng: np.random.Generator) -> None:
        self._all = site.replicas

    def route(self, turn: Turn, replicas: Sequence[ReplicaView], now: float) -> int:
        home = self._home.get(turn.program)
        if home is None or (len(replicas) < self._all and all(replica.id != home for replica in replicas)):
            home = self._home[turn.program] = super().route(turn, replicas, now)
        return home
