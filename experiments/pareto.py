"""`simcore pareto`: cost against goodput, TTFT p95 and throughput of every combination of axes, and what is not dominated.

A combination is dominated by one that costs no more only where the paired difference between the two is certain, at 95% for
all comparisons with it together (Bonferroni). It is on the front where it is certainly better than every combination that
costs no more. What is neither is undecided.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite, nan, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simcore.errors import ConfigError, SimcoreError
from simcore.experiments.capacity_trials import UNFIT
from simcore.experiments.compare import check, common_cut
from simcore.experiments.run import build_deployment, oracles
from simcore.experiments.statistics import METRICS, Difference, Level, Metric, compare_metric, level_of, time_blocks
from simcore.experiments.study import Arm, Study, StudyFile, read_study
from simcore.experiments.sweep import Run, Sweep, begin_folder, failures, plan_sweep, put_whole
from simcore.files import to_json
from simcore.models.metrics import Slo
from simcore.models.steady import Window, find_window

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

_NOT_VARIED = ("workload", "seeds", "horizon", "cost", "sample_every", "clients", "events")
_BY_NAME = {metric.name: metric for metric in METRICS}
TTFT_P95 = replace(_BY_NAME["ttft_mean"], name="ttft_p95", label="TTFT p95", statistic="p95")
THROUGHPUT = replace(TTFT_P95, name="throughput", label="Output throughput", unit="tokens/s", scale=1.0,
                     less_is_better=False, statistic="mean")
FRONT, DOMINATED, UNDECIDED, NO_MEAN = "front", "dominated", "undecided", "no mean"


@dataclass(frozen=True)
class Point:
    """One combination that fits: what it costs (`cost`: $ per hour, or GPUs), and its requests under each seed."""

    arm: Arm
    values: dict[str, Any]
    gpus: int
    usd_per_hour: float | None
    runs: list[pd.DataFrame]  # requests that count
    whole: list[pd.DataFrame]  # all requests
    window: Window

    @property
    def cost(self) -> float:
        return self.gpus if self.usd_per_hour is None else self.usd_per_hour


@dataclass(frozen=True)
class Place:
    """Where a point stands by one metric. `by`: a combination that dominates it, or those that leave it undecided."""

    status: str
    level: Level
    by: tuple[str, ...] = ()
    why: str = ""


class Front:
    """Points compared by pairs. `by_seed`: seeds are independent samples of the workload."""

    def __init__(self, points: Sequence[Point], slo: Slo, *, by_seed: bool) -> None:
        self.points, self.slo, self.by_seed = list(points), slo, by_seed
        self._levels: dict[tuple[str, str], Level] = {}

    @cached_property
    def metrics(self) -> list[Metric]:
        return [*([self._goodput] if self.slo != Slo() else []), TTFT_P95, THROUGHPUT]

    @cached_property
    def _goodput(self) -> Metric:
        """Requests within the SLO, per second of the time in which requests arrive: the share times the offered rate."""
        rates = [(len(t) - 1) / span for t in self.points[0].runs if (span := float(np.ptp(_placed(t)["arrival"]))) > 0]
        rate = float(np.mean(rates)) if rates else nan
        share = _BY_NAME["goodput_share"]
        return replace(share, name="goodput", label="Goodput", unit="requests/s", scale=rate)

    def level(self, metric: Metric, point: Point) -> Level:
        key = (metric.name, point.arm.label)
        if key not in self._levels:
            self._levels[key] = self._level(metric, point)
        return self._levels[key]

    def _level(self, metric: Metric, point: Point) -> Level:
        if not point.window.shown and metric is not THROUGHPUT:
            return Level(nan, nan, nan, 0, "", point.window.why)
        if metric is THROUGHPUT:
            low_high = _mean_interval(np.array([_tokens_per_second(table) for table in point.whole]))
            if self.by_seed and len(point.whole) > 1:
                return Level(*low_high, len(point.whole), "seeds")
            return Level(low_high[0], nan, nan, 1, "", "one sample" if self.by_seed else "fixed trace")
        return level_of(metric, [_placed(run) for run in point.runs], self.slo, by_seed=self.by_seed)

    def difference(self, metric: Metric, a: Point, b: Point) -> Difference:
        """b - a, paired by seed or by block of time."""
        unsteady = [p.window.why for p in (a, b) if not p.window.shown]
        if unsteady and metric is not THROUGHPUT:
            return Difference(metric.name, metric.label, metric.unit, nan, nan, nan, nan, nan, 0, "", metric.less_is_better,
                              "; ".join(unsteady))
        if metric is THROUGHPUT:
            return self._throughput(a, b)
        return compare_metric(metric, [_placed(run) for run in a.runs], [_placed(run) for run in b.runs], self.slo,
                              by_seed=self.by_seed)

    def _throughput(self, a: Point, b: Point) -> Difference:
        """Over seeds; or over blocks of the time in which requests arrive, a request's tokens counted where it ends."""
        if self.by_seed:
            deltas = np.array([_tokens_per_second(y) - _tokens_per_second(x) for x, y in zip(a.whole, b.whole, strict=True)])
            why = "one seed" if len(deltas) < 2 else ""
        else:
            blocks = [_block_throughput(x, y) for x, y in zip(a.whole, b.whole, strict=True)]
            deltas = np.concatenate([d for d, _ in blocks])
            why = next((why for _, why in blocks if why), "")
        values = [float(np.mean([_tokens_per_second(t) for t in point.whole])) for point in (a, b)]
        centre, low, high = _mean_interval(deltas)
        return Difference(THROUGHPUT.name, THROUGHPUT.label, THROUGHPUT.unit, values[0], values[1], centre, low, high,
                          len(deltas), "seeds" if self.by_seed else "time blocks", less_is_better=False, why=why)

    def place(self, metric: Metric, point: Point) -> Place:
        """Front, dominated, undecided, or without a mean. Rivals that look better are asked first: only they can dominate,
        and one of them that is not certain leaves the point undecided whatever the others say."""
        sign = 1 if metric.less_is_better else -1
        level = self.level(metric, point)
        if not isfinite(level.value):
            return Place(NO_MEAN, level, why=level.why)
        rivals = [(sign * self.level(metric, p).value, p) for p in self.points if p is not point and p.cost <= point.cost]
        rivals = sorted(((v, p) for v, p in rivals if isfinite(v)), key=lambda rival: (rival[0], rival[1].arm.label))
        open_: list[str] = []
        for value, rival in rivals:
            if open_ and value > sign * level.value:
                break
            d = self.difference(metric, rival, point)
            same = not d.why and d.difference == d.low == d.high == 0
            known = d.clear_of_zero(len(rivals)) and not (d.left_out and metric.needs_end)
            if (same and rival.cost < point.cost) or (known and not d.better):
                return Place(DOMINATED, level, (rival.arm.label,))
            if not known:
                open_.append(rival.arm.label)
        return Place(UNDECIDED, level, tuple(open_)) if open_ else Place(FRONT, level)


