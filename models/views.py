"""What a policy sees: live, read-only, valid during the call. Tokens, blocks, seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simcore.models.engine import EngineSettings
    from simcore.models.policy_desk import PinnedBlocks
    from simcore.models.replica import Replica
    from simcore.models.request import Request
    from simcore.models.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Site:
    """Static facts about where a policy works, given to `Policy.start`."""

    settings: EngineSettings
    num_blocks: int  # usable KV blocks of a replica
    kv_bytes_per_token: float  # all ranks together
    num_layers: int
    replicas: int
    prefill_seconds: Callable[..., float]  # (tokens, prefix=0) -> s for one request alone on the replica
    reload_seconds: Callable[[int], float | None]  # tokens -> s to load them from the host, alone; None = no such tier
    prefill_replicas: int = 0  # the first so many compute prompts for the others, which decode; 0 = each does both


class Turn:
    """A request that waits, is being routed, or has just ended."""

    __slots__ = ("_oracle", "_request")

    def __init__(self, request: Request, oracle: bool = False) -> None:
        self._request = request
        self._oracle = oracle

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id}, program={self.program}, turn={self.index})"

    @property
    def id(self) -> int:
        return self._request.id

    @property
    def program(self) -> int:
        return self._request.program

    @property
    def index(self) -> int:
        """0-based place of this turn in its program."""
        return self._request.turn

    @property
    def arrival(self) -> float:
        """When the request reached the cluster; on a decode replica, when it came there from its prefill replica."""
        return self._request.arrival

    @property
    def program_arrival(self) -> float:
        """When the program's first turn reached the cluster."""
        return self._request.program_arrival

    @property
    def is_last(self) -> bool | None:
        """Whether the program ends with this turn; None = not known (the client does not say, and this is no oracle)."""
        return self._request.is_last if self._oracle or self._request.last_known else None

    @property
    def tool(self) -> str | None:
        """The tool that ran before this turn, where the trace names it."""
        return self._request.tool

    @property
    def next_tool(self) -> str | None:
        """The tool that this turn calls (its output names it), known once the turn has ended; None = none, or not known."""
        request = self._request
        following = request.following if self._oracle or request.state == "finished" else None
        return following.tool if following else None

    @property
    def next_gap(self) -> float | None:
        """Seconds from now (the turn's end) to the program's next turn, by the trace; inf = no turn follows; None unless
        the policy is an oracle. A tool short of slots, or another turn that is waited for as well, may make it longer."""
        if not self._oracle:
            return None
        following = self._request.following
        if following is None:
            return inf
        if following.arrival == following.arrival:  # recorded
            return max(0.0, following.arrival - self._request.scheduler.now)
        return following.gap

    @property
    def priority(self) -> int:
        """Lower is more important."""
        return self._request.priority

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, whatever has been generated since."""
        return self._request.input_tokens

    @property
    def context_tokens(self) -> int:
        """Tokens known so far: the prompt, and what has been generated."""
        return self._request.known

    @property
    def generated(self) -> int:
        return self._request.known - self._request.input_tokens

    @property
    def remaining(self) -> int | None:
        """Output tokens still to come; None unless the policy is an oracle."""
        return self._request.total - self._request.known if self._oracle else None

    @property
    def cached_tokens(self) -> int:
        """Tokens that admission now would reuse from this replica's pool (0 before the request is routed)."""
        scheduler = self._request.scheduler
        return scheduler.cached_tokens(self._request) if scheduler else 0

    @property
    def lower_tier_tokens(self) -> int:
        """Tokens of the known ones that the host tier holds or is being written: while the turn waits, those that follow
        its `cached_tokens` without a gap; of a turn that runs or has ended, from its first token on."""
        scheduler = self._request.scheduler
        return scheduler.lower_tier_tokens(self._request) if scheduler else 0

    @property
    def blocks_needed(self) -> int:
        """Blocks that the known tokens need beyond those held or found in the pool."""
        scheduler = self._request.scheduler
        return scheduler.blocks_needed(self._request) if scheduler else 0

    @property
    def preempted(self) -> bool:
        return self._request.preempted

    @property
    def pinned(self) -> bool:
        """Whether blocks of this program are pinned on the replica."""
        scheduler = self._request.scheduler
        return scheduler is not None and self._request.program in scheduler.pins

    @property
    def wait(self) -> float:
        """Seconds in the queue: of the present wait, or of the last one if the request is running. The time of a load from
        the host is left out."""
        request = self._request
        if request.state == "waiting":
            return request.scheduler.now - request.queued_since
        if request.state == "new":
            return 0.0
        if request.state == "loading":
            return request.load_began - request.queued_since
        until = request.scheduler.now if request.state == "ready" else request.resumed
        return until - request.queued_since - request.load_seconds

    @property
    def service(self) -> float:
        """Seconds in the running list so far, preempted stays included."""
        request = self._request
        return request.service + (request.scheduler.now - request.running_since if request.state == "running" else 0.0)


