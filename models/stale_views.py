"""A router's view of a replica that is not quite new: a copy of its numbers and of what it caches, made now and then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simcore.models.views import ReplicaView, Turn

if TYPE_CHECKING:
    from simcore.models.replica import Replica


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a replica said of itself at `as_of` (s). `keys`: of the blocks that its pool could find."""

    as_of: float
    outstanding: int
    free_blocks: int
    num_running: int
    num_waiting: int
    num_loading: int
    running_tokens: int
    waiting_tokens: int
    to_host_bytes: float
    from_host_bytes: float
    pinned_blocks: int
    keys: frozenset[int]


class StaleView(ReplicaView):
    """Shows the state of `as_of`. The first look at a replica after `delay` s or more takes a new copy of all of it; between
    two copies nothing moves. `now` is the present time."""

    __slots__ = ("_copy", "_delay")

    def __init__(self, replica: Replica, delay: float) -> None:
        super().__init__(replica)
        self._delay = delay
        self._copy: Snapshot | None = None

    def _look(self) -> Snapshot:
        copy, now = self._copy, self._replica.sim.now
        if copy is None or now >= copy.as_of + self._delay:
            live = ReplicaView(self._replica)
            copy = self._copy = Snapshot(
                now, live.outstanding, live.free_blocks, live.num_running, live.num_waiting, live.num_loading,
                live.running_tokens, live.waiting_tokens, live.to_host_bytes, live.from_host_bytes, live.pinned_blocks,
                self._replica.scheduler.pool.keys(),
            )
        return copy

    @property
    def as_of(self) -> float:
        return self._look().as_of

    @property
    def outstanding(self) -> int:
        return self._look().outstanding

    @property
    def free_blocks(self) -> int:
        return self._look().free_blocks

    @property
    def num_running(self) -> int:
        return self._look().num_running

    @property
    def num_waiting(self) -> int:
        return self._look().num_waiting

    @property
    def num_loading(self) -> int:
        return self._look().num_loading

    @property
    def running_tokens(self) -> int:
        return self._look().running_tokens

    @property
    def waiting_tokens(self) -> int:
        return self._look().waiting_tokens

    @property
    def to_host_bytes(self) -> float:
        return self._look().to_host_bytes

    @property
    def from_host_bytes(self) -> float:
        return self._look().from_host_bytes

    @property
    def pinned_blocks(self) -> int:
        return self._look().pinned_blocks

    def cached_tokens(self, turn: Turn) -> int:
        """Prompt tokens of `turn` that this replica's pool held at `as_of`."""
        request, settings = turn._request, self._replica.scheduler.settings
        if not settings.enable_prefix_caching:
            return 0
        keys = self._look().keys
        blocks = 0
        for key in request.keys[: (request.known - 1) // settings.block_size]:
            if key not in keys:
                break
            blocks += 1
        return blocks * settings.block_size
