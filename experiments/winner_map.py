"""Which policy wins where: a map over two axes of a sweep, each cell coloured by its winner and honest about its lead."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simcore.errors import BadInput, ConfigError
from simcore.experiments.statistics import METRICS, PROGRAM_METRICS
from simcore.experiments.sweep_report import summary_field

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Cell:
    """One place of the map. `value`: the winner's mean over the seeds; `lead`: by how much the runner-up is worse (% of the
    runner-up's value); `sure`: the winner is better than every other with 95% confidence (paired by seed, Bonferroni)."""

    x: Any
    y: Any
    winner: str
    value: float
    runner_up: str
    lead: float
    sure: bool
    seeds: int


def read_map(folder: Path, x: str, y: str, metric: str) -> tuple[list[Cell], str]:
    """The cells of a sweep's map over its axes `x` and `y`, and the summary field that decides. All other axes together name
    the contestants. Raises BadInput for a folder that is no sweep, ConfigError for an axis or a metric that it has not."""
    import pandas as pd

    try:
        axes = list(json.loads((folder / "summary.json").read_text(encoding="utf-8"))["axes"])
        frame = pd.read_csv(folder / "sweep.csv", keep_default_na=False, na_values=[""])
    except (OSError, ValueError, KeyError) as error:
        why = f"not the folder of a finished sweep: {error}"
        raise BadInput(str(folder), why=why, allowed="what simcore sweep wrote") from None
    for option, axis in (("--x", x), ("--y", y)):
        if axis not in axes:
            raise ConfigError(option, found=axis, allowed=", ".join(axes))
    known = {m.name: m for m in (*PROGRAM_METRICS, *METRICS)}
    field = summary_field(metric) if metric in known else ""
    if field not in frame.columns:
        raise ConfigError("--metric", found=metric, allowed=", ".join(n for n in known if summary_field(n) in frame.columns))
    contestants = [axis for axis in axes if axis not in (x, y)]
    if not contestants:
        raise ConfigError("--x, --y", found=f"{x}, {y}", why="no axis is left to compare",
                          allowed="two of at least three axes")
    return _cells(frame, x, y, contestants, field, known[metric].less_is_better), field


def _cells(frame: pd.DataFrame, x: str, y: str, contestants: list[str], field: str, less: bool) -> list[Cell]:
    frame = frame.fillna({x: 0, y: 0})  # nothing of it, such as no host memory
    named = frame[contestants].astype(str).agg(", ".join, axis=1)
    cells = []
    for (at_x, at_y), part in frame.assign(contestant=named).groupby([x, y], sort=True):
        table = part.pivot_table(index="seed", columns="contestant", values=field, aggfunc="first", sort=False)
        table = table.dropna(axis=1)  # who has no value under some seed does not compete
        if table.shape[1]:
            cells.append(_cell(at_x, at_y, table, less))
    return cells


def _cell(x: Any, y: Any, table: pd.DataFrame, less: bool) -> Cell:
    """`table`: one row a seed, one column a contestant."""
    means = table.mean().sort_values(ascending=less, kind="stable")
    winner, others = str(means.index[0]), [str(name) for name in means.index[1:]]
    sure = len(table) > 1 and bool(others) and all(
        _clear((table[name] - table[winner]).to_numpy() * (1 if less else -1), len(others)) for name in others)
    best = float(means.iloc[0])
    second = float(means.iloc[1]) if others else best
    lead = 100 * abs(second - best) / abs(second) if second else 0.0
    return Cell(x, y, winner, best, others[0] if others else "", lead, sure, len(table))


def _clear(worse_by: np.ndarray, comparisons: int) -> bool:
    """Whether the mean is above 0 with 95% confidence, one of so many comparisons."""
    from scipy.special import stdtrit

    n = len(worse_by)
    half = float(stdtrit(n - 1, 1 - 0.05 / 2 / comparisons)) * float(worse_by.std(ddof=1)) / np.sqrt(n)
    return float(worse_by.mean()) - half > 0


def draw_map(path: Path, title: str, x: str, y: str, field: str, cells: list[Cell]) -> None:
    """Write a PNG: a square a cell in its winner's colour; pale where the lead is not certain. In it the winner's value (s
    for times) and its lead over the runner-up."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    xs, ys = (sorted({getattr(cell, name) for cell in cells}) for name in ("x", "y"))
    winners = sorted({cell.winner for cell in cells})
    colours = {name: f"C{k}" for k, name in enumerate(winners)}
    scale, unit = (1e-3, " s") if field.endswith("_ms") else (1.0, "")
    figure, axis = plt.subplots(figsize=(2.5 + 1.6 * len(xs), 1.9 + 0.95 * len(ys)), layout="constrained")
    for cell in cells:
        at = xs.index(cell.x), ys.index(cell.y)
        axis.add_patch(Rectangle((at[0] - 0.5, at[1] - 0.5), 1, 1, facecolor=colours[cell.winner], edgecolor="white",
                                 alpha=0.75 if cell.sure else 0.25))
        lead = f"\n-{cell.lead:.0f}%" if cell.runner_up else ""
        axis.text(*at, f"{cell.value * scale:,.4g}{unit}{lead}", ha="center", va="center", fontsize=8)
    axis.set(title=title, xlabel=x, ylabel=y, xlim=(-0.5, len(xs) - 0.5), ylim=(-0.5, len(ys) - 0.5))
    axis.set_xticks(range(len(xs)), [str(value) for value in xs])
    axis.set_yticks(range(len(ys)), [str(value) for value in ys])
    shown = [Patch(facecolor=colours[name], alpha=0.75, label=name) for name in winners]
    axis.legend(handles=[*shown, Patch(facecolor="grey", alpha=0.25, label="pale: lead not certain")], fontsize=8,
                loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=min(3, len(shown) + 1))
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
