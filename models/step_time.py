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
TABULATED = 9  # seconds, by table, of what takes as long as the step has tokens
CONSTANT = 10
COLUMNS = 11


class StepTables(NamedTuple):
    """A compiled cost model.

    The step takes sum over operators of max(compute row . x, memory row . x), where x holds the features TOKENS ..
    CHUNKS, `of_tokens[:, TOKENS]` (the last entry stands for every larger step) and 1. All entries of the two tables
    are seconds per unit.
    """

    compute: np.ndarray  # float64[operators, COLUMNS]
    memory: np.ndarray  # float64[operators, COLUMNS]
    of_tokens: np.ndarray  # float64[2, largest step in tokens + 1]: what EXPERTS and TABULATED stand for; of 0 tokens 0


@numba.njit(cache=True)
def step_time(tables: StepTables, features: np.ndarray) -> float:
    """Seconds that the batch with these integer features takes on the model and hardware behind `tables`."""
    x = np.empty(COLUMNS)
    load(x, tables, features)
    total = 0.0
    for op in range(tables.compute.shape[0]):
        total += operator_seconds(tables, x, op)
    return total


@numba.njit(cache=True)
def load(x, tables, features):
    """Set x, float64[COLUMNS], to what the tables' columns are multiplied with."""
    for k in range(FIXED):
        x[k] = features[k]
    tokens = min(features[TOKENS], tables.of_tokens.shape[1] - 1)
    x[EXPERTS] = tables.of_tokens[0, tokens]
    x[TABULATED] = tables.of_tokens[1, tokens]
    x[CONSTANT] = 1.0


@numba.njit(cache=True)
def operator_seconds(tables, x, op):
    """Seconds of one operator."""
    compute = 0.0
    memory = 0.0
    for k in range(COLUMNS):  # most entries are 0, and adding 0 changes no bit
        if tables.compute[op, k] != 0.0:
            compute += tables.compute[op, k] * x[k]
        if tables.memory[op, k] != 0.0:
            memory += tables.memory[op, k] * x[k]
    return max(compute, memory)


@numba.njit(cache=True)
def grows_with_context(tables, op):
    """Whether the operator's seconds change when nothing but the context read (KV_READ, QK_PAIRS) does."""
    return (tables.compute[op, KV_READ] != 0.0 or tables.compute[op, QK_PAIRS] != 0.0
            or tables.memory[op, KV_READ] != 0.0 or tables.memory[op, QK_PAIRS] != 0.0)


def features(counts: Sequence[int], before: Sequence[int], samples: Sequence[bool], window: int = 0) -> np.ndarray:
    """The integer features of a batch: int64[FIXED + 2 * prefill chunks].

    Sequence i computes `counts[i]` tokens after `before[i]` that are in the KV cache, and yields a token if `samples[i]`.
    `window`: keys that a query of a sliding-window layer sees, itself included; 0 = no such layers, both features stay 0.
    """
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
            continue
        kv += computed + count
        pairs += count * computed + count * (count + 1) // 2
        if window:
            kv_window += min(computed, window - 1) + count
            pairs_window += window_pairs(count, computed, window)
        out[CHUNKS] += 1
        out += (count, computed)
    out[TOKENS] = sum(counts)
    out[SAMPLED] = sum(samples)
    out[SEQUENCES] = len(counts)
    out[KV_READ], out[QK_PAIRS], out[KV_READ_WINDOW], out[QK_PAIRS_WINDOW] = kv, pairs, kv_window, pairs_window
    return np.array(out, dtype=np.int64)


def window_pairs(count: int, computed: int, window: int) -> int:
    """Query-key pairs of `count` new tokens after `computed` ones when each query sees at most `window` keys."""
    growing = min(count, max(0, window - computed))  # queries that still see everything before them
    return growing * computed + growing * (growing + 1) // 2 + (count - growing) * window
