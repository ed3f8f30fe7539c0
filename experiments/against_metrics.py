"""Measured and simulated figures side by side: distributions, errors, and how far a repeat would be off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from simcore.randomness import generator

if TYPE_CHECKING:
    from simcore.experiments.against_files import Requests
    from simcore.experiments.against_prometheus import Histogram, Metrics

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
SPLIT = {"queue": "queue", "prefill": "prefill", "decode": "decode", "again": "preempted, waiting again"}
STATISTICS = {"mean": None, "p50": 0.5, "p90": 0.9, "p99": 0.99}
NUMBERS = {
    "request_throughput": ("requests", "/s"), "output_throughput": ("output tokens", "/s"), "running": ("running", ""),
    "waiting": ("waiting", ""), "kv_use": ("KV in use", "%"), "hit_rate": ("prefix hit rate", "%"),
    "preemptions": ("preemptions a request", ""),
}
RESAMPLES = 400
MOST_GAPS = 1_000_000  # of inter-token gaps that a bootstrap looks at; more are thinned evenly
_NAN = float("nan")


@dataclass(frozen=True)
class Sample:
    """Observed values one by one (s), ascending; `owner`: the request of each, for resampling."""

    values: np.ndarray
    owner: np.ndarray | None = None

    @property
    def count(self) -> float:
        return len(self.values)

    @property
    def mean(self) -> float:
        return float(self.values.mean()) if len(self.values) else _NAN

    def quantile(self, q: float) -> float:
        return float(np.quantile(self.values, q)) if len(self.values) else _NAN

    def statistic(self, name: str) -> float:
        q = STATISTICS[name]
        return self.mean if q is None else self.quantile(q)


@dataclass(frozen=True)
class Binned:
    """Observed values counted in a server's buckets: `edges` as in Histogram, `counts` float64[buckets]; `total`: their sum.
    Quantiles as Prometheus's histogram_quantile has them: linear within a bucket."""

    edges: np.ndarray
    counts: np.ndarray
    total: float

    @property
    def count(self) -> float:
        return float(self.counts.sum())

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else _NAN

    def bucket(self, q: float) -> tuple[float, float]:
        """The limits between which the quantile lies."""
        k = self._bucket(q)
        return (float(self.edges[k - 1]) if k else 0.0), float(self.edges[k])

    def _bucket(self, q: float) -> int:
        return min(int(np.searchsorted(np.cumsum(self.counts), q * self.count)), len(self.edges) - 1)

    def quantile(self, q: float) -> float:
        if not self.count:
            return _NAN
        k = self._bucket(q)
        low, high = self.bucket(q)
        if np.isinf(high) or not self.counts[k]:
            return low if np.isinf(high) else high
        return low + (high - low) * (q * self.count - float(self.counts[:k].sum())) / float(self.counts[k])

    def statistic(self, name: str) -> float:
        q = STATISTICS[name]
        return self.mean if q is None else self.quantile(q)


Spread = Sample | Binned


@dataclass(frozen=True)
class Side:
    """One run, measured or simulated: its distributions (LATENCIES, SPLIT; s) and plain numbers (NUMBERS)."""

    spreads: dict[str, Any]
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One figure. `measured`, `simulated`: one value a file (simulated: the mean over seeds); `error`: of the means,
    simulated over measured - 1; `spread`: of the measurement, `seeds`: of the simulation, both relative, NaN = not known;
    `bucket`: of a server's histogram, in which both lie."""

    metric: str
    label: str
    statistic: str
    unit: str
    measured: tuple[float, ...]
    simulated: tuple[float, ...]
    error: float
    spread: float = _NAN
    seeds: float = _NAN
    bucket: tuple[float, float] | None = None

    @property
    def within(self) -> bool | None:
        """Whether the error is no larger than the spread; None where that is not known."""
        if np.isnan(self.spread) or np.isnan(self.error):
            return None
        return bool(abs(self.error) <= self.spread) or (self.bucket is not None and self.statistic != "mean")

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "measured": list(self.measured), "simulated": list(self.simulated),
                "bucket": list(self.bucket) if self.bucket else None, "within_spread": self.within}


def relative(found: float, reference: float) -> float:
    """found / reference - 1; 0 where both are 0, NaN where only the reference is."""
    if found == reference:
        return 0.0
    return found / reference - 1 if reference else _NAN


