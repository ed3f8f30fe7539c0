"""Vidur's request traces, CSV: `arrived_at` (s), `num_prefill_tokens`, `num_decode_tokens`. Read and written.

Format: github.com/microsoft/vidur, `data/processed_traces` (trace replay reads these three columns; the length files have no
`arrived_at`, and `num_total_tokens` and `pd_ratio` beside the lengths). No token identity, no sessions.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np

from simcore.errors import TraceError
from simcore.traces import rows as strict
from simcore.traces.files import csv_rows, replacing
from simcore.traces.workload import Source, Workload, build

COLUMNS = ("num_prefill_tokens", "num_decode_tokens")
_ARRIVAL = "arrived_at"
_SAYS_NOTHING_MORE = ("", "num_total_tokens", "pd_ratio", "request_id", "prompt_id", "Unnamed: 0")


def read_vidur(path: str | Path, *, source: Source | None = None, skip_bad: bool = False) -> Workload:
    """The requests of a file (plain or gzip); of a length file, all at t=0.

    Raises TraceError with file, line, key, found and allowed; with `skip_bad` such rows are listed in `skipped`.
    """
    bad = strict.BadRows(skip_bad)
    rows = csv_rows(path)
    where, header = next(rows, (str(path), []))
    if isinstance(header, TraceError):
        raise header
    header = [name.strip() for name in header]
    strict.check_keys(where, header, COLUMNS, (_ARRIVAL, *_SAYS_NOTHING_MORE))
    made: list[tuple[float, int, int]] = []
    for where, cells in rows:
        try:
            if isinstance(cells, TraceError):
                raise cells
            if len(cells) != len(header):
                raise TraceError(where, why="cells", found=len(cells), allowed=f"{len(header)}: {','.join(header)}")
            row = {key: strict.cell(cell) for key, cell in zip(header, cells, strict=True)}
            arrival = strict.real(where, row, _ARRIVAL) if _ARRIVAL in row else 0.0
            if made and arrival < made[-1][0]:
                raise TraceError(where, _ARRIVAL, why="time goes backwards", found=arrival,
                                 allowed=f"at least {made[-1][0]!r}, the arrival before it")
            whole = {key: int(v) if isinstance(v := row[key], float) and v.is_integer() else v for key in COLUMNS}
            made.append((arrival, strict.tokens(where, whole, COLUMNS[0]), strict.tokens(where, whole, COLUMNS[1])))
        except TraceError as error:
            bad.refuse(error)
    if not made:
        raise TraceError(str(path), found="no requests", allowed="a header and at least one row")
    arrivals, inputs, outputs = (list(column) for column in zip(*made, strict=True))
    source = source or Source(Path(path).name)
    notes = (
        f"Vidur CSV: {len(made):,} rows" + ("" if _ARRIVAL in header else " without arrivals, all at t=0"),
        "no token identity: nothing is shared, no sessions",
    )
    return build(arrival=np.array(arrivals), input_tokens=np.array(inputs), output_tokens=np.array(outputs),
                 source=replace(source, notes=(*source.notes, *notes)), skipped=tuple(bad.listed))


def write_vidur(workload: Workload, path: str | Path) -> None:
    """Arrivals and lengths, whole or not at all. Raises TraceError for requests without an arrival of their own."""
    w = workload
    if np.isnan(w.arrival).any():
        raise TraceError(str(path), "arrived_at", why="requests wait for others, or for a worker",
                         found=f"{int(np.isnan(w.arrival).sum())} without an arrival", allowed="arrivals only")
    with replacing(path) as stream:
        out = csv.writer(stream)
        out.writerow((_ARRIVAL, *COLUMNS))
        for row in zip(w.arrival.tolist(), w.input_tokens.tolist(), w.output_tokens.tolist(), strict=True):
            out.writerow(map(repr, row))
