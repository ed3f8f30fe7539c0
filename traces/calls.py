"""From logged calls to a workload: the half that gateway logs, spans and request traces share.

A call has a time, counts, perhaps an end, a session and a context. Rows are sorted by time; in a closed loop a call waits
for those calls of its session that had ended before it began, and the pause after them is the client's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from simcore.errors import TraceError
from simcore.traces.sessions import counted
from simcore.traces.workload import Source, Workload, build

CLOCKS = ("closed-loop", "recorded")


@dataclass
class Call:
    """One request as it was logged. Times in nanoseconds on the log's clock, so that nothing is lost by subtracting."""

    where: str
    start: int
    end: int | None
    input_tokens: int
    output_tokens: int
    session: object = None  # None: a program of its own
    parent: object = None  # the session that called this one
    first_token: int | None = None
    identity: Any = None  # what the reader needs to give ids


@dataclass(frozen=True)
class ToolSpan:
    """A tool that ran in a session, ns."""

    session: object
    name: str
    start: int
    end: int


@dataclass
class _Session:
    """Calls of one session whose order is being found."""

    parent: object
    left: int  # calls that are still to come
    last_end: int | None  # of all its calls; None = some end is not recorded
    frontier: list[tuple[int, list[int]]] = field(default_factory=list)  # (row, rows that wait for it)
    opened: list[int] | None = None  # what its first call waits for
    joined: bool = False

    def before(self, start: int, ends: Sequence[int | None]) -> list[int]:
        """Rows that had ended by `start` and that nothing which had ended waits for."""
        self.frontier = [
            (row, waiters) for row, waiters in self.frontier
            if not any(_ended(ends[waiter], start) for waiter in waiters)
        ]
        return [row for row, _ in self.frontier if _ended(ends[row], start)]


def build_calls(
    calls: Sequence[Call], source: Source, *, clock: str, block_tokens: int, known_tokens: np.ndarray | None,
    runs: tuple[np.ndarray, np.ndarray, np.ndarray] | None, tools: Sequence[ToolSpan] = (), skipped: tuple[str, ...] = (),
) -> Workload:
    """The workload of `calls`, which stand in order of time (`in_order`); time counts from the first.

    `known_tokens`, `runs`: identity of each call. Notes say which pieces were missing.
    """
    n = len(calls)
    ends = [call.end for call in calls]
    program = _programs(calls)
    waits = _waits(calls) if clock == "closed-loop" else [[] for _ in calls]
    numbers: dict[str, int] = {}
    by_session: dict[object, list[ToolSpan]] = {}
    for span in tools if clock == "closed-loop" else ():
        by_session.setdefault(span.session, []).append(span)
    gap, own_tool = np.zeros(n), np.full(n, -1)
    made: list[list[tuple[int, float]]] = []
    for row, (call, waited) in enumerate(zip(calls, waits, strict=True)):
        done: list[tuple[int, float]] = []
        if waited:
            since = max(end for k in waited if (end := ends[k]) is not None)
            for span in by_session.get(call.session, ()):
                if since < span.end <= call.start:
                    seconds = (span.end - max(span.start, since)) / 1e9
                    done.append((numbers.setdefault(span.name, len(numbers)), seconds))
            longest = max((seconds for _, seconds in done), default=0.0)
            gap[row] = max(0.0, (call.start - since) / 1e9 - longest)
            own_tool[row] = done[0][0] if done else -1
        made.append(done)
    zero = calls[0].start
    return build(
        arrival=np.array([np.nan if waits[row] else (call.start - zero) / 1e9 for row, call in enumerate(calls)]),
        input_tokens=np.array([call.input_tokens for call in calls]),
        output_tokens=np.array([call.output_tokens for call in calls]),
        source=replace(source, notes=(*source.notes, *_notes(calls, program, waits, clock))),
        block_tokens=block_tokens, known_tokens=known_tokens, runs=runs,
        program=program, turn=counted(program), gap=gap, waits=waits, calls=made, tool=own_tool,
        tools=tuple(numbers), skipped=skipped,
    )


