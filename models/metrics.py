"""Metric definitions, once, in vLLM's words. Times in seconds; names ending in `_ms` are milliseconds.

- TTFT: arrival at the cluster to the first token (queueing and routing included).
- E2E (`e2el`): arrival to the last token.
- TPOT: (E2E - TTFT) / (output tokens - 1), per request; undefined for one token.
- ITL: each gap between two consecutive tokens of a request.
- JCT: first arrival of a program to the end of its last turn.
- prefix hit rate: tokens reused / prompt tokens, at first admission; those loaded from the host included.
- host hit rate: tokens loaded from the host / prompt tokens, over all admissions.
- goodput: requests that meet every limit of the SLO, per second.
- utilisation: share of the duration in which a replica's device works, mean over replicas.
- duration: first arrival to last end, or to the horizon where that cut the run.
- Under failures a request's arrival is that of its first attempt, and its tokens are those of its last: TTFT and E2E are
  what the client sees. `failed` counts all that did not finish; `killed` those of status failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

STATISTICS = ("mean", "p50", "p90", "p99")
_PERCENTILES = (50, 75, 90, 95, 99)
_PORTION = 1 << 16  # of long arrays that are looked at piece by piece, so that nothing of their size is made beside them


@dataclass(frozen=True)
class Slo:
    """Upper limits in milliseconds, as in `vllm bench serve --goodput ttft:500 tpot:50`; None = no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    def met(self, requests: pd.DataFrame) -> np.ndarray:
        """bool[n]: finished, and within every limit (a request of one token has no TPOT to violate)."""
        good = (requests["status"] == "finished").to_numpy(dtype=bool)
        for column, limit in (("ttft", self.ttft_ms), ("tpot", self.tpot_ms), ("e2e", self.e2el_ms)):
            if limit is not None:
                good = good & ~(requests[column].to_numpy() * 1e3 > limit)
        return good

    def __str__(self) -> str:
        limits = [f"{n.split('_')[0]}:{v:g}" for n, v in vars(self).items() if v is not None]
        return " ".join(limits) or "none"


