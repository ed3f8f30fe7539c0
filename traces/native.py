"""The project's own trace formats, CSV and JSONL: read and written without losing a bit.

Columns: `arrival` (s), `input_tokens`, `output_tokens`; optional `priority`, `program`, `turn`, `gap` (s), `wait_for`
(row numbers from 0: space-separated in CSV, a list in JSONL), `tool` (a name) and `calls` (`name:seconds` separated by
spaces in CSV, [[name, seconds], ...] in JSONL). A row has an arrival or rows to wait for. JSONL adds token identity,
`known_tokens` with `ids` as inclusive [first, last] runs, and may start with a header: `{"simcore_trace": 1,
"block_tokens": 16, "tools": [...], "workers": 0, "source": {...}, "skipped": [...]}`; with workers, a row that has
neither an arrival nor rows to wait for is started by one. In CSV tools are numbered by first appearance.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path

import numpy as np

from simcore.errors import TraceError
from simcore.traces import rows as strict
from simcore.traces.files import csv_rows, json_rows, replacing
from simcore.traces.table import OPTIONAL, REQUIRED, Table
from simcore.traces.workload import Source, Workload

HEADER = "simcore_trace"
CSV_REQUIRED = ("arrival", *REQUIRED)
_COLUMNS = (*CSV_REQUIRED, *OPTIONAL)
_HEADER_OPTIONAL = ("block_tokens", "tools", "workers", "time_limit", "source", "ends_known", "skipped")
_SOURCE_KEYS = ("name", "licence", "origin", "notes")


def read_csv(path: str | Path, *, source: Source | None = None, skip_bad: bool = False) -> Workload:
    """A workload from our CSV (plain or gzip); it carries no token identity. A blank cell is a value not given.

    Raises TraceError with file, line, key, found and allowed; with `skip_bad` such rows, and rows that wait for them,
    are left out and listed in `skipped`.
    """
    rows = csv_rows(path)
    where, header = next(rows, (str(path), []))
    if isinstance(header, TraceError):
        raise header
    header = [name.strip() for name in header]
    strict.check_keys(where, header, CSV_REQUIRED, OPTIONAL)
    if len(set(header)) != len(header):
        raise TraceError(where, why="a column stands twice", found=header)
    table, bad = Table(path), strict.BadRows(skip_bad)
    table.read(((where, _object(where, header, cells)) for where, cells in rows), bad)
    source = source or Source(Path(path).name, notes=("CSV: no token identity, nothing is shared",))
    return table.workload(source, tuple(bad.listed))


def read_jsonl(path: str | Path, *, source: Source | None = None, skip_bad: bool = False) -> Workload:
    """A workload from our JSONL (plain or gzip), with its header line or without (then 16 tokens a block).

    Raises TraceError as `read_csv` does. A wrong header, or ids that are no prefix identities, are refused in any case.
    """
    rows = json_rows(path)
    table, bad = Table(path), strict.BadRows(skip_bad)
    time_limit = inf
    first = next(rows, None)
    if first is not None and isinstance(first[1], dict) and HEADER in first[1]:
        where, header = first[0], first[1]
        strict.check_keys(where, header, (HEADER,), _HEADER_OPTIONAL)
        strict.whole(where, header, HEADER, least=1, most=1)
        block_tokens = strict.whole(where, header, "block_tokens", least=1) if "block_tokens" in header else 16
        tools = _texts(where, header, "tools") if "tools" in header else None
        ends_known = header.get("ends_known", False)
        if not isinstance(ends_known, bool):
            raise TraceError(where, "ends_known", found=ends_known, allowed="true or false")
        workers = strict.whole(where, header, "workers") if "workers" in header else 0
        if header.get("time_limit") is not None:
            time_limit = strict.real(where, header, "time_limit")
        table = Table(path, block_tokens=block_tokens, tools=tools, ends_known=ends_known, workers=workers)
        bad.listed.extend(_texts(where, header, "skipped"))
        source = source or _source(where, header)
    elif first is not None:
        rows = itertools.chain([first], rows)
    table.read(rows, bad)
    workload = table.workload(source or Source(Path(path).name), tuple(bad.listed))
    return replace(workload, time_limit=time_limit).check()


def write_csv(workload: Workload, path: str | Path) -> None:
    """Write our CSV, whole or not at all. Raises TraceError if that would lose token identity, workers or a tool's name."""
    if workload.ends_known:
        raise TraceError(str(path), "ends_known", why="CSV does not tell a program's last turn", allowed="write_jsonl")
    if workload.known_tokens.any():
        raise TraceError(str(path), "known_tokens", why="CSV carries no token identity", allowed="write_jsonl")
    if workload.workers:
        raise TraceError(str(path), "workers", why="CSV does not tell who starts a program", allowed="write_jsonl")
    if isfinite(workload.time_limit):
        raise TraceError(str(path), "time_limit", why="CSV does not tell when clients give up", allowed="write_jsonl")
    for number, tool in enumerate(workload.tools):
        if not tool.strip():
            raise TraceError(str(path), "tools", found=tool, allowed="names that are not blank")
        if tool.split() != [tool] and (workload.call_tool == number).any():
            raise TraceError(str(path), "calls", found=tool, allowed="names without white space, or write_jsonl")
    with replacing(path) as stream:
        out = csv.writer(stream)  # lines end in CR LF (RFC 4180): with LF alone, a CR in a name would go unquoted
        out.writerow(_COLUMNS)
        for row in _rows(workload):
            row["wait_for"] = " ".join(str(k) for k in row.get("wait_for", []))
            row["calls"] = " ".join(f"{tool}:{seconds!r}" for tool, seconds in row.get("calls", []))
            out.writerow([row.get(column, "") for column in _COLUMNS])


