"""The scheduler of the planned path: rows and pool in arrays, hot passes in compiled kernels.

What a policy may see or decide (queue, preemption, pins, facts, the log) is inherited from `Scheduler` and works on
requests whose running state lives in a column of the arrays. The tests hold both paths equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from simcore.models import commit_kernels, decide_kernels, plan_kernels
from simcore.models import plan_memory as layout
from simcore.models.batch import Batch
from simcore.models.decision_points import Admission, Retention
from simcore.models.engine import EngineSettings
from simcore.models.facts import Listeners
from simcore.models.host_tier import HostTier
from simcore.models.plan_memory import IntMemory
from simcore.models.planned_pool import REUSE, PlannedPool
from simcore.models.policy_desk import Log
from simcore.models.request import NEVER, Request
from simcore.models.scheduler import Scheduler
from simcore.traces.workload import Workload


class PlannedRequest(Request):
    """A request of the planned path. While it runs it lives in a column of its scheduler's arrays and is of the class
    `InColumn`, which reads and writes there; otherwise it is a plain object, as fast as any."""

    __slots__ = ("column", "row_blocks", "rows")

    column: int
    row_blocks: np.ndarray  # int64[columns, blocks]
    rows: np.ndarray  # int64[fields, columns]

    no_keys = np.zeros(0, dtype=np.int64)

    @staticmethod
    def keys_of(workload: Workload, i: int, block_size: int) -> np.ndarray:
        return workload.block_keys(i, block_size)


def _live(field: int) -> property:
    def read(self: Any) -> int:
        return int(self.rows[field, self.column])

    def write(self: Any, value: int) -> None:
        self.rows[field, self.column] = value

    return property(read, write)


class InColumn(PlannedRequest):
    """The same object while it runs: what the kernels change is read from the arrays."""

    __slots__ = ()

    known = _live(layout.KNOWN)
    computed = _live(layout.COMPUTED)
    in_flight = _live(layout.IN_FLIGHT)
    next_hash = _live(layout.NEXT_HASH)
    chunked = _live(layout.CHUNKED)
    steps_start = _live(layout.STEPS_START)
    steps_stop = _live(layout.STEPS_STOP)

    @property
    def blocks(self) -> list[int]:
        return self.row_blocks[self.column, : self.rows[layout.HELD, self.column]].tolist()

    @blocks.setter
    def blocks(self, value: list[int]) -> None:
        if value:
            self.row_blocks[self.column, : len(value)] = value
        self.rows[layout.HELD, self.column] = len(value)

    @property
    def capacity(self) -> int:
        """Tokens that fit in the blocks held."""
        return int(self.rows[layout.HELD, self.column]) * self.scheduler.settings.block_size

    @capacity.setter
    def capacity(self, value: int) -> None:
        pass  # it follows from the blocks

    @property
    def quantum(self) -> int | None:
        left = int(self.rows[layout.QUANTUM, self.column])
        return left if left < NEVER >> 1 else None

    @quantum.setter
    def quantum(self, value: int | None) -> None:
        self.rows[layout.QUANTUM, self.column] = NEVER if value is None else value


class PlannedScheduler(Scheduler):
    """`schedule` decides one step as `Scheduler` does, but leaves the batch in the arrays; `plan` then runs it and the
    uneventful steps after it ahead, `commit` applies what has come to pass.

    Between decisions the arrays may lag behind the clock: `catch_up`, which the replica sets, commits what is due, and
    every look at the pool or the running requests calls it first.
    """

    pool_type = PlannedPool

    def __init__(
        self, settings: EngineSettings, num_blocks: int, admission: Admission, retention: Retention, *,
        max_model_len: int | None = None, listeners: Listeners | None = None, log: Log | None = None,
        replica: int = 0, tier: HostTier | None = None,
    ) -> None:
        self.catch_up: Callable[[], None] = _nothing_due
        super().__init__(
            settings, num_blocks, admission, retention, max_model_len=max_model_len, listeners=listeners, log=log,
            replica=replica, tier=tier)
        # Every running request holds a block of its own, so the pool bounds their number too.
        slots, block = min(self._max_running, num_blocks), settings.block_size
        blocks_per_row = min(num_blocks, -(-self.max_model_len // block)) + 1
        pool = self._pool
        self.memory = memory = IntMemory(
            slots, blocks_per_row, blocks_per_row if settings.enable_prefix_caching else 0, num_blocks, len(pool.table))
        pool.move(memory.blocks, memory.table, memory.counters)
        self.blocked, self.wanted = plan_kernels.NOBODY_WAITS, plan_kernels.NOTHING
        self.hears_of_admissions = self._hears_admitted or self._asks_limit
        # Those who use up a quantum give their blocks back before those who end do.
        self._nobody_hears_of_ends = not (self._asks_turn_end or self._hears_ended or self._asks_limit)
        _write_settings(self)
        self._columns: list[PlannedRequest | None] = [None] * slots
        self._free_columns = list(range(slots - 1, -1, -1))
        self._left = 0  # of the step's token budget
        self.long_way = 0  # steps that were decided request by request, or alone because somebody is asked at each

    # What others look at is up to date; code that runs at a decision, when nothing lags, uses `_pool` and `_running`.

    @property
    def pool(self) -> PlannedPool:
        self.catch_up()
        return self._pool

    @pool.setter
    def pool(self, value: PlannedPool) -> None:
        self._pool = value

    @property
    def running(self) -> list[Request]:  # type: ignore[override]
        self.catch_up()
        return self._running

    @running.setter
    def running(self, value: list[Request]) -> None:
        self._running = value

    @property
    def idle(self) -> bool:
        # Who runs changes only at decisions.
        return not (self._running or self.queue.size or self.loading or self.ready)

    def cached_tokens(self, request: Request) -> int:
        if not self._caching:
            return 0
        return self.pool.count_matched(request.keys, (request.known - 1) // self._block) * self._block

    # --- one decision -------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Batch:
        long_way = self.long_way
        batch = super().schedule(now)
        self._note_blocked()
        asks_room = self.pins and self._asks_room and not (self._room_when_idle and self._running)
        could_start = bool(self.ready) and len(self._running) < self._max_running
        if batch.preempted or could_start or (asks_room and self.blocked >= plan_kernels.NO_ROOM):
            self.blocked = plan_kernels.ASK_EVERY_STEP
            self.long_way = long_way + 1
        return batch

    def admit_head(self, cached: int) -> None:
        """The head of the queue, which a kernel has admitted, takes its column."""
        request = self.queue.head()
        self.queue.remove(request)
        self._attach(request)
        self._start_running(request, cached)

    def _note_blocked(self) -> None:
        """Why the head of the queue, or what is loaded, was not admitted, and the block that could change it."""
        self.wanted = plan_kernels.NOTHING
        if not self.num_waiting:
            self.blocked = plan_kernels.NOBODY_WAITS
        elif len(self._running) >= self._max_running:
            self.blocked = plan_kernels.NO_SLOT
        elif not self.queue.size:
            self.blocked = plan_kernels.NO_BUDGET
        else:
            head = self.queue.head()
            self.blocked, self.wanted = decide_kernels.why_blocked(
                head.keys, head.known, len(self._running), self.memory.all)

    def _continue_running(self, batch: Batch, budget: int, hold_prefills: bool) -> int:
        n = len(self._running)
        if not n:
            self._left = budget
            return budget
        self._left = decide_kernels.decide(n, self.num_waiting, self.memory.all)
        if self._left >= 0:
            return self._left
        # Blocks run short: decide request by request, as the plain path does, and write down what came of it.
        self.long_way += 1
        budget = self._left = super()._continue_running(batch, budget, hold_prefills)
        self._write_order()
        self.memory.rows[layout.COUNT] = 0
        for request, count in zip(batch.requests, batch.counts, strict=True):
            self.memory.rows[layout.COUNT, request.column] = count  # type: ignore[attr-defined]
        batch.requests.clear()
        batch.counts.clear()
        return budget

    def _admit(self, batch: Batch, budget: int) -> None:
        queue = self.queue
        budget = self._start_ready(batch, budget)
        while queue.size and budget > 0:
            running = len(self._running)
            if running >= self._max_running:
                break
            request = queue.head()
            look_on = self._load_head(request) if self.tier is not None else None
            if look_on is not None:
                if look_on:
                    continue
                break
            count, cached = decide_kernels.admit(
                self._free_columns[-1], request.keys, request.known, request.total, request.steps_start,
                request.steps_stop, running + self.num_waiting, running, budget, self.memory.all)
            if count > 0:
                self.admit_head(cached)
                budget -= count
            elif not count or not (
                self._make_room(self._pool.num_free - count, "admission", request) or queue.head() is not request
            ):
                break
        self._left = budget

    def _dispatch(self, batch: Batch) -> None:
        batch.tokens = self.settings.step_budget - self._left  # the arrays follow when the plan starts

    # --- steps --------------------------------------------------------------------------------------------------------

    def finish(self, ended: int, now: float) -> list[Request]:
        """The decision at the end of a plan: the `ended` requests whose columns stand in `out` have their last token and
        end; used-up quanta are asked about."""
        self.now = now
        rows = self.memory.rows
        columns, starts, stops = self.memory.out[:3, :ended].tolist()
        finished: list[Any] = [self._columns[i] for i in columns]
        if self._asks_limit:
            for request in list(self._running):
                column = request.column  # type: ignore[attr-defined]
                if rows[layout.QUANTUM, column] == 0 and rows[layout.KNOWN, column] < rows[layout.TOTAL, column]:
                    self._quantum_used(request)
        if ended:
            gone = set(map(id, finished))
            self._running = [request for request in self._running if id(request) not in gone]
        if self._asks_limit:
            self._write_order()
        for request, start, stop in zip(finished, starts, stops, strict=True):
            self._finish(request, start, stop)
        return finished

    def finish_one(self, column: int, start: int, stop: int) -> Request:
        """`finish` for the one request in `column`; no quantum is used up."""
        request = self._columns[column]
        assert request is not None
        self._running.remove(request)
        self._finish(request, start, stop)
        return request

    def _finish(self, request: PlannedRequest, start: int, stop: int) -> None:
        if self._nobody_hears_of_ends:  # what `_end_turn` does then; the kernel has given the blocks back
            if self.tier is not None:
                self._store(request, outputs=self.tier.outputs)
            request.service += self.now - request.running_since
            request.state = "finished"
            self._note("retention", request.id, "lru")
        else:
            self._end_turn(request)
        self._leave_column(request, request.total, start, stop)

    def note_interruptions(self) -> None:
        """Runs of token steps that the last commit found interrupted, to the requests that they belong to."""
        for column, start, stop in self.memory.out[3:, : self.memory.engine[layout.CLOSED]].T.tolist():
            request = self._columns[column]
            assert request is not None
            request.token_steps += (start, stop)

    # --- columns ------------------------------------------------------------------------------------------------------

    def _attach(self, request: Any) -> None:
        """The request that `decide_kernels.admit` has put into the next free column takes it as its own."""
        column = self._free_columns.pop()
        request.rows, request.row_blocks, request.column = self.memory.rows, self.memory.row_blocks, column
        request.__class__ = InColumn
        self._columns[column] = request

    def _seat(self, request: Any, count: int, batch: Batch) -> None:
        """What `decide_kernels.admit` does, for a request that holds its blocks already."""
        memory, column = self.memory, self._free_columns[-1]
        known, computed, next_hash, blocks = request.known, request.computed, request.next_hash, request.blocks
        steps = request.steps_start, request.steps_stop
        keys = request.keys[: memory.row_keys.shape[1]]  # they go on where max_model_len cuts the request
        memory.row_keys[column, : len(keys)] = keys
        memory.order[len(self._running)] = column
        memory.rows[layout.TOTAL, column] = request.total
        memory.rows[layout.COUNT, column] = count
        self._attach(request)
        request.known, request.computed, request.next_hash, request.blocks = known, computed, next_hash, blocks
        request.steps_start, request.steps_stop = steps
        request.quantum, request.in_flight, request.chunked = None, 0, False

    def _leave_column(self, request: Any, known: int, start: int, stop: int) -> None:
        """The request leaves its column and takes along what it must remember."""
        column = request.column
        request.__class__ = PlannedRequest
        request.known, request.steps_start, request.steps_stop = known, start, stop
        request.computed = request.in_flight = request.capacity = 0
        request.blocks = []
        self._columns[column] = None
        self._free_columns.append(column)

    def _write_order(self) -> None:
        self.memory.order[: len(self._running)] = [request.column for request in self._running]  # type: ignore[attr-defined]

    def _preempt(self, request: Request, batch: Batch | None) -> None:
        super()._preempt(request, batch)
        self._leave_column(request, request.known, request.steps_start, request.steps_stop)

    def _give_back(self, request: Any, reuse: str = "lru") -> None:
        if type(request) is InColumn:
            commit_kernels.release(request.column, REUSE[reuse], self.memory.all)


def _nothing_due() -> None:
    pass


def _write_settings(scheduler: PlannedScheduler) -> None:
    settings, semantics = scheduler.settings, scheduler.semantics
    out = scheduler.memory.settings
    out[layout.BLOCK] = settings.block_size
    out[layout.BUDGET] = settings.step_budget
    out[layout.MAX_LEN] = scheduler.max_model_len
    out[layout.CHUNK_CAP] = settings.long_prefill_token_threshold
    out[layout.LONE_UNCAPPED] = semantics.lone_prefill_uncapped
    out[layout.ADAPTIVE] = settings.max_num_batched_tokens if settings.long_prefill_token_threshold_adaptive else 0
    out[layout.CACHING] = settings.enable_prefix_caching
    out[layout.WATERMARK] = scheduler._watermark
    out[layout.RESERVE_FULL] = settings.scheduler_reserve_full_isl
    out[layout.CHUNKED_PREFILL] = settings.enable_chunked_prefill
    out[layout.MAX_RUNNING] = scheduler._max_running
    out[layout.UNHASHED_FIRST] = scheduler._pool.unhashed_first
    out[layout.RELEASE_ENDED] = scheduler._nobody_hears_of_ends
