"""`simcore reproduce`: plays what a paper's claims or figure ask for, each run once, and shows the verdicts."""

from __future__ import annotations

import csv
import importlib
import json as jsonlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simcore.errors import ConfigError, SimcoreError
from simcore.experiments.claims import Claim, Estimate, Outcome, Results, Run, Shown, measure, shown
from simcore.parallel import fan_out

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Point:
    """One point of a figure. `published` is NaN where the paper shows none."""

    panel: str
    arm: str
    x: float
    published: float
    found: Estimate

    def as_json(self) -> dict[str, Any]:
        return {"panel": self.panel, "arm": self.arm, "x": self.x, "published": self.published, "found": self.found.value,
                "low": self.found.low, "high": self.found.high, "seeds": self.found.seeds}


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: what it needs, and its points from that. `note` says how it differs from the paper's."""

    title: str
    x: str
    y: str
    note: str
    runs: Callable[[], Sequence[Run]]
    points: Callable[[Results], Sequence[Point]]


def papers() -> list[str]:
    """Names of the papers that have claims."""
    root = resources.files("simcore.experiments")
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir() and (entry / "claims.py").is_file())


def load_paper(paper: str) -> tuple[list[Claim], dict[int, Figure]]:
    """The claims and figures of a paper. Raises ConfigError."""
    if paper not in papers():
        raise ConfigError("paper", found=paper, allowed=", ".join(papers()))
    module = importlib.import_module(f"simcore.experiments.{paper}.claims")
    return module.CLAIMS, module.FIGURES


def choose(claims: Sequence[Claim], keys: str | None) -> list[Claim]:
    """The claims of these keys (`b,c`), in the paper's order; None = all. Raises ConfigError."""
    if keys is None:
        return list(claims)
    wanted = [key.strip() for key in keys.split(",")]
    known = [claim.key for claim in claims]
    for key in wanted:
        if key not in known:
            raise ConfigError("--claims", found=key, allowed=", ".join(known))
    return [claim for claim in claims if claim.key in wanted]


def figure_of(figures: Mapping[int, Figure], number: int) -> Figure:
    if number not in figures:
        raise ConfigError("--figure", found=number, allowed=", ".join(map(str, figures)))
    return figures[number]


# --- playing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    paper: str
    run: Run


def play_runs(
    paper: str, runs: Iterable[Run], *, processes: int, report: Callable[[int, float], Any] | None = None
) -> dict[Run, Outcome | str]:
    """Each distinct run's outcome, or what was wrong with it, in words. Results do not depend on `processes`."""
    distinct = list(dict.fromkeys(runs))
    jobs = [_Job(paper, run) for run in distinct]
    return dict(zip(distinct, fan_out(_play, jobs, processes=processes, report=report), strict=True))


def _play(job: _Job, progress: Callable[[float], Any]) -> Outcome | str:
    from simcore.experiments import load
    from simcore.experiments.run import Job, play

    run = job.run
    folder = Path(importlib.import_module(f"simcore.experiments.{job.paper}").__path__[0])
    try:
        file = load(folder / run.study, set=jsonlib.loads(run.settings)).file
        workload = None
        if run.world:
            module, _, name = run.world.partition(":")
            build = getattr(importlib.import_module(module), name)
            workload = build(seed=run.seed, **jsonlib.loads(run.given))
        return measure(play(Job(file.study, file.folder, run.seed), progress, workload))
    except SimcoreError as error:  # the claims that need this run say so; the others go on
        return str(error)


def judge(claims: Sequence[Claim], results: Mapping[Run, Outcome | str]) -> list[Shown]:
    """Each claim's verdict. One that cannot be run, or of which a run failed, is `not run` and says why."""
    out = []
    for claim in claims:
        why = claim.missing()
        if not why:
            failed = [said for run in claim.runs() if isinstance(said := results[run], str)]
            why = f"a run failed: {failed[0]}" if failed else ""
        judged = None if why else claim.judge(results)  # type: ignore[arg-type]  # of its runs none is a str
        out.append(Shown(claim, judged, why))
    return out


def needed(claims: Sequence[Claim]) -> list[Run]:
    """All runs of the claims that can be run, each once."""
    return list(dict.fromkeys(run for claim in claims if not claim.missing() for run in claim.runs()))


def as_json(paper: str, verdicts: Sequence[Shown]) -> dict[str, Any]:
    """What `--json` writes (DESIGN, section 4)."""
    return {"paper": paper, "claims": [item.as_json() for item in verdicts]}


def default_processes(processes: int | None) -> int:
    return processes or os.cpu_count() or 1


# --- figures ---------------------------------------------------------------------------------------------------------


def write_points(path: Path, points: Sequence[Point]) -> None:
    """The points as CSV: panel, arm, x, published, found, low, high, seeds."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["panel", "arm", "x", "published", "found", "low", "high", "seeds"])
        for p in points:
            numbers = (p.published, p.found.value, p.found.low, p.found.high)
            writer.writerow([p.panel, p.arm, p.x, *("" if v != v else f"{v:.6g}" for v in numbers), p.found.seeds])


def points_table(figure: Figure, points: Sequence[Point]) -> Table:
    """The points for the terminal, one line a panel and x."""
    from rich.table import Table

    table = Table(title=figure.title, title_justify="left")
    arms = list(dict.fromkeys(p.arm for p in points))
    for name in ("panel", figure.x, *arms):
        table.add_column(name, justify="left" if name == "panel" else "right")
    at = {(p.panel, p.x, p.arm): p for p in points}
    for panel, x in dict.fromkeys((p.panel, p.x) for p in points):
        cells = []
        for arm in arms:
            p = at.get((panel, x, arm))
            paper = f" [dim]({shown(p.published)})[/]" if p and p.published == p.published else ""
            cells.append(f"{shown(p.found.value)}{paper}" if p else "")
        table.add_row(panel, f"{x:g}", *cells)
    table.caption = f"{figure.y}; in brackets as published"
    return table


def draw_points(path: Path, figure: Figure, points: Sequence[Point]) -> None:
    """The figure as PNG: found with intervals as lines, published as dashes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys(p.panel for p in points))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    plot, axes = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.6 * rows), squeeze=False, layout="constrained")
    plot.suptitle(f"{figure.title}\nfull: found, dashed: published", fontsize=10)
    for k, axis in enumerate(axes.flat):
        if k >= len(panels):
            axis.axis("off")
            continue
        of_panel = [p for p in points if p.panel == panels[k]]
        for n, arm in enumerate(dict.fromkeys(p.arm for p in of_panel)):
            of_arm = [p for p in of_panel if p.arm == arm]
            x = [p.x for p in of_arm]
            half = [p.found.high - p.found.value if p.found.seeds > 1 else 0.0 for p in of_arm]
            axis.errorbar(x, [p.found.value for p in of_arm], yerr=half, marker="o", markersize=3, color=f"C{n}", label=arm)
            axis.plot(x, [p.published for p in of_arm], linestyle="--", linewidth=0.9, color=f"C{n}")
        axis.set(title=panels[k], xlabel=figure.x, ylabel=figure.y, ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    plot.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(plot)