def run_pareto(
    path: Path, settings: list[str], vary: list[str], goodput: list[str], *, seeds: str | None = None,
    prices: list[str] | None = None, out: Path | None = None, json: Path | None = None, processes: int | None = None,
) -> None:
    """Play every combination of the axes (kept as a sweep keeps its runs), and say which are not dominated.

    `prices`: GPU=dollars an hour, in place of cost.usd_per_gpu_hour. Raises ConfigError naming the option or the key, and
    SimcoreError naming runs that failed.
    """
    from simcore.experiments.terminal import console_of, progress_bar, write_json

    started = time.perf_counter()
    of_gpu = _prices(prices or [])
    file = read_study(path, settings, vary, goodput, seeds)
    _check(file)
    target = out or Path("out") / f"{file.study.name}-pareto"
    console = console_of(json)
    fits, unfit = fitting(file)
    _check_prices(of_gpu, [arm.study for arm in fits])
    sweep = plan_sweep(file, target, tables=True)
    labels = {arm.label for arm in fits}
    runs = [run for run in sweep.missing() if run.arm.label in labels]
    console.print(f"{len(file.arms)} combinations, {len(unfit)} that do not fit; {len(runs)} runs to play", highlight=False)
    failed: list[tuple[Run, str]] = []
    if runs:
        begin_folder(target)
        with progress_bar(console) as bar:
            task = bar.add_task("runs", total=len(runs))
            shares = [0.0] * len(runs)

            def report(number: int, share: float) -> None:
                shares[number] = share
                bar.update(task, completed=sum(shares))

            try:
                failed = sweep.play(runs, processes=processes or os.cpu_count() or 1, report=report)
            except BrokenExecutor as error:
                raise SimcoreError(f"a process died ({error}); finished runs are kept in {target}: start again") from None
            except KeyboardInterrupt:
                print(f"interrupted; finished runs are kept in {target}: start again to play the rest", file=sys.stderr)
                raise SystemExit(130) from None
    points = _points(sweep, fits, of_gpu, {run.arm.label for run, _ in failed})
    summary = summarise_front(file, points, unfit)
    summary["failed"] = [{"arm": run.arm.label, "seed": run.seed, "error": error} for run, error in failed]
    _write(target, file, summary, started)
    _print(console, file.study.name, summary)
    console.print(f"Written to {target}: summary.json, pareto.csv, plot.png, runs", highlight=False)
    write_json(json, summary)
    if failed:
        raise SimcoreError(failures(sweep, failed))


