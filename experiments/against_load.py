"""A workload drawn to be like what a server's metrics saw: the counts and mean lengths of each interval, arrivals of a
Poisson process within it. A weaker check than the requests themselves: which lengths met which, bursts inside an interval,
sessions and prefixes are not in the metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simcore.errors import ConfigError
from simcore.experiments.against_metrics import LATENCIES, SPLIT, Binned, Side, into_buckets, split_of, whole
from simcore.experiments.against_prometheus import Histogram, Metrics
from simcore.models.serving import RunResult
from simcore.randomness import generator
from simcore.traces.workload import Source, Workload, build

MOST_REQUESTS = 200_000
LEAD = 10  # mean E2E of a lead-in
_BLOCK = 16  # tokens; of the common prefix


@dataclass(frozen=True)
class Load:
    """A drawn workload; the metrics' time is `lead` to `lead + span` of it."""

    workload: Workload
    lead: float
    notes: tuple[str, ...]


def arrivals_of(m: Metrics) -> np.ndarray:
    """float64[k]: requests that came in each interval: first tokens and the growth of the queue, or, without TTFT, ends and
    the growth of what is in the engine. None is negative, and they keep their total where that is possible."""
    if "ttft" in m.histograms:
        came = m.histograms["ttft"].counts.sum(axis=1).copy()
        inside = m.gauges.get("waiting", np.zeros(len(m.times)))
    else:
        came = m.histograms["e2e"].counts.sum(axis=1).copy()
        inside = m.gauges.get("running", np.zeros(len(m.times))) + m.gauges.get("waiting", np.zeros(len(m.times)))
    came += np.diff(inside)
    owed = 0.0
    for k in range(len(came)):
        came[k] += owed
        owed = min(came[k], 0.0)
        came[k] = max(came[k], 0.0)
    return came


