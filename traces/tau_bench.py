"""Trajectories of tau-bench (a tool-agent-user benchmark), reduced to message sizes, as CSV. It has no times.

Source: github.com/sierra-research/tau-bench, historical_trajectories. Texts were measured in characters; a token is taken
to be `chars_per_token` of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from simcore.errors import TraceError
from simcore.traces import rows as strict
from simcore.traces.agent_programs import AgentTurn, Program, build_programs
from simcore.traces.files import csv_table
from simcore.traces.workload import Source, Workload

COLUMNS = (
    "task_id", "trial", "reward", "message_index", "role", "content_chars", "n_tool_calls", "tool_name", "tool_args_chars",
)
HUMAN = "human"
_ROLES = ("system", "user", "assistant", "tool")
_TEXTS = ("role", "tool_name")


def read_tau_bench(
    path: str | Path, *, tool_seconds: float = 0.0, human_seconds: float = 0.0, chars_per_token: float = 4.0,
    block_tokens: int = 16, source: Source | None = None, skip_bad: bool = False,
) -> Workload:
    """The trajectories of a file (plain or gzip), a program each, all starting at t=0; each assistant message is a turn.

    A turn's prompt is everything said before it. Between two turns a tool runs `tool_seconds`, under its recorded name, or
    the person thinks for `human_seconds`; both are assumptions, as the file has no times. All trajectories share the system
    message, taken to be the same text. Raises TraceError with file, line, key, found and allowed; with `skip_bad` a
    trajectory with such a row is left out as a whole and the row is listed in `skipped`.
    """
    for key, value in (("tool_seconds", tool_seconds), ("human_seconds", human_seconds)):
        if not 0 <= value < float("inf"):
            raise TraceError(str(path), key, found=value, allowed="a finite time, at least 0 s")
    if not 0 < chars_per_token < float("inf"):
        raise TraceError(str(path), "chars_per_token", found=chars_per_token, allowed="a finite number above 0")
    bad = strict.BadRows(skip_bad)
    programs = []
    for _, messages in groupby(_messages(path, bad), key=lambda message: message.trajectory):
        program = _program(list(messages), tool_seconds, human_seconds, chars_per_token, bad)
        programs += [program] if program else []
    if not programs:
        raise TraceError(str(path), found="no trajectories", allowed="at least one with an assistant message")
    notes = (
        f"tau-bench: {len(programs)} trajectories, all starting at t=0; sizes are characters / {chars_per_token:g}",
        f"no times in the file: assumed {tool_seconds:g} s a tool call, {human_seconds:g} s a person's answer",
        "assumed that context only grows and that the system message is one text, shared by all trajectories",
    )
    source = source or Source(Path(path).name)
    workload = build_programs(programs, replace(source, notes=(*source.notes, *notes)), block_tokens=block_tokens)
    return replace(workload, skipped=tuple(bad.listed))


class _Message(NamedTuple):
    where: str
    trajectory: tuple[int, int]
    row: dict[str, Any]  # empty = refused


def _messages(path: str | Path, bad: strict.BadRows) -> Iterable[_Message]:
    trajectory = (-1, -1)  # a row that cannot be read belongs to the trajectory it stands in
    for where, cells in csv_table(path, COLUMNS):
        try:
            if isinstance(cells, TraceError):
                raise cells
            row: dict[str, Any] = {key: text if key in _TEXTS else strict.cell(text) for key, text in cells.items()}
            trajectory = strict.whole(where, row, "task_id"), strict.whole(where, row, "trial")
            for key in ("message_index", "content_chars", "n_tool_calls", "tool_args_chars"):
                strict.whole(where, row, key, most=1 << 30)
            if row["role"] not in _ROLES:
                raise TraceError(where, "role", found=row["role"], allowed=", ".join(_ROLES))
            if row["role"] == "assistant" and row["n_tool_calls"] and not row["tool_name"]:
                raise TraceError(where, "tool_name", found="", allowed="a name, where n_tool_calls is above 0")
        except TraceError as error:
            bad.refuse(error)
            row = {}
        yield _Message(where, trajectory, row)


def _program(
    messages: list[_Message], tool_seconds: float, human_seconds: float, chars: float, bad: strict.BadRows
) -> Program | None:
    """None where a row was refused, or nothing was asked of the model."""
    for expected, message in enumerate(messages):
        if not message.row:
            return None
        if message.row["message_index"] != expected:
            bad.refuse(TraceError(message.where, "message_index", found=message.row["message_index"], allowed=str(expected)))
            return None
    turns: list[AgentTurn] = []
    prefix = new = 0
    answers: dict[str, Any] = {}
    for where, _, row in messages:
        tokens = ceil(row["content_chars"] / chars)
        if row["role"] == "system" and not turns and not new:
            prefix += tokens
        elif row["role"] != "assistant":
            new += tokens
        elif not turns and not prefix + new:
            bad.refuse(TraceError(where, "role", found="assistant", allowed="another role with some content first"))
            return None
        else:
            output = max(1, tokens + ceil(row["tool_args_chars"] / chars))
            turns.append(AgentTurn(new, output, **answers))
            calls = ((row["tool_name"], tool_seconds),) * row["n_tool_calls"]
            answers = {"calls": calls} if calls else {"tool": HUMAN, "gap": human_seconds}
            new = 0
    return Program(tuple(turns), agent="tau-bench", prefix_tokens=prefix) if turns else None
