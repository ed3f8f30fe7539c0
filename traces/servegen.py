"""ServeGen's client files: what each client of a production service does, fitted by window; requests are drawn from it.

Format: github.com/alibaba/ServeGen, `data/*/*/`: `chunk-i-trace.csv` without a header (window start s, rate 1/s, CV, Gamma
or Weibull, shape, scale) beside `chunk-i-dataset.json` ({window start: {input_tokens, output_tokens}}, each a text "{value:
probability}"); and those of many clients in one, `*_clients*.csv` with a header and client_id beside `*_token_pdfs*.jsonl`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from simcore.errors import TraceError
from simcore.randomness import generator
from simcore.traces import rows as strict
from simcore.traces.files import csv_rows, json_documents
from simcore.traces.workload import Source, Workload, build

COLUMNS = ("client_id", "timestamp_s", "rate_rps", "cv", "pattern", "param_1", "param_2")
_PATTERNS = ("Gamma", "Weibull")
_REAL = r"[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_PAIR = re.compile(rf"({_REAL})\s*:\s*({_REAL})")
_HISTOGRAM = re.compile(rf"\s*\{{\s*(?:{_REAL}\s*:\s*{_REAL}(?:\s*,\s*{_REAL}\s*:\s*{_REAL})*\s*)?\}}\s*")
_MOST_REQUESTS = 5_000_000


@dataclass
class _Client:
    windows: dict[float, tuple[float, str, float]] = field(default_factory=dict)  # start s -> (rate 1/s, pattern, shape)
    lengths: dict[float, tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)


def read_servegen(
    path: str | Path, *, lengths: str | None = None, start: float = 0.0, end: float | None = None,
    rate: float | None = None, clients: int | None = None, seed: int = 1, source: Source | None = None,
    skip_bad: bool = False,
) -> Workload:
    """Requests drawn from the clients of a file (plain or gzip) or of a folder of chunks; no sessions, no token identity.

    `start`, `end`: the part of the trace's clock to draw, s (end None: all of it). `rate`: mean requests/s over this part,
    by scaling every client alike; None = as fitted. `clients`: only the busiest. `lengths`: the file of the token
    histograms, if it does not lie beside the other under its usual name. A client's gaps within a window have the fitted
    law's shape and its rate's mean. Clients without histograms are left out and counted. Draws depend on (seed, client,
    window) alone. Raises TraceError with file, line, key, found and allowed.
    """
    if not (0 <= start < math.inf and (end is None or start < end)):
        raise TraceError(str(path), "start, end", found=(start, end), allowed="0 <= start < end, in s")
    if rate is not None and not 0 < rate < math.inf:
        raise TraceError(str(path), "rate", found=rate, allowed="a finite number above 0")
    if clients is not None and (type(clients) is not int or clients < 1):
        raise TraceError(str(path), "clients", found=clients, allowed="a whole number, at least 1")
    bad = strict.BadRows(skip_bad)
    known: dict[str, _Client] = {}
    pairs = list(_files(Path(path), lengths))
    for trace, histograms in pairs:
        _windows(trace, known, bad)
        _histograms(histograms, known)
    last = max((at for client in known.values() for at in client.windows), default=0.0)
    width = _width(path, known)
    end = last + width if end is None else min(end, last + width)
    spans = {name: [(at, w) for at, w in sorted(client.windows.items()) if at < end and at + width > start and w[0] > 0]
             for name, client in known.items()}
    expected = {name: sum(w[0] * (min(at + width, end) - max(at, start)) for at, w in span)
                for name, span in spans.items()}
    with_lengths = [name for name, client in known.items() if client.lengths and expected[name] > 0]
    busiest = sorted(with_lengths, key=lambda name: (-expected[name], name))[:clients]
    total, kept = sum(expected.values()), sum(expected[name] for name in busiest)
    if not kept:
        raise TraceError(str(path), found="no client with requests and token histograms",
                         allowed=f"some between {start:g} and {end:g} s")
    scale = 1.0 if rate is None else rate * (end - start) / kept
    if kept * scale > _MOST_REQUESTS:
        raise TraceError(str(path), "rate", found=f"{kept * scale:.0f} requests",
                         allowed=f"at most {_MOST_REQUESTS}: take a shorter part, fewer clients or a lower rate")
    drawn = [_draw(seed, name, known[name], at, window, scale, width, start, end)
             for name in sorted(busiest) for at, window in spans[name]]
    arrival, inputs, outputs = (np.concatenate([part[k] for part in drawn]) for k in range(3))
    if not len(arrival):
        raise TraceError(str(path), found="no request drawn", allowed="a longer part or a higher rate")
    order = np.argsort(arrival, kind="stable")
    source = source or Source(Path(path).name)
    without = [name for name in known if expected[name] > 0 and not known[name].lengths]
    notes = (
        f"ServeGen: {len(arrival):,} requests drawn (seed {seed}) from {len(busiest):,} of {len(known):,} clients between "
        f"{start:g} and {end:g} s, rates times {scale:.4g}; fitted by its authors, not a log",
        f"{len(without):,} clients without token histograms left out: "
        f"{sum(expected[name] for name in without) / total:.1%} of the requests",
        "no token identity: nothing is shared, no sessions",
    )
    return build(arrival=arrival[order] - start, input_tokens=inputs[order], output_tokens=outputs[order],
                 source=replace(source, notes=(*source.notes, *notes)), skipped=tuple(bad.listed))


def _draw(
    seed: int, name: str, client: _Client, at: float, window: tuple[float, str, float], scale: float, width: float,
    start: float, end: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(arrivals, inputs, outputs) of a client in one window, cut to [start, end)."""
    rate, pattern, shape = window[0] * scale, window[1], window[2]
    random = generator(seed, "servegen", name, repr(at))
    mean = 1 / rate
    times: list[np.ndarray] = []
    now = at + float(random.random()) * mean  # the window begins somewhere within a gap
    while now < at + width:
        n = max(16, int((at + width - now) * rate * 1.1))
        gaps = random.gamma(shape, mean / shape, n) if pattern == "Gamma" else (
            random.weibull(shape, n) * mean / math.gamma(1 + 1 / shape))
        block = now + np.concatenate(([0.0], np.cumsum(gaps)))
        times.append(block[:-1])
        now = float(block[-1])
    arrival = np.concatenate(times) if times else np.zeros(0)
    begin = max(k for k in client.lengths if k <= at) if any(k <= at for k in client.lengths) else min(client.lengths)
    drawn = [values[np.searchsorted(cumulated, random.random(len(arrival)), side="right")]
             for values, cumulated in client.lengths[begin]]
    inside = (arrival >= start) & (arrival < end) & (arrival < at + width)
    return arrival[inside], drawn[0][inside], drawn[1][inside]