def draw_load(m: Metrics, seed: int, longest: int) -> Load:
    """Draw the workload. `longest`: tokens of prompt and output that the engine takes. Raises ConfigError for one that is
    too large to play, or empty."""
    came = arrivals_of(m)
    if not 1 <= came.sum() <= MOST_REQUESTS:
        raise ConfigError(m.path, found=f"{came.sum():,.0f} requests in {m.span:,.0f} s",
                          allowed=f"1 to {MOST_REQUESTS:,}: narrow start and end of the query")
    steps = np.diff(m.times)
    lead = 0.0
    notes = [f"arrivals: drawn, Poisson with the counts of each of {len(came)} intervals of {np.median(steps):g} s, seed "
             f"{seed}: a weaker check than the requests themselves"]
    busy = sum(float(m.gauges[key][0]) for key in ("running", "waiting") if key in m.gauges)
    if came[0] > 0 and (busy > 0 or not m.gauges):
        e2e = m.histograms.get("e2e")
        lead = min(m.span, max(float(steps[0]), LEAD * whole(e2e).mean if e2e is not None else 0.0))
        came, steps = np.concatenate(([came[0] / steps[0] * lead], came)), np.concatenate(([lead], steps))
        notes.append(f"the server was not empty at the start: a lead-in of {lead:.3g} s at the first interval's rate, not "
                     "counted")
    ends = np.cumsum(steps)
    count = np.diff(np.floor(np.cumsum(came) + 0.5), prepend=0.0).astype(np.int64)  # rounded so that totals stay
    of = np.repeat(np.arange(len(count)), count)
    n = len(of)
    rng = generator(seed, "against/arrival")
    arrival = np.sort(ends[of] - rng.random(n) * steps[of])
    inputs, how_in = _lengths(m, "prompt", "prompt_tokens", "ttft", of, len(count), seed)
    outputs, how_out = _lengths(m, "generation", "generation_tokens", "e2e", of, len(count), seed)
    long = inputs + outputs > longest
    outputs = np.minimum(outputs, longest - 1)
    inputs = np.minimum(inputs, longest - outputs)
    notes += [f"prompt lengths: {how_in}", f"output lengths: {how_out}, drawn apart from the prompts"]
    if long.any():
        notes.append(f"{int(long.sum())} of {n} drawn requests were cut to the {longest} tokens that the engine takes")
    known, note = _prefix(m, inputs)
    notes.append(note)
    workload = build(
        arrival=arrival, input_tokens=inputs, output_tokens=outputs, source=Source(m.path, notes=tuple(notes)),
        known_tokens=known, block_ids=[np.arange(-(-int(k) // _BLOCK), dtype=np.int64) for k in known], block_tokens=_BLOCK)
    return Load(workload, lead, tuple(notes))


def _lengths(m: Metrics, histogram: str, counter: str, count_of: str, of: np.ndarray, intervals: int, seed: int
             ) -> tuple[np.ndarray, str]:
    """(int64[n] tokens, how they came about): of each request of interval `of`."""
    h = m.histograms.get(histogram)
    counts = h.counts.sum(axis=1) if h is not None else _counts(m, count_of)
    sums = m.counters[counter] if counter in m.counters and h is None else h.sums if h is not None else counts * np.nan
    overall = float(sums.sum() / counts.sum()) if counts.sum() else 1.0
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(counts >= 1, sums / counts, overall)
    mean = np.concatenate((np.full(intervals - len(mean), mean[0]), mean))  # the lead-in is like the first interval
    if h is None or not h.counts.sum():
        return np.maximum(np.rint(mean[of]), 1).astype(np.int64), "the mean of each interval, all alike"
    drawn = _from_buckets(h, generator(seed, f"against/{histogram}").random(len(of)))
    expected = max(float(drawn.mean()), 1e-9) if len(drawn) else 1.0
    tokens = np.maximum(np.rint(drawn * mean[of] / expected), 1).astype(np.int64)
    return tokens, "drawn from the server's buckets, even within one"


def _counts(m: Metrics, key: str) -> np.ndarray:
    some = m.histograms.get(key, m.histograms.get("e2e", m.histograms.get("ttft")))
    assert some is not None
    return some.counts.sum(axis=1)


def _from_buckets(h: Histogram, u: np.ndarray) -> np.ndarray:
    """Values at the shares u of the histogram, linear within a bucket; the last, open one is its lower limit."""
    counts = h.counts.sum(axis=0)
    low = np.concatenate(([0.0], h.edges[:-1]))
    high = np.where(np.isinf(h.edges), low, h.edges)
    filled = counts > 0
    counts, low, high = counts[filled], low[filled], high[filled]
    up_to = np.cumsum(counts)
    k = np.minimum(np.searchsorted(up_to, u * up_to[-1], side="right"), len(counts) - 1)
    return low[k] + (high[k] - low[k]) * np.clip((u * up_to[-1] - up_to[k] + counts[k]) / counts[k], 0, 1)


def _prefix(m: Metrics, inputs: np.ndarray) -> tuple[np.ndarray, str]:
    """(int64[n] tokens that a prompt has in common with all others, what to say)."""
    queries = m.counters.get("queries", np.zeros(1)).sum()
    rate = float(m.counters["hits"].sum() / queries) if queries and "hits" in m.counters else 0.0
    if not rate:
        return np.zeros(len(inputs), dtype=np.int64), "the metrics have no prefix hits: nothing is shared"
    known = (inputs * rate).astype(np.int64) // _BLOCK * _BLOCK
    return known, (f"measured prefix hit rate {rate:.1%}: each prompt begins with such a share of one common prefix; how "
                   "many different ones there were is not in the metrics, so that KV memory is flattered")


def window_side(result: RunResult, load: Load, m: Metrics, blocks: int, sample_every: float) -> Side:
    """What the server's counters would have seen of a run in the metrics' time: a TTFT when the first token comes, a gap at
    its end, all else at the request's end; through the server's buckets."""
    requests = result.requests
    begin, end = load.lead, load.lead + m.span
    at = {name: requests[name].to_numpy(dtype=float) for name in (
        "arrival", "admitted", "first_token", "ended", "service", "ttft", "tpot", "e2e", "queue_time", "preemptions",
        "cached_tokens", "input_tokens")}
    finished = (requests["status"] == "finished").to_numpy(dtype=bool) & (at["ended"] > begin) & (at["ended"] <= end)
    first = (at["first_token"] > begin) & (at["first_token"] <= end)
    values = {"ttft": at["ttft"][first], "tpot": at["tpot"][finished], "e2e": at["e2e"][finished]}
    values |= {key: found[finished] for key, found in split_of(at).items()}
    values["itl"], tokens = _gaps(result, begin, end)
    spreads = {}
    for key in (*LATENCIES, *SPLIT):
        if key in m.histograms:
            spreads[key] = into_buckets(values[key], whole(m.histograms[key]))
    spreads["again"] = Binned(np.array([np.inf]), np.array([float(finished.sum())]), float(np.nansum(values["again"])))
    numbers = {"request_throughput": float(finished.sum()) / m.span, "output_throughput": tokens / m.span}
    if finished.any():
        numbers["preemptions"] = float(at["preemptions"][finished].mean())
    admitted = (at["admitted"] > begin) & (at["admitted"] <= end)
    if admitted.any():
        numbers["hit_rate"] = float(at["cached_tokens"][admitted].sum() / at["input_tokens"][admitted].sum())
    again = np.nan_to_num(split_of(at)["again"])
    queued = _overlap(at["arrival"], at["admitted"], begin, end)
    inside = _overlap(at["arrival"], at["ended"], begin, end)
    shares = np.where(finished, again, 0.0)  # of those that ended here, waiting again after a preemption
    numbers["waiting"] = float((queued + shares).sum()) / m.span
    numbers["running"] = float((inside - queued - shares).sum()) / m.span
    numbers["kv_use"] = _kv_use(result, begin, end, blocks, sample_every)
    return Side(spreads, numbers)


def _gaps(result: RunResult, begin: float, end: float) -> tuple[np.ndarray, int]:
    """(gaps between tokens that end in the window, tokens delivered in it)."""
    parts, tokens = [np.zeros(0)], 0
    for i in result.token_steps:
        times = result.token_times(i)
        inside = (times > begin) & (times <= end)
        tokens += int(inside.sum())
        parts.append(np.diff(times)[inside[1:]])
    return np.concatenate(parts), tokens


def _overlap(start: np.ndarray, stop: np.ndarray, begin: float, end: float) -> np.ndarray:
    """Seconds of each span inside the window; what has not ended lasts to the window's end."""
    stop = np.where(np.isnan(stop), end, stop)
    return np.nan_to_num(np.clip(np.minimum(stop, end) - np.maximum(start, begin), 0, None))


def _kv_use(result: RunResult, begin: float, end: float, blocks: int, sample_every: float) -> float:
    """Mean share of the KV blocks in use, over replicas; a sample holds to the next, or for as long as samples are apart."""
    used = []
    for _, steps in result.steps.groupby("replica"):
        times = steps["time"].to_numpy()
        use = 1 - steps["free_blocks"].to_numpy() / max(blocks - 1, 1)
        until = np.minimum(np.append(times[1:], end), times + sample_every + steps["seconds"].to_numpy())
        used.append(float((use * np.clip(np.minimum(until, end) - np.maximum(times, begin), 0, None)).sum()) / (end - begin))
    return float(np.mean(used)) if used else 0.0
