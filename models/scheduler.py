"""One replica's scheduler with vLLM V1's semantics: continuous batching, chunked prefill, prefix caching, preemption.

It knows no clock, no events, no randomness and no I/O: `add`, `schedule(now) -> Batch`, `complete(batch, now) ->
Outcomes` change only its own queue, running list, block pool and host tier. What must happen outside (waking up at an
expiry, moving bytes) is returned in `Batch.effects` and `Outcomes.effects`. The rules are those of the data set
vllm_scheduler_golden; docs/scheduler.md lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Any

from simcore.models.batch import Batch, Outcomes, WakeAt
from simcore.models.block_pool import BlockPool
from simcore.models.decision_points import Admission, Retention
from simcore.models.engine import EngineSettings
from simcore.models.facts import Admitted, Listeners, Preempted, TurnArrived, TurnEnded
from simcore.models.host_tier import HostTier
from simcore.models.offload import Offload, Role
from simcore.models.policy_desk import Log
from simcore.models.request import NEVER, Request


class Scheduler(Offload):
    """See the module. `num_blocks` is vLLM's num_gpu_blocks (block 0 included)."""

    pool_type: type[Any] = BlockPool
    _decision_seconds: float

    def __init__(
        self, settings: EngineSettings, num_blocks: int, admission: Admission, retention: Retention, *,
        max_model_len: int | None = None, listeners: Listeners | None = None, log: Log | None = None,
        replica: int = 0, tier: HostTier | None = None, role: Role = "both", block_bytes: float = 0.0,
    ) -> None:
        super().__init__(admission, retention, listeners, log, replica, tier, role, block_bytes)
        self.settings = settings
        self.semantics = settings.semantics
        self.pool = self.pool_type(num_blocks, unhashed_first=self.semantics.unhashed_blocks_reused_first)
        self.running: list[Request] = []
        self.steps = 0
        self.preemptions = 0
        self.max_model_len = max_model_len or settings.max_model_len or NEVER
        self._block = settings.block_size
        self._caching = settings.enable_prefix_caching
        self._watermark = int(settings.watermark * num_blocks)
        self._max_running = min(settings.max_num_seqs, settings.max_num_active_seqs or NEVER)
        self._prefill_gap = NEVER  # executed steps since the last one with prefill work
        self._queue_left = False  # that step left requests waiting
        self.counts_lost = False  # preempted requests note what is lost (`Attempt.lost`)

    # --- from outside ------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float, gap: float = float("nan")) -> None:
        """Put a request into the queue. `gap`: seconds since its program's previous turn ended."""
        self.now = now
        request.scheduler = self
        request.total = min(request.input_tokens + request.output_tokens, self.max_model_len)
        self._enqueue(request)
        if self._hears_arrived:
            self._tell(TurnArrived(now, request.id, request.program, gap, request.tool))

    def abort(self, request: Request, now: float) -> None:
        """The client has given up: the request leaves at once, and its blocks go to the free list, findable where they were.
        What a batch in execution computes for it is thrown away. One that loads gives its blocks back when its copy has
        arrived. `computed` stays what was computed in the present stay in the running list. (Step by step only.)"""
        self.now = now
        state, blocks = request.state, request.blocks
        if state == "waiting":
            self.queue.remove(request)
        elif state == "loading":
            del self.loading[request.id]
            self.orphans[request] = blocks
        elif state == "ready":
            self.ready.remove(request)
        else:
            self.running.remove(request)
            request.service += now - request.running_since
        if state in ("ready", "running"):
            self.pool.give_back(blocks)
        if state != "running":
            request.computed = 0
        request.state = "aborted"
        request.blocks = []
        self._consume_at_end(request)
        if self._hears_ended:
            self._tell(TurnEnded(now, request.id, request.program, request.service, aborted=True))

    def everyone(self) -> list[Request]:
        """All requests that are here, by id."""
        here = [*self.running, *self.queue.in_order(), *self.loading.values(), *self.ready]
        return sorted(here, key=lambda request: request.id)

    @property
    def idle(self) -> bool:
        return not (self.running or self.queue or self.loading or self.ready)

    def cached_tokens(self, request: Request) -> int:
        """Leading tokens of the request that are in the pool: whole blocks, at most all but one known token."""
        return len(self._match(request)) * self._block

    def blocks_needed(self, request: Request) -> int:
        held = len(request.blocks) or len(self._match(request))
        return max(0, -(-request.known // self._block) - held)

    # --- one step ----------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Batch:
        """Decide the next batch. Order: expired pins, running requests (growth may drop pins or preempt), admissions."""
        self.now = now
        batch = Batch(self.steps)
        budget = self.settings.step_budget
        if self.pins:
            self._expire_pins()
        hold_prefills = self._prefill_gap < self.settings.prefill_schedule_interval and self._prefills_wait()
        budget = self._continue_running(batch, budget, hold_prefills)
        if (self.queue or self.ready) and not batch.preempted and budget > 0 and not hold_prefills:
            self._admit(batch, budget)
        self._dispatch(batch)
        if self.pins:
            until = min(pin.until for pin in self.pins.values())
            if now < until < inf:
                self.effects.append(WakeAt(until))
        batch.effects = self.take_effects()
        batch.decision_seconds, self._decision_seconds = self._decision_seconds, 0.0
        return batch

    def complete(self, batch: Batch, now: float) -> Outcomes:
        """Deliver the batch's tokens; requests at their last token end and give their blocks to retention."""
        self.now = now
        step = batch.step
        tokens = 0
        finished: list[Request] = []
        for request, sampled in zip(batch.requests, batch.samples, strict=True):
            if not sampled or request.state == "aborted":
                continue
            tokens += 1
            request.in_flight -= 1
            request.known += 1
            request.delivered(step)
            if request.state == "waiting":  # preempted while its token was in flight
                self.queue.tokens += 1
                if request.known >= request.total:
                    self.queue.remove(request)
                    finished.append(request)
                continue
            if request.computed - request.in_flight >= request.next_hash:  # asynchronous: the token was not known before
                self._register(request, request.computed - request.in_flight)
            if request.known >= request.total:
                finished.append(request)
            if request.quantum is not None and request.known + request.in_flight < request.total:
                self._use_quantum(request)
        if finished:
            ended = [request for request in finished if request.state == "running"]
            if ended:
                gone = set(map(id, ended))
                self.running = [request for request in self.running if id(request) not in gone]
            for request in finished:
                self._end_turn(request)
        return Outcomes(tokens, finished, self.take_effects())

    # --- running requests --------------------------------------------------------------------------------------------

    def _continue_running(self, batch: Batch, budget: int, hold_prefills: bool) -> int:
        """Give every running request its tokens, in list order; returns what is left of the budget."""
        running, pool, block = self.running, self.pool, self._block
        requests, counts = batch.requests, batch.counts
        cap = self._chunk_cap()
        i = 0
        while i < len(running) and budget > 0:
            request = running[i]
            missing = request.known + request.in_flight - request.computed
            if request.in_flight and request.computed + 2 - request.in_flight >= request.total:
                i += 1  # asynchronous: its last token is in flight
                continue
            if missing > 1:
                missing = min(missing, cap)
            count = min(missing, budget, self.max_model_len - 1 - request.computed)
            if count <= 0 or (hold_prefills and request.chunked):
                i += 1
                continue
            after = request.computed + count
            if after > request.capacity:
                need = -(-after // block) - len(request.blocks)
                if need > pool.num_free:
                    i, budget, fits = self._find_room(request, need, batch, budget, i)
                    if not fits:
                        if request.state == "running" or not (self.semantics.self_victim_passes):
                            break
                        continue  # it was preempted itself: index i now names the next one
                request.blocks += pool.take(need)
                request.capacity = len(request.blocks) * block
            if after >= request.next_hash:
                self._register(request, after)
            requests.append(request)
            counts.append(count)
            budget -= count
            i += 1
        return budget

    def _find_room(self, request: Request, need: int, batch: Batch, budget: int, i: int) -> tuple[int, int, bool]:
        """Free blocks for a running request by dropping pins and preempting, in the order of `room_order`.

        Returns the corrected index, the budget (tokens of preempted requests come back) and whether `need` now fits.
        """
        pool = self.pool
        if self.settings.room_order == "pins_first":
            self._make_room(need, "decode", request)
        while need > pool.num_free:
            alone = self.settings.room_order == "rows_first" and len(self.running) == 1
            if alone and self._make_room(need, "decode", request):
                break
            victim = self._victim(need)
            position = self.running.index(victim)
            del self.running[position]
            scheduled = False
            if victim in batch.requests:
                k = batch.requests.index(victim)
                budget += batch.counts[k]
                del batch.requests[k], batch.counts[k]
                scheduled = True
            if scheduled or (self.semantics.index_follows_victim and position < i):
                i -= 1
            self._preempt(victim, batch)
            if victim is request:
                return i, budget, False
        return i, budget, True

    def _preempt(self, request: Request, batch: Batch | None) -> None:
        """Take all blocks and progress away; the request goes back to its place in the queue. It has left the list."""
        self.preemptions += 1
        request.preemptions += 1
        request.preempted = True
        request.service += self.now - request.running_since
        if self.counts_lost:
            request.lost += request.computed  # type: ignore[attr-defined]
        self._give_back(request)
        request.blocks = []
        request.capacity = request.computed = 0
        request.chunked = False
        request.load_seconds = 0.0
        if batch is not None:
            batch.preempted.append(request)
        if self._hears_preempted:
            self._tell(Preempted(self.now, request.id, request.program))
        self._enqueue(request)

    def _use_quantum(self, request: Request) -> None:
        """Count a token against admission's limit."""
        assert request.quantum is not None
        request.quantum -= 1
        if not request.quantum:
            self._quantum_used(request)

    def _quantum_used(self, request: Request) -> None:
        """At the end of its quantum a request yields to a head with a smaller key, or gets a new quantum."""
        if self.queue:
            key = self._key(request)
            if self.queue.head_key() < key:
                self.running.remove(request)
                self._note("limit", request.id, "yield")
                self._preempt(request, None)
                return
        self._ask_quantum(request)

    # --- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, batch: Batch, budget: int) -> None:
        """Start what is loaded, then admit from the head of the queue; a head that does not fit blocks all behind it."""
        queue, pool, block, settings = self.queue, self.pool, self._block, self.settings
        budget = self._start_ready(batch, budget)
        while queue and budget > 0 and len(self.running) < self._max_running:
            request = queue.head()
            if self.loads:
                look_on = self._load_head(request)
                if look_on is not None:
                    if look_on:
                        continue
                    break
            hits = self._match(request)
            cached = len(hits) * block
            missing = min(request.known - cached, self._chunk_cap())
            if missing > budget and not settings.enable_chunked_prefill:
                break
            count = min(missing, budget)
            reach = request.known if settings.scheduler_reserve_full_isl else cached + count
            taken = pool.count_free(hits)  # hits that stand on the free list leave it
            floor = self._watermark if self.running else 0
            short = -(-reach // block) - len(hits) + taken + floor - pool.num_free
            if short > 0:
                if self._make_room(short + pool.num_free, "admission", request) or queue.head() is not request:
                    continue  # look again: dropped pins may have held hits, and may have moved the head
                break
            queue.remove(request)
            pool.hold(hits)
            request.blocks = hits + pool.take(-(-(cached + count) // block) - len(hits))
            request.capacity = len(request.blocks) * block
            request.computed = cached
            request.next_hash = cached + block if self._caching else NEVER
            if cached + count >= request.next_hash:
                self._register(request, cached + count)
            self._start_running(request, cached)
            batch.requests.append(request)
            batch.counts.append(count)
            budget -= count

    def _load_head(self, request: Request) -> bool | None:
        """Begin to load what lies elsewhere of the head of the queue beyond the GPU's hits; None = nothing. Else whether to
        look at the queue again: the head has left it, or room was made and it may find other hits; False: blocks run short.
        """
        hits, free_hits = self._hits(request)
        chunks, blocks = self._loadable(request, hits)
        if not blocks:
            return None
        floor = self._watermark if self.running else 0
        short = -(-request.known // self._block) - hits + free_hits + floor - self.pool.num_free
        if short > 0:
            return self._make_room(short + self.pool.num_free, "admission", request) or self.queue.head() is not request
        self._begin_load(request, chunks, blocks)
        return True

    def _start_ready(self, batch: Batch, budget: int) -> int:
        """Start the requests that are loaded and hold their blocks, as far as places and budget go; returns the budget."""
        ready = self.ready
        while ready and budget > 0 and len(self.running) < self._max_running:
            request = ready[0]
            missing = min(request.known - request.computed, self._chunk_cap())
            if missing > budget and not self.settings.enable_chunked_prefill:
                break
            ready.popleft()
            count = min(missing, budget)
            cached = request.computed
            self._seat(request, count, batch)
            if cached + count >= request.next_hash:
                self._register(request, cached + count)
            self._start_running(request, cached, request.had_pin)
            budget -= count
        return budget

    def _seat(self, request: Request, count: int, batch: Batch) -> None:
        """A request that holds its blocks computes `count` tokens in this step."""
        batch.requests.append(request)
        batch.counts.append(count)

    def _start_running(self, request: Request, cached: int, had_pin: bool | None = None) -> None:
        """`had_pin`: None = the request is admitted now, and takes its program's pin."""
        now = self.now
        if request.admitted != request.admitted:  # NaN: the first time
            request.admitted = now
            request.cached_first = cached
        request.cached_all += cached
        request.resumed = request.running_since = now
        resumed, request.preempted = request.preempted, False
        request.state = "running"
        self.running.append(request)
        if had_pin is None:
            had_pin = self._consume_pin(request)
        if self._hears_admitted:
            wait = now - request.queued_since - request.load_seconds
            self._tell(Admitted(now, request.id, request.program, wait, had_pin, cached, resumed))
        if self._asks_limit:
            self._ask_quantum(request)

    def _match(self, request: Request) -> list[int]:
        return self.pool.match(request.keys, (request.known - 1) // self._block) if self._caching else []

    # --- the end of a step -------------------------------------------------------------------------------------------

    def _dispatch(self, batch: Batch) -> None:
        """The batch is decided: count its tokens as computed and its samples as in flight."""
        before, samples = batch.before, batch.samples
        prefill = False
        for request, count in zip(batch.requests, batch.counts, strict=True):
            computed = request.computed
            before.append(computed)
            request.computed = computed = computed + count
            known = request.known + request.in_flight
            if computed == known:
                prefill = prefill or count > 1 or request.chunked
                request.in_flight += 1
                request.chunked = False
                samples.append(True)
            else:
                prefill = request.chunked = True
                samples.append(False)
        batch.tokens = sum(batch.counts)
        if batch.tokens:
            self.steps += 1
            if self.settings.prefill_schedule_interval and self.semantics.spaced_prefills:
                self._prefill_gap = 1 if prefill else self._prefill_gap + 1
                if prefill:
                    self._queue_left = self.num_waiting > 0

    def _prefills_wait(self) -> bool:
        """Whether spacing holds prefills back: something decodes, and the last prefill step emptied the queue."""
        return not self._queue_left and any(not request.chunked for request in self.running)

    def _chunk_cap(self) -> int:
        """The most tokens one request may compute in this step (long_prefill_token_threshold)."""
        settings = self.settings
        cap = settings.long_prefill_token_threshold
        if not cap:
            return NEVER
        system = len(self.running) + self.num_waiting
        if system == 1 and self.semantics.lone_prefill_uncapped:
            return NEVER
        if settings.long_prefill_token_threshold_adaptive:
            cap = max(cap, settings.max_num_batched_tokens // max(1, system))
        return cap

    def _register(self, request: Request, tokens: int) -> None:
        """Make the blocks that `tokens` known tokens fill findable."""
        tokens = min(tokens, request.known)
        block = self._block
        first = request.next_hash // block - 1
        stop = tokens // block
        for j in range(first, stop):
            self.pool.register(request.blocks[j], request.keys[j])
        request.next_hash = (max(first, stop) + 1) * block

    def check(self) -> None:
        """Raise AssertionError unless every block is accounted for exactly once and no queue lies (tests, --check)."""
        self.pool.check()
        held: dict[int, int] = {}
        holders = [*self.running, *self.check_loads()]
        holders += self.handed.values()
        for blocks in [r.blocks for r in holders] + [pin.blocks for pin in self.pins.values()] + [*self.orphans.values()]:
            for block in blocks:
                held[block] = held.get(block, 0) + 1
        assert all(self.pool.references[b] == held.get(b, 0) for b in range(1, self.pool.num_blocks)), "a reference is lost"
        for request in self.running:
            assert request.state == "running" and request.computed <= request.capacity
            assert request.computed <= request.known + request.in_flight <= request.total + request.in_flight
        order: Sequence[Request] = self.queue.in_order()
        assert len(order) == len(self.queue) and all(r.state == "waiting" and not r.blocks for r in order)
        assert self.queue.tokens == sum(r.known for r in order) and sum(self.queue.programs.values()) in (len(order), 0)
        keys = [r.queue_entry[:2] for r in order if r.queue_entry]
        assert all(a <= b for a, b in pairwise(keys))
