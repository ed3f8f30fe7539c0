"""The planned path's kernels that Python calls: decisions, with the plans that follow them."""

from __future__ import annotations

import numba

from simcore.models.commit_kernels import FLAGS, apply_pass, commit, register_full
from simcore.models.plan_kernels import (
    NEVER,
    NO_BUDGET,
    NO_ROOM,
    NO_SLOT,
    NOBODY_WAITS,
    NOTHING,
    chunk_cap,
    dispatch,
    plan,
    running_pass,
)
from simcore.models.plan_memory import (
    BLOCK,
    BUDGET,
    CACHING,
    CHUNKED,
    CHUNKED_PREFILL,
    COMPUTED,
    COUNT,
    HELD,
    IN_FLIGHT,
    KNOWN,
    MAX_RUNNING,
    NEXT_HASH,
    QUANTUM,
    RESERVE_FULL,
    STEPS_START,
    STEPS_STOP,
    TOKENS_COMPUTED,
    TOTAL,
    WATERMARK,
    float_parts,
    int_parts,
)
from simcore.models.planned_pool import FREE, hold, match, take
from simcore.models.planned_pool import find as find_block


@numba.njit(cache=True)
def decide(n, waiting, ints):
    """The running pass of a decision boundary. Returns the budget left, or -1 (and changes nothing but COUNT) if blocks
    run short, so that someone must be preempted."""
    rows, order, settings, _, _, _, _, blocks, table, counters, row_blocks, row_keys = int_parts(ints)
    budget, need, _ = running_pass(rows, order, n, settings, waiting, 0)
    if need > counters[FREE]:
        return -1
    apply_pass(rows, order, n, settings, blocks, table, counters, row_blocks, row_keys)
    return budget


@numba.njit(cache=True)
def start(n, waiting, blocked, wanted, now, decision_seconds, stop_at, ints, floats):
    """Dispatch the step that is decided and plan from it; returns the number of steps planned. `blocked`, `wanted`: why the
    head of the queue is not in it, and the key that could change that (see `plan`)."""
    rows, order, settings, engine, features, _, _, blocks, _, counters, _, row_keys = int_parts(ints)
    clock, plan_ends, plan_device, _, x, seconds, tables = float_parts(floats)
    engine[TOKENS_COMPUTED] += dispatch(rows, order, n, 0)
    return plan(
        rows, order, n, settings, clock, tables, features, blocks, counters, row_keys, waiting, blocked, wanted, now,
        decision_seconds, stop_at, plan_ends, plan_device, x, seconds,
    )


@numba.njit(cache=True)
def begin(
    n, waiting, budget, hold, now, decision_seconds, stop_at, column, keys, known, total, steps_start, steps_stop, ints,
    floats,
):
    """A whole decision where nobody but the queue is asked: running requests, the head of the queue, the plan.

    `column` .. `steps_stop` describe the head (see `admit`), if any. Returns (planned, count, cached, budget left):
    planned = -1 if the step must be decided request by request (blocks run short, or nothing can run; only COUNT has
    changed); 0 if the head was admitted and the caller is to look at the next one with the budget left (always, if `hold`:
    somebody hears of admissions); else the steps planned. count > 0: the head was admitted with so many tokens.
    """
    settings = int_parts(ints)[2]
    if budget < 0:
        budget = decide(n, waiting, ints) if n else settings[BUDGET]
        if budget < 0:
            return -1, 0, 0, 0
    count = cached = 0
    blocked, wanted = NOBODY_WAITS, NOTHING
    if waiting:
        blocked = NO_ROOM if n < settings[MAX_RUNNING] else NO_SLOT
        if blocked == NO_ROOM and budget > 0:
            count, cached = admit(column, keys, known, total, steps_start, steps_stop, n + waiting, n, budget, ints)
        if count > 0:
            budget -= count
            if hold or waiting > 1:
                return 0, count, cached, budget
            n += 1
            waiting = 0
            blocked = NOBODY_WAITS
        elif blocked == NO_ROOM:
            blocked, wanted = why_blocked(keys, known, n, ints)
    if n == 0:
        return -1, 0, 0, 0
    planned = start(n, waiting, blocked, wanted, now, decision_seconds, stop_at, ints, floats)
    return planned, count, cached, budget


@numba.njit(cache=True)
def turn_over(
    planned, steps, done, step_ends, n, waiting, budget, hold, now, decision_seconds, stop_at, column, keys, known, total,
    steps_start, steps_stop, ints, floats,
):
    """The end of a plan: `commit` and, unless a request has its last token, `begin`. `planned`: who waited when the plan was
    made. Returns what `commit` does, then what `begin` does; where that was not called, -2 and the first column of
    `out[:3]`."""
    found = commit(n, planned, steps, True, done, ints, floats, step_ends)
    if found >= FLAGS:
        out = int_parts(ints)[5]
        return found, -2, out[0, 0], out[1, 0], out[2, 0]
    planned, count, cached, left = begin(
        n, waiting, budget, hold, now, decision_seconds, stop_at, column, keys, known, total, steps_start, steps_stop, ints,
        floats)
    return found, planned, count, cached, left


@numba.njit(cache=True)
def why_blocked(keys, known, running, ints):
    """(NO_ROOM, the first key of the prompt that is not found) if a head of `known` tokens lacks blocks whatever the
    budget, else (NO_BUDGET, NOTHING)."""
    _, _, settings, _, _, _, _, blocks, table, counters, _, _ = int_parts(ints)
    if not settings[RESERVE_FULL]:
        return NO_BUDGET, NOTHING
    limit = found = taken = 0
    if settings[CACHING]:
        limit = min(len(keys), (known - 1) // settings[BLOCK])
        found, taken = match(blocks, table, keys, limit)
    if -(-known // settings[BLOCK]) - found + taken + (settings[WATERMARK] if running else 0) <= counters[FREE]:
        return NO_BUDGET, NOTHING
    return NO_ROOM, keys[found] if found < limit else NOTHING


@numba.njit(cache=True)
def admit(i, keys, known, total, steps_start, steps_stop, system, running, budget, ints):
    """Try to admit a request with `known` tokens into column i. Returns (count, cached) with count > 0 if it was; (0, -)
    if the budget keeps it out (chunked prefill off); (-s, -) if s more blocks would be needed."""
    rows, order, settings, _, _, _, _, blocks, table, counters, row_blocks, row_keys = int_parts(ints)
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
        register_full(rows, i, cached + count, known, block, blocks, table, row_blocks, row_keys)
    return count, cached
