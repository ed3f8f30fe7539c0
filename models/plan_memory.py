"""The memory of the planned path: all its integers in one array and all its floats in another.

A compiled kernel pays for every array it is handed (about 0.05 us, as much as ten of its own steps), so it is handed two and
carves them itself. `int_parts` and `float_parts` do that in compiled code, `IntMemory` and `FloatMemory` in Python; both see
the same places, which the arrays' own headers name.
"""

from __future__ import annotations

from pathlib import Path

import numba
import numpy as np
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from simcore.compiled import forget_stale
from simcore.models.planned_pool import POOL_COUNTERS, POOL_FIELDS
from simcore.models.step_time import COLUMNS, FIXED, StepTables

forget_stale(Path(__file__).parent, (
    "step_time.py", "planned_pool.py", "plan_memory.py", "plan_kernels.py", "commit_kernels.py", "decide_kernels.py"))

# Fields of a row; see models/request.py for what they mean.
(KNOWN, COMPUTED, TOTAL, HELD, NEXT_HASH, IN_FLIGHT, COUNT, CHUNKED, QUANTUM, STEPS_START, STEPS_STOP) = range(11)
ROW_FIELDS = 11

# Engine settings.
(BLOCK, BUDGET, MAX_LEN, CHUNK_CAP, LONE_UNCAPPED, ADAPTIVE, CACHING, WINDOW, WATERMARK, RESERVE_FULL, CHUNKED_PREFILL,
 MAX_RUNNING, UNHASHED_FIRST, RELEASE_ENDED) = range(14)
SETTINGS = 14

# Counters of the engine.
STEP, DELIVERED, CLOSED, TOKENS_COMPUTED, SAMPLES, LAST_TOKENS, LAST_SEQUENCES = range(7)
COUNTERS = 7

# Clock and overheads.
STEP_OVERHEAD, SEQUENCE_OVERHEAD, BUSY, NEXT_SAMPLE, SAMPLE_EVERY = range(5)
FLOATS = 5

PLAN_STEPS = 512  # the longest plan; a longer one is planned in pieces
OUT_FIELDS = 6

# The header: where each part ends, then the sizes that shape them.
_HEADER = 16
_WIDTH, _ROW_BLOCKS, _ROW_KEYS = 13, 14, 15


@intrinsic
def _borrowed(typing_context, array):
    """The same array without a reference count: every function that it is handed to would count up and down, atomically,
    which took a third of the kernels' time. Its owner must outlive it."""

    def build(context, builder, signature, args):
        view = make_array(signature.return_type)(context, builder, args[0])
        view.meminfo = view.meminfo.type(None)
        view.parent = view.parent.type(None)
        return view._getvalue()

    return array(array), build


@numba.njit(cache=True)
def _carve_ints(m):
    width = m[_WIDTH]
    return (
        m[m[0]:m[1]].reshape((2 * ROW_FIELDS, width)), m[m[1]:m[2]], m[m[2]:m[3]], m[m[3]:m[4]], m[m[4]:m[5]],
        m[m[5]:m[6]].reshape((OUT_FIELDS, width)), m[m[6]:m[7]].reshape((PLAN_STEPS, 4)),
        m[m[7]:m[8]].reshape((POOL_FIELDS, (m[8] - m[7]) // POOL_FIELDS)), m[m[8]:m[9]], m[m[9]:m[10]],
        m[m[10]:m[11]].reshape((width, m[_ROW_BLOCKS])), m[m[11]:m[12]].reshape((width, m[_ROW_KEYS])),
    )


@numba.njit(cache=True)
def _carve_floats(m):
    a = int(m[0])
    b = a + FLOATS
    c = b + PLAN_STEPS
    d = c + PLAN_STEPS
    e = d + 2 * PLAN_STEPS
    operators = int(m[1])
    f = e + operators * COLUMNS
    g = f + operators * COLUMNS
    h = g + COLUMNS
    i = h + operators
    tables = StepTables(m[e:f].reshape((operators, COLUMNS)), m[f:g].reshape((operators, COLUMNS)),
                        m[i:].reshape((2, len(m[i:]) // 2)))
    return m[a:b], m[b:c], m[c:d], m[d:e].reshape((PLAN_STEPS, 2)), m[g:h], m[h:i], tables


@numba.njit(cache=True)
def int_parts(memory):
    """(rows, order, settings, engine, features, out, samples, blocks, table, counters, row_blocks, row_keys)."""
    return _carve_ints(_borrowed(memory))  # type: ignore[call-arg]


@numba.njit(cache=True)
def float_parts(memory):
    """(clock, plan_ends, plan_device, sample_times, x, seconds, tables)."""
    return _carve_floats(_borrowed(memory))  # type: ignore[call-arg]


class IntMemory:
    """int64 parts, as views of `all`: `rows` [2 * ROW_FIELDS, width >= slots] (the truth, then the plan's copy), `order`
    [width], `settings`, `engine`, `features`, `out` [OUT_FIELDS, width], `samples` [PLAN_STEPS, 4], the pool's `blocks`,
    `table` and `counters`, `row_blocks` and `row_keys` [width, blocks of a row]. Pages that nobody reaches cost nothing."""

    def __init__(self, slots: int, row_blocks: int, row_keys: int, num_blocks: int, table: int) -> None:
        width = (slots + 7) // 8 * 8 | 8  # no power of two: the fields of a request would compete for few places in a cache
        sizes = (2 * ROW_FIELDS * width, width, SETTINGS, COUNTERS, FIXED + 2 * width, OUT_FIELDS * width, 4 * PLAN_STEPS,
                 POOL_FIELDS * num_blocks, table, POOL_COUNTERS, width * row_blocks, width * row_keys)
        ends = np.cumsum((_HEADER, *sizes))
        self.all = np.zeros(int(ends[-1]), dtype=np.int64)
        self.all[: len(ends)] = ends
        self.all[[_WIDTH, _ROW_BLOCKS, _ROW_KEYS]] = width, row_blocks, row_keys
        (self.rows, self.order, self.settings, self.engine, self.features, self.out, self.samples, self.blocks, self.table,
         self.counters, self.row_blocks, self.row_keys) = _carve_ints.py_func(self.all)


class FloatMemory:
    """float64 parts, as views of `all`: `clock`, `plan_ends` and `plan_device` [PLAN_STEPS], `sample_times`
    [PLAN_STEPS, 2], a copy of the cost model's tables, and room to evaluate them: `x` [COLUMNS], `seconds` [operators]."""

    def __init__(self, tables: StepTables) -> None:
        operators = len(tables.compute)
        size = 2 + FLOATS + 4 * PLAN_STEPS + 2 * operators * COLUMNS + COLUMNS + operators + tables.of_tokens.size
        self.all = np.zeros(size)
        self.all[:2] = 2, operators
        self.clock, self.plan_ends, self.plan_device, self.sample_times, _, _, own = _carve_floats.py_func(self.all)
        for part, given in zip(own, tables, strict=True):
            part[:] = given
