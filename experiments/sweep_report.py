"""What a sweep shows: one line an arm on the terminal, and one picture of the headline metric over an axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from simcore.experiments.report import number

MOST_LINES = 60  # arms shown on the terminal; all of them are in the tables

# Columns of the terminal: heading, field of the summary, factor.
_COLUMNS = [
    ("TTFT mean (ms)", "mean_ttft_ms", 1.0),
    ("TTFT p99 (ms)", "p99_ttft_ms", 1.0),
    ("TPOT mean (ms)", "mean_tpot_ms", 1.0),
    ("E2E mean (ms)", "mean_e2el_ms", 1.0),
    ("Output tokens/s", "output_throughput", 1.0),
    ("Prefix hit (%)", "prefix_cache_hit_rate", 100.0),
    ("Within SLO (%)", "slo_attainment", 100.0),
]
_FIELDS = {"goodput_share": "slo_attainment", "hit_rate": "prefix_cache_hit_rate"}


def summary_field(metric: str) -> str:
    """The field of a summary that holds a metric of `compare.headline`: ttft_mean -> mean_ttft_ms."""
    name, _, statistic = metric.rpartition("_")
    return _FIELDS.get(metric) or f"{statistic}_{'e2el' if name == 'e2e' else name}_ms"


def unsteady(windows: list[dict[str, Any]]) -> str:
    """Which runs of an arm show no mean: "" if all do."""
    states = [window["state"] for window in windows]
    words = {"unstable": "unstable", "none": "not steady"}
    found = [words[state] + (f" ({states.count(state)} of {len(states)})" if len(states) > 1 else "")
             for state in words if state in states]
    return ", ".join(found)


def sweep_table(title: str, arms: list[dict[str, Any]], *, with_slo: bool) -> Table:
    """One row an arm: means over the seeds, with the half width of the 95% interval where there is one."""
    columns = _COLUMNS if with_slo else _COLUMNS[:-1]
    intervals = any(m["low"] is not None for arm in arms for m in arm["metrics"].values())
    seeds = max((len(arm["seeds"]) for arm in arms), default=0)
    over = f", mean over {seeds} seeds" if seeds > 1 else ""
    table = Table(title=title + over + (" ± half of the 95% t interval" if intervals else ""), title_justify="left")
    table.add_column("Arm")
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for arm in arms[:MOST_LINES]:
        cells = [_cell(arm["metrics"].get(field), scale) for _, field, scale in columns]
        cells[0] = unsteady(arm["windows"]) or cells[0]
        table.add_row(arm["arm"], *cells)
    return table


def _cell(metric: dict[str, Any] | None, scale: float) -> str:
    if metric is None or metric["mean"] is None:
        return "N/A"
    if metric["low"] is None:
        return number(metric["mean"], scale)
    half = float(f"{(metric['high'] - metric['low']) / 2 * scale:.2g}")  # two digits say enough of an interval
    return f"{number(metric['mean'], scale)} ± {half:,g}"


def draw_sweep(path: Path, title: str, axes: list[str], arms: list[dict[str, Any]], metric: str) -> None:
    """Write a PNG: a summary field over the numeric axis of the most values (without one, over the arms), one line a
    combination of the other axes; bars are 95% intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, plot = plt.subplots(figsize=(8, 5.2), layout="constrained")
    values = {axis: list(dict.fromkeys(arm["axes"][axis] for arm in arms)) for axis in axes}
    numeric = [axis for axis in axes if all(type(value) in (int, float) for value in values[axis]) and len(values[axis]) > 1]
    along = max(numeric, key=lambda axis: len(values[axis])) if numeric else None
    lines: dict[str, list[tuple[Any, dict[str, Any]]]] = {}
    for arm in arms:
        shown = arm["metrics"].get(metric)
        if shown is not None and shown["mean"] is not None:
            others = [f"{axis.split('.')[-1]}={arm['axes'][axis]}" for axis in axes if axis != along] if along else []
            lines.setdefault(", ".join(others), []).append((arm["axes"][along] if along else arm["arm"], shown))
    for label, points in lines.items():
        if along:
            points.sort(key=lambda point: point[0])
        halves = [0.0 if m["low"] is None else (m["high"] - m["low"]) / 2 for _, m in points]
        plot.errorbar([x for x, _ in points], [m["mean"] for _, m in points], yerr=halves, label=label, capsize=3,
                      fmt="o-" if along else "o", markersize=4, linewidth=1.2)
    plot.set(title=title, xlabel=along or "", ylabel=metric)
    plot.grid(alpha=0.3)
    if not along:
        plot.tick_params(axis="x", rotation=30)
    if 1 < len(lines) <= 20:
        plot.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
