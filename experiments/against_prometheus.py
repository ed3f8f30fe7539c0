"""Measured metrics: a dump of Prometheus's /api/v1/query_range over the raw series of vLLM.

One answer to `{__name__=~"vllm:.+"}`, several one after another, a list of answers, or an object whose values are answers.
Names: vllm/v1/metrics/loggers.py; older ones (gpu_cache_usage_perc, gpu_prefix_cache_*, time_per_output_token_seconds, which
is per token in V1) are understood, and names in which a relabelling put a prefix or `_` for `:`. Counters are summed over
engines and pods; a counter that falls was restarted, and goes on from 0 (as `increase` has it).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

import numpy as np

from simcore.errors import ConfigError, TraceError

QUERY = "raw series of vLLM from /api/v1/query_range, e.g. of the query {__name__=~\"vllm:.+\"}"
HISTOGRAMS = {
    "ttft": ("time_to_first_token_seconds",), "tpot": ("request_time_per_output_token_seconds",),
    "itl": ("inter_token_latency_seconds", "time_per_output_token_seconds"), "e2e": ("e2e_request_latency_seconds",),
    "queue": ("request_queue_time_seconds",), "prefill": ("request_prefill_time_seconds",),
    "decode": ("request_decode_time_seconds",), "prompt": ("request_prompt_tokens",),
    "generation": ("request_generation_tokens",),
}
COUNTERS = {
    "preemptions": ("num_preemptions",), "prompt_tokens": ("prompt_tokens",), "generation_tokens": ("generation_tokens",),
    "success": ("request_success",), "hits": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "queries": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
}
GAUGES = {
    "running": ("num_requests_running",), "waiting": ("num_requests_waiting",),
    "kv_use": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
}
_NAME = re.compile(r"(?:.*[^a-z])?vllm[:_](.+)")


@dataclass(frozen=True)
class Histogram:
    """Observations of each interval. `edges`: upper limits of the buckets, ascending, the last infinite; `counts`:
    float64[intervals, buckets], of each bucket alone; `sums`: float64[intervals]."""

    edges: np.ndarray
    counts: np.ndarray
    sums: np.ndarray


@dataclass(frozen=True)
class Metrics:
    """What a server's metrics say of k intervals: `times` float64[k + 1], s, unix. `counters`: increases, float64[k];
    `gauges`: values at `times`, float64[k + 1], summed over engines (kv_use: their mean). `engines`: 0 = not known."""

    path: str
    times: np.ndarray
    histograms: dict[str, Histogram]
    counters: dict[str, np.ndarray]
    gauges: dict[str, np.ndarray]
    engines: int
    model: str | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def span(self) -> float:
        return float(self.times[-1] - self.times[0])


@dataclass(frozen=True)
class _Series:
    labels: dict[str, str]
    times: np.ndarray
    values: np.ndarray


def is_answer(value: Any) -> bool:
    """Whether a JSON value is an answer of Prometheus, or holds some."""
    if isinstance(value, dict):
        inner = list(value.values())
        return "resultType" in value or "data" in value or (bool(inner) and all(
            isinstance(v, dict) and ("data" in v or "resultType" in v) for v in inner))
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) and is_answer(v) for v in value)


def read_prometheus(path: str, found: Sequence[tuple[int, Any]], match: Sequence[str] = ()) -> Metrics:
    """The metrics of a dump. `match`: `label=value`, of the series to take. Raises TraceError with file, series, found and
    allowed; ConfigError for a bad `match`."""
    wanted = _wanted(match)
    series: dict[str, list[_Series]] = defaultdict(list)
    others = 0
    for line, value in found:
        for where, result in _results(path if len(found) == 1 else f"{path}:{line}", value):
            name, one = _series(where, result)
            short = _NAME.fullmatch(name)
            if short is None:
                others += 1
            elif all(one.labels.get(key) == text for key, text in wanted.items()):
                series[short[1]].append(one)
    if not series:
        why = f"no series of vLLM{' with ' + ', '.join(match) if wanted else ''} among {others}"
        raise TraceError(path, why=why, allowed=QUERY)
    return _Reading(path, series, others).metrics()


def _wanted(match: Sequence[str]) -> dict[str, str]:
    wanted = {}
    for item in match:
        key, sign, value = item.partition("=")
        if not sign or not key:
            raise ConfigError(f"--match {item}", allowed="label=value, e.g. model_name=meta-llama/Llama-3.1-8B")
        wanted[key] = value
    return wanted


def _results(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        for k, inner in enumerate(value):
            yield from _results(f"{where}: [{k}]", inner)
    elif isinstance(value, dict) and not ({"data", "resultType", "status"} & set(value)):
        for key, inner in value.items():
            yield from _results(f"{where}: {key}", inner)
    elif not isinstance(value, dict):
        raise TraceError(where, found=value, allowed=QUERY)
    else:
        if value.get("status", "success") != "success":
            raise TraceError(where, "status", found=value.get("error") or value["status"], allowed="success")
        data = value.get("data", value)
        if not isinstance(data, dict) or data.get("resultType") != "matrix":
            kind = data.get("resultType") if isinstance(data, dict) else data
            raise TraceError(where, "resultType", found=kind, allowed="matrix: ask query_range, not query")
        if not isinstance(data.get("result"), list):
            raise TraceError(where, "result", found=data.get("result"), allowed="a list of series")
        for k, result in enumerate(data["result"]):
            yield f"{where}: result[{k}]", result


def _series(where: str, result: Any) -> tuple[str, _Series]:
    labels = result.get("metric") if isinstance(result, dict) else None
    if not isinstance(labels, dict) or not all(isinstance(v, str) for v in labels.values()):
        raise TraceError(where, "metric", found=labels, allowed="an object of labels")
    name = labels.get("__name__")
    if not isinstance(name, str):
        raise TraceError(where, "__name__", why="a series without a name: of rate(), sum() or the like", allowed=QUERY)
    pairs = result.get("values")
    if not isinstance(pairs, list) or not pairs:
        raise TraceError(where, "values", found=pairs, allowed="a list of [time, \"value\"]")
    times, values = np.empty(len(pairs)), np.empty(len(pairs))
    for k, pair in enumerate(pairs):
        try:
            times[k], values[k] = float(pair[0]), float(pair[1])
            if len(pair) != 2 or not isfinite(times[k]) or values[k] in (inf, -inf):
                raise ValueError
        except (TypeError, ValueError, LookupError, OverflowError):
            raise TraceError(f"{where} ({name})", f"values[{k}]", found=pair, allowed="[time, \"value\"]") from None
    if (np.diff(times) <= 0).any():
        raise TraceError(f"{where} ({name})", "values", why="time goes backwards", allowed="ascending times")
    keep = ~np.isnan(values)
    return name, _Series({k: v for k, v in labels.items() if k != "__name__"}, times[keep], values[keep])


class _Reading:
    """Series by name, over one grid of times."""

    def __init__(self, path: str, series: dict[str, list[_Series]], others: int) -> None:
        self.path, self.series = path, series
        self.times = np.unique(np.concatenate([s.times for group in series.values() for s in group]))
        self.notes = [f"{others} series that are not vLLM's are left alone"] if others else []
        if len(self.times) < 2:
            raise TraceError(path, "values", found=f"{len(self.times)} times",
                             allowed="at least two: give start, end and step")
        labels = [s.labels for group in series.values() for s in group]
        self.models = sorted({found["model_name"] for found in labels if "model_name" in found})
        if len(self.models) > 1:
            raise TraceError(path, "model_name", found=", ".join(self.models),
                             allowed=f"one model: --match model_name={self.models[0]}")
        self.restarts = 0

    def metrics(self) -> Metrics:
        histograms = {key: h for key, names in HISTOGRAMS.items() if (h := self._first(self._histogram, names)) is not None}
        counters = {key: c for key, names in COUNTERS.items() if (c := self._first(self._counter, names)) is not None}
        gauges = {key: g for key, names in GAUGES.items() if (g := self._first(self._gauge, names)) is not None}
        if "ttft" not in histograms and "e2e" not in histograms:
            raise TraceError(self.path, "vllm:time_to_first_token_seconds", why="no histogram of TTFT or E2E",
                             found=", ".join(sorted(self.series)), allowed=QUERY)
        for counter, histogram in (("prompt_tokens", "prompt"), ("generation_tokens", "generation")):
            if counter not in counters and histogram not in histograms:
                raise TraceError(self.path, f"vllm:{counter}_total", why="missing, so that lengths are not known",
                                 found=", ".join(sorted(self.series)), allowed=QUERY)
        some = histograms.get("e2e", histograms.get("ttft"))
        assert some is not None
        if not some.counts.sum():
            raise TraceError(self.path, why="no request ended in the time of the dump",
                             found=f"{self.times[-1] - self.times[0]:g} s", allowed="a dump of a time under load")
        if self.restarts:
            self.notes.append(f"{self.restarts} counters fell: an engine was restarted, its counters go on from 0")
        engines = max((len(group) for name, group in self.series.items() if name in ("num_requests_running",)), default=0)
        return Metrics(self.path, self.times, histograms, counters, gauges, engines,
                       self.models[0] if self.models else None, tuple(self.notes))

    def _first(self, read: Any, names: Sequence[str]) -> Any:
        return next((value for name in names if (value := read(name)) is not None), None)

    def _increase(self, series: Sequence[_Series]) -> np.ndarray:
        """float64[intervals]: what the counters grew by, an increase over missing samples spread over their time."""
        out = np.zeros(len(self.times) - 1)
        for one in series:
            if len(one.times) < 2:
                continue
            grown = np.diff(one.values)
            fell = grown < 0
            self.restarts += int(fell.sum())
            grown[fell] = one.values[1:][fell]
            at = np.searchsorted(self.times, one.times)
            steps = np.diff(at)
            if (steps == 1).all():
                out[at[0]:at[-1]] += grown
            else:
                total = np.interp(self.times[at[0]:at[-1] + 1], one.times, np.concatenate(([0.0], np.cumsum(grown))))
                out[at[0]:at[-1]] += np.diff(total)
        return out

    def _counter(self, name: str) -> np.ndarray | None:
        series = self.series.get(f"{name}_total", self.series.get(name))
        return None if series is None else self._increase(series)

    def _gauge(self, name: str) -> np.ndarray | None:
        series = self.series.get(name)
        if series is None:
            return None
        total, seen = np.zeros(len(self.times)), np.zeros(len(self.times))
        for one in series:
            at = np.searchsorted(self.times, one.times)
            total[at] += one.values
            seen[at] += 1
        if not seen.any():
            return None
        value = total / np.maximum(seen, 1) if "usage" in name else total
        known = np.flatnonzero(seen)
        return np.interp(self.times, self.times[known], value[known])

    def _histogram(self, name: str) -> Histogram | None:
        buckets = self.series.get(f"{name}_bucket")
        if buckets is None:
            return None
        limits: dict[tuple, set[float]] = defaultdict(set)
        by_limit: dict[float, list[_Series]] = defaultdict(list)
        for one in buckets:
            try:
                limit = float(one.labels["le"])
            except (KeyError, ValueError):
                raise TraceError(self.path, f"vllm:{name}_bucket", found=one.labels.get("le"),
                                 allowed="a label le") from None
            limits[tuple(sorted((k, v) for k, v in one.labels.items() if k != "le"))].add(limit)
            by_limit[limit].append(one)
        if len({frozenset(found) for found in limits.values()}) > 1:
            raise TraceError(self.path, f"vllm:{name}_bucket", why="engines with different buckets (or a bucket is missing)",
                             allowed="engines of one version: choose with --match")
        edges = np.array(sorted(by_limit))
        if edges[-1] != inf:
            raise TraceError(self.path, f"vllm:{name}_bucket", why="no bucket le=\"+Inf\"", found=edges.tolist(),
                             allowed=QUERY)
        restarts = self.restarts
        up_to = np.stack([self._increase(by_limit[limit]) for limit in edges.tolist()], axis=1)
        # Buckets of one scrape may be a moment apart: none counts below nothing.
        counts = np.maximum(np.diff(np.maximum.accumulate(up_to, axis=1), axis=1, prepend=0.0), 0.0)
        sums = self.series.get(f"{name}_sum")
        if sums is None:
            raise TraceError(self.path, f"vllm:{name}_sum", why="missing, so that there is no mean", allowed=QUERY)
        found = self._increase(sums)
        self.restarts = restarts + (self.restarts > restarts)
        return Histogram(edges, counts, found)
