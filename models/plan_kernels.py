"""The planned path's kernels that look ahead: `plan` runs steps on a copy of the rows and changes nothing else.

Rows are int64[2 * ROW_FIELDS, width], one column a running request: the first half is the truth, the second half the
copy that `plan` works on (a field's copy stands COPY further on). `order[:n]` holds the columns in running order.
Between two calls one step is in flight: its tokens are counted as computed, its samples are in IN_FLIGHT.
"""

from __future__ import annotations

import numba

from simcore.models.plan_memory import (
    ADAPTIVE,
    BLOCK,
    BUDGET,
    CHUNK_CAP,
    CHUNKED,
    COMPUTED,
    COUNT,
    HELD,
    IN_FLIGHT,
    KNOWN,
    LONE_UNCAPPED,
    MAX_LEN,
    NEXT_HASH,
    QUANTUM,
    ROW_FIELDS,
    SEQUENCE_OVERHEAD,
    STEP_OVERHEAD,
    TOTAL,
    WINDOW,
)
from simcore.models.planned_pool import FREE, HASHED, NEXT
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
    grows_with_context,
    load,
    operator_seconds,
    step_time,
)

# Why the head of the queue is not admitted, which decides when a plan must stop to look again.
# NO_ROOM: whatever the step's budget; NO_BUDGET: with more tokens left it might be.
NOBODY_WAITS, NO_SLOT, NO_ROOM, NO_BUDGET, ASK_EVERY_STEP = range(5)

COPY = ROW_FIELDS
NEVER = 1 << 62
NOTHING = -1 << 63  # no key of a block


