"""Drives `Scheduler` as the recordings of vLLM's own scheduler were made (data set vllm_scheduler_golden)."""

from __future__ import annotations

import gzip
import json
from collections import deque
from pathlib import Path
from typing import Any

from simcore.models.batch import Batch
from simcore.models.engine import EngineSettings
from simcore.models.request import Request
from simcore.models.scheduler import Scheduler
from simcore.policies.admission.fcfs import Fcfs
from simcore.policies.admission.priority import Priority
from simcore.policies.retention.lru import Lru

POLICIES = {"fcfs": Fcfs, "priority": Priority}


def read_lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def prefix_keys(tokens: list[tuple[str, int]], block: int, known: dict[tuple, int]) -> list[int]:
    """Identities of the full blocks of a token list: equal prefix, equal number."""
    keys: list[int] = []
    parent = -1
    for start in range(0, len(tokens) // block * block, block):
        parent = known.setdefault((parent, *tokens[start : start + block]), len(known))
        keys.append(parent)
    return keys


class Driver:
    """Runs one workload; `records` are then like the steps of a recording, `total()` like its last line."""

    def __init__(self, workload: dict[str, Any], version: str) -> None:
        settings = dict(workload["settings"])
        policy = settings.pop("policy")
        self.settings = EngineSettings(version=version, **settings)  # type: ignore[arg-type]
        assert self.settings.num_gpu_blocks is not None
        self.scheduler = Scheduler(self.settings, self.settings.num_gpu_blocks, POLICIES[policy](), Lru())
        self.rows = {row["id"]: row for row in workload["requests"]}
        self.max_steps = workload["max_steps"]
        self.due = {i: row["arrive"] for i, row in self.rows.items() if "arrive" in row}
        known: dict[tuple, int] = {}
        self.requests: dict[int, Request] = {}
        for i, row in self.rows.items():
            prompt = [(stream, at) for stream, start, count in row["prompt"] for at in range(start, start + count)]
            output = [(f"o{i}", at) for at in range(row["max_tokens"])]
            keys = prefix_keys(prompt + output, self.settings.block_size, known)
            self.requests[i] = Request(i, len(prompt), row["max_tokens"], keys, priority=row["priority"])
        self.arrived = 0
        self.finished: set[int] = set()
        self.started: set[int] = set()
        self.records: list[dict[str, Any]] = []
        self.scheduled = 0

    def run(self) -> Driver:
        """Step as the README of the data set says ("How steps are counted")."""
        in_flight: deque[tuple[int, Batch]] = deque()
        step = idle = 0
        while (self.due or self.arrived > len(self.finished) or in_flight) and step < self.max_steps and idle < 8:
            arrivals = sorted(i for i, at in self.due.items() if at == step)
            record: dict[str, Any] = {"s": step}
            if arrivals:
                record["arr"] = arrivals
            for i in arrivals:
                del self.due[i]
                self.requests[i].arrival = float(self.arrived)
                self.arrived += 1
                self.scheduler.add(self.requests[i], float(step))
            unfinished = self.arrived > len(self.finished)
            update = bool(in_flight)
            if unfinished:
                batch = self._schedule(step, record)
                in_flight.append((step, batch))
                update = not self.settings.async_scheduling or len(in_flight) > 1 or not (
                    batch.counts or self.settings.version == "0.33.0")
                idle = 0 if batch.counts or self.due or arrivals else idle + 1
            if update and in_flight:
                self._update(step, *in_flight.popleft(), record)
            if len(record) > 1:
                self.records.append(record)
            step += 1
        return self

    def _schedule(self, step: int, record: dict[str, Any]) -> Batch:
        scheduler, block = self.scheduler, self.settings.block_size
        running = {r.id for r in scheduler.running}
        held = {r.id: len(r.blocks) for r in scheduler.running}
        evictions = scheduler.pool.evictions
        batch = scheduler.schedule(float(step))
        entries = []
        for request, count, before in zip(batch.requests, batch.counts, batch.before, strict=True):
            if request.id in running:
                kind, first = "R", held[request.id]
            else:
                kind, first = ("P" if request.id in self.started else "N"), before // block
            self.started.add(request.id)
            entry: list[Any] = [request.id, kind, count, before]
            if new := request.blocks[first:]:
                entry.append(new)
            entries.append(entry)
        self.scheduled += batch.tokens
        record["sched"] = entries
        if batch.preempted:
            record["pre"] = [r.id for r in batch.preempted]
        if scheduler.pool.evictions > evictions:
            record["ev"] = scheduler.pool.evictions - evictions
        record["free"] = scheduler.pool.num_free
        if waiting := [r.id for r in scheduler.queue.in_order()]:
            record["wait"] = waiting
        record["run"] = [r.id for r in scheduler.running]
        return batch

    def _update(self, step: int, scheduled_at: int, batch: Batch, record: dict[str, Any]) -> None:
        if self.settings.async_scheduling:
            record["upd"] = scheduled_at
        outcomes = self.scheduler.complete(batch, float(step))
        if outcomes.finished:
            record["fin"] = [r.id for r in outcomes.finished]
            record["free2"] = self.scheduler.pool.num_free
        for request in outcomes.finished:
            self.finished.add(request.id)
            for i, row in self.rows.items():
                if "after" in row and row["after"][0] == request.id:
                    self.due[i] = step + row["after"][1]
        self.scheduler.check()


def first_difference(recording: list[dict[str, Any]], driver: Driver) -> str:
    """"" if the run equals the recording in every record, the totals and the final free list; else what differs first."""
    steps, last = recording[1:-1], recording[-1]
    for want, got in zip(steps, driver.records, strict=False):
        want = {k: v for k, v in want.items() if v or k not in ("run", "sched", "pre", "arr")}
        got = {k: v for k, v in got.items() if v or k not in ("run", "sched", "pre", "arr")}
        if want != got:
            keys = [k for k in sorted({*want, *got}) if want.get(k) != got.get(k)]
            return f"step {want['s']}: " + "; ".join(f"{k}: recorded {want.get(k)}, got {got.get(k)}" for k in keys)
    if len(steps) != len(driver.records):
        return f"{len(steps)} records recorded, got {len(driver.records)}"
    scheduler, total = driver.scheduler, last["total"]
    got_total = {
        "scheduled": driver.scheduled, "preemptions": scheduler.preemptions, "evictions": scheduler.pool.evictions,
        "finished": len(driver.finished), "free_end": scheduler.pool.num_free,
        "hit_tokens_first": sum(r.cached_first for r in driver.requests.values()),
        "hit_tokens_all": sum(r.cached_all for r in driver.requests.values()),
    }
    for key, value in got_total.items():
        if total[key] != value:
            return f"total {key}: recorded {total[key]}, got {value}"
    if last["free_queue"] != list(scheduler.pool.free):
        return "the final free queue differs"
    return ""
