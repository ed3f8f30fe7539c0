"""Azure LLM inference traces (2023 and 2024): TIMESTAMP, ContextTokens, GeneratedTokens. No token identity.

Format: github.com/Azure/AzurePublicDataset. 2023 writes `2023-11-16 18:15:46.6805900` (UTC, 100 ns), 2024 writes
`2024-05-10 00:00:00.009930+00:00`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from simcore.errors import TraceError
from simcore.traces import rows as strict
from simcore.traces.files import csv_rows
from simcore.traces.workload import Source, Workload, build

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def read_azure(path: str | Path, *, source: Source | None = None, skip_bad: bool = False) -> Workload:
    """The requests of an Azure trace (plain or gzip); arrivals in seconds after the first row.

    Raises TraceError with file, line, key, found and allowed; with `skip_bad` such rows are listed in `skipped`.
    """
    bad = strict.BadRows(skip_bad)
    times: list[int] = []  # ns, whole numbers: a float would lose the trace's 100 ns
    inputs: list[int] = []
    outputs: list[int] = []
    header: list[str] = []
    for where, cells in csv_rows(path):
        try:
            if isinstance(cells, TraceError):
                raise cells
            if not header:
                _check_header(where, cells)
                header = cells
                continue
            if len(cells) != len(header):
                raise TraceError(where, why="cells", found=len(cells), allowed=f"{len(header)}: {','.join(header)}")
            row: dict[str, object] = dict(zip(header, cells, strict=True))
            time = _nanoseconds(where, str(row["TIMESTAMP"]))
            if times and time < times[-1]:
                raise TraceError(
                    where, "TIMESTAMP", why="time goes backwards", found=row["TIMESTAMP"],
                    allowed="not before the row above",
                )
            row = {key: strict.cell(str(row[key])) for key in COLUMNS[1:]}
            row_tokens = strict.tokens(where, row, "ContextTokens"), strict.tokens(where, row, "GeneratedTokens")
        except TraceError as error:
            if not header:
                raise
            bad.refuse(error)
            continue
        times.append(time)
        inputs.append(row_tokens[0])
        outputs.append(row_tokens[1])
    if not times:
        raise TraceError(str(path), found="no requests", allowed="a header and at least one row")
    source = source or Source(Path(path).name)
    notes = (
        f"Azure LLM trace: {len(times)} rows, arrivals relative to the first row",
        "no token identity: nothing is shared, no sessions",
    )
    return build(
        arrival=np.array([(time - times[0]) / 1e9 for time in times]),
        input_tokens=np.array(inputs),
        output_tokens=np.array(outputs),
        source=replace(source, notes=(*source.notes, *notes)),
        skipped=tuple(bad.listed),
    )


def _check_header(where: str, cells: list[str]) -> None:
    strict.check_keys(where, cells, COLUMNS)
    if len(cells) != len(COLUMNS):
        raise TraceError(where, why="a column stands twice", found=cells, allowed=",".join(COLUMNS))


def _nanoseconds(where: str, text: str) -> int:
    """Nanoseconds since 1970, exact; a time without a zone is UTC."""
    match = _TIME.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        zone = match[3] or "+00:00"
        since = datetime.fromisoformat(match[1] + zone) - _EPOCH
    except ValueError:
        raise TraceError(where, "TIMESTAMP", found=text, allowed="YYYY-MM-DD hh:mm:ss[.fraction][+hh:mm]") from None
    return (since.days * 86400 + since.seconds) * 10**9 + int((match[2] or "0").ljust(9, "0"))