def compare_sides(measured: Sequence[Side], simulated: Sequence[Sequence[Side]], single: dict[tuple[str, str], float],
                  names: dict[str, str], statistics: Sequence[str] = tuple(STATISTICS)) -> list[Row]:
    """Rows of the distributions that every side has. `simulated`: of each file, one side a seed. `single`: relative spread
    of (metric, statistic) where there is one file only."""
    rows = []
    for key, label in names.items():
        if not all(key in side.spreads for side in (*measured, *(s for seeds in simulated for s in seeds))):
            continue
        for statistic in statistics:
            values = [side.spreads[key].statistic(statistic) for side in measured]
            found = [[side.spreads[key].statistic(statistic) for side in seeds] for seeds in simulated]
            rows.append(_row(key, label, statistic, "ms", values, found, single, 1e3,
                             _same_bucket(measured, simulated, key, statistic)))
    return rows


def compare_numbers(measured: Sequence[Side], simulated: Sequence[Sequence[Side]],
                    single: dict[tuple[str, str], float]) -> list[Row]:
    rows = []
    for key, (label, unit) in NUMBERS.items():
        if all(key in side.numbers for side in (*measured, *(s for seeds in simulated for s in seeds))):
            rows.append(_row(key, label, "", unit, [side.numbers[key] for side in measured],
                             [[side.numbers[key] for side in seeds] for seeds in simulated], single,
                             100.0 if unit == "%" else 1.0, None))
    return rows


def _row(key: str, label: str, statistic: str, unit: str, measured: list[float], simulated: list[list[float]],
         single: dict[tuple[str, str], float], scale: float, bucket: tuple[float, float] | None) -> Row:
    middle = float(np.mean(measured))
    found = [float(np.mean(seeds)) for seeds in simulated]
    spread = single.get((key, statistic), _NAN)
    if len(measured) > 1:
        spread = (max(measured) - min(measured)) / middle if middle else _NAN
    ranges = [max(seeds) - min(seeds) for seeds in simulated if len(seeds) > 1]
    seeds = float(np.mean(ranges)) / float(np.mean(found)) if ranges and np.mean(found) else _NAN
    return Row(key, label, statistic, unit, tuple(v * scale for v in measured), tuple(v * scale for v in found),
               relative(float(np.mean(found)), middle), spread, seeds,
               (bucket[0] * scale, bucket[1] * scale) if bucket else None)


def _same_bucket(measured: Sequence[Side], simulated: Sequence[Sequence[Side]], key: str, statistic: str
                 ) -> tuple[float, float] | None:
    q = STATISTICS[statistic]
    spreads = [side.spreads[key] for side in (*measured, *(s for seeds in simulated for s in seeds))]
    if q is None or not all(isinstance(spread, Binned) and spread.count for spread in spreads):
        return None
    found = {spread.bucket(q) for spread in spreads}
    return found.pop() if len(found) == 1 else None


# --- sides -----------------------------------------------------------------------------------------------------------


def sample(values: np.ndarray, owner: np.ndarray | None = None) -> Sample:
    keep = ~np.isnan(values)
    order = np.argsort(values[keep], kind="stable")
    owners = np.arange(len(values)) if owner is None else owner
    return Sample(values[keep][order], owners[keep][order])


