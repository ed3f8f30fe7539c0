"""The steady part of a run under generated load: where its start-up ends, and whether its queue grows without end.

Start-up: MSER-5 (White, "An effective truncation heuristic for bias reduction in simulation output", Simulation 69(6),
1997) over the E2E of the requests in order of arrival, averaged over the seeds where there are several. On stationary M/M/1
queues of load 0.8 it shows no steady state in 32% of the runs of 1,000 requests and in 6% of those of 5,000 (at load 0.6 in
11% and 1%): what it refuses wants a longer run.

Growth: a least-squares line through the number in the system, seen at each arrival of the second half of the arrivals. Over
these A arrivals it may rise by 2 sqrt(A), twice the standard deviation of a Poisson count of A; a queue of load r > 1
rises by (1 - 1/r) A. Of M/M/1 queues with 2,000 requests this finds 98% at load 1.2, 75% at 1.1, 17% at 1.0, 1% at 0.9 and
none at 0.8 or 0.6 (100 runs each). If those that wait for admission grow by as much, the run is unstable; if only the number
in the system does, it still fills up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan, sqrt
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from simcore.models.metrics import Slo, gaps_and_rates, host_hit_rate, summarise

if TYPE_CHECKING:
    import pandas as pd

    from simcore.models.serving import RunResult

BATCH = 5  # requests a batch mean
LAST_BATCHES = 5  # never cut this close to the end: over so few batches the variance is near zero by chance
RULE = "MSER-5 over E2E in order of arrival"
State = Literal["all", "steady", "unstable", "none"]

# What an unsteady run has no value of; its counts, duration and throughput are those of the whole run.
_OF_THE_WINDOW = (
    "request_goodput", "slo_attainment", "prefix_cache_hit_rate", "host_hit_rate",
    "usd_per_million_output_tokens_within_slo",
)


@dataclass(frozen=True)
class Window:
    """Which requests of a run count: those from row `cut` on. `state` "unstable" and "none" (no steady state shown): no mean
    is shown, and `why` says so."""

    state: State
    cut: int = 0
    why: str = ""

    @property
    def shown(self) -> bool:
        return self.state in ("all", "steady")

    def described(self, requests: pd.DataFrame) -> dict[str, Any]:
        """What stands in a summary: kind, state, requests cut and counted, time of the first one counted (s), why."""
        counted = requests["arrival"].iloc[self.cut :]
        return {
            "kind": "all" if self.state == "all" else "steady", "state": self.state, "cut": self.cut if self.shown else None,
            "requests": len(counted) if self.shown else 0, "of": len(requests),
            "from": float(counted.min()) if self.shown and len(counted) else None,
            "rule": None if self.state == "all" else RULE, "why": self.why,
        }


def window_line(described: dict[str, Any]) -> str:
    """The window of a summary in one line."""
    d = described
    if d["state"] == "all":
        return f"Window: all {d['of']:,} requests; nothing is cut"
    if d["state"] == "steady":
        return (f"Window: steady ({d['rule']}): the first {d['cut']:,} of {d['of']:,} requests are cut; {d['requests']:,} "
                f"count, arrived from {d['from']:.4g} s on")
    return f"Window: steady: {d['why']}"


def mser5(values: Sequence[float] | np.ndarray) -> int | None:
    """How many leading values to cut, a multiple of five; None if no steady state is shown.

    `values`: one defined number a request, in order. Of the means z of m batches of five (an incomplete last batch is left
    out) the truncation d minimises the squared marginal standard error sum((z[d:] - mean(z[d:]))^2) / (m - d)^2. The last
    five batches are no candidates (Hoad, Robinson, Davies, "Automating warm-up length estimation", JORS 61, 2010). A
    minimum in the last half means that the run is too short, or has no steady state.
    """
    batches = len(values) // BATCH
    if batches <= LAST_BATCHES:
        return None
    z = np.asarray(values, dtype=float)[: batches * BATCH].reshape(batches, BATCH).mean(axis=1)
    z = z - z.mean()  # the sums of squares below then lose no digits to a large mean
    left = np.arange(batches, 0, -1)
    total, squares = np.cumsum(z[::-1])[::-1], np.cumsum(np.square(z)[::-1])[::-1]
    error = np.maximum(squares - np.square(total) / left, 0.0) / np.square(left)
    best = int(np.argmin(error[: batches - LAST_BATCHES]))
    return best * BATCH if best <= batches / 2 else None


@dataclass(frozen=True)
class Growth:
    """Rise of a count over the second half of the arrivals (a fitted line), and what chance allows."""

    rise: float
    arrivals: int

    @property
    def allowed(self) -> float:
        return 2 * sqrt(self.arrivals)

    @property
    def grows(self) -> bool:
        return self.rise > self.allowed


def growth(requests: pd.DataFrame, left: str) -> Growth:
    """How the number of requests that have arrived and not yet `left` (a column: "ended" or "admitted") rises."""
    here = requests[requests["arrival"].notna()]
    arrival = np.sort(here["arrival"].to_numpy())
    gone = np.sort(here[left].fillna(here["ended"]).fillna(inf).to_numpy())  # a refused one leaves when it is refused
    half = len(arrival) // 2
    if len(arrival) - half < 2:
        return Growth(0.0, len(arrival) - half)
    count = np.arange(1, len(arrival) + 1) - np.searchsorted(gone, arrival, side="right")
    index = np.arange(len(arrival) - half, dtype=float)
    index -= index.mean()
    return Growth(float(index @ count[half:] / (index @ index)) * len(index), len(index))


def find_window(runs: Sequence[pd.DataFrame]) -> Window:
    """The steady window of one arm, from the requests tables of its seeds: one truncation for all of them."""
    system, queue = ([growth(run, left) for run in runs] for left in ("ended", "admitted"))
    in_system, waiting = _mean(system), _mean(queue)
    if in_system.grows:
        if waiting.grows:
            return Window("unstable", why=f"unstable: the queue grows; no steady mean (waiting requests rise by "
                                          f"{waiting.rise:,.0f} over {waiting.arrivals:,} arrivals; chance allows "
                                          f"{waiting.allowed:,.0f})")
        return Window("none", why="no steady state shown: the number of requests in the system still grows; no steady mean "
                                  f"(it rises by {in_system.rise:,.0f} over {in_system.arrivals:,} arrivals)")
    e2e = [run["e2e"].to_numpy(dtype=float) for run in runs]
    shortest = min(len(values) for values in e2e)
    together = np.stack([values[:shortest] for values in e2e])
    defined = np.flatnonzero(~np.isnan(together).all(axis=0))
    cut = mser5(np.nanmean(together[:, defined], axis=0))
    if cut is None:
        return Window("none", why="no steady state shown: MSER-5 would cut more than half of the run; no steady mean")
    return Window("steady", int(defined[cut]) if cut else 0)


def _mean(growths: Sequence[Growth]) -> Growth:
    return Growth(sum(g.rise for g in growths) / len(growths), sum(g.arrivals for g in growths) // len(growths))


def apply_window(
    result: RunResult, window: Window, *, slo: Slo, gpus: int, usd_per_gpu_hour: float | None, horizon: float = inf
) -> None:
    """Make the summary that of the window. Utilisation, steps, computed tokens and what a host tier did (but for
    its hit rate) stay those of the whole run; the tables keep every request. A run that shows no steady mean keeps its
    counts, duration and throughput, and has no latencies."""
    if window.state == "steady":
        counted = result.requests.iloc[window.cut :]
        kept = {i: runs for i, runs in result.token_steps.items() if i >= window.cut}
        gaps, rates = gaps_and_rates(
            kept, result.requests["replica"].tolist(), result.step_ends, float(counted["arrival"].min()))
        cut_at = horizon if horizon < inf and (result.requests["status"] == "unfinished").any() else None
        fresh = summarise(
            counted, gaps, rates, slo=slo, gpus=gpus,
            usd_per_gpu_hour=usd_per_gpu_hour, busy_seconds=[nan], cut_at=cut_at,
        )
        if "host_hit_rate" in result.summary:
            fresh["host_hit_rate"] = host_hit_rate(counted)
        result.summary |= {key: value for key, value in fresh.items() if key != "utilization"}
    elif not window.shown:
        result.summary |= {key: nan for key in result.summary if key.endswith("_ms") or key in _OF_THE_WINDOW}
    result.summary["window"] = window.described(result.requests)
