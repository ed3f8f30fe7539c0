"""What a scheduler does with KV that lies elsewhere: in a host tier, where a turn's KV is stored when the turn ends and from
which it is loaded when a later one asks for it; or on the prefill replica that computed the prompt (split_cluster.py).

A load does not block: the request takes its GPU blocks, leaves the queue, and comes back as *ready* when the copy has
arrived. The scheduler only says which copies begin (`Batch.effects`, `Outcomes.effects`); time is the replica's.
"""

from __future__ import annotations

from typing import Any, Literal

from simcore.errors import PolicyError
from simcore.models.batch import Copy, Effect, StartLoad, StartPush, StartStore
from simcore.models.decision_points import Admission, Retention, Swap
from simcore.models.engine import EngineSettings
from simcore.models.facts import FlowEnded, Listeners
from simcore.models.host_tier import HostTier
from simcore.models.policy_desk import Log, PolicyDesk
from simcore.models.request import NEVER, Request

Role = Literal["both", "prefill", "decode"]


class Offload(PolicyDesk):
    """Base of a scheduler, between the desk and the steps. `tier` None = an engine without one. `role`: "prefill" computes
    prompts and holds their blocks until they have been pushed, "decode" has them pushed to it, "both" is on its own. Of a
    replica of role "both" without a tier nothing here acts."""

    settings: EngineSettings

    def __init__(
        self, admission: Admission, retention: Retention, listeners: Listeners | None = None, log: Log | None = None,
        replica: int = 0, tier: HostTier | None = None, role: Role = "both", block_bytes: float = 0.0,
    ) -> None:
        super().__init__(admission, retention, listeners, log, replica)
        self.tier = tier
        self.role: Role = role
        self.block_bytes = block_bytes  # of a KV block that is pushed, all ranks together
        self.loads = tier is not None or role == "decode"
        self.handed: dict[int, Request] = {}  # by id: prompts that are computed, their blocks held for a push
        self.effects: list[Effect] = []  # what must happen outside, since the replica was last told
        self.orphans: dict[Request, list[int]] = {}  # aborted while loading -> blocks that their copies still write to
        self._hears_flows = self._listeners.wants(FlowEnded)

    @property
    def num_waiting(self) -> int:
        """Requests that could run and do not: in the queue, or loaded and not yet started."""
        return self.queue.size + len(self.ready)

    def take_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects

    def lower_tier_tokens(self, request: Request) -> int:
        """Tokens of the request in the tier or on their way there, without a gap: beyond the GPU's hits while it waits;
        from the first one on once it has blocks of its own or has ended."""
        tier = self.tier
        if tier is None:
            return 0
        blocks = self._hits(request)[0] if request.state == "waiting" else 0
        return tier.find(request.keys, blocks, request.known, writing=True)[1] * tier.block_size

    def _hits(self, request: Request) -> tuple[int, int]:
        """(blocks of the request that the pool holds, how many of those are free)."""
        return self.pool.look(request.keys, (request.known - 1) // self.settings.block_size)

    def _loadable(self, request: Request, hits: int) -> tuple[list[int], int]:
        """(chunks, blocks) that continue the request's first `hits` blocks and lie elsewhere: of the tier, or (no chunks)
        all that a prefill replica has computed."""
        if self.tier is not None:
            return self.tier.find(request.keys, hits, request.known)
        waits = request.source is not None  # type: ignore[attr-defined]
        return [], -(-request.known // self.settings.block_size) - hits if waits else 0

    # --- loads --------------------------------------------------------------------------------------------------------

    def _begin_load(self, request: Request, chunks: list[int], blocks: int) -> None:
        """The head of the queue takes blocks for all its known tokens, so that it cannot be stuck half-way, and the copy of
        `blocks` blocks beyond its hits begins. There is room."""
        tier, pool = self.tier, self.pool
        block = self.settings.block_size
        hits = pool.match(request.keys, (request.known - 1) // block)
        self.queue.remove(request)
        pool.hold(hits)
        request.blocks = hits + pool.take(-(-request.known // block) - len(hits))
        request.capacity = len(request.blocks) * block
        request.computed = len(hits) * block
        request.next_hash = request.computed + block
        request.state = "loading"
        request.load_began = self.now
        self.loading[request.id] = request
        request.had_pin = self._consume_pin(request)
        if tier is not None:
            tier.load(chunks)
            self.effects.append(StartLoad(request, chunks, blocks * block, len(chunks) * tier.chunk_bytes))
            return
        source: Request = request.source  # type: ignore[attr-defined]
        request.source = None  # type: ignore[attr-defined]  # if it is preempted it computes its prompt itself
        tokens = request.known - 1 - request.computed  # the last token is computed here, for its logits
        self.effects.append(StartPush(request, source, tokens, blocks * self.block_bytes))

    def copied(self, copy: Copy, seconds: float, now: float) -> None:
        """A copy that was begun `seconds` ago has arrived."""
        self.now = now
        if isinstance(copy, StartPush):
            self._loaded(copy.request, copy.tokens, seconds)
        else:
            assert self.tier is not None
            if isinstance(copy, StartLoad):
                self.tier.loaded(copy.chunks)
                self._loaded(copy.request, copy.tokens, seconds)
            else:
                self.tier.stored(copy.chunks)
        if self._hears_flows:
            self._tell(FlowEnded(now, self._replica, copy.link, copy.bytes, seconds))

    def _loaded(self, request: Request, tokens: int, seconds: float) -> None:
        if request in self.orphans:
            self.pool.give_back(self.orphans.pop(request))
            return
        block = self.settings.block_size
        first = request.computed // block
        request.computed += tokens
        stop = request.computed // block
        if self.settings.enable_prefix_caching:
            self.pool.register_all(request.blocks[first:stop], request.keys[first:stop])
            request.next_hash = (stop + 1) * block
        else:
            request.next_hash = NEVER
        request.loaded_tokens += tokens
        request.load_seconds = seconds
        request.reload_time += seconds
        del self.loading[request.id]
        request.state = "ready"
        self.ready.append(request)

    # --- stores -------------------------------------------------------------------------------------------------------

    def _store(self, request: Request, *, outputs: bool) -> None:
        """Begin to copy what the tier lacks of an ended turn. (Of the last token there is no KV.)"""
        tier = self.tier
        assert tier is not None
        chunks = tier.reserve(request.keys, request.total - 1 if outputs else request.input_tokens)
        if chunks:
            self.effects.append(StartStore(request, chunks, len(chunks) * tier.chunk_bytes))

    def _end_turn(self, request: Request) -> None:
        if self.role == "prefill" and request.blocks:
            self._hand_over(request)
            return
        if self.tier is not None:
            self._store(request, outputs=self.tier.outputs)
        super()._end_turn(request)

    def _swap(self, request: Request, answer: Swap) -> None:
        """What is stored at every turn's end need only be released; of the output, too, there shall be a copy."""
        if self.tier is None:
            super()._swap(request, answer)
        if answer.tier != "host":
            raise PolicyError(self.retention, self.now, f"at_turn_end answered {answer!r}; allowed: Swap('host')")
        self._store(request, outputs=True)
        self._give_back(request)
        self._note("retention", request.id, "swap to host")

    # --- prompts that are computed for another replica ----------------------------------------------------------------

    def _hand_over(self, request: Request) -> None:
        """The prompt is computed. Its turn ends here, for retention and whoever listens, when its KV has been pushed."""
        request.service += self.now - request.running_since
        request.state = "handed"
        self.handed[request.id] = request

    def pushed(self, request: Request, now: float) -> None:
        """What was handed over is no longer needed here."""
        self.now = now
        del self.handed[request.id]
        super()._end_turn(request)

    # --- for tests ----------------------------------------------------------------------------------------------------

    def check_loads(self) -> list[Any]:
        """Raise AssertionError if a loading or ready request is in a wrong state; returns these requests."""
        if self.tier is not None:
            self.tier.check()
        away = [*self.loading.values(), *self.ready]
        assert not away or self.loads
        assert all(r.state == "handed" and r.blocks for r in self.handed.values())
        assert all(r.state == "loading" for r in self.loading.values()) and all(r.state == "ready" for r in self.ready)
        assert all(r.computed < r.known <= r.capacity == len(r.blocks) * self.settings.block_size for r in away)
        return away
