"""The planned path's two kernels: `plan` runs steps ahead on a copy and changes nothing; `commit` applies them.

Rows are int64[2 * ROW_FIELDS, slots], one column a running request: the first half is the truth, the second half the
copy that `plan` works on (a field's copy stands COPY further on). `order[:n]` holds the columns in running order.
Between two calls one step is in flight: its tokens are counted as computed, its samples are in IN_FLIGHT.
"""

from __future__ import annotations

import numba

from simcore.models.planned_pool import FREE, HASHED, NEXT, give_back, hold, match, register, take
from simcore.models.planned_pool import find as find_block
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

# Fields of a row; see models/request.py for what they mean.
(KNOWN, COMPUTED, TOTAL, HELD, NEXT_HASH, IN_FLIGHT, COUNT, CHUNKED, QUANTUM, STEPS_START, STEPS_STOP) = range(11)
ROW_FIELDS = 11
COPY = ROW_FIELDS

# Engine settings, int64.
(BLOCK, BUDGET, MAX_LEN, CHUNK_CAP, LONE_UNCAPPED, ADAPTIVE, CACHING, WINDOW, WATERMARK, RESERVE_FULL,
 CHUNKED_PREFILL) = range(11)
SETTINGS = 11

# Counters of the engine, int64.
STEP, DELIVERED, CLOSED, TOKENS_COMPUTED, SAMPLES, LAST_TOKENS, LAST_SEQUENCES = range(7)
COUNTERS = 7

# What `commit` says beside the number of requests that ended.
HAS_DELIVERED, HAS_CLOSED, HAS_SAMPLES, FLAGS = 1, 2, 4, 8

# Clock and overheads, float64.
STEP_OVERHEAD, SEQUENCE_OVERHEAD, BUSY, NEXT_SAMPLE, SAMPLE_EVERY = range(5)
FLOATS = 5

# Why the head of the queue is not admitted, which decides when a plan must stop to look again.
NOBODY_WAITS, NO_SLOT, NO_ROOM, ASK_EVERY_STEP = range(4)

