"""Every request of a session to the replica that served its first; first requests to the least loaded one."""

from collections.abc import Sequence

from simcore.models.views import ReplicaView, Turn
from simcore.policies.replica_routing.least_loaded import LeastLoaded


class SessionAffinity(LeastLoaded):
    """Needs no look into the caches, only a session id (a cookie, a header): the usual sticky routing of gateways."""

    def __init__(self, by: str = "requests") -> None:
        super().__init__(by)  # type: ignore[arg-type]
        self._home: dict[int, int] = {}

    def route(self, turn: Turn, replicas: Sequence[ReplicaView], now: float) -> int:
        home = self._home.get(turn.program)
        if home is None:
            home = self._home[turn.program] = super().route(turn, replicas, now)
        return home
