"""The executor that runs batches on a real model and says how long they took; the simulation's clock goes by that."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simcore.kernels.decoder import Decoder, StepInputs
from simcore.kernels.install import require
from simcore.kernels.tokens import token_ids
from simcore.models.batch import Batch
from simcore.models.executor import Completion

torch = require()


@dataclass(frozen=True)
class RealStep:
    """What a batch was and took: as in Batch, and seconds from its start to its last token."""

    counts: tuple[int, ...]
    before: tuple[int, ...]
    samples: tuple[bool, ...]
    seconds: float


class RealExecutor:
    """Runs each batch at once, over the blocks that the scheduler gave its requests (synchronous scheduling, no host tier).

    `steps`: what ran. `tokens`: request -> the ids that it yielded, greedily. `replayed`: durations (s) to report in place
    of the measured ones, in order: the same decisions again. `keep_logits`: keep (request, computed tokens, logits) of all
    sampled tokens in `logits`.
    """

    def __init__(
        self, decoder: Decoder, *, replayed: Sequence[float] | None = None, keep_logits: bool = False
    ) -> None:
        self.decoder = decoder
        self.steps: list[RealStep] = []
        self.tokens: dict[int, list[int]] = {}
        self.logits: list[tuple[int, int, Any]] = []
        self._replayed = None if replayed is None else iter(replayed)
        self._keep_logits = keep_logits

    def start(self, batch: Batch, now: float) -> Completion:
        """See models/executor.py: the batch has been run when this returns; `now` is simulated."""
        began = time.perf_counter()
        inputs, order = batch_inputs(batch, self.decoder)
        logits = self.decoder.step(inputs)
        chosen = logits.argmax(dim=-1).tolist()  # the engine waits for its tokens
        seconds = time.perf_counter() - began
        self.steps.append(RealStep(tuple(batch.counts), tuple(batch.before), tuple(batch.samples), seconds))
        sampled = [i for i in order if batch.samples[i]]
        for i, token in zip(sampled, chosen, strict=True):
            self.tokens.setdefault(batch.requests[i].id, []).append(token)
        if self._keep_logits:
            self.logits += [(batch.requests[i].id, batch.before[i] + batch.counts[i], row)
                            for i, row in zip(sampled, logits, strict=True)]
        if self._replayed is not None:
            seconds = next(self._replayed)
        return Completion(now + (seconds + batch.decision_seconds), seconds)


def batch_inputs(batch: Batch, decoder: Decoder) -> tuple[StepInputs, list[int]]:
    """The batch as the decoder wants it, and the order of its sequences there: those of one token first."""
    size, vocab = decoder.block_size, decoder.llm.vocab
    order = sorted(range(len(batch.counts)), key=lambda i: batch.counts[i] > 1)  # stable
    tokens, positions, slots = [], [], []
    table = np.zeros((len(order), max(len(request.blocks) for request in batch.requests)), dtype=np.int32)
    for row, i in enumerate(order):
        request, start = batch.requests[i], batch.before[i]
        stop = start + batch.counts[i]
        blocks = np.array(request.blocks, dtype=np.int64)
        at = np.arange(start, stop)
        tokens.append(token_ids(request.keys, request.id, start, stop, size, vocab))
        positions.append(at)
        slots.append(blocks[at // size] * size + at % size)
        table[row, : len(blocks)] = blocks
    counts = np.array([batch.counts[i] for i in order])
    context_lens = counts + np.array([batch.before[i] for i in order])
    decodes = int((counts == 1).sum())
    starts = np.concatenate(([0], np.cumsum(counts[decodes:])))
    last = np.cumsum(counts) - 1
    sampled = last[np.array([batch.samples[i] for i in order], dtype=bool)]
    return StepInputs(
        np.concatenate(tokens), np.concatenate(positions), np.concatenate(slots), table, context_lens.astype(np.int32),
        starts.astype(np.int32), sampled, decodes), order
