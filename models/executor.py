"""Executors say when a batch ends. The simulated one asks a compiled cost model; a real one runs kernels and measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from simcore.models.scheduler import Batch
from simcore.models.step_time import (
    CHUNKS,
    FIXED,
    KV_READ,
    KV_READ_WINDOW,
    QK_PAIRS,
    QK_PAIRS_WINDOW,
    SAMPLED,
    SEQUENCES,
    TOKENS,
    StepTables,
    step_time,
)


@dataclass(frozen=True, slots=True)
class Completion:
    """When the batch's tokens are there, and how long the device worked for it (s)."""

    ends: float
    device_seconds: float


class Executor(Protocol):
    """The seam between scheduling and doing: one scheduler and one set of policies drive every executor."""

    def start(self, batch: Batch, now: float) -> Completion:
        """Begin the batch at `now`; batches run in the order in which they are started."""
        ...


class SimulatedExecutor:
    """Prices a batch with `step_time` over compiled tables.

    `step_overhead` (s a step) and `sequence_overhead` (s a sequence and step) are the host's work: scheduling, input
    preparation, sampling, detokenising. With synchronous scheduling the device waits for it; with asynchronous
    scheduling it runs beside the previous batch and only the longer of the two is seen.
    """

    def __init__(self, tables: StepTables, *, window: int = 0, step_overhead: float = 0.0, sequence_overhead: float = 0.0,
                 asynchronous: bool = False) -> None:
        self.tables = tables
        self.window = window
        self.step_overhead = step_overhead
        self.sequence_overhead = sequence_overhead
        self.asynchronous = asynchronous
        self._free_at = 0.0

    def start(self, batch: Batch, now: float) -> Completion:
        device = step_time(self.tables, features(batch.counts, batch.before, batch.samples, self.window))
        ready = now + self.step_overhead + self.sequence_overhead * len(batch.counts) + batch.decision_seconds
        if self.asynchronous:
            ready = max(ready, self._free_at)
        self._free_at = ready + device
        return Completion(self._free_at, device)


def features(counts: list[int], before: list[int], samples: list[bool], window: int) -> np.ndarray:
    """The integer features of a batch (layout: step_time.py), int64[FIXED + 2 * chunks].

    `window`: keys that a query of a sliding-window layer sees, itself included; 0 = the model has no such layers.
    """
    n = len(counts)
    out = [0] * FIXED
    kv = pairs = kv_window = pairs_window = 0
    for count, computed in zip(counts, before, strict=True):
        if count == 1:
            kv += computed + 1
            pairs += computed + 1
            if window:
                seen = computed + 1 if computed < window else window
                kv_window += seen
                pairs_window += seen
        else:
            kv += computed + count
            pairs += count * computed + count * (count + 1) // 2
            if window:
                kv_window += min(computed, window - 1) + count
                pairs_window += window_pairs(count, computed, window)
            out[CHUNKS] += 1
            out += (count, computed)
    out[TOKENS] = sum(counts)
    out[SAMPLED] = sum(samples)
    out[SEQUENCES] = n
    out[KV_READ], out[QK_PAIRS], out[KV_READ_WINDOW], out[QK_PAIRS_WINDOW] = kv, pairs, kv_window, pairs_window
    return np.array(out, dtype=np.int64)


def window_pairs(count: int, computed: int, window: int) -> int:
    """Query-key pairs of `count` new tokens after `computed` ones when each query sees at most `window` keys."""
    growing = min(count, max(0, window - computed))  # queries that still see everything before them
    return growing * computed + growing * (growing + 1) // 2 + (count - growing) * window
