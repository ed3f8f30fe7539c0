"""A workload into the formats of other tools, and what such a file does not carry.

A file is read back before it is reported: what a run of the export would see is compared with what a run of the original
sees, and every difference is counted and said. What would make another workload of it (a wait that cannot be said) is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import numpy as np

from simcore.errors import TraceError
from simcore.traces.files import replacing
from simcore.traces.mooncake import read_mooncake
from simcore.traces.native import read_csv, write_csv
from simcore.traces.vidur import read_vidur, write_vidur
from simcore.traces.workload import Workload, _ints

TARGETS = ("mooncake", "agentic-mooncake", "vidur", "csv")


@dataclass(frozen=True)
class Export:
    """What was written: `read_with`, the format and options that read it; `lost`, what it does not carry, with counts."""

    path: str
    requests: int
    read_with: dict[str, object]
    lost: tuple[str, ...]


def export_trace(workload: Workload, target: str | Path, to: str, *, block_tokens: int | None = None) -> Export:
    """Write `workload` to `target` (.gz is compressed), whole or not at all.

    `to`: mooncake, agentic-mooncake, vidur or csv (our own). `block_tokens`, for the Mooncake forms: tokens of a block of
    the file, a divisor of the workload's; None = the workload's. Mooncake's own files have 512; a file does not say which.
    Raises TraceError for what the format cannot say: workers, time limits, waits (vidur), waits for more than the turn
    before (mooncake), waits for another program.
    """
    if to not in TARGETS:
        raise TraceError("to", found=to, allowed=", ".join(TARGETS))
    size = workload.block_tokens if block_tokens is None else block_tokens
    if to in ("vidur", "csv") and block_tokens is not None:
        raise TraceError("block_tokens", found=block_tokens, allowed=f"none: {to} has no blocks")
    if type(size) is not int or size < 1 or workload.block_tokens % size:
        raise TraceError("block_tokens", found=size, allowed=f"a divisor of the trace's {workload.block_tokens}")
    if not len(workload):
        raise TraceError(str(target), found="no requests", allowed="at least one")
    _demand_said(workload, target, to)
    read_with: dict[str, object] = {"format": to}
    if to == "csv":
        write_csv(_without_identity(replace(workload, ends_known=False)), target)
        back = read_csv(target)
    elif to == "vidur":
        write_vidur(workload, target)
        back = read_vidur(target)
    else:
        _write_mooncake(workload, target, size, _agentic_row if to == "agentic-mooncake" else _plain_row)
        back = read_mooncake(target, block_tokens=size)
        read_with = {"format": "mooncake", "block_tokens": size}
    return Export(str(target), len(workload), read_with, tuple(_losses(workload, back, size)))


def _demand_said(w: Workload, target: str | Path, to: str) -> None:
    """TraceError for what no such file can say."""
    where = str(target)
    if w.workers:
        raise TraceError(where, "workers", why=f"{to} does not say who starts a program",
                         allowed="programs that have arrivals (workload.start gives them some)")
    if isfinite(w.time_limit):
        raise TraceError(where, "time_limit", why=f"{to} does not say when clients give up", allowed="none")
    if to == "vidur" and len(w.wait_for):
        raise TraceError(where, "wait_for", why="vidur cannot say that a request waits",
                         found=f"{int((np.diff(w.wait_offsets) > 0).sum())} that do",
                         allowed="arrivals only: read the trace with clock: recorded, if it has times")
    if to in ("mooncake", "agentic-mooncake"):
        waiter = np.repeat(np.arange(len(w)), np.diff(w.wait_offsets))
        strange = w.program[waiter] != w.program[w.wait_for]
        if strange.any():
            raise TraceError(f"{where}: row {int(waiter[np.argmax(strange)])}", "wait_for", why="waits for another program",
                             allowed="waits within a program")
    if to == "mooncake":
        before = _turn_before(w)
        for row in np.flatnonzero(np.diff(w.wait_offsets) > 0).tolist():
            if w.waits(row).tolist() != [before[row]]:
                raise TraceError(
                    f"{where}: row {row}", "wait_for", found=w.waits(row).tolist(), allowed="agentic-mooncake",
                    why="mooncake can only say a delay after the row before it in its session")


def _turn_before(w: Workload) -> list[int]:
    """The row before each row in its program, -1 for the first."""
    last: dict[int, int] = {}
    out = []
    for row, program in enumerate(w.program.tolist()):
        out.append(last.get(program, -1))
        last[program] = row
    return out


def _write_mooncake(
    w: Workload, target: str | Path, size: int, timing: Callable[[Workload, int], dict[str, object]]
) -> None:
    priorities = bool(w.priority.any())
    with replacing(target) as stream:
        for row, ids in enumerate(_prompt_ids(w, size)):
            said = timing(w, row)
            said |= {"input_length": int(w.input_tokens[row]), "output_length": int(w.output_tokens[row]), "hash_ids": ids}
            if priorities:
                said["priority"] = int(w.priority[row])
            stream.write(json.dumps(said) + "\n")


def _plain_row(w: Workload, row: int) -> dict[str, object]:
    session: dict[str, object] = {"session_id": int(w.program[row])}
    if np.isnan(w.arrival[row]):
        return session | {"delay": _ms(float(w.pause[row]) if w.calls(row) else float(w.gap[row]))}
    return session | {"timestamp": _ms(float(w.arrival[row]))}


def _agentic_row(w: Workload, row: int) -> dict[str, object]:
    said: dict[str, object] = {"request_id": f"r{row}", "session_id": int(w.program[row])}
    if not np.isnan(w.arrival[row]):
        return said | {"timestamp": _ms(float(w.arrival[row]))}
    calls = [(w.tools[tool], seconds) for tool, seconds in w.calls(row)]
    gap = float(w.gap[row])
    waited = 0.0
    if not calls and w.tool[row] >= 0 and gap > 0:  # a tool that is named and has no calls ran for the whole gap
        name = w.tools[w.tool[row]]
        calls, waited, gap = ([], gap, 0.0) if name == "tool" else ([(name, gap)], 0.0, 0.0)
    longest = max((seconds for _, seconds in calls), default=0.0)
    said |= {"wait_for": [f"r{k}" for k in w.waits(row).tolist()], "delay": _ms(gap)}
    if waited:
        said["tool_wait_ms"] = _ms(waited)  # a reader calls what ran for it "tool"
    if calls:
        said["tool_wait_ms"] = _ms(longest)
        said["tool_events"] = [{"tool_class": tool or "tool", "duration_ms": _ms(seconds)} for tool, seconds in calls]
    return said


def _ms(seconds: float) -> float | int:
    """The ms that a reader's division by 1000 turns into these seconds, to the last bit where there are such."""
    ms = seconds * 1000
    for near in (float(round(ms)), ms, float(np.nextafter(ms, np.inf)), float(np.nextafter(ms, -np.inf))):
        if near / 1000 == seconds:
            return int(near) if near.is_integer() and near < 1e15 else near
    return ms