def fitting(file: StudyFile) -> tuple[list[Arm], list[tuple[Arm, str]]]:
    """The arms that can be served, and those that cannot (memory, heads that do not divide), each with the reason. Raises
    ConfigError for what is wrong in any other way, or where nothing fits."""
    fits: list[Arm] = []
    unfit: list[tuple[Arm, str]] = []
    for arm in file.arms:
        try:
            build_deployment(arm.study, file.folder)
        except ConfigError as error:
            if error.where not in UNFIT and error.key not in UNFIT:
                raise file.located(error, arm) from None
            unfit.append((arm, str(error)))
        else:
            fits.append(arm)
    if not fits:
        raise ConfigError(file.document.where(("compare", "vary")), "compare.vary", found=unfit[0][0].label,
                          why=f"no combination fits; the first: {unfit[0][1]}")
    check(file, fits)
    return fits, unfit


def _check(file: StudyFile) -> None:
    axes = file.study.compare.vary
    where = file.document.where(("compare", "vary"))
    if len(file.arms) < 2:
        raise ConfigError(where, "compare.vary", found=axes,
                          allowed="at least two combinations, e.g. --vary cluster.replicas=1,2,4")
    for axis in axes:
        if axis.split(".")[0] in _NOT_VARIED:
            raise ConfigError(where, "compare.vary", found=axis, why="all combinations must serve the same requests",
                              allowed="keys of what serves: cluster, model, engine, policies, cost_model")


