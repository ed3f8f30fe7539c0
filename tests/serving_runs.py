"""Small serving runs for tests: hand-made cost tables, workloads from lists, and `serve` under watch.

Every run is made with a scheduler that is checked before and after each decision and with a replica that must not idle
while something could run; what happened is counted in `Witness`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from simcore.models import host_tier, serving
from simcore.models.batch import Batch, Outcomes, StartLoad, StartStore
from simcore.models.decision_points import Admission, ReplicaRouting, Retention
from simcore.models.engine import EngineSettings
from simcore.models.replica import Replica
from simcore.models.request import Request
from simcore.models.scheduler import Scheduler
from simcore.models.serving import Deployment, Policies, RunResult, serve
from simcore.models.step_time import COLUMNS, CONSTANT, KV_READ, KV_READ_WINDOW, TOKENS, StepTables
from simcore.policies.admission.fcfs import Fcfs
from simcore.policies.replica_routing.round_robin import RoundRobin
from simcore.policies.retention.lru import Lru
from simcore.traces.workload import Source, Workload, build

BLOCK_BYTES = 2.0**30  # of a KV block in these runs: `kv_offloading_size` counts blocks


def tables(
    constant: float = 1.0, per_token: float = 0.0, per_kv_token: float = 0.0, per_window_token: float = 0.0
) -> StepTables:
    """A step takes `constant + per_token * tokens + per_kv_token * context tokens read + per_window_token * context tokens
    read in a window` seconds."""
    compute = np.zeros((1, COLUMNS))
    compute[0, CONSTANT], compute[0, TOKENS], compute[0, KV_READ] = constant, per_token, per_kv_token
    compute[0, KV_READ_WINDOW] = per_window_token
    return StepTables(compute, np.zeros((1, COLUMNS)), np.zeros((2, 2)))


def workload(rows: Sequence[dict[str, Any]], *, block_tokens: int = 4, **columns: Any) -> Workload:
    """One dict a request: `at` (arrival, s) or `after` (request ids) and `gap`; `prompt`, `output` (tokens); optional
    `program`, `turn`, `priority`, `tool`, `ids` (trace blocks, covering `known` tokens; default all that they can)."""
    totals = [row["prompt"] + row["output"] for row in rows]
    ids = [np.array(row.get("ids", []), dtype=np.int64) for row in rows]
    return build(
        arrival=np.array([row.get("at", np.nan) for row in rows]),
        input_tokens=np.array([row["prompt"] for row in rows]),
        output_tokens=np.array([row["output"] for row in rows]),
        priority=np.array([row.get("priority", 0) for row in rows]),
        program=np.array([row.get("program", i) for i, row in enumerate(rows)]),
        turn=np.array([row.get("turn", 0) for row in rows]),
        gap=np.array([row.get("gap", 0.0) for row in rows]),
        tool=np.array([row.get("tool", -1) for row in rows]),
        waits=[list(row.get("after", [])) for row in rows],
        block_ids=ids,
        known_tokens=np.array([
            row.get("known", min(total, len(i) * block_tokens)) for row, total, i in zip(rows, totals, ids, strict=True)
        ]),
        block_tokens=block_tokens, source=Source("test"), **columns,
    )


@dataclass
class Witness:
    """What a watched run met: `counts` of events, the schedulers and replicas with their final state, every batch."""

    counts: Counter[str] = field(default_factory=Counter)
    schedulers: list[Scheduler] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)
    batches: list[tuple[float, list[int], list[int]]] = field(default_factory=list)  # (time, request ids, tokens)
    computed: Counter[int] = field(default_factory=Counter)  # request -> tokens computed
    lost: Counter[int] = field(default_factory=Counter)  # request -> tokens whose KV a preemption threw away


def run(
    work: Workload, *, settings: dict[str, Any] | None = None, blocks: int = 100, replicas: int = 1,
    cost: StepTables | None = None, max_model_len: int = 1000, admission: Callable[[], Admission] = Fcfs,
    retention: Callable[[], Retention] | None = Lru, router: Callable[[], ReplicaRouting] = RoundRobin,
    step_overhead: float = 0.0, window: int = 0, witness: Witness | None = None, link: float = 1.0, latency: float = 0.0,
    lmcache_chunk: int = 8, **options: Any,
) -> RunResult:
    """`serve` under watch (of the step-by-step path).

    `blocks`: usable KV blocks of 4 tokens; `retention` None = the admission object serves both. `link`: blocks/s to and from
    the host; `lmcache_chunk`: tokens of a chunk with that backend."""
    engine = EngineSettings(**{"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8} | (settings or {}))
    deployment = Deployment(
        engine, replicas, blocks + 1, max_model_len, cost or tables(), window=window, step_overhead=step_overhead,
        kv_bytes_per_token=BLOCK_BYTES / 4, host_bandwidth=link * BLOCK_BYTES, host_latency=latency)
    policies = Policies(lambda r: admission(), lambda r, a: retention() if retention else a, router)  # type: ignore
    seen = witness if witness is not None else Witness()
    with (
        patch.multiple(serving, Scheduler=_watched_scheduler(seen), Replica=_watched_replica(seen)),
        patch.object(host_tier, "LMCACHE_CHUNK", lmcache_chunk),
    ):
        return serve(work, deployment, policies, **{"sample_every": 0.0, "path": "step-by-step"} | options)


def _watched_scheduler(seen: Witness) -> type[Scheduler]:
    class Watched(Scheduler):
        """Scheduler that checks itself after every change and keeps the books that the invariants need."""

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.last_head = (-1, 0)  # the blocked head of the queue, and the tokens that it would have reused
            seen.schedulers.append(self)

        def schedule(self, now: float) -> Batch:
            assert now >= self.now, "the clock went back"
            batch = super().schedule(now)
            self.check()
            assert batch.tokens <= self.settings.step_budget and min(batch.counts, default=1) >= 1
            assert len(self.running) <= self.settings.max_num_seqs
            assert len({id(request) for request in batch.requests}) == len(batch.requests)
            for request, count in zip(batch.requests, batch.counts, strict=True):
                seen.computed[request.id] += count
            if self.queue and batch.tokens and len(self.running) < self._max_running and not batch.preempted:
                seen.counts["blocked heads"] += 1
                head, hits = self.queue.head(), self.cached_tokens(self.queue.head())
                seen.counts["heads that lost hits"] += self.last_head[0] == head.id and hits < self.last_head[1]
                self.last_head = (head.id, hits)
            seen.batches.append((now, [r.id for r in batch.requests], list(batch.counts)))
            seen.counts["chunks"] += batch.samples.count(False)
            seen.counts["ready and held back"] += len(self.ready) > 0
            seen.counts["loads at once"] += len(self.loading) > 1
            return batch

        def complete(self, batch: Batch, now: float) -> Outcomes:
            assert now >= self.now, "the clock went back"
            outcomes = super().complete(batch, now)
            self.check()
            assert outcomes.tokens == sum(batch.samples)
            return outcomes

        def _preempt(self, request: Request, batch: Batch | None) -> None:
            seen.lost[request.id] += request.computed
            seen.counts["preemptions" if batch is not None else "yields"] += 1
            super()._preempt(request, batch)

        def _end_turn(self, request: Request) -> None:
            seen.counts["ended while waiting"] += request.state == "waiting"
            assert seen.computed[request.id] + request.cached_all - seen.lost[request.id] == request.computed
            assert request.computed == (request.total - 1 if request.state == "running" else 0)
            super()._end_turn(request)

        def _drop_pin(self, program: int, cause: str) -> None:
            seen.counts[f"pins {cause}"] += 1
            super()._drop_pin(program, cause)

        def _load_head(self, request: Request) -> bool | None:
            look_on = super()._load_head(request)
            seen.counts["blocked loads"] += look_on is False
            return look_on

        def _begin_load(self, request: Request, chunks: list[int], blocks: int) -> None:
            seen.counts["loads"] += 1
            seen.counts["loads after hits"] += self.cached_tokens(request) > 0
            seen.counts["loads of preempted"] += request.preempted
            super()._begin_load(request, chunks, blocks)

        def copied(self, copy: StartLoad | StartStore, seconds: float, now: float) -> None:
            assert now >= self.now, "the clock went back"
            seen.counts["stores"] += isinstance(copy, StartStore)
            super().copied(copy, seconds, now)
            self.check()

    return Watched


def _watched_replica(seen: Witness) -> type[Replica]:
    class Watched(Replica):
        """Replica that must not stand idle while its scheduler could run something."""

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            seen.replicas.append(self)

        def _decide(self) -> None:
            super()._decide()
            scheduler = self.scheduler
            if not self._in_flight:
                assert not scheduler.running and not scheduler.ready, "idle while requests could run"
                if scheduler.queue:
                    head, pool = scheduler.queue.head(), scheduler.pool
                    hits = pool.match(head.keys, (head.known - 1) // 4) if scheduler.settings.enable_prefix_caching else []
                    reach = head.known
                    loads = scheduler.loads and scheduler._loadable(head, len(hits))[1] > 0
                    if not scheduler.settings.scheduler_reserve_full_isl and not loads:
                        reach = min(reach, len(hits) * 4 + scheduler.settings.step_budget)
                    # free hits would leave the free list: what must come from it is everything but the held hits
                    held = len(hits) - pool.count_free(hits)
                    assert -(-reach // 4) - held > pool.num_free, f"idle, though request {head.id} could be admitted"
                    seen.counts["blocked while idle"] += 1

    return Watched