def _files(path: Path, lengths: str | None) -> Iterator[tuple[Path, Path]]:
    """(trace, token histograms) of each file named or found."""
    traces = sorted(path.glob("chunk-*-trace.csv*"), key=lambda p: (len(p.name), p.name)) if path.is_dir() else [path]
    if not traces:
        raise TraceError(str(path), found="no files", allowed="chunk-*-trace.csv beside chunk-*-dataset.json")
    for trace in traces:
        plain = trace.name.removesuffix(".gz")
        names = (plain.replace("-trace.csv", "-dataset.json"),
                 plain.replace("_clients", "_token_pdfs").removesuffix(".csv") + ".jsonl")
        found = [Path(lengths)] if lengths else [trace.with_name(f"{name}{gz}") for name in names for gz in ("", ".gz")
                                                 if name != plain]
        beside = next((file for file in found if file.is_file()), None)
        if beside is None:
            raise TraceError(str(trace), "lengths", why="no token histograms", allowed=" or ".join(f.name for f in found))
        yield trace, beside


def _windows(path: Path, known: dict[str, _Client], bad: strict.BadRows) -> None:
    one = path.name.split("-")[1] if path.name.startswith("chunk-") else None
    header: tuple[str, ...] | None = COLUMNS[1:] if one is not None else None
    for where, cells in csv_rows(path):
        try:
            if isinstance(cells, TraceError):
                raise cells
            if header is None:
                strict.check_keys(where, cells, COLUMNS)
                header = tuple(cells)
                continue
            if len(cells) != len(header):
                raise TraceError(where, why="cells", found=len(cells), allowed=f"{len(header)}: {','.join(header)}")
            row: dict[str, object] = dict(zip(header, cells, strict=True))
            name = one if one is not None else str(row["client_id"]).strip()
            values = {key: strict.cell(str(row[key])) for key in COLUMNS[1:] if key != "pattern"}
            at, rate, shape = (strict.real(where, values, key) for key in ("timestamp_s", "rate_rps", "param_1"))
            pattern = str(row["pattern"]).strip()
            if rate > 0 and (pattern not in _PATTERNS or not shape > 0):
                raise TraceError(where, "pattern", found=(pattern, shape), allowed="Gamma or Weibull with a shape above 0")
            client = known.setdefault(name, _Client())
            if at in client.windows:
                raise TraceError(where, "timestamp_s", why="a window stands twice", found=at)
            client.windows[at] = rate, pattern, shape
        except TraceError as error:
            if header is None:
                raise
            bad.refuse(error)


