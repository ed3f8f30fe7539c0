"""Mooncake JSONL: `timestamp` ms, `input_length`, `output_length` tokens, `hash_ids` of 512-token prefix blocks.

Format: github.com/kvcache-ai/Mooncake, FAST25-release/traces. Ids are whole numbers of any width or strings, renumbered.
Extensions that other tools write are read too: `session_id`, `delay` (ms after the row before it in its session has ended)
and `priority`; and Dynamo's agentic rows (dynamo-data-gen 1.3 to 1.5, AgenticMooncakeRow): `request_id`, `wait_for`
(request_ids; the row comes `delay` + `tool_wait_ms` after the last of them has ended), `tool_events` (calls side by side:
`tool_class`, `duration_ms`), `branches` and `prefix_reset`, which say nothing that the other fields do not. Its later form,
whose first line has a `schema`, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from simcore.errors import TraceError
from simcore.traces import rows as strict
from simcore.traces.files import json_rows
from simcore.traces.identity import chained, first_conflict
from simcore.traces.sessions import by_prefix, common_root, counted
from simcore.traces.workload import Source, Workload, build

_REQUIRED = ("input_length", "output_length", "hash_ids")
_OPTIONAL = ("timestamp", "delay", "session_id", "priority")
_AGENTIC = ("request_id", "wait_for", "tool_wait_ms", "tool_events", "branches", "prefix_reset")
_TOOL = "tool"  # the wait of a row that names none


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


@dataclass
class _Wait:
    """What a row waits for, and how long after it the row comes."""

    arrival: float = float("nan")
    gap: float = 0.0
    rows: list[int] = field(default_factory=list)
    tool: str | None = None
    calls: list[tuple[str, float]] = field(default_factory=list)


class _Reading:
    """Columns as they grow row by row."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.priorities: list[int] = []
        self.waits: list[_Wait] = []
        self.ids: list[np.ndarray] = []
        self.sessions: list[object] = []
        self.number: dict[int | str, int] = {}  # hash id of any width, or a text -> order of first appearance
        self.last_row: dict[object, int | None] = {}  # None: the session's latest row was left out
        self.named: dict[str, int | None] = {}  # request_id -> its row, None = left out
        self.tools: dict[str, int] = {}
        self.now = 0.0
        self.has_priority = False

    def add(self, where: str, row: dict[str, object]) -> None:
        if "schema" in row:
            raise TraceError(where, "schema", found=row["schema"], allowed="rows without a header (Dynamo 1.3 to 1.5)")
        strict.check_keys(where, row, _REQUIRED, (*_OPTIONAL, *_AGENTIC))
        inputs = strict.tokens(where, row, "input_length")
        outputs = strict.tokens(where, row, "output_length")
        hash_ids = self._hash_ids(where, row, inputs)
        priority = strict.whole(where, row, "priority", least=-(1 << 63)) if "priority" in row else 0
        session = row.get("session_id")
        if "session_id" in row and type(session) not in (str, int):
            raise TraceError(where, "session_id", found=session, allowed="a string or a whole number")
        request_id = self._request_id(where, row)
        wait = self._agentic_wait(where, row) if row.get("wait_for") else self._wait(where, row, session)
        # Nothing may fail from here on: a refused row leaves no trace.
        self.now = self.now if wait.rows else wait.arrival
        self.inputs.append(inputs)
        self.outputs.append(outputs)
        self.priorities.append(priority)
        self.waits.append(wait)
        for tool in (*([wait.tool] if wait.tool else []), *(tool for tool, _ in wait.calls)):
            self.tools.setdefault(tool, len(self.tools))
        self.ids.append(np.array([self.number.setdefault(h, len(self.number)) for h in hash_ids], dtype=np.int64))
        self.sessions.append(session)
        self.has_priority |= "priority" in row
        if session is not None:
            self.last_row[session] = len(self.inputs) - 1
        if request_id is not None:
            self.named[request_id] = len(self.inputs) - 1

    def leave_out(self, row: dict[str, object]) -> None:
        """A row was refused; rows that wait for it cannot stay either."""
        session, request_id = row.get("session_id"), row.get("request_id")
        if type(session) in (str, int):
            self.last_row[session] = None
        if isinstance(request_id, str):
            self.named.setdefault(request_id, None)

    def _request_id(self, where: str, row: dict[str, object]) -> str | None:
        found = row.get("request_id")
        if found is None and any(key in row for key in _AGENTIC):
            raise TraceError(where, "request_id", why="missing", allowed="a name, in a row that says what it waits for")
        if found is not None and (not isinstance(found, str) or not found or found in self.named):
            raise TraceError(where, "request_id", found=found, allowed="a name that no row before has")
        return found

    def _hash_ids(self, where: str, row: dict[str, object], inputs: int) -> list[int | str]:
        ids = row["hash_ids"]
        if not isinstance(ids, list) or ({type(h) for h in ids} - {int} and {type(h) for h in ids} != {str}):
            raise TraceError(where, "hash_ids", found=ids, allowed="a list of whole numbers, or one of strings")
        blocks = -(-inputs // self.block_tokens)
        if len(ids) != blocks:
            raise TraceError(
                where, "hash_ids", found=f"{len(ids)} ids",
                allowed=f"{blocks} ids: input_length {inputs} in blocks of {self.block_tokens} tokens",
            )
        return ids

    def _wait(self, where: str, row: dict[str, object], session: object) -> _Wait:
        """Of a row that has a time, or a delay after the row before it in its session."""
        for key in ("tool_wait_ms", "tool_events"):
            if row.get(key):
                raise TraceError(where, key, found=row[key], allowed="only in a row that waits for others")
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
            return _Wait(arrival)
        gap = strict.real(where, row, "delay") / 1000
        if session is None or session not in self.last_row:
            raise TraceError(where, "delay", found=row["delay"], allowed="only after an earlier row of its session_id")
        before = self.last_row[session]
        if before is None:
            raise TraceError(where, "delay", why="the row of its session that it waits for was left out")
        return _Wait(gap=gap, rows=[before])

    def _agentic_wait(self, where: str, row: dict[str, object]) -> _Wait:
        """Of a row with wait_for. A timestamp says nothing then; a call is cut to the wait, as it may begin earlier."""
        names = row["wait_for"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TraceError(where, "wait_for", found=names, allowed="a list of request_ids")
        for name in names:
            if name not in self.named:
                raise TraceError(where, "wait_for", found=name, allowed="request_ids of rows before this one")
        rows = {self.named[name] for name in names}
        if None in rows:
            raise TraceError(where, "wait_for", why="a row that it waits for was left out", found=names)
        delay, tools = (strict.real(where, row, key) / 1000 if key in row else 0.0 for key in ("delay", "tool_wait_ms"))
        events = row.get("tool_events", [])
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise TraceError(where, "tool_events", found=events, allowed="a list of objects")
        calls = []
        for event in events:
            tool = event.get("tool_class")
            if not isinstance(tool, str) or not tool or "duration_ms" not in event:
                raise TraceError(where, "tool_events", found=event, allowed="objects with tool_class and duration_ms")
            calls.append((tool, min(strict.real(where, event, "duration_ms") / 1000, delay + tools)))
        longest = max((seconds for _, seconds in calls), default=0.0)
        name = calls[0][0] if calls else _TOOL if tools else None
        return _Wait(gap=delay + tools - longest, rows=sorted(k for k in rows if k is not None), tool=name, calls=calls)

    def workload(self, source: Source, skipped: tuple[str, ...]) -> Workload:
        n = len(self.inputs)
        notes = [
            f"Mooncake JSONL: {n} rows, {self.block_tokens} tokens a block, timestamps in ms",
            "outputs are not identified: no later prompt shares them",
            *_tick_note(np.array([wait.arrival for wait in self.waits])),
        ]
        ids = self.ids
        if first_conflict(ids, len(self.number)) is not None:
            ids = chained(ids)
            notes.append("hash_ids are content ids (an id stands behind different prefixes): chained to prefix ids")
        named = any(s is not None for s in self.sessions)
        if self.named:
            program = self._connected()
            turn = counted(program)
            notes.append("programs are the rows that one another's wait_for and session_id connect")
        elif named:
            program, turn = _by_name(self.sessions)
            notes.append("sessions are the trace's session_id; a row without one is a session of its own")
        else:
            program, turn = by_prefix(ids)
            notes.append(f"sessions are prefix chains after a common root of {common_root(ids)} blocks")
        if self.has_priority:
            notes.append("priority is read as it stands: lower = more important")
        return build(
            arrival=np.array([wait.arrival for wait in self.waits]),
            input_tokens=np.array(self.inputs),
            output_tokens=np.array(self.outputs),
            source=replace(source, notes=(*source.notes, *notes)),
            block_tokens=self.block_tokens,
            known_tokens=np.array(self.inputs),
            block_ids=ids,
            priority=np.array(self.priorities),
            program=program,
            turn=turn,
            gap=np.array([wait.gap for wait in self.waits]),
            waits=[wait.rows for wait in self.waits],
            tool=np.array([self.tools[wait.tool] if wait.tool else -1 for wait in self.waits]),
            calls=[[(self.tools[tool], seconds) for tool, seconds in wait.calls] for wait in self.waits],
            tools=tuple(self.tools),
            skipped=skipped,
        )


    def _connected(self) -> np.ndarray:
        """program, int64[n]: a sub-agent has a session of its own, but its rows and its caller's wait for one another."""
        root = list(range(len(self.inputs)))

        def find(row: int) -> int:
            while root[row] != row:
                root[row] = row = root[root[row]]
            return row

        first: dict[object, int] = {}
        for row, (wait, session) in enumerate(zip(self.waits, self.sessions, strict=True)):
            for other in (*wait.rows, *([first.setdefault(session, row)] if session is not None else [])):
                a, b = find(row), find(other)
                root[max(a, b)] = min(a, b)
        number: dict[int, int] = {}
        return np.array([number.setdefault(find(row), len(number)) for row in range(len(root))], dtype=np.int64)


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
