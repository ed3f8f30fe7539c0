"""Measured runs, request by request: a `vllm bench serve --save-result --save-detailed` JSON, the summary.json of a run of
ours with `--save-detailed`, our requests table as CSV, or a CSV of one's own.

Fields of vLLM: vllm/benchmarks/serve.py (`calculate_metrics`, `main_async`) and lib/endpoint_request_func.py. A request that
failed has a text in `errors`, output_len 0 and TTFT 0. `start_times` are the sending times by the client's own clock; in
versions that lack them nothing says when a request was sent. A gap of `itls` is one between two chunks of the stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from simcore.errors import TraceError
from simcore.traces.files import csv_rows, lines
from simcore.traces.rows import MOST_TOKENS, cell

BENCH, OURS, CSV = "vllm bench serve", "simcore summary", "CSV"
CSV_NEEDS = ("arrival", "input_tokens", "output_tokens", "ttft", "e2e")
CSV_MORE = ("tpot", "queue_time", "preemptions", "status", "generated_tokens", "admitted", "first_token", "ended")
_LISTS = ("input_lens", "output_lens", "ttfts", "itls", "errors")
_SAVE = "a result of vllm bench serve with --save-result and --save-detailed"
AGREES = 0.01  # between the aggregates of a file and its own lists


@dataclass(frozen=True)
class Client:
    """How the client sent: `rate` requests/s (inf = at once) with gaps of a Gamma distribution of shape `burstiness`, at
    most `max_concurrency` at a time; `ramp`: (linear or exponential, first rate, last rate). None = not recorded."""

    rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp: tuple[str, float, float] | None = None


@dataclass(frozen=True)
class Requests:
    """n measured requests in the order of the file. Times in seconds, NaN where a request has none; `arrival` from the first
    one on, or None where the file does not say; `good`: answered to the end. `itls`: the gaps of each, or None. `split`:
    what was measured of queue, prefill and decode (s) and of preemptions (times), one array each."""

    path: str
    kind: str
    input_tokens: np.ndarray
    output_tokens: np.ndarray  # 0 where nothing is known to have been written
    arrival: np.ndarray | None
    ttft: np.ndarray
    e2e: np.ndarray
    good: np.ndarray
    played: np.ndarray  # bool[n]: what a simulation of the run has to play, judged or not
    tpot: np.ndarray | None = None
    itls: list[np.ndarray] | None = None
    split: dict[str, np.ndarray] | None = None
    client: Client = Client()
    duration: float | None = None
    model: str | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.input_tokens)


def documents(path: str | Path) -> list[tuple[int, Any]]:
    """(line where it begins, value) of each JSON value of a file, plain or gzip: one, or several after one another. Raises
    TraceError with file and line where the file is torn, empty or no JSON."""
    text = "".join(line for _, line in lines(path))
    decoder, place, found = json.JSONDecoder(), 0, []
    while True:
        while place < len(text) and text[place].isspace():
            place += 1
        if place == len(text):
            break
        line = text.count("\n", 0, place) + 1
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            at = getattr(error, "lineno", line)
            raise TraceError(f"{path}:{at}", why=f"not a whole JSON value, the file is torn or not JSON ({error})") from None
        found.append((line, value))
    if not found:
        raise TraceError(str(path), why="the file is empty", allowed=_SAVE)
    return found


def begins_as_json(path: str | Path) -> bool:
    for _, line in lines(path):
        if line.strip():
            return line.lstrip()[0] in "{["
    raise TraceError(str(path), why="the file is empty", allowed="measured requests, or a dump of metrics")


def read_bench(path: str | Path, found: Sequence[tuple[int, Any]]) -> Requests:
    """The requests of a result of `vllm bench serve` (or of ours). Raises TraceError with file, key, found and allowed."""
    where = str(path)
    if len(found) > 1:
        raise TraceError(f"{path}:{found[1][0]}", why=f"{len(found)} results in one file (--append-result)",
                         allowed="a file of its own for each result")
    data = found[0][1]
    if not isinstance(data, dict):
        raise TraceError(where, found=data, allowed=_SAVE)
    ours = "mean_queue_time_ms" in data
    missing = [name for name in _LISTS if name not in data and name != "errors"]
    if missing:
        raise TraceError(where, missing[0], why="missing: the file has aggregates only, or is no result", allowed=_SAVE)
    n = len(_list(where, data, "input_lens", None))
    if not n:
        raise TraceError(where, "input_lens", why="no requests", allowed="at least one")
    inputs = _tokens(where, data, "input_lens", n, least=1)
    outputs = _tokens(where, data, "output_lens", n, least=0)
    ttft = _seconds(where, data, "ttfts", n, hole=ours)
    itls = [_gaps(where, k, gaps, hole=ours) for k, gaps in enumerate(_list(where, data, "itls", n))]
    errors = _list(where, data, "errors", n) if "errors" in data else [""] * n
    good = np.array([not error for error in errors]) & (outputs > 0) & ~np.isnan(ttft)
    gaps_sum = np.array([float(gaps.sum()) for gaps in itls])
    e2e = ttft + gaps_sum
    if "latencies" in data:
        e2e = _seconds(where, data, "latencies", n, hole=ours)
        good &= ~np.isnan(e2e)
        short = good & (e2e < ttft * (1 - 1e-9))
        if short.any():
            k = int(np.argmax(short))
            raise TraceError(where, f"latencies[{k}]", found=float(e2e[k]), allowed=f"at least its TTFT, {ttft[k]:g} s")
    arrival = _seconds(where, data, "start_times", n, hole=ours) if "start_times" in data else None
    if arrival is not None:
        good &= ~np.isnan(arrival)
    if not good.any():
        raise TraceError(where, "errors", why="no request was answered", found=next((e for e in errors if e), ""))
    if arrival is not None and not ours:  # ours are from the first arrival on already
        arrival = arrival - arrival[good].min()
    notes = list(_own_sums(data, good, ttft, itls)) if not ours or good.all() else []
    if "spec_decode_acceptance_rate" in data:
        notes.append("measured with speculative decoding, which is not simulated")
    ramp = None
    if data.get("ramp_up_strategy") is not None:
        ramp = (_one_of(where, data, "ramp_up_strategy", ("linear", "exponential")),
                _number(where, data, "ramp_up_start_rps"), _number(where, data, "ramp_up_end_rps"))
        if not (0 <= ramp[1] < inf and 0 < ramp[2] < inf) or (ramp[0] == "exponential" and not ramp[1]):
            raise TraceError(where, "ramp_up_start_rps, ramp_up_end_rps", found=ramp[1:],
                             allowed="rates above 0 (linear: from 0)")
    split = None
    if ours and "queue_times" in data:  # vLLM's own queue_times are those of the client's semaphore
        queue = _seconds(where, data, "queue_times", n, hole=True)
        split = {"queue": queue, "prefill": ttft - queue, "decode": e2e - ttft}
    concurrency = data.get("max_concurrency")
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        raise TraceError(where, "max_concurrency", found=concurrency, allowed="null, or a whole number of at least 1")
    burstiness = _number(where, data, "burstiness", default=1.0)
    if not burstiness > 0:
        raise TraceError(where, "burstiness", found=burstiness, allowed="a number above 0")
    rate = _number(where, data, "request_rate") if "request_rate" in data else None
    if rate is not None and not rate > 0:
        raise TraceError(where, "request_rate", found=rate, allowed='a number above 0, or "inf"')
    return Requests(
        where, OURS if ours else BENCH, inputs, outputs, arrival, np.where(good, ttft, np.nan), np.where(good, e2e, np.nan),
        good, good, itls=itls, split=split, client=Client(rate, burstiness, concurrency, ramp),
        duration=_number(where, data, "duration", default=0.0) or None,
        model=data["model_id"] if isinstance(data.get("model_id"), str) else None, notes=tuple(notes))


def read_requests_csv(path: str | Path) -> Requests:
    """The requests of our table, or of any CSV with arrival, input_tokens, output_tokens, ttft and e2e (s and tokens);
    further columns are left alone. Raises TraceError with file, line, column, found and allowed."""
    rows = csv_rows(path)
    where, header = next(rows, (str(path), []))
    if isinstance(header, TraceError):
        raise header
    header = [name.strip() for name in header]
    for name in CSV_NEEDS:
        if name not in header:
            raise TraceError(where, name, why="no such column", found=", ".join(header), allowed=", ".join(CSV_NEEDS))
    known = [*CSV_NEEDS, *CSV_MORE]
    twice = [name for name in known if header.count(name) > 1]
    if twice:
        raise TraceError(where, twice[0], why="a column stands twice", found=", ".join(header))
    columns: dict[str, list[Any]] = {name: [] for name in known if name in header}
    for row in _checked_rows(rows, header):
        for name, value in row.items():
            columns[name].append(value)
    n = len(columns["arrival"])
    if not n:
        raise TraceError(str(path), why="no requests", allowed="at least one row")
    return _from_columns(str(path), n, columns)


def _checked_rows(rows: Iterator[tuple[str, list[str] | TraceError]], header: list[str]) -> Iterator[dict[str, Any]]:
    for where, cells in rows:
        if isinstance(cells, TraceError):
            raise cells
        if len(cells) != len(header):
            raise TraceError(where, why="the row is torn", found=f"{len(cells)} cells", allowed=f"{len(header)}")
        row: dict[str, Any] = {}
        for name, text in zip(header, cells, strict=True):
            if name in ("input_tokens", "output_tokens"):
                value: Any = cell(text)
                least = 1 if name == "input_tokens" else 0
                if type(value) is not int or not least <= value <= MOST_TOKENS:
                    raise TraceError(where, name, found=text, allowed=f"a whole number, {least} to {MOST_TOKENS}")
                row[name] = value
            elif name == "status":
                row[name] = text.strip()
            elif name in CSV_NEEDS or name in CSV_MORE:
                value = float("nan") if text.strip().lower() in ("", "nan") else cell(text)
                if isinstance(value, str) or value in (inf, -inf):
                    raise TraceError(where, name, found=text, allowed="a number, or blank where there is none")
                if name in ("ttft", "e2e", "tpot", "queue_time") and value < 0:
                    raise TraceError(where, name, found=text, allowed="a number of at least 0, or blank")
                row[name] = float(value)
        if row["arrival"] != row["arrival"] and row.get("status", "finished") == "finished":
            raise TraceError(where, "arrival", why="blank in a row that ended well", allowed="seconds, on any clock")
        if row["e2e"] < row["ttft"] * (1 - 1e-9):
            raise TraceError(where, "e2e", found=row["e2e"], allowed=f"at least the TTFT, {row['ttft']:g} s")
        yield row


def _from_columns(path: str, n: int, columns: dict[str, list[Any]]) -> Requests:
    values = {name: np.array(found) for name, found in columns.items()}
    simulated = "status" in values and "generated_tokens" in values
    good = ~np.isnan(values["ttft"]) & ~np.isnan(values["e2e"]) & (values["output_tokens"] > 0)
    if "status" in values:
        good &= values["status"] == "finished"
    if not good.any():
        raise TraceError(path, why="no row has a TTFT and an E2E", allowed="at least one request that ended well")
    split: dict[str, np.ndarray] = {}
    if "queue_time" in values:
        queue = values["queue_time"]
        split = {"queue": queue, "prefill": values["ttft"] - queue, "decode": values["e2e"] - values["ttft"]}
    if "preemptions" in values:
        split["preemptions"] = values["preemptions"]
    arrival, played = values["arrival"], good
    if simulated:  # time stays as it is, to the last bit; what was refused or unfinished came too
        played = ~np.isnan(arrival) & (values["output_tokens"] > 0)
    else:  # a wall clock's times are too large to keep a microsecond in a sum
        arrival = arrival - arrival[good].min()
    tpot = values.get("tpot")
    return Requests(
        path, CSV, values["input_tokens"].astype(np.int64), values["output_tokens"].astype(np.int64), arrival,
        np.where(good, values["ttft"], np.nan), np.where(good, values["e2e"], np.nan), good, played,
        tpot=None if tpot is None else np.where(good, tpot, np.nan), split=split or None)


def _own_sums(data: dict[str, Any], good: np.ndarray, ttft: np.ndarray, itls: list[np.ndarray]) -> Iterator[str]:
    """What the aggregates of a file say against its own lists: a file that was cut or mixed by hand is told so."""
    window = data.get("window")
    if isinstance(window, dict) and window.get("kind") == "steady":
        return  # ours, whose aggregates are of the window
    completed = data.get("completed")
    if isinstance(completed, int) and completed != int(good.sum()):
        yield f"the file counts {completed} completed requests, its lists have {int(good.sum())}"
    gaps = np.concatenate([g for g, ok in zip(itls, good, strict=True) if ok] or [np.zeros(0)])
    for name, found in (("ttft", ttft[good]), ("itl", gaps)):
        said = data.get(f"mean_{name}_ms")
        if isinstance(said, (int, float)) and len(found):
            mean = 1e3 * float(found.mean())
            if abs(said - mean) > AGREES * max(mean, 1e-3):
                yield f"the file's mean_{name}_ms is {said:g}, the mean of its list {mean:g}: a file changed by hand?"


def _list(where: str, data: dict[str, Any], key: str, n: int | None) -> list[Any]:
    value = data[key]
    if not isinstance(value, list):
        raise TraceError(where, key, found=value, allowed="a list, one entry a request")
    if n is not None and len(value) != n:
        raise TraceError(where, key, found=f"{len(value)} entries", allowed=f"{n}, as many as input_lens")
    return value


def _tokens(where: str, data: dict[str, Any], key: str, n: int, *, least: int) -> np.ndarray:
    for k, value in enumerate(_list(where, data, key, n)):
        if type(value) is not int or not least <= value <= MOST_TOKENS:
            raise TraceError(where, f"{key}[{k}]", found=value, allowed=f"a whole number, {least} to {MOST_TOKENS}")
    return np.array(data[key], dtype=np.int64)


def _seconds(where: str, data: dict[str, Any], key: str, n: int, *, hole: bool) -> np.ndarray:
    """float64[n]; null is NaN where `hole` (ours writes it for a request that did not get so far)."""
    out = np.full(n, np.nan)
    for k, value in enumerate(_list(where, data, key, n)):
        if value is None and hole:
            continue
        if type(value) not in (int, float) or not isfinite(value) or value < 0:
            raise TraceError(where, f"{key}[{k}]", found=value, allowed="seconds, a finite number of at least 0")
        out[k] = value
    return out


def _gaps(where: str, k: int, gaps: Any, *, hole: bool) -> np.ndarray:
    if gaps is None and hole:
        return np.zeros(0)
    if not isinstance(gaps, list):
        raise TraceError(where, f"itls[{k}]", found=gaps, allowed="a list of seconds")
    for j, value in enumerate(gaps):
        if type(value) not in (int, float) or not isfinite(value) or value < 0:
            raise TraceError(where, f"itls[{k}][{j}]", found=value, allowed="seconds, a finite number of at least 0")
    return np.array(gaps, dtype=np.float64)


def _number(where: str, data: dict[str, Any], key: str, default: float | None = None) -> float:
    """data[key] as a float; "inf" and Infinity are infinite."""
    value = data.get(key)
    if value is None and default is not None:
        return default
    if value == "inf":
        return inf
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise TraceError(where, key, found=value, allowed="a number")
    return float(value)


def _one_of(where: str, data: dict[str, Any], key: str, allowed: Sequence[str]) -> str:
    if data[key] not in allowed:
        raise TraceError(where, key, found=data[key], allowed=", ".join(allowed))
    return str(data[key])