def write_jsonl(workload: Workload, path: str | Path) -> None:
    """Write our JSONL with its header line, whole or not at all; `read_jsonl` gives back an equal workload."""
    source = {key: getattr(workload.source, key) for key in _SOURCE_KEYS}
    header = {
        HEADER: 1, "block_tokens": workload.block_tokens, "tools": workload.tools, "source": source,
        "workers": workload.workers, "time_limit": workload.time_limit if isfinite(workload.time_limit) else None,
        "ends_known": workload.ends_known, "skipped": workload.skipped,
    }
    with replacing(path) as stream:
        stream.write(json.dumps(header) + "\n")
        for i, row in enumerate(_rows(workload)):
            if workload.known_tokens[i]:
                a, b = workload.run_offsets[i], workload.run_offsets[i + 1]
                row["known_tokens"] = int(workload.known_tokens[i])
                row["ids"] = np.column_stack((workload.run_first[a:b], workload.run_last[a:b])).tolist()
            stream.write(json.dumps(row) + "\n")


def _rows(workload: Workload) -> Iterator[dict]:
    """Each request as a dict in plain Python numbers (repr of a float is exact); neutral values are left out."""
    w = workload
    for i in range(len(w)):
        waits = w.waits(i).tolist()
        row: dict = {"wait_for": waits} if waits else {}
        if not np.isnan(w.arrival[i]):
            row["arrival"] = float(w.arrival[i])
        for key in ("input_tokens", "output_tokens", "priority", "program", "turn"):
            row[key] = int(getattr(w, key)[i])
        if waits:
            row["gap"] = float(w.gap[i])
        if w.tool[i] >= 0:
            row["tool"] = w.tools[w.tool[i]]
        if calls := w.calls(i):
            row["calls"] = [[w.tools[tool], seconds] for tool, seconds in calls]
        yield row


def _object(where: str, header: list[str], cells: list[str] | TraceError) -> dict[str, object] | TraceError:
    """A CSV row as the dict that its JSONL line would hold."""
    if isinstance(cells, TraceError):
        return cells
    if len(cells) != len(header):
        return TraceError(where, why="cells", found=len(cells), allowed=f"{len(header)}: {','.join(header)}")
    row: dict[str, object] = {}
    for key, text in zip(header, cells, strict=True):
        if not text.strip() and key not in REQUIRED:
            continue
        if key == "tool":
            row[key] = text
        elif key == "wait_for":
            row[key] = [strict.cell(k) for k in text.split()]
        elif key == "calls":
            row[key] = [[tool, strict.cell(seconds)] for tool, _, seconds in (call.rpartition(":") for call in text.split())]
        else:
            row[key] = strict.cell(text)
    return row


def _texts(where: str, row: dict, key: str) -> tuple[str, ...]:
    value = row.get(key, [])
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise TraceError(where, key, found=value, allowed="a list of strings")
    if key == "tools" and len(set(value)) != len(value):
        raise TraceError(where, key, found=value, allowed="each tool once")
    return tuple(value)


def _source(where: str, header: dict) -> Source | None:
    value = header.get("source")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise TraceError(where, "source", found=value, allowed="an object")
    strict.check_keys(f"{where}: source", value, ("name",), _SOURCE_KEYS[1:])
    for key in ("name", "licence", "origin"):
        if not isinstance(value.get(key, ""), str):
            raise TraceError(f"{where}: source", key, found=value[key], allowed="a string")
    notes = _texts(f"{where}: source", value, "notes")
    return Source(value["name"], value.get("licence", ""), value.get("origin", ""), notes)