def _prompt_ids(w: Workload, size: int) -> Iterator[list[int]]:
    """Ids of each prompt's blocks of `size` tokens, numbered by first appearance. A block that is not wholly known up to the
    prompt's end is of this request alone."""
    number: dict[tuple[int, int] | tuple[str, int, int], int] = {}
    finer = w.block_tokens // size
    for row in range(len(w)):
        inputs, known, ids = int(w.input_tokens[row]), int(w.known_tokens[row]), w.ids(row).tolist()
        out = []
        for k in range(-(-inputs // size)):
            whole = min((k + 1) * size, inputs) <= known
            key = (ids[k // finer], k % finer) if whole else ("own", row, k)
            out.append(number.setdefault(key, len(number)))
        yield out


def _without_identity(w: Workload) -> Workload:
    return replace(w, known_tokens=np.zeros(len(w), dtype=np.int64), run_offsets=np.zeros(len(w) + 1, dtype=np.int64),
                   run_first=_ints([]), run_last=_ints([]))


def _losses(a: Workload, b: Workload, size: int) -> Iterator[str]:
    """What `b`, the file read back, does not say of `a`."""
    def differ(x: np.ndarray, y: np.ndarray) -> int:
        return int((~((x == y) | (np.isnan(x) & np.isnan(y)))).sum())

    pause = differ(a.pause, b.pause)
    for count, what in (
        (differ(a.arrival, b.arrival), f"arrivals differ in the last bits, by at most {_most(a.arrival, b.arrival):.3g} s"),
        (pause, f"pauses differ in the last bits, by at most {_most(a.pause, b.pause):.3g} s"),
        (int((a.priority != b.priority).sum()), "priorities are lost"),
        (int((a.program != b.program).sum()), "rows belong to a program of another number or to none"),
        (int((a.turn != b.turn).sum()), "rows have another turn number"),
        (_call_rows(a, b), "rows have other tool names, or their tools' time in other parts (the pause stays)"),
        (int(a.ends_known) * a.n_programs, "programs whose last turn clients tell: not said"),
        (len(a.skipped), "entries of rows left out on reading: not said"),
    ):
        if count:
            yield f"{count:,} {what}"
    if not b.known_tokens.any():
        if a.known_tokens.any():
            yield f"token identity of {int((a.known_tokens > 0).sum()):,} requests: a run of the export shares no prefixes"
        return
    outputs = np.maximum(0, a.known_tokens - a.input_tokens)
    if outputs.any():
        yield (f"{int(outputs.sum()):,} tokens of {int((outputs > 0).sum()):,} outputs were identified: no later prompt of "
               "the export shares them from the output's own blocks")
    ends = np.minimum(a.known_tokens, a.input_tokens)
    inside = np.where((ends < a.input_tokens), ends % size, 0)
    if inside.any():
        yield (f"{int(inside.sum()):,} tokens of {int((inside > 0).sum()):,} prompts are known up to within a block: there "
               "shared with nobody; smaller block_tokens keep more")


def _most(x: np.ndarray, y: np.ndarray) -> float:
    both = np.isfinite(x) & np.isfinite(y)
    return float(np.abs(x[both] - y[both]).max()) if both.any() else 0.0


def _call_rows(a: Workload, b: Workload) -> int:
    """Rows whose tools or calls are not those of the original."""
    def said(w: Workload, row: int) -> tuple[str | None, list[tuple[str, float]]]:
        name = w.tools[w.tool[row]] if w.tool[row] >= 0 else None
        return name, [(w.tools[tool], round(seconds, 9)) for tool, seconds in w.calls(row)]

    return sum(said(a, row) != said(b, row) for row in range(len(a)))