NEVER = 1 << 62


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
    rows, order, n, settings, floats, tables, features, blocks, counters, waiting, blocked, now, decision_seconds, stop_at,
    step_ends, device,
):
    """End times and device seconds of the step in flight and those after it, up to the next decision; returns how many.

    The last planned step ends at a decision: a request finishes or uses up its quantum, blocks run short, a waiting
    head must be looked at, a request would get nothing; or at a pause: `stop_at` is reached, or the buffers are full.
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
        host = floats[STEP_OVERHEAD] + floats[SEQUENCE_OVERHEAD] * sequences + decision_seconds
        now = (now + host) + seconds  # in the executor's order: the last bit counts
        decision_seconds = 0.0
        step_ends[planned] = now
        device[planned] = seconds
        planned += 1
        stop = planned == len(step_ends) or now >= stop_at or blocked == ASK_EVERY_STEP
        stop = stop or (blocked == NO_ROOM and chunk)
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
        if blocked == NO_ROOM and _changes_room(rows, order, n, blocks, cursor, need):
            return planned
        for _ in range(need if blocked == NO_ROOM else 0):
            cursor = blocks[NEXT, cursor]
        free -= need
        dispatch(rows, order, n, COPY)
        if need:
            for k in range(n):
                i = order[k]
                rows[COPY + HELD, i] = max(rows[COPY + HELD, i], -(-rows[COPY + COMPUTED, i] // block))
        if blocked < NO_ROOM and only_decodes(rows, order, n, settings, COPY):
            return plan_decodes(
                rows, order, n, settings, floats, tables, features, free, now, stop_at, planned, step_ends, device)


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
def plan_decodes(rows, order, n, settings, floats, tables, features, free, now, stop_at, planned, step_ends, device):
    """`plan` from a dispatched step of nothing but decodes on, with one light loop a step; the same floats in the same
    order."""
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
    host = floats[STEP_OVERHEAD] + floats[SEQUENCE_OVERHEAD] * n + 0.0
    while True:
        features[KV_READ] = features[QK_PAIRS] = kv
        seconds = step_time(tables, features[:FIXED])
        now = (now + host) + seconds
        step_ends[planned] = now
        device[planned] = seconds
        planned += 1
        left -= 1
        if left == 0 or planned == len(step_ends) or now >= stop_at:
            return planned
        for k in range(FIXED, FIXED + n):
            features[k] -= 1
            if features[k] < 0:
                features[k] += block
                free -= 1
        if free < 0:
            return planned
        kv += n


@numba.njit(cache=True)
def commit_decode(rows, order, n, block, step, last, blocks, table, counters, row_blocks, row_keys):
    """One step of nothing but decodes: complete it and, unless it is the `last`, dispatch the next; False if a request's run
    of token steps was interrupted before it (then nothing has changed)."""
    for k in range(n):
        i = order[k]
        if rows[STEPS_STOP, i] != step:
            return False
    for k in range(n):
        i = order[k]
        rows[KNOWN, i] += 1
        rows[QUANTUM, i] -= 1
        rows[STEPS_STOP, i] = step + 1
        if last:
            rows[IN_FLIGHT, i] = 0
            continue
        after = rows[COMPUTED, i] + 1
        rows[COMPUTED, i] = after
        held = rows[HELD, i]
        if after > held * block:
            row_blocks[i, held] = take(blocks, table, counters)
            rows[HELD, i] = held + 1
        if after >= rows[NEXT_HASH, i]:
            register_full(rows, i, after, block, blocks, table, row_blocks, row_keys)
    return True


@numba.njit(cache=True)
def _changes_room(rows, order, n, blocks, cursor, need):
    """Whether the next step could change what a blocked head needs: a prefill chunk, a block that fills, an eviction."""
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
def release(i, reuse, unhashed_first, rows, blocks, table, counters, row_blocks):
    """Give the blocks of column i back."""
    give_back(blocks, table, counters, row_blocks[i], rows[HELD, i], reuse, unhashed_first)


@numba.njit(cache=True)
def apply_pass(rows, order, n, settings, blocks, table, counters, row_blocks, row_keys):
    """Give every running request the blocks that its COUNT needs, and register those that become full."""
    block = settings[BLOCK]
    for k in range(n):
        i = order[k]
        count = rows[COUNT, i]
        if count == 0:
            continue
        after = rows[COMPUTED, i] + count
        for j in range(rows[HELD, i], -(-after // block)):
            row_blocks[i, j] = take(blocks, table, counters)
            rows[HELD, i] = j + 1
        if after >= rows[NEXT_HASH, i]:
            register_full(rows, i, after, block, blocks, table, row_blocks, row_keys)


@numba.njit(cache=True)
def register_full(rows, i, tokens, block, blocks, table, row_blocks, row_keys):
    """Make the blocks that `tokens` known tokens fill findable."""
    first = rows[NEXT_HASH, i] // block - 1
    stop = min(tokens, rows[KNOWN, i]) // block
    for j in range(first, stop):
        register(blocks, table, row_blocks[i, j], row_keys[i, j])
    rows[NEXT_HASH, i] = (max(first, stop) + 1) * block


@numba.njit(cache=True)
def commit(
    n, waiting, steps, final, done, rows, order, settings, floats, blocks, table, counters, row_blocks, row_keys, engine,
    plan_ends, plan_device, step_ends, out, samples, sample_times,
):
    """Complete `steps` planned steps, the first of them number `done` of the plan, each followed by the dispatch of the
    next, except the last one if `final` (a decision follows). Their ends go to `step_ends`, by step number.

    Returns FLAGS x the number of requests that have their last token, plus flags. Those requests leave `order`; `out[:3]`
    holds their (column, start, stop of the open run of token steps), in running order. `out[3:]`: runs of token steps that
    were interrupted (column, start, stop), engine[CLOSED] of them. `samples`: int64[capacity, 4] (step,
    tokens, sequences, free blocks) and `sample_times`: float64[capacity, 2] (end, device seconds) of the steps to be
    sampled, engine[SAMPLES] of them; the last step of a final commit is left out. engine[DELIVERED]: tokens delivered.
    """
    engine[DELIVERED] = engine[CLOSED] = engine[SAMPLES] = 0
    decodes = only_decodes(rows, order, n, settings, 0)
    for s in range(done, done + steps):
        tokens = 0
        sequences = 0
        step = engine[STEP]
        last = final and s == done + steps - 1
        free = counters[FREE]  # before the next step takes its blocks
        light = decodes and commit_decode(
            rows, order, n, settings[BLOCK], step, last, blocks, table, counters, row_blocks, row_keys)
        if light:
            tokens = sequences = n
            engine[DELIVERED] += n
        for k in range(0 if light else n):
            i = order[k]
            tokens += rows[COUNT, i]
            if rows[COUNT, i]:
                sequences += 1
            if rows[IN_FLIGHT, i]:
                rows[IN_FLIGHT, i] = 0
                rows[KNOWN, i] += 1
                rows[QUANTUM, i] -= 1
                engine[DELIVERED] += 1
                if rows[STEPS_STOP, i] != step:
                    if rows[STEPS_STOP, i] >= 0:
                        closed = engine[CLOSED]
                        out[3, closed], out[4, closed], out[5, closed] = i, rows[STEPS_START, i], rows[STEPS_STOP, i]
                        engine[CLOSED] += 1
                    rows[STEPS_START, i] = step
                rows[STEPS_STOP, i] = step + 1
        step_ends[step] = plan_ends[s]
        engine[STEP] += 1
        engine[LAST_TOKENS] = tokens
        engine[LAST_SEQUENCES] = sequences
        floats[BUSY] += plan_device[s]
        if plan_ends[s] >= floats[NEXT_SAMPLE] and not last:
            m = engine[SAMPLES]
            samples[m, 0], samples[m, 1], samples[m, 2], samples[m, 3] = step, tokens, sequences, free
            sample_times[m, 0], sample_times[m, 1] = plan_ends[s], plan_device[s]
            engine[SAMPLES] += 1
            floats[NEXT_SAMPLE] = plan_ends[s] + floats[SAMPLE_EVERY]
        if light:
            engine[TOKENS_COMPUTED] += 0 if last else n
        elif not last:
            running_pass(rows, order, n, settings, waiting, 0)
            apply_pass(rows, order, n, settings, blocks, table, counters, row_blocks, row_keys)
            engine[TOKENS_COMPUTED] += dispatch(rows, order, n, 0)
            decodes = only_decodes(rows, order, n, settings, 0)
    ended = 0
    if final:
        for k in range(n):
            i = order[k]
            if rows[KNOWN, i] >= rows[TOTAL, i]:
                out[0, ended], out[1, ended], out[2, ended] = i, rows[STEPS_START, i], rows[STEPS_STOP, i]
                ended += 1
            else:
                order[k - ended] = i
    flags = (HAS_DELIVERED if engine[DELIVERED] else 0) + (HAS_CLOSED if engine[CLOSED] else 0)
    return FLAGS * ended + flags + (HAS_SAMPLES if engine[SAMPLES] else 0)


@numba.njit(cache=True)
def decide(n, waiting, rows, order, settings, blocks, table, counters, row_blocks, row_keys):
    """The running pass of a decision boundary. Returns the budget left, or -1 (and changes nothing but COUNT) if blocks
    run short, so that someone must be preempted."""
    budget, need, _ = running_pass(rows, order, n, settings, waiting, 0)
    if need > counters[FREE]:
        return -1
    apply_pass(rows, order, n, settings, blocks, table, counters, row_blocks, row_keys)
    return budget


@numba.njit(cache=True)
def start(
    n, waiting, blocked, now, decision_seconds, stop_at, decided, rows, order, settings, floats, blocks, table, counters,
    row_blocks, row_keys, engine, compute, memory, experts, features, plan_ends, plan_device,
):
    """Dispatch the next step and plan from it; returns the number of steps planned. Unless the step is `decided`, its
    running pass is made first, and -1 is returned (and nothing changed) if blocks run short."""
    if not decided and decide(n, waiting, rows, order, settings, blocks, table, counters, row_blocks, row_keys) < 0:
        return -1
    engine[TOKENS_COMPUTED] += dispatch(rows, order, n, 0)
    tables = StepTables(compute, memory, experts)
    return plan(
        rows, order, n, settings, floats, tables, features, blocks, counters, waiting, blocked, now, decision_seconds,
        stop_at, plan_ends, plan_device,
    )


@numba.njit(cache=True)
def admit(
    i, keys, known, total, steps_start, steps_stop, system, running, budget, rows, order, settings, blocks, table, counters,
    row_blocks, row_keys,
):
    """Try to admit a request with `known` tokens into column i. Returns (count, cached) with count > 0 if it was; (0, -)
    if the budget keeps it out (chunked prefill off); (-s, -) if s more blocks would be needed."""
    block = settings[BLOCK]
    found = taken = 0
    if settings[CACHING]:
        found, taken = match(blocks, table, keys, min(len(keys), (known - 1) // block))
    cached = found * block
    missing = min(known - cached, chunk_cap(settings, system))
    if missing > budget and not settings[CHUNKED_PREFILL]:
        return 0, cached
    count = min(missing, budget)
    reach = known if settings[RESERVE_FULL] else cached + count
    floor = settings[WATERMARK] if running else 0
    short = -(-reach // block) - found + taken + floor - counters[FREE]
    if short > 0:
        return -short, cached
    for j in range(min(len(keys), row_keys.shape[1])):  # keys go on where max_model_len cuts the request
        row_keys[i, j] = keys[j]
    for j in range(found):
        row_blocks[i, j] = find_block(blocks, table, keys[j])
        hold(blocks, counters, row_blocks[i, j])
    held = -(-(cached + count) // block)
    for j in range(found, held):
        row_blocks[i, j] = take(blocks, table, counters)
    order[running] = i
    rows[KNOWN, i] = known
    rows[TOTAL, i] = total
    rows[QUANTUM, i] = NEVER
    rows[STEPS_START, i] = steps_start
    rows[STEPS_STOP, i] = steps_stop
    rows[COMPUTED, i] = cached
    rows[HELD, i] = held
    rows[COUNT, i] = count
    rows[IN_FLIGHT, i] = 0
    rows[CHUNKED, i] = 0
    rows[NEXT_HASH, i] = cached + block if settings[CACHING] else NEVER
    if cached + count >= rows[NEXT_HASH, i]:
        register_full(rows, i, cached + count, block, blocks, table, row_blocks, row_keys)
    return count, cached

