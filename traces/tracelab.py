"""TraceLab: recorded rounds of coding agents with token split and tool times (JSONL), and published quantiles (CSV).

Format: github.com/uw-syfi/TraceLab, sanitized `round_trace.jsonl`; the quantiles are quoted from `artifacts/*/README.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from simcore.errors import TraceError
from simcore.traces import rows as strict
from simcore.traces.agent_programs import AgentTurn, Program, build_programs
from simcore.traces.files import csv_table, json_rows
from simcore.traces.workload import Source, Workload

AGGREGATES = ("metric", "scope", "value", "unit", "upstream_artifact")
CLOCKS = ("closed-loop", "recorded")
HUMAN = "human"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_INPUTS = ("user_message", "tool_result")
_OUTPUTS = ("reasoning", "text", "tool_call")
_REQUIRED = ("session_id", "round_index", "input_tokens_total", "prefix_tokens", "output_tokens", "timing_events", "tools")


def read_tracelab(
    path: str | Path, *, clock: str = "closed-loop", block_tokens: int = 16, source: Source | None = None,
    skip_bad: bool = False,
) -> Workload:
    """The rounds of a file (plain or gzip); a session is a program, all starting at t=0.

    A round is asked for when its last input (tool result, user message) is there and has ended with its last output; the
    time between is the client's. In it the tools of the round before run side by side, each its wall time, cut to that
    pause as it may begin while the model still writes. `clock` closed-loop keeps these pauses, recorded the rounds' times.
    Prompts grow by appending, less the reasoning tokens where they are counted; of a shorter one only the recorded
    `prefix_tokens` (what the provider's cache gave, a lower bound) are taken as shared. Keys that are not needed are not
    looked at. Raises TraceError with file, line, key, found and allowed; with `skip_bad` such rows are listed in `skipped`,
    and rounds of their session that come after are left out.
    """
    if clock not in CLOCKS:
        raise TraceError(str(path), "clock", found=clock, allowed=", ".join(CLOCKS))
    bad = strict.BadRows(skip_bad)
    sessions: dict[str, list[_Round]] = {}
    ended: set[object] = set()
    for where, row in json_rows(path):
        try:
            if isinstance(row, TraceError):
                raise row
            if skip_bad and row.get("session_id") in ended:
                raise TraceError(where, why="a round before it in its session was left out")
            _add(where, row, sessions)
        except TraceError as error:
            bad.refuse(error)
            ended |= {row.get("session_id")} if isinstance(row, dict) else set()
    if not sessions:
        raise TraceError(str(path), found="no rounds", allowed="at least one row")
    notes = (
        f"TraceLab: {len(sessions)} sessions, all starting at t=0; "
        + ("recorded client time between rounds" if clock == "closed-loop" else "rounds at their recorded times"),
        "assumed that context grows by appending (a shorter prompt shares the provider's cached prefix only) and that "
        "counted reasoning tokens leave it",
    )
    source = source or Source(Path(path).name)
    programs = [_program(rounds, clock == "recorded") for rounds in sessions.values()]
    workload = build_programs(programs, replace(source, notes=(*source.notes, *notes)), block_tokens=block_tokens)
    return replace(workload, skipped=tuple(bad.listed))


def read_tracelab_aggregates(path: str | Path) -> dict[tuple[str, str], tuple[float, str]]:
    """(metric, scope) -> (value, unit), of `published_aggregates.csv`: quantiles of the full corpus. Raises TraceError."""
    out: dict[tuple[str, str], tuple[float, str]] = {}
    for where, cells in csv_table(path, AGGREGATES):
        if isinstance(cells, TraceError):
            raise cells
        key = cells["metric"], cells["scope"]
        if key in out:
            raise TraceError(where, "metric, scope", found=key, allowed="each once")
        out[key] = strict.real(where, {"value": strict.cell(cells["value"])}, "value"), cells["unit"]
    return out


@dataclass(frozen=True)
class _Round:
    asked: int  # microseconds since 1970
    ended: int
    by_person: bool
    input_tokens: int
    prefix_tokens: int
    output_tokens: int
    reasoning: int
    tools: tuple[tuple[str, float], ...]  # that it calls: name, s


def _add(where: str, row: dict[str, Any], sessions: dict[str, list[_Round]]) -> None:
    for key in _REQUIRED:
        if key not in row:
            raise TraceError(where, key, why="missing", allowed=", ".join(_REQUIRED))
    if not isinstance(row["session_id"], str):
        raise TraceError(where, "session_id", found=row["session_id"], allowed="a string")
    before = sessions.get(row["session_id"], [])
    if strict.whole(where, row, "round_index") != len(before):
        raise TraceError(where, "round_index", found=row["round_index"], allowed=f"{len(before)}, as rounds leave no hole")
    times = _times(where, row["timing_events"])
    asked = max((t for kind, t in times if kind in _INPUTS), default=before[-1].ended if before else times[0][1])
    outputs = strict.tokens(where, row, "output_tokens")
    reasoning = 0  # null: not counted
    if row.get("reasoning_output_tokens") is not None:
        reasoning = strict.whole(where, row, "reasoning_output_tokens", most=outputs)
    if before and asked < before[-1].asked:
        raise TraceError(where, "timing_events", why="time goes backwards: asked for before the round above")
    if not isinstance(row["tools"], list):
        raise TraceError(where, "tools", found=row["tools"], allowed="a list")
    found = _Round(
        asked, max(t for _, t in times), "user_message" in {kind for kind, _ in times},
        strict.tokens(where, row, "input_tokens_total"), strict.whole(where, row, "prefix_tokens"), outputs, reasoning,
        tuple(_tool(where, tool) for tool in row["tools"]),
    )
    sessions.setdefault(row["session_id"], []).append(found)


def _times(where: str, events: object) -> list[tuple[str, int]]:
    """(kind, microseconds since 1970) of the events that are read."""
    if not isinstance(events, list) or not events:
        raise TraceError(where, "timing_events", found=events, allowed="a list of at least one event")
    out = []
    for event in events:
        try:
            kind, time = str(event["event_type"]), datetime.fromisoformat(event["timestamp"])
        except (TypeError, KeyError, ValueError):
            raise TraceError(where, "timing_events", found=event, allowed="event_type and an ISO timestamp") from None
        if kind in (*_INPUTS, *_OUTPUTS):
            since = (time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH
            out.append((kind, since // timedelta(microseconds=1)))
    if not out:
        raise TraceError(where, "timing_events", found=events, allowed=f"an event of {', '.join((*_INPUTS, *_OUTPUTS))}")
    return out


def _tool(where: str, tool: Any) -> tuple[str, float]:
    if not isinstance(tool, dict) or not isinstance(tool.get("tool_name"), str) or not tool["tool_name"]:
        raise TraceError(where, "tools", found=tool, allowed="objects with tool_name")
    given = tool.get("tool_wall_latency_ms")
    return tool["tool_name"], 0.0 if given is None else strict.real(where, tool, "tool_wall_latency_ms") / 1000


def _program(rounds: list[_Round], recorded: bool) -> Program:
    turns: list[AgentTurn] = []
    for k, now in enumerate(rounds):
        at = (now.asked - rounds[0].asked) / 1e6 if recorded else None
        kept = now.output_tokens - now.reasoning
        if not k:
            turns.append(AgentTurn(now.input_tokens, now.output_tokens, kept, at=at))
            continue
        before = rounds[k - 1]
        pause = max(0, now.asked - before.ended) / 1e6
        calls = () if now.by_person else tuple((tool, min(seconds, pause)) for tool, seconds in before.tools)
        gap = pause - max((seconds for _, seconds in calls), default=0.0)
        new = now.input_tokens - before.input_tokens - (before.output_tokens - before.reasoning)
        keep = None if new >= 0 else min(now.prefix_tokens, before.input_tokens, now.input_tokens)
        turns.append(AgentTurn(
            new if keep is None else now.input_tokens - keep, now.output_tokens, kept, keep_tokens=keep, calls=calls,
            gap=gap, tool=HUMAN if now.by_person else None, at=at,
        ))
    return Program(tuple(turns))
