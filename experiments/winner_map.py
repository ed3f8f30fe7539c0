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
    runner-up's value); `sure`: the winner is better than every other with 95% confidence (paired by seed, Bonferroni);
    `gain`, `gains`: the same against the baseline alone, the sweep's first contestant; `oracle`: what a policy
    that knows the future reaches at best, which does not compete (None = there is none)."""

    x: Any
    y: Any
    winner: str
    value: float
    runner_up: str
    lead: float
    sure: bool
    gain: float
    gains: bool
    oracle: float | None
    seeds: int


def read_map(folder: Path, x: str, y: str, metric: str) -> tuple[list[Cell], str]:
    """The cells of a sweep's map over its axes `x` and `y`, and the summary field that decides. All other axes together name
    the contestants. Raises BadInput for a folder that is no sweep, ConfigError for an axis or a metric that it has not."""
    import pandas as pd

    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        axes, oracles = list(summary["axes"]), set(summary["oracles"])
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
    chosen = frame[[x, y, "seed", field]].copy()
    chosen["oracle"] = frame["arm"].isin(oracles)
    chosen["contestant"] = frame[contestants].astype(str).agg(", ".join, axis=1)
    return _cells(chosen, x, y, field, known[metric].less_is_better), field


def _cells(frame: pd.DataFrame, x: str, y: str, field: str, less: bool) -> list[Cell]:
    frame = frame.assign(**{axis: [_number(value) for value in frame[axis]] for axis in (x, y)})
    cells = []
    for (at_x, at_y), part in frame.groupby([x, y], sort=True):
        table = part.pivot_table(index="seed", columns="contestant", values=field, aggfunc="first", sort=False)
        table = table.dropna(axis=1)  # who has no value under some seed does not compete
        oracles = table[[name for name in table if part.loc[part["contestant"] == name, "oracle"].all()]]
        table = table.drop(columns=oracles.columns)
        if table.shape[1]:
            reached = oracles.mean()
            oracle = float(reached.min() if less else reached.max()) if len(reached) else None
            cells.append(_cell(at_x, at_y, table, less, oracle))
    return cells


def _number(value: Any) -> Any:
    """A value of an axis, so that they sort: nothing of it, such as no host memory, is 0."""
    if value in ("None", "") or value != value:
        return 0
    try:
        return float(value)
    except ValueError:
        return value


def _cell(x: Any, y: Any, table: pd.DataFrame, less: bool, oracle: float | None = None) -> Cell:
    """`table`: one row a seed, one column a contestant, the baseline first."""
    means = table.mean().sort_values(ascending=less, kind="stable")
    winner, others = str(means.index[0]), [str(name) for name in means.index[1:]]
    baseline = str(table.columns[0])

    def beats(name: str, comparisons: int) -> bool:
        return len(table) > 1 and _clear((table[name] - table[winner]).to_numpy() * (1 if less else -1), comparisons)

    def by(name: str) -> float:
        return 100 * abs(float(means[name]) - best) / abs(float(means[name])) if means[name] else 0.0

    best = float(means.iloc[0])
    return Cell(
        x, y, winner, best, others[0] if others else "", by(others[0]) if others else 0.0,
        bool(others) and all(beats(name, len(others)) for name in others), by(baseline),
        winner != baseline and beats(baseline, 1), oracle, len(table))


def _clear(worse_by: np.ndarray, comparisons: int) -> bool:
    """Whether the mean is above 0 with 95% confidence, one of so many comparisons."""
    from scipy.special import stdtrit

    n = len(worse_by)
    half = float(stdtrit(n - 1, 1 - 0.05 / 2 / comparisons)) * float(worse_by.std(ddof=1)) / np.sqrt(n)
    return float(worse_by.mean()) - half > 0


def draw_map(path: Path, title: str, x: str, y: str, field: str, cells: list[Cell]) -> None:
    """Write a PNG: a square a cell in its winner's colour; full where it is certainly better than everyone, half where
    than the baseline, pale where not even that. In it the winner's value (s for times), its gain over the
    baseline, an oracle's value."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    xs, ys = (sorted({getattr(cell, name) for cell in cells}) for name in ("x", "y"))
    winners = sorted({cell.winner for cell in cells})
    colours = {name: f"C{k}" for k, name in enumerate(winners)}
    scale, unit = (1e-3, " s") if field.endswith("_ms") else (1.0, "")
    figure, axis = plt.subplots(figsize=(3 + 1.9 * len(xs), 2 + 1.05 * len(ys)), layout="constrained")
    for cell in cells:
        at = xs.index(cell.x), ys.index(cell.y)
        strength = 0.85 if cell.sure else 0.5 if cell.gains else 0.18
        axis.add_patch(Rectangle((at[0] - 0.5, at[1] - 0.5), 1, 1, facecolor=colours[cell.winner], edgecolor="white",
                                 alpha=strength))
        oracle = "" if cell.oracle is None else f"\nbound {cell.oracle * scale:,.4g}{unit}"
        axis.text(*at, f"{cell.value * scale:,.4g}{unit}\n{cell.gain:.0f}% over baseline{oracle}", ha="center", va="center",
                  fontsize=8)
    axis.set(title=title, xlabel=x, ylabel=y, xlim=(-0.5, len(xs) - 0.5), ylim=(-0.5, len(ys) - 0.5))
    axis.set_xticks(range(len(xs)), [f"{value:g}" if isinstance(value, float | int) else str(value) for value in xs])
    axis.set_yticks(range(len(ys)), [f"{value:g}" if isinstance(value, float | int) else str(value) for value in ys])
    shown = [Patch(facecolor=colours[name], alpha=0.85, label=name) for name in winners]
    words = ((0.85, "better than all, 95%"), (0.5, "better than the baseline, 95%"), (0.18, "not certain"))
    shown += [Patch(facecolor="grey", alpha=alpha, label=word) for alpha, word in words]
    axis.legend(handles=shown, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
