"""Call sizes and prefix reuse of three recorded agents, as CSV.

Source: github.com/LMCache/lmcache-agent-trace, reduced to one row a call. Texts were measured in characters; a token is
taken to be `chars_per_token` of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from simcore.errors import TraceError
from simcore.traces import rows as strict
from simcore.traces.contexts import BlockIds, Context, columns
from simcore.traces.files import csv_table
from simcore.traces.sessions import counted
from simcore.traces.workload import Source, Workload, build

COLUMNS = (
    "workload", "session", "call_index", "t_s", "input_chars", "output_chars", "max_common_prefix_chars_with_earlier_call",
)
CLOCKS = ("recorded", "closed-loop")
_COMMON = COLUMNS[-1]


def read_lmcache_agents(
    path: str | Path, *, agent: str | None = None, clock: str = "recorded", gap: float | None = None,
    chars_per_token: float = 4.0, block_tokens: int = 16, source: Source | None = None, skip_bad: bool = False,
) -> Workload:
    """The calls of a file (plain or gzip), or of one `agent` in it (miniswe, magagent, taubench); a session is a program.

    The trace has one time a call, its start, so that service and client time cannot be told apart: `clock` recorded plays
    the starts, closed-loop has a call come `gap` seconds (to be given) after the call before it has ended. All sessions
    begin at t=0. A prompt shares its recorded common prefix with the latest earlier prompt of its session that is as long;
    outputs are not identified. Raises TraceError with file, line, key, found and allowed; with `skip_bad` such rows are
    listed in `skipped`, and the rest of their session goes on without them.
    """
    if clock not in CLOCKS:
        raise TraceError(str(path), "clock", found=clock, allowed=", ".join(CLOCKS))
    if (clock == "closed-loop") != (gap is not None) or (gap is not None and not 0 <= gap < np.inf):
        raise TraceError(str(path), "gap", found=gap, allowed="a time in s with clock closed-loop, else none")
    if not 0 < chars_per_token < np.inf:
        raise TraceError(str(path), "chars_per_token", found=chars_per_token, allowed="a finite number above 0")
    sessions: dict[str, list[tuple[float, int, int, int]]] = {}
    agents: set[object] = set()
    bad = strict.BadRows(skip_bad)
    empty = 0
    for where, row in _rows(path, bad):
        if agent in (None, row["workload"]):
            call = _call(where, row, sessions.get(str(row["session"]), []), bad, chars_per_token)
            if call is not None:
                agents.add(row["workload"])
                empty += not row["input_chars"] or not row["output_chars"]
                sessions.setdefault(str(row["session"]), []).append(call)
    if not sessions:
        raise TraceError(str(path), found="no calls", allowed="at least one row" + (f" of agent {agent}" if agent else ""))
    notes = (
        f"lmcache agent trace: {len(sessions)} sessions, all starting at t=0; sizes are characters / {chars_per_token:g}",
        *([f"{empty} calls with an empty prompt or output count as 1 token each there"] if empty else []),
        *(["taubench prompts are single messages, not whole contexts"] if "taubench" in agents else []),
        "one time a call, its start: " + (
            "arrivals as recorded since each session's start" if gap is None else
            f"a call comes {gap:g} s (assumed) after the one before it has ended"),
        "a prompt shares the recorded common prefix with the latest prompt of its session that is as long; outputs are not "
        "identified; sessions share nothing",
    )
    source = source or Source(Path(path).name)
    return _workload(sessions, gap, block_tokens, replace(source, notes=(*source.notes, *notes)), tuple(bad.listed))


def _rows(path: str | Path, bad: strict.BadRows) -> Iterator[tuple[str, dict[str, object]]]:
    for where, cells in csv_table(path, COLUMNS):
        if isinstance(cells, TraceError):
            bad.refuse(cells)
        else:
            yield where, {key: text if key in ("workload", "session") else strict.cell(text) for key, text in cells.items()}


def _call(
    where: str, row: dict[str, object], before: list[tuple[float, int, int, int]], bad: strict.BadRows, chars: float,
) -> tuple[float, int, int, int] | None:
    """(start s, input, output, shared tokens), None where the row was refused and skipped."""
    try:
        start = strict.real(where, row, "t_s")
        sizes = [strict.whole(where, row, key, most=1 << 30) for key in ("input_chars", "output_chars", _COMMON)]
        if before and start < before[-1][0]:
            raise TraceError(where, "t_s", why="time goes backwards", found=start, allowed=f"at least {before[-1][0]!r}")
        if sizes[2] > sizes[0]:
            raise TraceError(where, _COMMON, found=sizes[2], allowed=f"at most input_chars, {sizes[0]}")
    except TraceError as error:
        bad.refuse(error)
        return None
    inputs, outputs = (max(1, round(size / chars)) for size in sizes[:2])
    return start, inputs, outputs, min(int(sizes[2] / chars), inputs)


def _workload(
    sessions: dict[str, list[tuple[float, int, int, int]]], gap: float | None, block_tokens: int, source: Source,
    skipped: tuple[str, ...],
) -> Workload:
    ids = BlockIds(block_tokens)
    calls, program, contexts = [], [], []
    for number, session in enumerate(sessions.values()):
        prompts: list[Context] = []
        for call in session:
            like = next((p for p in reversed(prompts) if p.tokens >= call[3]), None)
            prompts.append(ids.grow(like, call[3] if like else 0, call[1]))
        calls += session
        contexts += prompts
        program += [number] * len(session)
    start, numbers = np.array([call[0] for call in calls]), np.array(program)
    order = np.argsort(start, kind="stable") if gap is None else np.arange(len(calls))
    known, runs = columns([contexts[k] for k in order.tolist()])
    first = np.append(True, np.diff(numbers) > 0)
    return build(
        arrival=start[order] if gap is None else np.where(first, 0.0, np.nan),
        input_tokens=np.array([call[1] for call in calls])[order],
        output_tokens=np.array([call[2] for call in calls])[order],
        source=source, block_tokens=block_tokens, known_tokens=known, runs=runs, program=numbers[order],
        turn=counted(numbers[order]), gap=None if gap is None else np.where(first, 0.0, gap), skipped=skipped,
        waits=None if gap is None else [[] if opens else [row - 1] for row, opens in enumerate(first.tolist())],
    )
