"""The workload schema: what arrives, when, how long it is, and which tokens it shares with others.

Columnar (numpy). One row is one request to a model; a program (an agent's job, a chat session) is a set of requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from simcore.errors import TraceError

# Keys of engine blocks whose content no trace id gives: negative, from (request, block), so never shared.
_OWN_BLOCKS = 1 << 24


@dataclass(frozen=True)
class Source:
    """Where a workload comes from and what was understood on reading it; travels with every result."""

    name: str
    licence: str = ""
    origin: str = ""
    notes: tuple[str, ...] = ()

    def noted(self, note: str) -> Source:
        return replace(self, notes=(*self.notes, note))


@dataclass(frozen=True)
class Workload:
    """n requests. Row number = request id = order of arrival (requests without an arrival of their own come last in
    no particular place: they keep the trace's order).

    Token identity. `ids` of request i are the blocks of `block_tokens` tokens over its input *and* output, written as
    inclusive runs `run_first[k]..run_last[k]` for k in `run_offsets[i]:run_offsets[i+1]`. Ids are *prefix* identities:
    an equal id means equal tokens in this block and in everything before it (readers chain plain content ids). Only the
    first `known_tokens[i]` tokens are covered; what follows (outputs that the trace does not identify) is shared with
    nobody. A last block that is only partly covered may share its id with a block of the same tokens.

    Dependence. A request with `wait_for` rows waits until the last of them has ended; then its `calls`, if any, run side by
    side (a call waits first where its tool is short of slots); `gap` seconds after the last of them has returned it arrives.
    So gap and calls are client time that adds up (closed loop: tools, think time), and never service; `arrival` is NaN.
    `tool` names what ran: the first call's tool; in a row without calls, a tool that is named ran for the whole gap.

    Starts. Other requests arrive at `arrival` (seconds from the start), or, where that is NaN, when a worker is free:
    `workers` clients share the programs, each takes the next in the order of the trace when the one it has is finished.
    A client gives up at the end of the first turn that ends `time_limit` seconds or more after its program began.
    """

    arrival: np.ndarray  # float64[n], s; NaN where wait_for is not empty or a worker starts the program
    input_tokens: np.ndarray  # int64[n], >= 1
    output_tokens: np.ndarray  # int64[n], >= 1
    priority: np.ndarray  # int64[n], lower = more important
    program: np.ndarray  # int64[n], program (session) index, 0 .. n_programs-1
    turn: np.ndarray  # int64[n], 0-based place within the program
    gap: np.ndarray  # float64[n], s after the last request waited for and the last call; 0 where it waits for none
    tool: np.ndarray  # int64[n], index into `tools` of what ran before this turn, -1 = none or unknown
    wait_offsets: np.ndarray  # int64[n+1]
    wait_for: np.ndarray  # int64[wait_offsets[n]], request ids
    call_offsets: np.ndarray  # int64[n+1]
    call_tool: np.ndarray  # int64[call_offsets[n]], index into `tools`
    call_seconds: np.ndarray  # float64[call_offsets[n]], s
    block_tokens: int  # tokens per trace block
    known_tokens: np.ndarray  # int64[n], <= input + output
    run_offsets: np.ndarray  # int64[n+1]
    run_first: np.ndarray  # int64[run_offsets[n]]
    run_last: np.ndarray  # int64[run_offsets[n]], inclusive
    source: Source
    tools: tuple[str, ...] = ()
    workers: int = 0  # clients that start programs; 0 = every program has an arrival
    time_limit: float = inf  # s from a program's start; nothing that waits for a turn that ends later comes
    ends_known: bool = False  # clients tell the engine which turn is a program's last
    skipped: tuple[str, ...] = field(default=(), repr=False)  # rows left out by --skip-bad: "file:line: reason"

    def __len__(self) -> int:
        return len(self.input_tokens)

    @cached_property
    def n_programs(self) -> int:
        return int(self.program.max()) + 1 if len(self) else 0

    @property
    def by_worker(self) -> np.ndarray:
        """bool[n]: whether the request starts its program when a worker is free."""
        return np.isnan(self.arrival) & (np.diff(self.wait_offsets) == 0) & (self.workers > 0)

    @property
    def total_tokens(self) -> np.ndarray:
        return self.input_tokens + self.output_tokens

    def ids(self, i: int) -> np.ndarray:
        """Trace block ids of request i in order, int64[ceil(known_tokens / block_tokens)]."""
        a, b = self.run_offsets[i], self.run_offsets[i + 1]
        first, last = self.run_first[a:b], self.run_last[a:b]
        lengths = last - first + 1
        starts = np.concatenate(([0], np.cumsum(lengths)[:-1])) if len(lengths) else lengths
        return np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(first - starts, lengths)

    def block_keys(self, i: int, block_size: int) -> np.ndarray:
        """Identity of each full engine block of request i, int64[(input + output) // block_size].

        A key names the block's last token: (trace id of that token's block, offset in it). Since ids are prefix
        identities, equal keys mean equal prefixes, for any block size. Unknown content gets negative keys of its own.
        """
        count = int(self.total_tokens[i]) // block_size
        last = np.arange(1, count + 1, dtype=np.int64) * block_size - 1
        keys = -(np.int64(i) * _OWN_BLOCKS + np.arange(count, dtype=np.int64)) - 1
        known = int(np.searchsorted(last, self.known_tokens[i]))
        if known:
            at = last[:known]
            keys[:known] = self.ids(i)[at // self.block_tokens] * self.block_tokens + at % self.block_tokens
        return keys

    def waits(self, i: int) -> np.ndarray:
        return self.wait_for[self.wait_offsets[i] : self.wait_offsets[i + 1]]

    def calls(self, i: int) -> list[tuple[int, float]]:
        """The tools that ran side by side before request i: (index into `tools`, s)."""
        a, b = self.call_offsets[i], self.call_offsets[i + 1]
        return list(zip(self.call_tool[a:b].tolist(), self.call_seconds[a:b].tolist(), strict=True))

    @property
    def pause(self) -> np.ndarray:
        """float64[n], s from the end of what a request waits for to its arrival, if no tool is short of slots."""
        longest = np.zeros(len(self))
        np.maximum.at(longest, np.repeat(np.arange(len(self)), np.diff(self.call_offsets)), self.call_seconds)
        return longest + self.gap

    def take(self, rows: np.ndarray) -> Workload:
        """The chosen requests (ascending row numbers), renumbered; programs are renumbered by first appearance.

        Raises TraceError when a chosen request waits for one that is left out.
        """
        rows = np.asarray(rows, dtype=np.int64)
        new_id = np.full(len(self), -1, dtype=np.int64)
        new_id[rows] = np.arange(len(rows))
        wait_offsets, wait_for = take_ragged(self.wait_offsets, rows, self.wait_for)
        call_offsets, call_tool, call_seconds = take_ragged(self.call_offsets, rows, self.call_tool, self.call_seconds)
        wait_for = new_id[wait_for]
        if (wait_for < 0).any():
            raise TraceError(self.source.name, why="a chosen request waits for one that is left out")
        run_offsets, run_first, run_last = take_ragged(self.run_offsets, rows, self.run_first, self.run_last)
        _, first_seen, inverse = np.unique(self.program[rows], return_index=True, return_inverse=True)
        rank = np.empty(len(first_seen), dtype=np.int64)
        rank[np.argsort(first_seen)] = np.arange(len(first_seen))
        per_row = {
            name: getattr(self, name)[rows]
            for name in ("arrival", "input_tokens", "output_tokens", "priority", "turn", "gap", "tool", "known_tokens")
        }
        return replace(
            self, **per_row, program=rank[inverse], wait_offsets=wait_offsets, wait_for=wait_for,
            call_offsets=call_offsets, call_tool=call_tool, call_seconds=call_seconds,
            run_offsets=run_offsets, run_first=run_first, run_last=run_last,
        )

    def check(self) -> Workload:
        """Raise TraceError if the columns contradict the schema; else return self. Readers call it last."""
        n = len(self)
        name = self.source.name

        def demand(ok: np.ndarray | bool, column: str, allowed: str) -> None:
            good = np.broadcast_to(np.asarray(ok), (n,))
            if not good.all():
                row = int(np.argmin(good))
                raise TraceError(f"{name}: row {row}", column, found=getattr(self, column)[row], allowed=allowed)

        for column in fields(self):
            value = getattr(self, column.name)
            if isinstance(value, np.ndarray) and column.name not in _RAGGED and len(value) != n:
                raise TraceError(name, column.name, found=len(value), allowed=f"{n} rows")
        depends = np.diff(self.wait_offsets) > 0
        demand(self.input_tokens >= 1, "input_tokens", "at least 1")
        demand(self.output_tokens >= 1, "output_tokens", "at least 1")
        by_worker = self.by_worker
        demand(depends | by_worker | (np.isfinite(self.arrival) & (self.arrival >= 0)), "arrival", "a finite time >= 0")
        demand(~depends | np.isnan(self.arrival), "arrival", "NaN in a row that waits for others")
        demand(np.isfinite(self.gap) & (self.gap >= 0), "gap", "a finite time >= 0")
        demand(depends | (self.gap == 0), "gap", "0 in a row that waits for none")
        demand(depends | (np.diff(self.call_offsets) == 0), "call_offsets", "no calls in a row that waits for none")
        demand((self.tool >= -1) & (self.tool < len(self.tools)), "tool", "-1, or an index into tools")
        demand((self.known_tokens >= 0) & (self.known_tokens <= self.total_tokens), "known_tokens", "0 .. input + output")
        demand(self.turn >= 0, "turn", "at least 0")
        demand(self.program >= 0, "program", "at least 0")
        if ((self.call_tool < 0) | (self.call_tool >= len(self.tools))).any():
            raise TraceError(name, "call_tool", found=self.call_tool.tolist(), allowed=f"0 .. {len(self.tools) - 1}")
        if not (np.isfinite(self.call_seconds) & (self.call_seconds >= 0)).all():
            raise TraceError(name, "call_seconds", found=float(self.call_seconds.min()), allowed="finite times >= 0")
        if not self.time_limit > 0:
            raise TraceError(name, "time_limit", found=self.time_limit, allowed="above 0 s")
        if self.workers < 0:
            raise TraceError(name, "workers", found=self.workers, allowed="at least 0")
        started = np.unique(self.program[by_worker], return_counts=True)[1]
        if (started > 1).any():
            raise TraceError(name, "arrival", why="two turns of one program would each be started by a worker")
        own = self.arrival[~depends & ~by_worker]
        if len(own) and (np.diff(own) < 0).any():
            raise TraceError(name, "arrival", why="time goes backwards")
        if ((self.run_first < 0) | (self.run_last < self.run_first)).any():
            raise TraceError(name, "run_first, run_last", why="a run is empty or has a negative id")
        covered = np.add.reduceat(
            np.append(self.run_last - self.run_first + 1, 0), np.minimum(self.run_offsets[:-1], len(self.run_first))
        ) * (np.diff(self.run_offsets) > 0) if n else self.known_tokens
        demand(covered == -(-self.known_tokens // self.block_tokens), "known_tokens", "as many block ids as cover them")
        if len(self.wait_for):
            waiter = np.repeat(np.arange(n), np.diff(self.wait_offsets))
            bad = (self.wait_for < 0) | (self.wait_for >= n) | (self.wait_for >= waiter)
            if bad.any():
                k = int(np.argmax(bad))
                raise TraceError(
                    f"{name}: row {int(waiter[k])}", "wait_for", found=int(self.wait_for[k]),
                    allowed="a request that stands earlier in the trace",
                )
        return self


_RAGGED = {
    "wait_offsets", "wait_for", "call_offsets", "call_tool", "call_seconds", "run_offsets", "run_first", "run_last",
}


def build(
    *,
    arrival: np.ndarray,
    input_tokens: np.ndarray,
    output_tokens: np.ndarray,
    source: Source,
    block_tokens: int = 16,
    known_tokens: np.ndarray | None = None,
    block_ids: list[np.ndarray] | None = None,
    runs: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    priority: np.ndarray | None = None,
    program: np.ndarray | None = None,
    turn: np.ndarray | None = None,
    gap: np.ndarray | None = None,
    tool: np.ndarray | None = None,
    waits: list[list[int]] | None = None,
    calls: list[list[tuple[int, float]]] | None = None,
    workers: int = 0,
    tools: tuple[str, ...] = (),
    ends_known: bool = False,
    skipped: tuple[str, ...] = (),
) -> Workload:
    """A checked Workload from columns; what is left out gets its neutral value (no sharing, one program a request).

    Give identity either as `block_ids` (one id array a request) or as `runs` (offsets, first, last).
    """
    n = len(input_tokens)
    if runs is None:
        runs = to_runs(block_ids) if block_ids is not None else (np.zeros(n + 1, np.int64), _ints([]), _ints([]))
    wait_lists = waits if waits is not None else [[]] * n
    call_lists = calls if calls is not None else [[]] * n
    return Workload(
        arrival=np.asarray(arrival, dtype=np.float64),
        input_tokens=_ints(input_tokens),
        output_tokens=_ints(output_tokens),
        priority=_ints(priority if priority is not None else np.zeros(n)),
        program=_ints(program if program is not None else np.arange(n)),
        turn=_ints(turn if turn is not None else np.zeros(n)),
        gap=np.asarray(gap if gap is not None else np.zeros(n), dtype=np.float64),
        tool=_ints(tool if tool is not None else np.full(n, -1)),
        wait_offsets=_offsets(wait_lists),
        wait_for=_ints([k for w in wait_lists for k in w]),
        call_offsets=_offsets(call_lists),
        call_tool=_ints([tool for c in call_lists for tool, _ in c]),
        call_seconds=np.array([seconds for c in call_lists for _, seconds in c], dtype=np.float64),
        block_tokens=int(block_tokens),
        known_tokens=_ints(known_tokens if known_tokens is not None else np.zeros(n)),
        run_offsets=runs[0],
        run_first=runs[1],
        run_last=runs[2],
        source=source,
        tools=tools,
        workers=int(workers),
        ends_known=ends_known,
        skipped=skipped,
    ).check()


def to_runs(block_ids: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(offsets, first, last): each list of ids as inclusive runs of consecutive numbers."""
    counts, firsts, lasts = [0], [], []
    for ids in block_ids:
        ids = _ints(ids)
        if len(ids):
            cut = np.flatnonzero(np.diff(ids) != 1)
            firsts.append(ids[np.concatenate(([0], cut + 1))])
            lasts.append(ids[np.concatenate((cut, [len(ids) - 1]))])
            counts.append(len(cut) + 1)
        else:
            counts.append(0)
    empty = [_ints([])]
    return np.cumsum(counts).astype(np.int64), np.concatenate(firsts or empty), np.concatenate(lasts or empty)


def take_ragged(offsets: np.ndarray, rows: np.ndarray, *values: np.ndarray) -> tuple[np.ndarray, ...]:
    """(offsets, values...) of the chosen rows of ragged columns, in the order of `rows`."""
    lengths = np.diff(offsets)[rows]
    new = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    index = np.arange(int(new[-1]), dtype=np.int64) + np.repeat(offsets[:-1][rows] - new[:-1], lengths)
    return (new, *(v[index] for v in values))


def _offsets(lists: list[list[Any]]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum([len(part) for part in lists], dtype=np.int64))).astype(np.int64)


def _ints(values: object) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)