def _histograms(path: Path, known: dict[str, _Client]) -> None:
    one = path.name.split("-")[1] if path.name.startswith("chunk-") else None
    for where, row in json_documents(path):
        if isinstance(row, TraceError):
            raise row
        name = one if one is not None else str(row.get("client_id"))
        windows = row.get("dataset") if one is None else row
        if not isinstance(windows, dict):
            raise TraceError(where, "dataset", why="missing", allowed="{window start s: {input_tokens, output_tokens}}")
        for at, laws in windows.items():
            key = f"dataset[{at}]"
            if not isinstance(laws, dict) or not _is_time(at):
                raise TraceError(where, key, found=at, allowed="a window's start, s: {input_tokens, output_tokens}")
            made = [_law(where, f"{key}.{which}", laws.get(which)) for which in ("input_tokens", "output_tokens")]
            if name in known and all(law is not None for law in made):
                known[name].lengths[float(at)] = made[0], made[1]  # type: ignore[assignment]


def _is_time(at: object) -> bool:
    value = strict.cell(str(at))
    return isinstance(value, int | float) and 0 <= value < math.inf


def _law(where: str, key: str, text: object) -> tuple[np.ndarray, np.ndarray] | None:
    """(values, cumulated probabilities), None for an empty histogram. The texts are Python's of a dict."""
    if isinstance(text, dict):
        text = json.dumps(text).replace('"', "")
    if not isinstance(text, str) or not _HISTOGRAM.fullmatch(text):
        raise TraceError(where, key, why="no histogram", allowed="{value: probability, ...}")
    pairs = np.array([(float(a), float(b)) for a, b in _PAIR.findall(text)]).reshape(-1, 2)
    pairs = pairs[pairs[:, 1] > 0]
    if not len(pairs):
        return None
    if (pairs[:, 0] > strict.MOST_TOKENS).any():
        raise TraceError(where, key, found=float(pairs[:, 0].max()), allowed=f"at most {strict.MOST_TOKENS} tokens")
    cumulated = np.cumsum(pairs[:, 1])
    cumulated /= cumulated[-1]
    cumulated[-1] = np.inf  # a draw just below 1 stays inside
    return np.maximum(1, np.rint(pairs[:, 0])).astype(np.int64), cumulated


def _width(path: str | Path, known: dict[str, _Client]) -> float:
    """Seconds of a window: the least distance of two starts."""
    starts = sorted({at for client in known.values() for at in client.windows})
    if len(starts) < 2:
        raise TraceError(str(path), "timestamp_s", found=f"{len(starts)} windows", allowed="at least two, to tell a width")
    return min(b - a for a, b in pairwise(starts))