@numba.njit(cache=True)
def chunk_cap(settings, system):
    """The most tokens one request may compute in a step, with `system` requests running or waiting."""
    cap = settings[CHUNK_CAP]
    if cap == 0 or (system == 1 and settings[LONE_UNCAPPED]):
        return NEVER
    if settings[ADAPTIVE]:
        cap = max(cap, settings[ADAPTIVE] // max(1, system))
    return cap


@numba.njit(cache=True)
def running_pass(rows, order, n, settings, waiting, at):
    """COUNT of each running request for the next step; returns (budget left, blocks needed, whether one got nothing).

    `at` is 0 for the truth and COPY for the plan's copy. Changes only COUNT.
    """
    budget, block = settings[BUDGET], settings[BLOCK]
    cap = chunk_cap(settings, n + waiting)
    need = 0
    starved = False
    for k in range(n):
        i = order[k]
        computed = rows[at + COMPUTED, i]
        count = rows[at + KNOWN, i] - computed
        if count > 1 and count > cap:
            count = cap
        count = max(0, min(count, budget, settings[MAX_LEN] - 1 - computed))
        rows[at + COUNT, i] = count
        if count == 0:
            starved = True
        budget -= count
        missing = -(-(computed + count) // block) - rows[at + HELD, i]
        if missing > 0:
            need += missing
    return budget, need, starved


@numba.njit(cache=True)
def dispatch(rows, order, n, at):
    """The counts are decided: count their tokens as computed, their samples as in flight; returns tokens in the step."""
    tokens = 0
    for k in range(n):
        i = order[k]
        count = rows[at + COUNT, i]
        rows[at + IN_FLIGHT, i] = 0
        if count == 0:
            continue
        tokens += count
        rows[at + COMPUTED, i] += count
        if rows[at + COMPUTED, i] == rows[at + KNOWN, i]:
            rows[at + IN_FLIGHT, i] = 1
            rows[at + CHUNKED, i] = 0
        else:
            rows[at + CHUNKED, i] = 1
    return tokens


@numba.njit(cache=True)
def device_seconds(rows, order, n, settings, tables, features, at):
    """(seconds, sequences, whether a prefill chunk is in it) of the dispatched step; fills `features`."""
    window = settings[WINDOW]
    for f in range(FIXED):
        features[f] = 0
    chunks = 0
    for k in range(n):
        i = order[k]
        count = rows[at + COUNT, i]
        if count == 0:
            continue
        before = rows[at + COMPUTED, i] - count
        features[TOKENS] += count
        features[SEQUENCES] += 1
        features[SAMPLED] += rows[at + IN_FLIGHT, i]
        features[KV_READ] += before + count
        features[QK_PAIRS] += count * before + count * (count + 1) // 2
        if window:
            growing = min(count, max(0, window - before))
            features[KV_READ_WINDOW] += min(before, window - 1) + count
            features[QK_PAIRS_WINDOW] += growing * before + growing * (growing + 1) // 2 + (count - growing) * window
        if count > 1:
            features[FIXED + 2 * chunks] = count
            features[FIXED + 2 * chunks + 1] = before
            chunks += 1
    features[CHUNKS] = chunks
    return step_time(tables, features[: FIXED + 2 * chunks]), features[SEQUENCES], chunks > 0


@numba.njit(cache=True)
def plan(
    rows, order, n, settings, clock, tables, features, blocks, counters, row_keys, waiting, blocked, wanted, now,
    decision_seconds, stop_at, step_ends, device, x, parts,
):
    """End times and device seconds of the step in flight and those after it, up to the next decision; returns how many.

    The last planned step ends at a decision: a request finishes or uses up its quantum, blocks run short, a waiting
    head must be looked at, a request would get nothing; or at a pause: `stop_at` is reached, or the buffers are full.

    A head that lacks blocks whatever the budget (NO_ROOM) must be looked at when a block with the key `wanted` fills, the
    first one of its prompt that was not found; nothing else within a plan can let it in. It lacks R - h - F blocks (R: all
    it needs; h: its hits that running requests hold; F: free blocks). F only falls; h grows by that block, or by one that
    was a hit on the free list, was evicted (F fell by one) and is filled again.
    """
    for k in range(n):
        i = order[k]
        for f in range(QUANTUM + 1):
            rows[COPY + f, i] = rows[f, i]
    block = settings[BLOCK]
    free = counters[FREE]
    cursor = blocks[NEXT, 0]
    planned = 0
    while True:
        seconds, sequences, chunk = device_seconds(rows, order, n, settings, tables, features, COPY)
        host = clock[STEP_OVERHEAD] + clock[SEQUENCE_OVERHEAD] * sequences + decision_seconds
        now = (now + host) + seconds  # in the executor's order: the last bit counts
        decision_seconds = 0.0
        step_ends[planned] = now
        device[planned] = seconds
        planned += 1
        stop = planned == len(step_ends) or now >= stop_at or blocked == ASK_EVERY_STEP
        stop = stop or (blocked == NO_BUDGET and chunk)
        for k in range(n):
            i = order[k]
            if rows[COPY + IN_FLIGHT, i]:
                rows[COPY + KNOWN, i] += 1
                rows[COPY + QUANTUM, i] -= 1
                if rows[COPY + KNOWN, i] >= rows[COPY + TOTAL, i] or rows[COPY + QUANTUM, i] == 0:
                    stop = True
        if stop:
            return planned
        _, need, starved = running_pass(rows, order, n, settings, waiting, COPY)
        if need > free or starved:
            return planned
        if blocked == NO_BUDGET and _changes_room(rows, order, n, blocks, cursor, need):
            return planned
        for _ in range(need if blocked == NO_BUDGET else 0):
            cursor = blocks[NEXT, cursor]
        if wanted != NOTHING and _fills(rows, order, n, block, wanted, row_keys):
            return planned
        free -= need
        dispatch(rows, order, n, COPY)
        if need:
            for k in range(n):
                i = order[k]
                rows[COPY + HELD, i] = max(rows[COPY + HELD, i], -(-rows[COPY + COMPUTED, i] // block))
        if blocked != NO_BUDGET and only_decodes(rows, order, n, settings, COPY):
            return plan_decodes(
                rows, order, n, settings, clock, tables, features, row_keys, free, wanted, now, stop_at, planned, step_ends,
                device, x, parts)


@numba.njit(cache=True)
def only_decodes(rows, order, n, settings, at):
    """Whether every running request computes its one newest token in the dispatched step, and none is younger than the
    sliding window: from there on the batch's features grow by a fixed amount a step."""
    window = settings[WINDOW]
    for k in range(n):
        i = order[k]
        if not (rows[at + COUNT, i] == 1 and rows[at + IN_FLIGHT, i]) or rows[at + COMPUTED, i] <= window:
            return False
    return n <= settings[BUDGET]


@numba.njit(cache=True)
def plan_decodes(
    rows, order, n, settings, clock, tables, features, row_keys, free, wanted, now, stop_at, planned, step_ends, device, x,
    parts,
):
    """`plan` from a dispatched step of nothing but decodes on, with one light loop a step; the same floats in the same
    order: an operator that the growing context does not touch keeps its seconds (`parts`)."""
    block = settings[BLOCK]
    left = NEVER  # steps until a request ends or uses up its quantum
    kv = 0
    for k in range(n):
        i = order[k]
        left = min(left, rows[COPY + TOTAL, i] - rows[COPY + KNOWN, i], rows[COPY + QUANTUM, i])
        kv += rows[COPY + COMPUTED, i]
        features[k + FIXED] = rows[COPY + HELD, i] * block - rows[COPY + COMPUTED, i]  # tokens that its blocks still hold
    features[TOKENS] = features[SAMPLED] = features[SEQUENCES] = n
    features[CHUNKS] = 0
    features[KV_READ_WINDOW] = features[QK_PAIRS_WINDOW] = n * settings[WINDOW]
    features[KV_READ] = features[QK_PAIRS] = kv
    load(x, tables, features)
    for op in range(len(parts)):
        parts[op] = operator_seconds(tables, x, op)
    host = clock[STEP_OVERHEAD] + clock[SEQUENCE_OVERHEAD] * n + 0.0
    done = 0
    while True:
        seconds = 0.0
        for op in range(len(parts)):
            seconds += parts[op]
        now = (now + host) + seconds
        step_ends[planned] = now
        device[planned] = seconds
        planned += 1
        left -= 1
        if left == 0 or planned == len(step_ends) or now >= stop_at:
            return planned
        done += 1
        for k in range(FIXED, FIXED + n):
            features[k] -= 1
            if features[k] < 0:
                features[k] += block
                free -= 1
            elif features[k] == 0 and wanted != NOTHING:
                i = order[k - FIXED]
                if row_keys[i, (rows[COPY + COMPUTED, i] + done) // block - 1] == wanted:
                    return planned
        if free < 0:
            return planned
        kv += n
        x[KV_READ] = x[QK_PAIRS] = kv
        for op in range(len(parts)):
            if grows_with_context(tables, op):
                parts[op] = operator_seconds(tables, x, op)


@numba.njit(cache=True)
def _changes_room(rows, order, n, blocks, cursor, need):
    """Whether the next step could change what a head lacks that needs budget: a prefill chunk, a block that fills, an
    eviction (with fewer hits it may ask for less)."""
    for k in range(n):
        i = order[k]
        count = rows[COPY + COUNT, i]
        if count > 1 or rows[COPY + COMPUTED, i] + count >= rows[COPY + NEXT_HASH, i]:
            return True
        if rows[COPY + KNOWN, i] - rows[COPY + COMPUTED, i] > count:
            return True
    for _ in range(need):
        if blocks[HASHED, cursor]:
            return True
        cursor = blocks[NEXT, cursor]
    return False


@numba.njit(cache=True)
def _fills(rows, order, n, block, wanted, row_keys):
    """Whether the next step fills a block with the key `wanted`."""
    for k in range(n):
        i = order[k]
        computed = rows[COPY + COMPUTED, i]
        for j in range(computed // block, (computed + rows[COPY + COUNT, i]) // block):
            if row_keys[i, j] == wanted:
                return True
    return False