def in_order(calls: list[Call]) -> list[Call]:
    """By start; calls of one time keep the order of the log."""
    return sorted(calls, key=lambda call: call.start)


def check_clock(path: object, clock: str, block_tokens: object) -> None:
    """TraceError for options that no reader of calls takes."""
    if clock not in CLOCKS:
        raise TraceError(str(path), "clock", found=clock, allowed=", ".join(CLOCKS))
    if type(block_tokens) is not int or block_tokens < 1:
        raise TraceError(str(path), "block_tokens", found=block_tokens, allowed="a whole number, at least 1")


def counts_note(counts: Counter[str]) -> list[str]:
    """Missing pieces, as one note."""
    said = listed(counts)
    return [f"missing or left out: {said}"] if said else []


def listed(counts: Counter[str]) -> str:
    return "; ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def _ended(end: int | None, by: int) -> bool:
    return end is not None and end <= by


def _waits(calls: Sequence[Call]) -> list[list[int]]:
    """For each call the rows that it waits for; none where no call of its session had ended before it began."""
    ends = [call.end for call in calls]
    sessions: dict[object, _Session] = {}
    children: dict[object, list[object]] = {}
    for call in calls:
        if call.session is None:
            continue
        known = sessions.get(call.session)
        if known is None:
            sessions[call.session] = known = _Session(call.parent, 0, call.end)
            if call.parent is not None:
                children.setdefault(call.parent, []).append(call.session)
        known.left += 1
        known.last_end = None if known.last_end is None or call.end is None else max(known.last_end, call.end)
    out: list[list[int]] = []
    for row, call in enumerate(calls):
        waited: list[int] = []
        if call.session is not None:
            own = sessions[call.session]
            if own.opened is None:  # its first call comes from the agent that called it
                own.opened = sessions[own.parent].before(call.start, ends) if own.parent in sessions else []
            waited = own.before(call.start, ends) or list(own.opened)
            for child in (sessions[name] for name in children.get(call.session, ())):
                if not child.joined and not child.left and _ended(child.last_end, call.start):
                    child.joined = True
                    waited += child.before(call.start, ends)
            waited = sorted(set(waited))
            for k, waiters in own.frontier:
                if k in waited:
                    waiters.append(row)
            own.frontier.append((row, []))
            own.left -= 1
        out.append(waited)
    return out


def _programs(calls: Sequence[Call]) -> np.ndarray:
    """program, int64[n]: sessions with those that they called, numbered by first appearance."""
    parent = {call.session: call.parent for call in reversed(calls) if call.session is not None}

    def root(session: object) -> object:
        seen = set()
        while parent.get(session) in parent and session not in seen:
            seen.add(session)
            session = parent[session]
        return min(seen, key=str) if session in seen else session

    number: dict[object, int] = {}
    return np.array([
        number.setdefault(("row", row) if call.session is None else ("session", root(call.session)), len(number))
        for row, call in enumerate(calls)
    ], dtype=np.int64)


def _notes(calls: Sequence[Call], program: np.ndarray, waits: list[list[int]], clock: str) -> list[str]:
    n, named = len(calls), sum(call.session is not None for call in calls)
    spans = [(call.end - call.start) / 1e9 for call in calls if call.end is not None]
    firsts = [(call.first_token - call.start) / 1e9 for call in calls if call.first_token is not None]
    loop = (
        f"closed loop: {sum(map(bool, waits)):,} calls wait for the calls of their session that had ended before them; the "
        "pause is the client's" if clock == "closed-loop" else "arrivals as recorded"
    )
    notes = [f"sessions: {len(np.unique(program)):,} programs, {n - named:,} calls have no session; {loop}"]
    for what, values in (("latency", spans), ("time to first token", firsts)):
        if values:
            p50, p99 = np.quantile(values, (0.5, 0.99)).tolist()
            notes.append(f"recorded {what} of {len(values):,} calls: mean {float(np.mean(values)):.3f} s, p50 {p50:.3f} s, "
                         f"p99 {p99:.3f} s")
    return notes
