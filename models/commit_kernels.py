"""The planned path's kernels that apply planned steps to the rows and to the pool."""

from __future__ import annotations

import numba

from simcore.models.plan_kernels import NEVER, dispatch, only_decodes, running_pass
from simcore.models.plan_memory import (
    BLOCK,
    BUSY,
    CLOSED,
    COMPUTED,
    COUNT,
    DELIVERED,
    HELD,
    IN_FLIGHT,
    KNOWN,
    LAST_SEQUENCES,
    LAST_TOKENS,
    NEXT_HASH,
    NEXT_SAMPLE,
    QUANTUM,
    RELEASE_ENDED,
    SAMPLE_EVERY,
    SAMPLES,
    STEP,
    STEPS_START,
    STEPS_STOP,
    TOKENS_COMPUTED,
    TOTAL,
    UNHASHED_FIRST,
    float_parts,
    int_parts,
)
from simcore.models.planned_pool import FREE, LRU, give_back, register, take

# What `commit` says beside the number of requests that ended.
HAS_DELIVERED, HAS_CLOSED, HAS_SAMPLES, FLAGS = 1, 2, 4, 8


@numba.njit(cache=True)
def commit(n, waiting, steps, final, done, ints, floats, step_ends):
    """Complete `steps` planned steps, the first of them number `done` of the plan, each followed by the dispatch of the
    next, except the last one if `final` (a decision follows). Their ends go to `step_ends`, by step number.

    Returns FLAGS x the number of requests that have their last token, plus flags. Those requests leave `order`; `out[:3]`
    holds their (column, start, stop of the open run of token steps), in running order; with RELEASE_ENDED their blocks are
    given back (nobody is asked about them). `out[3:]`: runs of token steps that
    were interrupted (column, start, stop), engine[CLOSED] of them. `samples`: int64[capacity, 4] (step,
    tokens, sequences, free blocks) and `sample_times`: float64[capacity, 2] (end, device seconds) of the steps to be
    sampled, engine[SAMPLES] of them; the last step of a final commit is left out. engine[DELIVERED]: tokens delivered.
    """
    rows, order, settings, engine, _, out, samples, blocks, table, counters, row_blocks, row_keys = int_parts(ints)
    clock, plan_ends, plan_device, sample_times, _, _, _ = float_parts(floats)
    engine[DELIVERED] = engine[CLOSED] = engine[SAMPLES] = 0
    decodes = only_decodes(rows, order, n, settings, 0)
    for s in range(done, done + steps):
        if decodes and commit_decodes(s, done + steps - s, final, n, ints, floats, step_ends):
            break
        tokens = 0
        sequences = 0
        step = engine[STEP]
        last = final and s == done + steps - 1
        for k in range(n):
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
        clock[BUSY] += plan_device[s]
        if last:
            break
        if plan_ends[s] >= clock[NEXT_SAMPLE]:
            note_sample(
                engine, samples, sample_times, clock, step, tokens, sequences, counters[FREE], plan_ends[s], plan_device[s])
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
                if settings[RELEASE_ENDED]:
                    release(i, LRU, ints)
            else:
                order[k - ended] = i
    flags = (HAS_DELIVERED if engine[DELIVERED] else 0) + (HAS_CLOSED if engine[CLOSED] else 0)
    return FLAGS * ended + flags + (HAS_SAMPLES if engine[SAMPLES] else 0)


@numba.njit(cache=True)
def commit_decodes(first, steps, final, n, ints, floats, step_ends):
    """`commit` for `steps` planned steps of nothing but decodes, the first of them number `first` of the plan; False if a
    request's run of token steps was interrupted before them (then nothing has changed). A request is looked at only where
    it needs a block or fills one."""
    rows, order, settings, engine, left, _, samples, blocks, table, counters, row_blocks, row_keys = int_parts(ints)
    clock, plan_ends, plan_device, sample_times, _, _, _ = float_parts(floats)
    block, step = settings[BLOCK], engine[STEP]
    for k in range(n):
        if rows[STEPS_STOP, order[k]] != step:
            return False
    nearest = NEVER  # steps until the first of them must be looked at
    for k in range(n):
        i = order[k]
        left[k] = min(rows[HELD, i] * block, rows[NEXT_HASH, i] - 1) - rows[COMPUTED, i]
        nearest = min(nearest, left[k])
    for s in range(steps):
        end, device = plan_ends[first + s], plan_device[first + s]
        step_ends[step + s] = end
        clock[BUSY] += device
        if final and s == steps - 1:
            break
        if end >= clock[NEXT_SAMPLE]:
            note_sample(engine, samples, sample_times, clock, step + s, n, n, counters[FREE], end, device)
        if s < nearest:
            continue
        nearest = NEVER
        for k in range(n):
            if left[k] == s:
                i = order[k]
                after = rows[COMPUTED, i] + s + 1
                held = rows[HELD, i]
                if after > held * block:
                    row_blocks[i, held] = take(blocks, table, counters)
                    held += 1
                    rows[HELD, i] = held
                if after >= rows[NEXT_HASH, i]:
                    register_full(rows, i, after, after, block, blocks, table, row_blocks, row_keys)
                left[k] = min(held * block, rows[NEXT_HASH, i] - 1) - rows[COMPUTED, i]
            nearest = min(nearest, left[k])
    computed = steps - final
    for k in range(n):
        i = order[k]
        rows[KNOWN, i] += steps
        rows[QUANTUM, i] -= steps
        rows[STEPS_STOP, i] += steps
        rows[COMPUTED, i] += computed
        if final:
            rows[IN_FLIGHT, i] = 0
    engine[STEP] += steps
    engine[DELIVERED] += n * steps
    engine[TOKENS_COMPUTED] += n * computed
    engine[LAST_TOKENS] = engine[LAST_SEQUENCES] = n
    return True


@numba.njit(cache=True)
def note_sample(engine, samples, sample_times, clock, step, tokens, sequences, free, end, device):
    """A row of the steps table."""
    k = engine[SAMPLES]
    samples[k, 0], samples[k, 1], samples[k, 2], samples[k, 3] = step, tokens, sequences, free
    sample_times[k, 0], sample_times[k, 1] = end, device
    engine[SAMPLES] += 1
    clock[NEXT_SAMPLE] = end + clock[SAMPLE_EVERY]


@numba.njit(cache=True)
def release(i, reuse, ints):
    """Give the blocks of column i back."""
    rows, _, settings, _, _, _, _, blocks, table, counters, row_blocks, _ = int_parts(ints)
    give_back(blocks, table, counters, row_blocks[i], rows[HELD, i], reuse, settings[UNHASHED_FIRST])


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
            register_full(rows, i, after, rows[KNOWN, i], block, blocks, table, row_blocks, row_keys)


@numba.njit(cache=True)
def register_full(rows, i, tokens, known, block, blocks, table, row_blocks, row_keys):
    """Make the blocks that `tokens` tokens fill findable, as far as the tokens are known."""
    first = rows[NEXT_HASH, i] // block - 1
    stop = min(tokens, known) // block
    for j in range(first, stop):
        register(blocks, table, row_blocks[i, j], row_keys[i, j])
    rows[NEXT_HASH, i] = (max(first, stop) + 1) * block