def tpot_of(ttft: np.ndarray, e2e: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """float64[n], s: vLLM's TPOT, NaN for a single token."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(tokens > 1, (e2e - ttft) / (tokens - 1), np.nan)


def measured_side(m: Requests, rows: np.ndarray) -> Side:
    """The measured side over these rows of the file."""
    ttft, e2e, tokens = m.ttft[rows], m.e2e[rows], m.output_tokens[rows]
    tpot = tpot_of(ttft, e2e, tokens) if m.tpot is None else m.tpot[rows]
    spreads = {"ttft": sample(ttft), "tpot": sample(tpot), "e2e": sample(e2e)}
    if m.itls is not None and gaps_are_tokens(m):
        spreads["itl"] = gaps_sample([m.itls[int(i)] for i in rows])
    numbers: dict[str, float] = {}
    for key, values in (m.split or {}).items():
        if key == "preemptions":
            numbers[key] = float(np.nanmean(values[rows]))
        else:
            spreads[key] = sample(values[rows])
    seconds = m.duration
    if m.arrival is not None:
        seconds = float((m.arrival[rows] + e2e).max() - m.arrival[rows].min())
    return Side(spreads, numbers | _throughput(len(rows), int(tokens.sum()), seconds))


def _throughput(requests: int, tokens: int, seconds: float | None) -> dict[str, float]:
    return {"request_throughput": requests / seconds, "output_throughput": tokens / seconds} if seconds else {}


def gaps_are_tokens(m: Requests) -> bool:
    """Whether (nearly) every gap of a stream is one between two tokens; not so where a chunk holds several."""
    assert m.itls is not None
    gaps = sum(len(g) for g, ok in zip(m.itls, m.good, strict=True) if ok)
    tokens = int(np.maximum(m.output_tokens[m.good] - 1, 0).sum())
    return gaps > 0 and abs(gaps - tokens) <= 0.01 * tokens


def gaps_sample(gaps: Sequence[np.ndarray]) -> Sample:
    owner = np.repeat(np.arange(len(gaps)), [len(g) for g in gaps])
    return sample(np.concatenate(gaps) if len(gaps) else np.zeros(0), owner)


def simulated_side(table: dict[str, np.ndarray], gaps: Sequence[np.ndarray], rows: np.ndarray, from_zero: bool) -> Side:
    """The simulated side over these requests. `table`: columns of the requests table; `gaps`: of each of `rows`;
    `from_zero`: throughput is counted from time 0 on, as a client that waited for its first request counts it."""
    at = {name: values[rows] for name, values in table.items()}
    spreads: dict[str, Any] = {name: sample(at[name]) for name in ("ttft", "tpot", "e2e")}
    spreads["itl"] = gaps_sample(gaps)
    spreads |= {key: sample(values) for key, values in split_of(at).items()}
    seconds = float(at["ended"].max()) - (0.0 if from_zero else float(at["arrival"].min()))
    numbers = {"preemptions": float(at["preemptions"].mean())}
    return Side(spreads, numbers | _throughput(len(rows), int(at["generated_tokens"].sum()), seconds))


def split_of(at: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Where the time of requests goes (s). Queue, prefill and decode as vLLM's metrics cut it, so that waiting again after a
    preemption is part of prefill or decode; `again` says how much that was."""
    again = at["e2e"] - at["queue_time"] - at["service"]
    again = np.where(at["preemptions"] > 0, np.maximum(again, 0.0), np.where(np.isnan(again), np.nan, 0.0))
    return {"queue": at["queue_time"], "prefill": at["first_token"] - at["admitted"],
            "decode": at["ended"] - at["first_token"], "again": again}


def of_metrics(m: Metrics) -> Side:
    """The measured side of a server's metrics over all their time."""
    spreads = {key: whole(h) for key, h in m.histograms.items() if key in LATENCIES or key in SPLIT}
    ended = m.counters["success"].sum() if "success" in m.counters else _ended(m)
    numbers = {"request_throughput": float(ended) / m.span}
    if "generation_tokens" in m.counters:
        numbers["output_throughput"] = float(m.counters["generation_tokens"].sum()) / m.span
    if "preemptions" in m.counters and ended:
        numbers["preemptions"] = float(m.counters["preemptions"].sum()) / float(ended)
    if m.counters.get("queries", np.zeros(1)).sum() > 0 and "hits" in m.counters:
        numbers["hit_rate"] = float(m.counters["hits"].sum() / m.counters["queries"].sum())
    steps = np.diff(m.times)
    for key, values in m.gauges.items():
        numbers[key] = float(((values[1:] + values[:-1]) / 2 * steps).sum() / m.span)
    return Side(spreads, numbers)


def _ended(m: Metrics) -> float:
    some = m.histograms.get("e2e", m.histograms.get("ttft"))
    return float(some.counts.sum()) if some is not None else _NAN


def whole(h: Histogram) -> Binned:
    return Binned(h.edges, h.counts.sum(axis=0), float(h.sums.sum()))


def into_buckets(values: np.ndarray, like: Binned) -> Binned:
    """Values counted in the buckets of another distribution, as the server would have counted them."""
    values = values[~np.isnan(values)]
    counts = np.bincount(np.searchsorted(like.edges, values, side="left"), minlength=len(like.edges)).astype(float)
    return Binned(like.edges, counts, float(values.sum()))


# --- spread of one file ----------------------------------------------------------------------------------------------


def bootstrap_requests(side: Side, requests: int) -> dict[tuple[str, str], float]:
    """Relative half-width of the 95% interval of each figure under resampling of requests. Requests that share a queue are
    not independent: a second run may be further off than this."""
    rng = generator(0, "against/bootstrap")
    draws = rng.multinomial(requests, np.full(requests, 1 / requests), size=RESAMPLES)
    out: dict[tuple[str, str], float] = {}
    for key, spread in side.spreads.items():
        if not isinstance(spread, Sample) or not len(spread.values) or spread.owner is None:
            continue
        every = -(-len(spread.values) // MOST_GAPS)
        values, owner = spread.values[::every], spread.owner[::every]
        found: dict[str, list[float]] = {name: [] for name in STATISTICS}
        for draw in draws if len(values) < MOST_GAPS // 10 else draws[:100]:
            weight = np.cumsum(draw[owner])
            if not weight[-1]:
                continue
            found["mean"].append(float((values * draw[owner]).sum() / weight[-1]))
            for name, q in STATISTICS.items():
                if q is not None:
                    found[name].append(float(values[min(np.searchsorted(weight, q * weight[-1]), len(values) - 1)]))
        out |= {(key, name): _half(found[name], spread.statistic(name)) for name in STATISTICS}
    return out


def bootstrap_intervals(m: Metrics) -> dict[tuple[str, str], float]:
    """The same under resampling of the intervals of a dump, whose load may differ on purpose; of gauges, which are looked at
    once an interval, 1.96 standard errors of their mean."""
    k = len(m.times) - 1
    out: dict[tuple[str, str], float] = {}
    draws = generator(0, "against/bootstrap").multinomial(k, np.full(k, 1 / k), size=RESAMPLES)
    for key, h in m.histograms.items():
        if key not in LATENCIES and key not in SPLIT:
            continue
        made = [Binned(h.edges, draw @ h.counts, float(draw @ h.sums)) for draw in draws]
        for name in STATISTICS:
            out[key, name] = _half([b.statistic(name) for b in made if b.count], whole(h).statistic(name))
    for key, values in m.gauges.items():
        if values.mean() > 0:
            out[key, ""] = float(1.96 * values.std(ddof=1) / np.sqrt(len(values)) / values.mean())
    return out


def _half(found: Sequence[float], value: float) -> float:
    if len(found) < 2 or not value > 0:
        return _NAN
    low, high = np.quantile(found, [0.025, 0.975])
    return float(high - low) / 2 / value


# --- before and after ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One figure before and after a change, relative to before. `spread`: of the measured change (NaN = not known);
    `sign`: agrees, contradicts, or none where the measured change is within its spread; `size`: whether the predicted change
    is within the spread of the measured one."""

    metric: str
    label: str
    statistic: str
    unit: str
    before: float
    after: float
    measured: float
    predicted: float
    spread: float
    sign: str
    size: bool | None


def changes(before: Sequence[Row], after: Sequence[Row]) -> list[Change]:
    of_after = {(row.metric, row.statistic): row for row in after}
    out = []
    for a in before:
        b = of_after.get((a.metric, a.statistic))
        if b is None:
            continue
        was, now = float(np.mean(a.measured)), float(np.mean(b.measured))
        measured = relative(now, was)
        predicted = relative(float(np.mean(b.simulated)), float(np.mean(a.simulated)))
        spread = float(np.hypot(a.spread * was, b.spread * now)) / was if was else _NAN
        if np.isnan(measured) or np.isnan(predicted):
            sign = "not known"
        elif not np.isnan(spread) and abs(measured) <= spread:
            sign = "none measured"
        else:
            sign = "agrees" if np.sign(measured) == np.sign(predicted) else "contradicts"
        size = None if np.isnan(spread) or sign == "not known" else bool(abs(predicted - measured) <= spread)
        out.append(Change(a.metric, a.label, a.statistic, a.unit, was, now, measured, predicted, spread, sign, size))
    return out