def with_metrics(requests: pd.DataFrame) -> pd.DataFrame:
    """The requests table with ttft, tpot, e2e and queue_time (s, NaN where undefined) appended."""
    finished = (requests["status"] == "finished").to_numpy(dtype=bool)
    tokens = requests["generated_tokens"].to_numpy()
    ttft = (requests["first_token"] - requests["arrival"]).to_numpy()
    e2e = np.where(finished, (requests["ended"] - requests["arrival"]).to_numpy(), np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where(finished & (tokens > 1), (e2e - ttft) / (tokens - 1), np.nan)
    queue_time = (requests["admitted"] - requests["arrival"]).to_numpy()
    return requests.assign(ttft=ttft, tpot=tpot, e2e=e2e, queue_time=queue_time)


def token_times(runs: Sequence[int], step_ends: np.ndarray) -> np.ndarray:
    """When each token of a request was delivered, from its runs of steps [start, stop, ...]: float64[tokens], s."""
    if len(runs) == 2:
        return step_ends[runs[0] : runs[1]]
    return np.concatenate([step_ends[a:b] for a, b in zip(runs[::2], runs[1::2], strict=True)])


class Gaps(NamedTuple):
    """All gaps between consecutive tokens of one request (s), equal ones together: requests that decode side by side share
    the steps, so that there are as many entries as steps, not as tokens."""

    seconds: np.ndarray  # float64[m], ascending
    counts: np.ndarray  # int32[m], how often each occurred, >= 1


def gaps_and_rates(
    token_steps: dict[int, list[int]], served_by: Sequence[int], step_ends: list[np.ndarray], start: float
) -> tuple[Gaps, np.ndarray]:
    """The gaps between tokens, and the tokens delivered in each whole second from `start` on (int64)."""
    latest = max((ends[-1] for ends in step_ends if len(ends)), default=start)
    rates = np.zeros(int(latest - start) + 1 if latest >= start else 1, dtype=np.int64)
    runs_of: list[list[list[int]]] = [[] for _ in step_ends]
    for i, runs in token_steps.items():
        runs_of[served_by[i]].append(runs)
    seconds, counts = [np.zeros(0)], [np.zeros(0, dtype=np.int32)]
    for ends, served in zip(step_ends, runs_of, strict=True):
        if not served:
            continue
        tokens, within = _per_step(served, len(ends))
        for k in range(0, len(ends), _PORTION):
            part = slice(k, k + _PORTION)
            delivered = np.flatnonzero(tokens[part])
            second = (ends[part][delivered] - start).astype(np.int64)
            rates += np.bincount(second, tokens[part][delivered], minlength=len(rates)).astype(np.int64)
        again = np.flatnonzero(within)
        breaks = [(r[k] - 1, r[k + 1]) for r in served if len(r) > 2 for k in range(1, len(r) - 1, 2)]
        before, after = np.array(breaks, dtype=np.int64).reshape(-1, 2).T
        seconds += [ends[again] - ends[again - 1], ends[after] - ends[before]]
        counts += [within[again], np.ones(len(breaks), dtype=np.int32)]
    return _sorted_gaps(seconds, counts), rates


def _per_step(runs: list[list[int]], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each step, int32[steps]: the tokens it delivered, and those of them that follow another token of their run."""
    flat = np.fromiter(chain.from_iterable(runs), dtype=np.int64)
    tokens = np.bincount(flat[::2], minlength=steps + 1).astype(np.int32)
    within = -tokens[:steps]
    tokens -= np.bincount(flat[1::2], minlength=steps + 1).astype(np.int32)
    np.cumsum(tokens, out=tokens)
    within += tokens[:steps]
    return tokens[:steps], within


def _sorted_gaps(seconds: list[np.ndarray], counts: list[np.ndarray]) -> Gaps:
    """The parts as one; the lists are emptied on the way, since a long run has gaps in the millions."""
    all_seconds = np.concatenate(seconds)
    seconds.clear()
    all_counts = np.concatenate(counts)
    counts.clear()
    order = np.argsort(all_seconds, kind="stable")
    all_counts = all_counts[order]
    del order
    all_seconds.sort()
    return Gaps(all_seconds, all_counts)


def distribution(values: np.ndarray) -> dict[str, float]:
    """mean, std, min, max and percentiles of the defined values; all NaN if there are none."""
    undefined = np.isnan(values)
    if undefined.any():
        values = values[~undefined]
    if not len(values):
        return dict.fromkeys(("mean", "std", "min", "max", *(f"p{p}" for p in _PERCENTILES)), float("nan"))
    out = {"mean": float(values.mean()), "std": float(values.std()), "min": float(values.min()), "max": float(values.max())}
    out |= {f"p{p}": float(q) for p, q in zip(_PERCENTILES, np.percentile(values, _PERCENTILES), strict=True)}
    return out


def distribution_of_gaps(gaps: Gaps) -> dict[str, float]:
    """`distribution` of the gaps written out one by one; percentiles to the last bit as numpy has them."""
    seconds, counts = gaps
    if not len(seconds):
        return distribution(seconds)
    up_to = np.cumsum(counts, dtype=np.int64)
    total = int(up_to[-1])
    mean, squares = 0.0, 0.0
    for k in range(0, len(seconds), _PORTION):
        mean += float((seconds[k : k + _PORTION] * counts[k : k + _PORTION]).sum()) / total
    for k in range(0, len(seconds), _PORTION):
        squares += float(((seconds[k : k + _PORTION] - mean) ** 2 * counts[k : k + _PORTION]).sum())
    out = {"mean": mean, "std": float(np.sqrt(squares / total)),
           "min": float(seconds[0]), "max": float(seconds[-1])}
    for p in _PERCENTILES:
        place = p / 100 * (total - 1)
        low = int(place)
        a, b = seconds[np.searchsorted(up_to, [low, min(low + 1, total - 1)], side="right")]
        t = place - low
        out[f"p{p}"] = float(b - (b - a) * (1 - t) if t >= 0.5 else a + (b - a) * t)
    return out


def summarise(
    requests: pd.DataFrame, itls: Gaps, tokens_per_second: np.ndarray, *, slo: Slo, gpus: int,
    usd_per_gpu_hour: float | None, busy_seconds: Sequence[float], cut_at: float | None = None,
) -> dict[str, Any]:
    """The aggregate fields of `vllm bench serve`, then ours. `itls`: all inter-token gaps (s); `tokens_per_second`: tokens
    delivered in each whole second from the first arrival; one busy time a replica; `cut_at`: the horizon, if it cut the
    run."""
    status = requests["status"].value_counts()
    finished = requests[requests["status"] == "finished"]
    duration = run_seconds(requests, cut_at)
    good = slo.met(requests)
    output = int(finished["generated_tokens"].sum())
    prompt = int(finished["input_tokens"].sum())
    admitted = requests[requests["admitted"].notna()]
    out: dict[str, Any] = {
        "duration": duration,
        "completed": len(finished),
        "failed": len(requests) - len(finished),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": _rate(len(finished), duration),
        "request_goodput": _rate(int(good.sum()), duration),
        "output_throughput": _rate(output, duration),
        "total_token_throughput": _rate(prompt + output, duration),
        "max_output_tokens_per_s": int(tokens_per_second.max(initial=0)),
        "max_concurrent_requests": _max_concurrent(requests),
    }
    metrics: Mapping[str, np.ndarray] = {
        "ttft": requests["ttft"].to_numpy(), "tpot": requests["tpot"].to_numpy(), "e2el": requests["e2e"].to_numpy(),
        "queue_time": requests["queue_time"].to_numpy(),
    }
    spreads = {name: distribution(values) for name, values in metrics.items()} | {"itl": distribution_of_gaps(itls)}
    for name in ("ttft", "tpot", "itl", "e2el", "queue_time"):
        spread = spreads[name]
        out[f"median_{name}_ms"] = spread["p50"] * 1e3
        out |= {f"{statistic}_{name}_ms": value * 1e3 for statistic, value in spread.items()}
    good_tokens = int(requests["generated_tokens"].to_numpy()[good].sum())
    out |= {
        "refused": int(status.get("refused", 0)),
        "cancelled": int(status.get("cancelled", 0)),
        "unfinished": int(status.get("unfinished", 0)),
        **_attempts(requests, status),
        "preemptions": int(requests["preemptions"].sum()),
        "prefix_cache_hit_rate": _rate(int(admitted["cached_tokens"].sum()), int(admitted["input_tokens"].sum())),
        "utilization": float(np.mean(busy_seconds)) / duration if duration > 0 else float("nan"),
        "slo": str(slo),
        "slo_attainment": _rate(int(good.sum()), len(requests)),
        "gpus": gpus,
        "usd": usd_per_gpu_hour * gpus * duration / 3600 if usd_per_gpu_hour is not None else None,
    }
    out["usd_per_million_output_tokens_within_slo"] = (
        out["usd"] / (good_tokens / 1e6) if out["usd"] is not None and good_tokens else None
    )
    return out


def _attempts(requests: pd.DataFrame, status: pd.Series) -> dict[str, int]:
    """What a summary says of clients that give up and replicas that die; nothing where there are none."""
    if "attempts" not in requests:
        return {}
    attempts = requests["attempts"].to_numpy()
    return {
        "timed_out": int(status.get("timed_out", 0)), "killed": int(status.get("failed", 0)),
        "retried": int((attempts > 1).sum()), "attempts": int(attempts.sum()),
    }


def host_hit_rate(requests: pd.DataFrame) -> float:
    """Tokens loaded from the host tier / prompt tokens of the requests that were admitted; NaN if there are none."""
    admitted = requests[requests["admitted"].notna()]
    return _rate(int(admitted["loaded_tokens"].sum()), int(admitted["input_tokens"].sum()))


def run_seconds(requests: pd.DataFrame, cut_at: float | None = None) -> float:
    """First arrival to last end, or to the horizon that cut the run (s); NaN if nothing has ended and nothing was cut."""
    ended = requests.loc[requests["status"] == "finished", "ended"]
    end = cut_at if cut_at is not None else ended.max() if len(ended) else np.nan
    return float(end - requests["arrival"].min())


def _rate(amount: float, over: float) -> float:
    return amount / over if over > 0 else float("nan")


def _max_concurrent(requests: pd.DataFrame) -> int:
    served = requests[requests["status"] == "finished"]
    times = np.concatenate((served["ended"].to_numpy(), served["arrival"].to_numpy()))
    change = np.concatenate((np.full(len(served), -1), np.ones(len(served), dtype=int)))
    order = np.argsort(times, kind="stable")  # at one instant ends come before arrivals
    return int(np.cumsum(change[order]).max(initial=0))
