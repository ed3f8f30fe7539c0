"""One picture of a comparison or a run: latency distributions, load over time, and paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from simcore.experiments.statistics import Difference
    from simcore.models.serving import RunResult


def draw(path: Path, title: str, runs: dict[str, RunResult], differences: dict[str, list[Difference]]) -> None:
    """Write a PNG: TTFT and TPOT distributions (JCT and TTFT where programs have turns), requests in the system over time,
    and differences with intervals (or, for a single run, the use of the KV pool)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title)
    panels = [("requests", "ttft", "TTFT (s)", 1.0), ("requests", "tpot", "TPOT (ms)", 1e3)]
    if all("mean_jct_ms" in run.summary for run in runs.values()):
        panels = [("programs", "jct", "JCT (s)", 1.0), panels[0]]
    for axis, (table, column, label, scale) in zip(axes[0], panels, strict=True):
        for name, run in runs.items():
            _cdf(axis, run.tables[table][column].dropna().to_numpy() * scale, name)
        axis.set(xlabel=label, ylabel=f"share of {table}", xscale="log", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0, 0].legend(loc="lower right")
    for name, run in runs.items():
        times, count = _in_system(run)
        axes[1, 0].plot(times, count, label=name, linewidth=0.9)
    axes[1, 0].set(xlabel="simulated time (s)", ylabel="requests in the system", ylim=(0, None))
    axes[1, 0].grid(alpha=0.3)
    if differences:
        _differences(axes[1, 1], differences, next(iter(runs)))
    else:
        _pool(axes[1, 1], next(iter(runs.values())))
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _cdf(axis: Any, values: np.ndarray, name: str) -> None:
    values = np.sort(values[values > 0])
    if len(values):
        axis.plot(values, np.arange(1, len(values) + 1) / len(values), label=name, linewidth=1.2)


def _in_system(run: RunResult, spans: int = 120, points: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Mean number of requests in the system in each of `spans` equal spans of time (over `points` looks at each)."""
    requests = run.requests
    arrival = np.sort(requests["arrival"].dropna().to_numpy())
    ended = np.sort(requests["ended"].dropna().to_numpy())
    if not len(arrival):
        return np.zeros(1), np.zeros(1)
    times = np.linspace(arrival[0], max(arrival[-1], ended[-1] if len(ended) else 0), spans * points)
    count = np.searchsorted(arrival, times, "right") - np.searchsorted(ended, times, "right")
    return times.reshape(spans, points).mean(axis=1), count.reshape(spans, points).mean(axis=1)


def _differences(axis: Any, differences: dict[str, list[Difference]], first: str) -> None:
    """Differences as a share of the first arm's value, with their intervals."""
    rows: Sequence[str] = [d.label for d in next(iter(differences.values()))]
    height = 0.8 / len(differences)
    for k, (name, ds) in enumerate(differences.items()):
        at = np.arange(len(ds)) + (k - (len(differences) - 1) / 2) * height
        scale = np.array([100 / d.a if d.a else np.nan for d in ds])
        middle = np.array([d.difference for d in ds]) * scale
        half = np.array([d.high - d.difference for d in ds]) * np.abs(scale)
        axis.errorbar(middle, at, xerr=np.nan_to_num(half), fmt="o", markersize=3, capsize=2, color=f"C{k + 1}", label=name)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xscale("symlog", linthresh=10)  # a hit rate may triple where a latency moves by a few percent
    axis.set_xticks([-100, -10, -5, 0, 5, 10, 100], ["-100", "-10", "-5", "0", "5", "10", "100"])
    axis.set_yticks(range(len(rows)), rows, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(f"difference to {first} (% of its value), 95% intervals")
    axis.grid(alpha=0.3, axis="x")
    axis.legend(fontsize=8)


def _pool(axis: Any, run: RunResult) -> None:
    for replica, steps in run.steps.groupby("replica"):
        axis.plot(steps["time"], steps["free_blocks"], linewidth=0.8, label=f"replica {replica}")
    axis.set(xlabel="simulated time (s)", ylabel="free KV blocks", ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
