"""BurstGPT CSV: requests to ChatGPT and GPT-4 with times in seconds and counts; its third part has sessions and latencies.

Format: github.com/HPMLL/BurstGPT. Columns `Timestamp`, `Model`, `Request tokens`, `Response tokens`, `Total tokens`,
`Log Type`; BurstGPT_3 adds `Session ID` and `Elapsed time` (s). 0 response tokens mean that the request failed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from simcore.errors import TraceError
from simcore.traces import rows as strict
from simcore.traces import times
from simcore.traces.calls import Call, build_calls, check_clock, counts_note, in_order, listed
from simcore.traces.files import csv_rows
from simcore.traces.workload import Source, Workload

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
_OPTIONAL = ("Session ID", "Elapsed time")


def read_burstgpt(
    path: str | Path, *, clock: str = "closed-loop", model: str | None = None, log_type: str | None = None,
    source: Source | None = None, skip_bad: bool = False,
) -> Workload:
    """The requests of a BurstGPT file (plain or gzip), from the first on; no token identity.

    `model`, `log_type`: only these. `clock`: see traces/calls.py; without sessions and latencies arrivals are as recorded.
    Failed requests are left out and counted. Raises TraceError with file, line, key, found and allowed.
    """
    check_clock(path, clock, 1)
    bad, counts = strict.BadRows(skip_bad), Counter[str]()
    calls: list[Call] = []
    rows = csv_rows(path)
    where, header = next(rows, (str(path), []))
    if isinstance(header, TraceError):
        raise header
    header = [name.strip() for name in header]
    strict.check_keys(where, header, COLUMNS, _OPTIONAL)
    for where, cells in rows:
        try:
            if isinstance(cells, TraceError):
                raise cells
            if len(cells) != len(header):
                raise TraceError(where, why="cells", found=len(cells), allowed=f"{len(header)}: {','.join(header)}")
            row = {key: cell.strip() for key, cell in zip(header, cells, strict=True)}
            if (model is not None and row["Model"] != model) or (log_type is not None and row["Log Type"] != log_type):
                counts["rows of other models or log types"] += 1
                continue
            call = _call(where, row)
        except TraceError as error:
            bad.refuse(error)
            continue
        if call is None:
            counts["failed requests (0 response tokens)"] += 1
        else:
            calls.append(call)
    if not calls:
        raise TraceError(str(path), found=listed(counts) or "no requests", allowed="at least one row")
    counts["rows not in order of time, sorted"] = sum(b.start < a.start for a, b in pairwise(calls))
    source = source or Source(Path(path).name)
    notes = (f"BurstGPT: {len(calls):,} requests; no token identity: nothing is shared", *counts_note(counts))
    return build_calls(in_order(calls), replace(source, notes=(*source.notes, *notes)), clock=clock, block_tokens=16,
                       known_tokens=None, runs=None, skipped=tuple(bad.listed))


def _call(where: str, row: dict[str, str]) -> Call | None:
    """None for a request that failed."""
    start = times.seconds(row["Timestamp"])
    if start is None:
        raise TraceError(where, "Timestamp", found=row["Timestamp"], allowed="seconds, at least 0")
    cells = {key: strict.cell(row[key]) for key in ("Request tokens", "Response tokens")}
    cells = {key: int(cell) if isinstance(cell, float) and cell.is_integer() else cell for key, cell in cells.items()}
    inputs = strict.tokens(where, cells, "Request tokens")
    outputs = strict.whole(where, cells, "Response tokens", most=strict.MOST_TOKENS)
    end = None
    if row.get("Elapsed time"):
        elapsed = times.seconds(row["Elapsed time"])
        if elapsed is None:
            raise TraceError(where, "Elapsed time", found=row["Elapsed time"], allowed="seconds, at least 0")
        end = start + elapsed
    return Call(where, start, end, inputs, outputs, row.get("Session ID") or None) if outputs else None