def _prices(items: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in (part for text in items for part in text.split(",")):
        gpu, _, price = item.partition("=")
        try:
            value = float(price)
            if not (gpu.strip() and 0 <= value < float("inf")):
                raise ValueError
        except ValueError:
            raise ConfigError(f"--price {item}", allowed="GPU=dollars an hour, e.g. h100-sxm=2.5") from None
        found[gpu.strip()] = value
    return found


def _check_prices(prices: dict[str, float], studies: Sequence[Study]) -> None:
    used = {study.cluster.gpu for study in studies}
    for gpu in prices:
        if gpu not in used:
            raise ConfigError(f"--price {gpu}", allowed=", ".join(sorted(used)))
    if prices and (missing := used - set(prices)):
        raise ConfigError("--price", found=", ".join(prices), why=f"no price for {', '.join(sorted(missing))}",
                          allowed="one for each GPU of the combinations, or cost.usd_per_gpu_hour for all")


def _points(sweep: Sweep, fits: Sequence[Arm], prices: dict[str, float], without: set[str]) -> list[Point]:
    """The points of the arms of which every run is there; all count the same requests."""
    import pandas as pd

    loaded: list[tuple[Arm, dict[str, Any], list[pd.DataFrame], Window]] = []
    for arm in fits:
        if arm.label in without:
            continue
        runs = [run for run in sweep.runs if run.arm.label == arm.label]
        tables = [pd.read_parquet(sweep.folder / "runs" / run.key / "requests.parquet") for run in runs]
        window = Window("all") if arm.study.window == "all" else find_window(tables)
        loaded.append((arm, runs[0].values, tables, window))
    cut = common_cut(window for *_, window in loaded)
    points = []
    for arm, values, tables, window in loaded:
        cluster = arm.study.cluster
        gpus = cluster.replicas * cluster.tensor_parallel_size
        price = prices.get(cluster.gpu, arm.study.cost.usd_per_gpu_hour)
        points.append(Point(arm, values, gpus, None if price is None else gpus * price,
                            [table.iloc[cut:] for table in tables], tables, window))
    return points


def summarise_front(file: StudyFile, points: Sequence[Point], unfit: Sequence[tuple[Arm, str]]) -> dict[str, Any]:
    """The whole answer as JSON-able data."""
    study = file.study
    by_seed = len(study.seeds) > 1 and study.workload.replicated_by_seed
    front = Front(points, study.limits, by_seed=by_seed)
    priced = [point.usd_per_hour is not None for point in points]
    notes = []
    kinds = {point.arm.study.cluster.gpu for point in points}
    if len(kinds) > 1 and not all(priced):
        notes.append(f"GPUs of different kinds ({', '.join(sorted(kinds))}) are counted alike: give prices")
    elif len(kinds) > 1 and len({p.cost / p.gpus for p in points}) == 1:
        notes.append(f"one price for {', '.join(sorted(kinds))}: --price GPU=dollars gives each its own")
    if len(study.seeds) > 1 and not by_seed:
        notes.append("seeds are no independent samples of a fixed trace: intervals come from blocks of time")
    metrics = front.metrics if points else []
    placed = [{m.name: front.place(m, point) for m in metrics} for point in points]
    for metric in metrics:
        states = {place[metric.name].level.why for place in placed if place[metric.name].level.why}
        if len(points) > 1 and states and not by_seed:
            d = front.difference(metric, points[0], points[1])
            if d.why:
                notes.append(f"{metric.label}: no interval ({d.why}); more seeds, or a longer trace, decide more")
    return {
        "slo": str(study.limits), "cost": "usd_per_hour" if points and all(priced) else "gpus",
        "axes": {axis: list(dict.fromkeys(str(v) for v in values)) for axis, values in study.compare.vary.items()},
        "metrics": [{"name": m.name, "label": m.label, "unit": m.unit, "less_is_better": m.less_is_better} for m in metrics],
        "points": [{
            "arm": point.arm.label, "axes": point.values, "gpus": point.gpus, "usd_per_hour": point.usd_per_hour,
            "window": point.window.why or point.window.state,
            "metrics": {name: {"value": p.level.value, "low": p.level.low, "high": p.level.high, "status": p.status,
                               "by": list(p.by), "why": p.why} for name, p in place.items()},
        } for point, place in zip(points, placed, strict=True)],
        "do_not_fit": [{"arm": arm.label, "why": why} for arm, why in unfit],
        "oracles": {p.arm.label: found for p in points if (found := oracles(p.arm.study, file.folder))},
        "notes": list(dict.fromkeys(notes)),
    }


def _placed(requests: pd.DataFrame) -> pd.DataFrame:
    """Every request has a time by which it is placed: one that never arrived, that of the last arrival before it."""
    arrival = np.fmax.accumulate(requests["arrival"].to_numpy(dtype=float)) if len(requests) else requests["arrival"]
    return requests.assign(arrival=np.nan_to_num(arrival, nan=0.0))


def _tokens_per_second(requests: pd.DataFrame) -> float:
    done = requests[requests["status"] == "finished"]
    seconds = float(done["ended"].max() - requests["arrival"].min()) if len(done) else nan
    return float(done["generated_tokens"].sum()) / seconds if seconds > 0 else nan


def _block_throughput(a: pd.DataFrame, b: pd.DataFrame) -> tuple[np.ndarray, str]:
    """Differences of tokens a second in each block of time, and why there are too few blocks."""
    arrival = _placed(a)["arrival"].to_numpy()
    e2e = float(np.nanmean(np.concatenate([a["e2e"], b["e2e"]]))) if len(a) else nan
    blocks, why = time_blocks(arrival, e2e)
    if why:
        return np.array([_tokens_per_second(b) - _tokens_per_second(a)]), why
    edges = np.linspace(arrival.min(), arrival.max(), int(blocks.max()) + 2)
    rates = [np.histogram(t["ended"].dropna(), edges, weights=t.loc[t["ended"].notna(), "generated_tokens"])[0]
             / np.diff(edges) for t in (a, b)]
    return rates[1] - rates[0], ""


def _mean_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean and its 95% t interval."""
    from scipy.special import stdtrit

    n, mean = len(values), float(values.mean())
    if n < 2:
        return mean, nan, nan
    half = float(stdtrit(n - 1, 0.975)) * float(values.std(ddof=1)) / sqrt(n)
    return mean, mean - half, mean + half


_MARKS = {FRONT: "*", UNDECIDED: "?", DOMINATED: "", NO_MEAN: "-"}


def _print(console: Console, title: str, summary: dict[str, Any]) -> None:
    from rich.table import Table

    from simcore.experiments.report import number

    table = Table(title=f"simcore pareto | {title} | * on the front, ? undecided", title_justify="left")
    table.add_column("Combination")
    money = summary["cost"] == "usd_per_hour"
    named_metrics = [f"{m['label']} ({m['unit']})" for m in summary["metrics"]]
    for heading in ["GPUs", *(["$ per hour"] if money else []), *named_metrics]:
        table.add_column(heading, justify="right")
    for point in sorted(summary["points"], key=lambda p: (p["usd_per_hour"] if money else p["gpus"], p["arm"])):
        cells = [_cell(point["metrics"][m["name"]], number) for m in summary["metrics"]]
        table.add_row(point["arm"], str(point["gpus"]), *([number(point["usd_per_hour"])] if money else []), *cells)
    console.print(table)
    for m in summary["metrics"]:
        named = {status: [p["arm"] for p in summary["points"] if p["metrics"][m["name"]]["status"] == status]
                 for status in (FRONT, UNDECIDED)}
        console.print(f"{m['label']} against cost: front {'; '.join(named[FRONT]) or 'none is certain'}"
                      + (f"; undecided {'; '.join(named[UNDECIDED])}" if named[UNDECIDED] else ""),
                      highlight=False, soft_wrap=True)
    for entry in summary["do_not_fit"]:
        console.print(f"Does not fit: {entry['arm']}: {entry['why']}", highlight=False, soft_wrap=True)
    for label, found in summary["oracles"].items():
        console.print(f"ORACLE: {label} uses the true future ({', '.join(found)})", style="bold yellow", highlight=False)
    for note in summary["notes"]:
        console.print(note, highlight=False, soft_wrap=True)


def _cell(metric: dict[str, Any], number: Callable[..., str]) -> str:
    mark = _MARKS[metric["status"]]
    if metric["low"] is None or not isfinite(metric["low"]):
        return f"{number(metric['value'])}{mark and ' ' + mark}"
    half = float(f"{(metric['high'] - metric['low']) / 2:.2g}")
    return f"{number(metric['value'])} ± {half:,g}{mark and ' ' + mark}"


def _write(target: Path, file: StudyFile, summary: dict[str, Any], started: float) -> None:
    import pandas as pd

    from simcore.experiments.output import run_facts, write_config

    begin_folder(target)
    rows = []
    for point in summary["points"]:
        row = {"arm": point["arm"], **point["axes"], "gpus": point["gpus"], "usd_per_hour": point["usd_per_hour"]}
        for name, m in point["metrics"].items():
            row |= {name: m["value"], f"{name}_low": m["low"], f"{name}_high": m["high"], f"{name}_status": m["status"],
                    f"{name}_by": "; ".join(m["by"])}
        rows.append(row)
    rows += [{"arm": entry["arm"], "does_not_fit": entry["why"]} for entry in summary["do_not_fit"]]
    put_whole(target / "pareto.csv", lambda place: pd.DataFrame(rows).to_csv(place, index=False))
    if summary["points"]:
        put_whole(target / "plot.png", lambda place: draw_front(place, file.study.name, summary))
    put_whole(target / "summary.json", lambda place: place.write_text(to_json(summary), encoding="utf-8"))
    put_whole(target / "config.yaml", lambda place: write_config(place, file.study, file.folder))
    facts = run_facts({}, sys.argv[1:], time.perf_counter() - started)
    put_whole(target / "run.json", lambda place: place.write_text(to_json(facts), encoding="utf-8"))


MOST_NAMED = 20  # combinations named in the picture
_COLOURS = {FRONT: "C2", UNDECIDED: "C1", DOMINATED: "0.6"}


def draw_front(path: Path, title: str, summary: dict[str, Any]) -> None:
    """Write a PNG: a panel a metric over the cost, with intervals; dashed: the steps of the best value so far."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    metrics, key = summary["metrics"], summary["cost"]
    figure, plots = plt.subplots(1, len(metrics), figsize=(5 * len(metrics), 4.6), layout="constrained", squeeze=False)
    figure.suptitle(title)
    number = {point["arm"]: k for k, point in enumerate(summary["points"], 1)}
    for plot, metric in zip(plots[0], metrics, strict=True):
        shown = [(p[key], p["metrics"][metric["name"]], p["arm"]) for p in summary["points"]
                 if p["metrics"][metric["name"]]["status"] != NO_MEAN]
        for status, colour in _COLOURS.items():
            some = [(x, m) for x, m, _ in shown if m["status"] == status]
            half = [(m["high"] - m["low"]) / 2 if isfinite(m["low"]) else 0.0 for _, m in some]
            if some:
                plot.errorbar([x for x, _ in some], [m["value"] for _, m in some], yerr=half, fmt="o", color=colour,
                              markersize=5, capsize=3, label=status)
        if len(number) <= MOST_NAMED:
            for x, m, arm in shown:
                plot.annotate(str(number[arm]), (x, m["value"]), fontsize=7, xytext=(4, 3), textcoords="offset points")
        best = np.minimum.accumulate if metric["less_is_better"] else np.maximum.accumulate
        order = sorted(shown, key=lambda item: (item[0], item[1]["value"] * (1 if metric["less_is_better"] else -1)))
        if order:
            plot.step([x for x, *_ in order], best([m["value"] for _, m, _ in order]), where="post", color="C2",
                      linewidth=0.9, linestyle="--")
        plot.set(xlabel="$ per hour" if key == "usd_per_hour" else "GPUs", ylabel=f"{metric['label']} ({metric['unit']})")
        plot.grid(alpha=0.3)
    plots[0][0].legend(fontsize=8)
    if len(number) <= MOST_NAMED:
        figure.supxlabel("\n".join(f"{k}: {arm}" for arm, k in number.items()), fontsize=7, x=0.01, ha="left")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
