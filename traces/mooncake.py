"""Mooncake JSONL: `timestamp` ms, `input_length`, `output_length` tokens, `hash_ids` of 512-token prefix blocks.

Format: github.com/kvcache-ai/Mooncake, FAST25-release/traces. Extensions that other tools write are read too:
`session_id`, `delay` (ms after the row before it in its session has ended) and `priority`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from simcore.errors import TraceError
from simcore.traces import rows as strict
from simcore.traces.files import json_rows
from simcore.traces.identity import chained, first_conflict
from simcore.traces.sessions import by_prefix, common_root
from simcore.traces.workload import Source, Workload, build

_REQUIRED = ("input_length", "output_length", "hash_ids")
_OPTIONAL = ("timestamp", "delay", "session_id", "priority")


def read_mooncake(
    path: str | Path, *, block_tokens: int = 512, source: Source | None = None, skip_bad: bool = False
) -> Workload:
    """The requests of a Mooncake trace (plain or gzip); arrivals in seconds on the trace's own clock.

    Prompts are identified, outputs are not. Raises TraceError with file, line, key, found and allowed; with `skip_bad`
    such rows are left out and listed in `skipped`.
    """
    if type(block_tokens) is not int or block_tokens < 1:
        raise TraceError(str(path), "block_tokens", found=block_tokens, allowed="a whole number, at least 1")
    reading = _Reading(block_tokens)
    bad = strict.BadRows(skip_bad)
    for where, row in json_rows(path):
        try:
            if isinstance(row, TraceError):
                raise row
            reading.add(where, row)
        except TraceError as error:
            bad.refuse(error)
            if isinstance(row, dict):
                reading.leave_out(row)
    if not reading.inputs:
        raise TraceError(str(path), found="no requests", allowed="at least one row")
    return reading.workload(source or Source(Path(path).name), tuple(bad.listed))


class _Reading:
    """Columns as they grow row by row."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.arrivals: list[float] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.priorities: list[int] = []
        self.gaps: list[float] = []
        self.waits: list[list[int]] = []
        self.ids: list[np.ndarray] = []
        self.sessions: list[object] = []
        self.number: dict[int, int] = {}  # hash id of any width -> order of first appearance
        self.last_row: dict[object, int | None] = {}  # None: the session's latest row was left out
        self.now = 0.0
        self.has_priority = False

    def add(self, where: str, row: dict[str, object]) -> None:
        strict.check_keys(where, row, _REQUIRED, _OPTIONAL)
        inputs = strict.tokens(where, row, "input_length")
        outputs = strict.tokens(where, row, "output_length")
        hash_ids = self._hash_ids(where, row, inputs)
        priority = strict.whole(where, row, "priority", least=-(1 << 63)) if "priority" in row else 0
        session = row.get("session_id")
        if "session_id" in row and type(session) not in (str, int):
            raise TraceError(where, "session_id", found=session, allowed="a string or a whole number")
        arrival, gap, waits = self._time(where, row, session)
        # Nothing may fail from here on: a refused row leaves no trace.
        self.now = self.now if waits else arrival
        self.arrivals.append(arrival)
        self.inputs.append(inputs)
        self.outputs.append(outputs)
        self.priorities.append(priority)
        self.gaps.append(gap)
        self.waits.append(waits)
        self.ids.append(np.array([self.number.setdefault(h, len(self.number)) for h in hash_ids], dtype=np.int64))
        self.sessions.append(session)
        self.has_priority |= "priority" in row
        if session is not None:
            self.last_row[session] = len(self.inputs) - 1

    def leave_out(self, row: dict[str, object]) -> None:
        """A row of a session was refused; rows that wait for it cannot stay either."""
        session = row.get("session_id")
        if type(session) in (str, int):
            self.last_row[session] = None

    def _hash_ids(self, where: str, row: dict[str, object], inputs: int) -> list[int]:
        ids = row["hash_ids"]
        if not isinstance(ids, list) or not all(type(h) is int for h in ids):
            raise TraceError(where, "hash_ids", found=ids, allowed="a list of whole numbers")
        blocks = -(-inputs // self.block_tokens)
        if len(ids) != blocks:
            raise TraceError(
                where, "hash_ids", found=f"{len(ids)} ids",
                allowed=f"{blocks} ids: input_length {inputs} in blocks of {self.block_tokens} tokens",
            )
        return ids

    def _time(self, where: str, row: dict[str, object], session: object) -> tuple[float, float, list[int]]:
        """(arrival s, gap s, rows waited for)."""
        if ("timestamp" in row) == ("delay" in row):
            found = "both" if "delay" in row else "neither"
            raise TraceError(where, "timestamp", found=found, allowed="either timestamp or delay")
        if "timestamp" in row:
            arrival = strict.real(where, row, "timestamp") / 1000
            if arrival < self.now:
                raise TraceError(
                    where, "timestamp", why="time goes backwards", found=row["timestamp"],
                    allowed=f"at least {self.now * 1000:g}, the timestamp before it",
                )
            return arrival, 0.0, []
        gap = strict.real(where, row, "delay") / 1000
        if session is None or session not in self.last_row:
            raise TraceError(where, "delay", found=row["delay"], allowed="only after an earlier row of its session_id")
        before = self.last_row[session]
        if before is None:
            raise TraceError(where, "delay", why="the row of its session that it waits for was left out")
        return float("nan"), gap, [before]

    def workload(self, source: Source, skipped: tuple[str, ...]) -> Workload:
        n = len(self.inputs)
        notes = [
            f"Mooncake JSONL: {n} rows, {self.block_tokens} tokens a block, timestamps in ms",
            "outputs are not identified: no later prompt shares them",
            *_tick_note(np.array(self.arrivals)),
        ]
        ids = self.ids
        if first_conflict(ids, len(self.number)) is not None:
            ids = chained(ids)
            notes.append("hash_ids are content ids (an id stands behind different prefixes): chained to prefix ids")
        named = any(s is not None for s in self.sessions)
        if named:
            program, turn = _by_name(self.sessions)
            notes.append("sessions are the trace's session_id; a row without one is a session of its own")
        else:
            program, turn = by_prefix(ids)
            notes.append(f"sessions are prefix chains after a common root of {common_root(ids)} blocks")
        if self.has_priority:
            notes.append("priority is read as it stands: lower = more important")
        return build(
            arrival=np.array(self.arrivals),
            input_tokens=np.array(self.inputs),
            output_tokens=np.array(self.outputs),
            source=replace(source, notes=(*source.notes, *notes)),
            block_tokens=self.block_tokens,
            known_tokens=np.array(self.inputs),
            block_ids=ids,
            priority=np.array(self.priorities),
            program=program,
            turn=turn,
            gap=np.array(self.gaps),
            waits=self.waits,
            skipped=skipped,
        )


def _by_name(sessions: list[object]) -> tuple[np.ndarray, np.ndarray]:
    number: dict[object, int] = {}
    turns: dict[int, int] = {}
    program = np.zeros(len(sessions), dtype=np.int64)
    turn = np.zeros(len(sessions), dtype=np.int64)
    for row, session in enumerate(sessions):
        key: object = ("row", row) if session is None else session
        program[row] = number.setdefault(key, len(number))
        turn[row] = turns.get(int(program[row]), 0)
        turns[int(program[row])] = int(turn[row]) + 1
    return program, turn


def _tick_note(arrival: np.ndarray) -> list[str]:
    """A note when many requests share few, evenly spaced arrival times."""
    times = arrival[np.isfinite(arrival)]
    distinct = np.unique(times)
    if len(distinct) < 3 or 2 * len(distinct) > len(times):
        return []
    steps = np.diff(distinct)
    tick = float(np.median(steps))
    if np.quantile(np.abs(steps - tick), 0.9) > tick / 10:
        return []
    return [f"arrivals sit on ticks of about {tick:.1f} s ({len(distinct)} distinct times)"]