class Running(Turn):
    """A request in the running list."""

    __slots__ = ()

    @property
    def blocks(self) -> int:
        return len(self._request.blocks)


class Pinned:
    """Blocks kept after a turn's end."""

    __slots__ = ("_pin",)

    def __init__(self, pin: PinnedBlocks) -> None:
        self._pin = pin

    @property
    def program(self) -> int:
        return self._pin.request.program

    @property
    def blocks(self) -> int:
        return len(self._pin.blocks)

    @property
    def tokens(self) -> int:
        return self._pin.tokens

    @property
    def since(self) -> float:
        return self._pin.since

    @property
    def until(self) -> float:
        return self._pin.until

    @property
    def program_arrival(self) -> float:
        return self._pin.request.program_arrival

    @property
    def next_turn_waiting(self) -> bool:
        """Whether the program's next turn is in this replica's queue."""
        return self._pin.request.program in self._pin.desk.queue.programs


class Engine:
    """A replica's queue and pool."""

    __slots__ = ("_scheduler",)

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def now(self) -> float:
        return self._scheduler.now

    @property
    def free_blocks(self) -> int:
        """Blocks that no running, loading or loaded request, no push from here and no pin holds (cached ones included)."""
        return self._scheduler.pool.num_free

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and those that are loaded (from the host, or pushed) and have not started."""
        return self._scheduler.num_waiting

    @property
    def num_loading(self) -> int:
        """Requests that hold blocks and wait for their KV from the host, or from a prefill replica."""
        return len(self._scheduler.loading)

    @property
    def running_tokens(self) -> int:
        """Known tokens of the running requests."""
        return sum(request.known for request in self._scheduler.running)

    @property
    def waiting_tokens(self) -> int:
        """Known tokens of the waiting requests."""
        return self._scheduler.queue.tokens + sum(request.known for request in self._scheduler.ready)

    @property
    def to_host_bytes(self) -> float:
        """Bytes of the copies to the host under way, each counted whole until it ends; 0 without a host tier."""
        tier = self._scheduler.tier
        return tier.to_host_bytes if tier is not None else 0.0

    @property
    def from_host_bytes(self) -> float:
        """Bytes of the copies from the host under way, each counted whole until it ends; 0 without a host tier."""
        tier = self._scheduler.tier
        return tier.from_host_bytes if tier is not None else 0.0

    @property
    def pinned_blocks(self) -> int:
        return sum(len(pin.blocks) for pin in self._scheduler.pins.values())


class ReplicaView(Engine):
    """What a router sees of a replica. The state is the present one, and `as_of` is now, unless the study has a `view_delay`
    (stale_views.py)."""

    __slots__ = ("_replica",)

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica.scheduler)
        self._replica = replica

    @property
    def id(self) -> int:
        return self._replica.id

    @property
    def role(self) -> str:
        """"prefill" (a request enters there), "decode" (it goes on there), or "both", where the cluster is not split."""
        return self._replica.scheduler.role

    @property
    def now(self) -> float:
        return self._replica.sim.now

    @property
    def as_of(self) -> float:
        """The simulated time of the state shown."""
        return self._replica.sim.now

    @property
    def outstanding(self) -> int:
        """Requests routed here that have not ended, those still on their way included."""
        return self._replica.outstanding

    def cached_tokens(self, turn: Turn) -> int:
        """Prompt tokens of `turn` that this replica's pool holds now."""
        return self._scheduler.cached_tokens(turn._request)


def entrances(replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
    """Those of these replicas where a request may enter: all, or where the cluster is split, the prefill ones."""
    return replicas if replicas[0].role == "both" else [replica for replica in replicas if replica.role == "prefill"]
