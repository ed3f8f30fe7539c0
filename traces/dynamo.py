"""NVIDIA Dynamo's request traces, JSONL: `dynamo.request.trace.v1` with rolling hashes of prompts, sessions and tool events.

Format: docs.nvidia.com/dynamo, request trace reference; github.com/ai-dynamo/dynamo, lib/data-gen. A line is a record, or
holds one under `event`. `request_end` and `tool_end`/`tool_error` are read; payloads, which hold text, are not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from simcore.errors import TraceError
from simcore.traces import rows as strict
from simcore.traces.calls import Call, ToolSpan, build_calls, check_clock, counts_note, in_order
from simcore.traces.files import json_rows
from simcore.traces.gateway import without_text
from simcore.traces.identity import chained, first_conflict
from simcore.traces.workload import Source, Workload, to_runs

SCHEMA = "dynamo.request.trace.v1"
_IGNORED = ("request_payload", "tool_start")
_TOOL_ENDS = ("tool_end", "tool_error")


def read_dynamo(
    path: str | Path, *, clock: str = "closed-loop", source: Source | None = None, skip_bad: bool = False
) -> Workload:
    """The requests of a trace file (plain or gzip). A session and those that it called (`parent_session_id`) are a program.

    Prompts are identified by their sequence hashes, of any width, renumbered; outputs where `completion_sequence_hashes` are
    given. `clock`: see traces/calls.py. A request that ended without output counts as 1 token and is counted. Raises
    TraceError with file, line, key and allowed, also for hashes that do not fit the length; with `skip_bad` such rows are
    left out and listed in `skipped`.
    """
    check_clock(path, clock, 1)
    reading, bad = _Reading(), strict.BadRows(skip_bad)
    for where, row in json_rows(path):
        try:
            if isinstance(row, TraceError):
                raise row
            reading.add(where, row)
        except TraceError as error:
            bad.refuse(without_text(error))
    if not reading.calls:
        raise TraceError(str(path), found="no request_end records", allowed="at least one")
    return reading.workload(source or Source(Path(path).name), clock, tuple(bad.listed))


class _Reading:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.tools: list[ToolSpan] = []
        self.named: set[str] = set()
        self.number: dict[int | str, int] = {}  # hash of any width -> order of first appearance
        self.block_tokens = 0
        self.counts: Counter[str] = Counter()

    def add(self, where: str, row: dict[str, object]) -> None:
        event = row.get("event")
        row = event if isinstance(event, dict) else row
        kind = row.get("event_type")
        if kind in _IGNORED:
            self.counts[f"{kind} records"] += 1
            return
        if row.get("schema") != SCHEMA:
            raise TraceError(where, "schema", why="another one", allowed=SCHEMA)
        if kind != "request_end" and kind not in _TOOL_ENDS:
            raise TraceError(where, "event_type", why="another one",
                             allowed=", ".join(("request_end", *_TOOL_ENDS, *_IGNORED)))
        context = row.get("agent_context")
        agent = context if isinstance(context, dict) else {}
        session, parent = (agent.get(key) for key in ("session_id", "parent_session_id"))
        for key, value in (("session_id", session), ("parent_session_id", parent)):
            if value is not None and not isinstance(value, str):
                raise TraceError(where, f"agent_context.{key}", why="no text", allowed="a string")
        if kind == "request_end":
            self._request(where, row, session, parent)
        else:
            self._tool(where, row, session if session is not None else row.get("session_id"))

    def _request(self, where: str, row: dict[str, object], session: str | None, parent: str | None) -> None:
        request = _object(where, row, "request")
        replay = _object(f"{where}: request", request, "replay")
        name = request.get("request_id")
        if not isinstance(name, str) or name in self.named:
            raise TraceError(where, "request.request_id", why="missing, or not the first of its name", allowed="a name each")
        for key in ("request_received_ms", "output_tokens"):
            if key not in request:
                raise TraceError(where, f"request.{key}", why="missing", allowed="a whole number")
        size = strict.whole(where, replay, "trace_block_size", least=1) if "trace_block_size" in replay else 0
        if not size or self.block_tokens not in (0, size):
            raise TraceError(where, "request.replay.trace_block_size", found=size,
                             allowed=f"{self.block_tokens}, as in the rows before" if self.block_tokens else "at least 1")
        if "input_length" not in replay:
            raise TraceError(where, "request.replay.input_length", why="missing", allowed="a whole number")
        inputs = strict.tokens(where, replay, "input_length")
        outputs = strict.whole(where, request, "output_tokens", most=strict.MOST_TOKENS)
        hashes = _hashes(where, replay, "input_sequence_hashes", inputs, size)
        known = inputs
        if replay.get("completion_sequence_hashes") is not None:
            longer = _hashes(where, replay, "completion_sequence_hashes", inputs + outputs, size)
            if longer[: inputs // size] != hashes[: inputs // size]:
                raise TraceError(where, "request.replay.completion_sequence_hashes", why="do not begin with the prompt's")
            hashes, known = longer, inputs + outputs
        start = strict.whole(where, request, "request_received_ms")
        end = self._end(where, row, request, start)
        self.named.add(name)
        self.block_tokens = size
        self.counts["requests without output, counted as 1 token"] += outputs == 0
        ids = np.array([self.number.setdefault(h, len(self.number)) for h in hashes], dtype=np.int64)
        first = request.get("ttft_ms")
        self.calls.append(Call(
            where, start * 10**6, end, inputs, max(1, outputs), session, parent,
            start * 10**6 + int(first * 1e6) if isinstance(first, int | float) and 0 <= first < 1e12 else None, (ids, known),
        ))

    def _end(self, where: str, row: dict[str, object], request: dict[str, object], start: int) -> int | None:
        if request.get("total_time_ms") is not None:
            return start * 10**6 + round(strict.real(where, request, "total_time_ms") * 1e6)
        if row.get("event_time_unix_ms") is not None:
            return max(start, strict.whole(where, row, "event_time_unix_ms")) * 10**6
        self.counts["requests without an end"] += 1
        return None

    def _tool(self, where: str, row: dict[str, object], session: object) -> None:
        tool = _object(where, row, "tool")
        name = tool.get("tool_class")
        if not isinstance(name, str) or not name:
            raise TraceError(where, "tool.tool_class", why="missing", allowed="a name")
        if session is None:
            self.counts["tool events without a session"] += 1
            return
        holder, key = (tool, "ended_at_unix_ms") if tool.get("ended_at_unix_ms") is not None else (row, "event_time_unix_ms")
        if key not in holder:
            raise TraceError(where, key, why="missing", allowed="a whole number")
        end = strict.whole(where, holder, key) * 10**6
        begin = end
        if tool.get("started_at_unix_ms") is not None:
            begin = strict.whole(where, tool, "started_at_unix_ms") * 10**6
        elif tool.get("duration_ms") is not None:
            begin = end - round(strict.real(where, tool, "duration_ms") * 1e6)
        if begin > end:
            raise TraceError(where, "tool.started_at_unix_ms", why="after its end")
        self.tools.append(ToolSpan(session, name, begin, end))

    def workload(self, source: Source, clock: str, skipped: tuple[str, ...]) -> Workload:
        calls = in_order(self.calls)
        ids = [call.identity[0] for call in calls]
        known = np.array([min(call.identity[1], call.input_tokens + call.output_tokens) for call in calls])
        outputs = int((known > np.array([call.input_tokens for call in calls])).sum())
        notes = [
            f"Dynamo request trace: {len(calls):,} requests, {len(self.tools):,} tool events, {self.block_tokens} tokens a "
            "block",
            *counts_note(self.counts),
            f"outputs of {outputs:,} requests are identified" if outputs else
            "outputs are not identified: no later prompt shares them",
        ]
        if first_conflict(ids, len(self.number)) is not None:
            ids = chained(ids)
            notes.append("hashes are content ids (one stands behind different prefixes): chained to prefix ids")
        return build_calls(
            calls, replace(source, notes=(*source.notes, *notes)), clock=clock, block_tokens=self.block_tokens,
            known_tokens=known, runs=to_runs(ids), tools=self.tools, skipped=skipped,
        )


def _object(where: str, row: dict[str, object], key: str) -> dict[str, object]:
    value = row.get(key)
    if not isinstance(value, dict):
        raise TraceError(where, key, why="missing", allowed="an object")
    return value


def _hashes(where: str, replay: dict[str, object], key: str, length: int, size: int) -> list[int | str]:
    hashes = replay.get(key)
    if not isinstance(hashes, list) or not all(type(h) is int or isinstance(h, str) for h in hashes):
        raise TraceError(where, f"request.replay.{key}", why="no hashes", allowed="a list of whole numbers or strings")
    if len(hashes) != -(-length // size):
        raise TraceError(where, f"request.replay.{key}", why=f"{len(hashes)} hashes",
                         allowed=f"{-(-length // size)}: {length} tokens in blocks of {size}")
    return hashes
