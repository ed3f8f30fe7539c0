"""More sessions from those of a trace: clones raise its rate, resampling makes another trace like it.

A copy of a session (program) keeps the pauses between its turns, its lengths and what its turns share. What several
sessions of the source share (the common root, a system prompt, a document) it shares too; what belongs to its session
alone gets fresh ids, so that no copy finds its own tokens in the cache of the original.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simcore.errors import TraceError
from simcore.randomness import generator, uniform
from simcore.traces.identity import Numbering
from simcore.traces.transform import demand, no_workers, noted
from simcore.traces.workload import Workload, take_ragged, to_runs


def clone_sessions(workload: Workload, factor: float, seed: int) -> Workload:
    """The workload at `factor` times its rate: each session stays, and has factor - 1 clones (of a fraction, one with that
    probability; a smaller factor's clones are a subset of a larger one's).

    A clone begins at another time of the source's span: it is moved as a whole, wraps around at the end of the times at
    which it still fits, and its turns keep their order and distances. Raises TraceError when factor is below 1, when a
    session waits for another, or when workers start the sessions.
    """
    demand(workload, 1 <= factor < np.inf, "factor", factor, "a finite number of at least 1 (thin lowers the rate)")
    no_workers(workload, "clone sessions")
    sessions = _Sessions(workload)
    whole = int(factor)
    counts = np.full(workload.n_programs, whole - 1)
    counts += np.array([uniform(seed, "clone", p) < factor - whole for p in range(workload.n_programs)], dtype=np.int64)
    program = np.repeat(np.arange(workload.n_programs), counts)
    copy = np.concatenate([np.arange(1, n + 1) for n in counts.tolist()] or [counts]).astype(np.int64)
    room = (sessions.end - sessions.begin) - (sessions.last - sessions.first)[program]  # where a clone's first turn may be
    offset = np.array([uniform(seed, "clone/offset", p, k) for p, k in zip(program.tolist(), copy.tolist(), strict=True)])
    place = sessions.first[program] - sessions.begin
    moved = np.zeros(len(program))
    free = room > 0
    moved[free] = (place[free] + offset[free] * room[free]) % room[free] - place[free]
    every, none = np.arange(workload.n_programs), np.zeros(workload.n_programs, dtype=np.int64)
    out = sessions.copies(*map(np.concatenate, ((every, program), (none, copy), (none.astype(float), moved))))
    return noted(out, f"rate raised {factor:g} times by cloning whole sessions at random offsets (seed {seed}): "
                      f"{workload.n_programs} -> {out.n_programs} sessions, {len(workload)} -> {len(out)} requests")


def resample_sessions(workload: Workload, seed: int) -> Workload:
    """A bootstrap replicate: as many sessions as there are, drawn whole and with replacement.

    A session that is drawn again gets fresh ids and begins up to one mean distance of session starts earlier or later,
    within the source's span; where workers start the sessions, those drawn again come after all the others. Raises
    TraceError when a session waits for another.
    """
    sessions = _Sessions(workload)
    n = workload.n_programs
    random = generator(seed, "resample")
    program = np.sort(random.integers(n, size=n)) if n else np.zeros(0, dtype=np.int64)
    copy = np.arange(n) - np.searchsorted(program, program)  # 0 for the first of a session's copies
    jitter = random.uniform(-1, 1, size=n) * (sessions.end - sessions.begin) / max(n, 1)
    earliest, latest = sessions.begin - sessions.first[program], sessions.end - sessions.last[program]
    out = sessions.copies(program, copy, np.where(copy > 0, np.clip(jitter, earliest, latest), 0.0))
    return noted(out, f"resampled by whole sessions with replacement (seed {seed}): {len(np.unique(program))} of {n} "
                      f"sessions, {len(out)} requests for {len(workload)}")


class _Sessions:
    """A workload by session: rows, times, and which ids belong to one session alone."""

    def __init__(self, workload: Workload) -> None:
        w = self.workload = workload
        n = w.n_programs
        self.rows = np.argsort(w.program, kind="stable")  # the rows of program p are rows[offsets[p] : offsets[p + 1]]
        self.offsets = np.concatenate(([0], np.cumsum(np.bincount(w.program, minlength=n)))).astype(np.int64)
        waiter = np.repeat(np.arange(len(w)), np.diff(w.wait_offsets))
        across = w.program[waiter] != w.program[w.wait_for]
        if across.any():
            raise TraceError(f"{w.source.name}: row {int(waiter[np.argmax(across)])}", "wait_for",
                             why="waits for another session, so sessions cannot be copied alone")
        own = np.isfinite(w.arrival)
        self.begin, self.end = (float(f(w.arrival[own])) for f in (np.min, np.max)) if own.any() else (0.0, 0.0)
        self.first, self.last = np.full(n, np.inf), np.full(n, -np.inf)
        np.minimum.at(self.first, w.program[own], w.arrival[own])
        np.maximum.at(self.last, w.program[own], w.arrival[own])
        empty = np.isinf(self.first)  # a number that no row carries, or a session that a worker starts
        self.first[empty] = self.last[empty] = self.begin
        self._number_ids()

    def _number_ids(self) -> None:
        """`local[i]`: the place of id i among those that only its session uses, -1 where several sessions use it."""
        w = self.workload
        self.number = Numbering(w.run_first, w.run_last)
        owner = np.full(self.number.size, -1)
        for row in range(len(w)):
            ids, program = self.number(w.ids(row)), w.program[row]
            owner[ids] = np.where((owner[ids] == -1) | (owner[ids] == program), program, -2)
        private = np.flatnonzero(owner >= 0)
        by_owner = private[np.argsort(owner[private], kind="stable")]
        self.private = np.bincount(owner[private], minlength=w.n_programs)  # how many a session has
        starts = np.cumsum(self.private) - self.private
        self.local = np.full(self.number.size, -1)
        self.local[by_owner] = np.arange(len(by_owner)) - starts[owner[by_owner]]

    def copies(self, program: np.ndarray, copy: np.ndarray, shift: np.ndarray) -> Workload:
        """A workload of copies of sessions: copy k of `program[k]`, moved by `shift[k]` seconds, becomes program k;
        `copy[k]` = 0 keeps its ids. Rows stand in order of time, those of a session in their own order."""
        w = self.workload
        lengths = np.diff(self.offsets)[program]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        of = np.repeat(np.arange(len(program)), lengths)  # the copy of each new row, copy by copy
        at = np.arange(total) - (ends - lengths)[of]  # its place in the session
        row = self.rows[self.offsets[program][of] + at]
        # A row that waits for others stands where the source had it: at the time of the last arrival before it.
        time = np.fmax.accumulate(w.arrival)[row] + shift[of] if total else w.arrival
        order = np.lexsort((row, copy[of], time))
        new_row = np.empty(total, dtype=np.int64)
        new_row[order] = np.arange(total)
        place = np.empty(len(w), dtype=np.int64)  # of each source row in its session
        place[self.rows] = np.arange(len(w)) - self.offsets[w.program[self.rows]]

        row, of, time = row[order], of[order], time[order]
        wait_offsets, waited = take_ragged(w.wait_offsets, row, w.wait_for)
        wait_for = new_row[(ends - lengths)[np.repeat(of, np.diff(wait_offsets))] + place[waited]]
        call_offsets, call_tool, call_seconds = take_ragged(w.call_offsets, row, w.call_tool, w.call_seconds)
        runs = to_runs(self._ids(row, of, program, copy))
        per_row = {name: getattr(w, name)[row] for name in (
            "input_tokens", "output_tokens", "priority", "turn", "gap", "tool", "known_tokens")}
        return replace(
            w, **per_row, arrival=np.where(np.isnan(w.arrival[row]), np.nan, time), program=of, wait_offsets=wait_offsets,
            wait_for=wait_for, call_offsets=call_offsets, call_tool=call_tool, call_seconds=call_seconds,
            run_offsets=runs[0], run_first=runs[1], run_last=runs[2],
        )

    def _ids(self, row: np.ndarray, of: np.ndarray, program: np.ndarray, copy: np.ndarray) -> list[np.ndarray]:
        """Block ids of each new row; fresh ones are numbered on from the source's largest."""
        w = self.workload
        need = np.where(copy > 0, self.private[program], 0)
        start = np.cumsum(need) - need + int(w.run_last.max(initial=-1)) + 1
        largest = int(start[-1] + need[-1]) if len(need) else 0
        if largest > ((1 << 63) - 1) // w.block_tokens - 1:  # block_keys multiplies by block_tokens
            raise TraceError(w.source.name, "ids", found=int(w.run_last.max()), why="too large for fresh ones after them")
        out = []
        for source, k in zip(row.tolist(), of.tolist(), strict=True):
            ids = w.ids(source)
            if copy[k]:
                local = self.local[self.number(ids)]
                ids = np.where(local >= 0, start[k] + local, ids)
            out.append(ids)
        return out
