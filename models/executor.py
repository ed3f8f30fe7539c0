"""Executors say when a batch ends. The simulated one asks a compiled cost model; a real one runs kernels and measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from simcore.models.batch import Batch
from simcore.models.step_time import StepTables, features, step_time


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
    scheduling it runs beside the previous batch and only the longer of the two is seen. The host prepares one batch at
    a time.
    """

    def __init__(self, tables: StepTables, *, window: int = 0, step_overhead: float = 0.0, sequence_overhead: float = 0.0,
                 asynchronous: bool = False) -> None:
        self.tables = tables
        self.window = window
        self.step_overhead = step_overhead
        self.sequence_overhead = sequence_overhead
        self.asynchronous = asynchronous
        self._free_at = 0.0  # the device
        self._host_free_at = 0.0

    def start(self, batch: Batch, now: float) -> Completion:
        device = step_time(self.tables, features(batch.counts, batch.before, batch.samples, self.window))
        host = self.step_overhead + self.sequence_overhead * len(batch.counts) + batch.decision_seconds
        self._host_free_at = ready = max(now, self._host_free_at) + host
        if self.asynchronous:
            ready = max(ready, self._free_at)
        self._free_at = ready + device
        return Completion(self._free_at, device)
