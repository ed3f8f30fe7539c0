"""The float part of a batch: one compiled function from integer features to seconds, called by every path.

A cost model is compiled to `StepTables` when a run starts (see roofline.py); nothing here knows which model it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

# Integer features of a batch: int64[FIXED + 2 * prefill chunks].
TOKENS = 0  # tokens computed in the step, over all sequences
SAMPLED = 1  # sequences that yield a token (LM head and sampler run for them)
SEQUENCES = 2  # sequences in the batch
KV_READ = 3  # context tokens whose KV a full-attention layer reads: sum of (before + chunk)
QK_PAIRS = 4  # query-key pairs of a full-attention layer: sum of chunk * before + chunk * (chunk + 1) / 2
KV_READ_WINDOW = 5  # as KV_READ for a sliding-window layer: sum of min(before, window - 1) + chunk
QK_PAIRS_WINDOW = 6  # as QK_PAIRS for a sliding-window layer: each query sees at most `window` keys, itself included
CHUNKS = 7  # number of prefill chunks (sequences that compute more than one token); their (chunk, before) pairs follow
FIXED = 8

# Columns of a term table: seconds per unit of the feature of the same number, then these.
EXPERTS = 8  # expected number of distinct experts that the step's tokens activate in one layer
CONSTANT = 9
COLUMNS = 10


class StepTables(NamedTuple):
    """A compiled cost model.

    The step takes sum over operators of max(compute row . x, memory row . x), where x holds the features TOKENS ..
    CHUNKS, `experts[TOKENS]` (the last entry stands for every larger step) and 1. All entries are seconds per unit.
    """

    compute: np.ndarray  # float64[operators, COLUMNS]
    memory: np.ndarray  # float64[operators, COLUMNS]
    experts: np.ndarray  # float64[largest step in tokens + 1], experts[0] = 0


@numba.njit(cache=True)
def step_time(tables: StepTables, features: np.ndarray) -> float:
    """Seconds that the batch with these integer features takes on the model and hardware behind `tables`."""
    x = np.empty(COLUMNS)
    for k in range(FIXED):
        x[k] = features[k]
    x[EXPERTS] = tables.experts[min(features[TOKENS], len(tables.experts) - 1)]
    x[CONSTANT] = 1.0
    total = 0.0
    for op in range(tables.compute.shape[0]):
        compute = 0.0
        memory = 0.0
        for k in range(COLUMNS):
            compute += tables.compute[op, k] * x[k]
            memory += tables.memory[op, k] * x[k]
        total += max(compute, memory)
    return total


def features_of(sequences: Sequence[tuple[int, int, bool]], window: int = 0) -> np.ndarray:
    """Features of a batch, the readable reference for the layout above: int64[FIXED + 2 * prefill chunks].

    A sequence is (tokens in the KV cache before the step, tokens computed in it, whether it yields a token).
    `window` is the sliding window in tokens, a query itself included; 0, for a model without such layers, leaves both
    window features at 0.
    """
    features = np.zeros(FIXED, dtype=np.int64)
    chunks: list[int] = []
    for before, chunk, samples in sequences:
        features[TOKENS] += chunk
        features[SAMPLED] += samples
        features[SEQUENCES] += 1
        features[KV_READ] += before + chunk
        features[QK_PAIRS] += chunk * before + chunk * (chunk + 1) // 2
        if window:
            # The first `short` queries of the chunk still see everything before them, the others `window` keys each.
            short = min(chunk, max(0, window - before))
            features[KV_READ_WINDOW] += min(before, window - 1) + chunk
            features[QK_PAIRS_WINDOW] += short * before + short * (short + 1) // 2 + (chunk - short) * window
        if chunk > 1:
            features[CHUNKS] += 1
            chunks += [chunk, before]
    return np.concatenate([features, np.array(chunks, dtype=np.int64)])
