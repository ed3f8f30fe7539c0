"""`simcore capacity`: what it takes to meet an SLO, or what load is carried: search, tell, draw and write."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simcore.errors import ConfigError, SimcoreError
from simcore.experiments.capacity_search import (
    FIND,
    HOURS_A_MONTH,
    Headroom,
    Search,
    Shape,
    costs,
    headroom,
    notes,
    rate_axis,
    replicas_axis,
    saturation,
    search,
    search_gpus,
)
from simcore.experiments.capacity_trials import Trial, Trials
from simcore.experiments.run import build_cost, build_deployment, build_workload, oracles, study_llm
from simcore.experiments.study import Study, read_study
from simcore.files import to_json

if TYPE_CHECKING:
    from rich.console import Console


def run_capacity(
    path: Path, settings: list[str], goodput: list[str], *, percentile: float = 95.0, find: str = "replicas",
    seeds: str | None = None, arm: str | None = None, sizes: str | None = None, most: int = 256, precision: float = 0.05,
    users: float | None = None, with_headroom: bool = True, out: Path | None = None, json: Path | None = None,
    processes: int | None = None,
) -> None:
    """Find what meets the study's SLO for `percentile` percent of the requests, and print, draw and write the answer.

    `find`: replicas, rate or gpus. `sizes`: tensor-parallel sizes for gpus, as `1,2,4,8`. `most`: replicas (or GPUs) tried
    at most. `precision`: the step between two rates, as a share. Raises ConfigError naming the option or the key, and
    SimcoreError where a run fails.
    """
    from simcore.experiments.terminal import console_of, progress_bar, write_json

    started = time.perf_counter()
    _check(percentile, find, most, precision, users)
    tp_sizes = _sizes(sizes)
    file = read_study(path, settings, goodput=goodput, seeds=seeds)
    target = out or Path("out") / f"{file.study.name}-capacity"
    console = console_of(json)
    with progress_bar(console) as bar:

        def watch(label: str, runs: int) -> Callable[[int, float], Any]:
            task = bar.add_task(label, total=runs)
            shares = [0.0] * runs

            def report(number: int, share: float) -> None:
                shares[number] = share
                bar.update(task, completed=sum(shares), visible=not all(s >= 1 for s in shares))

            return report

        def tell(trial: Trial) -> None:
            console.print(f"{trial.label}: {trial.said}", highlight=False, soft_wrap=True)

        trials = Trials(file, target, target=percentile / 100, arm=arm, processes=processes or os.cpu_count() or 1,
                        watch=watch, tell=tell)
        workload = build_workload(trials.study.workload, file.folder, trials.study.seeds[0])
        console.print(f"At least {percentile:g}% of {len(workload):,} requests within {trials.slo} (ms), "
                      f"{len(trials.study.seeds)} seed{'s' if len(trials.study.seeds) > 1 else ''}", highlight=False)
        try:
            summary = _answer(trials, find, tp_sizes, most, precision, users, with_headroom=with_headroom)
        except KeyboardInterrupt:
            if trials.played:
                _write(target, trials, {"partial": True, "trials": [t.as_json() for t in trials.played]}, [], started)
            print(f"interrupted; finished runs are kept in {target}: start again to go on", file=sys.stderr)
            raise SystemExit(130) from None
        except BrokenExecutor as error:
            raise SimcoreError(f"a process died ({error}); finished runs are kept in {target}: start again") from None
    summary |= {"slo": str(trials.slo), "percentile": percentile, "find": find, "seeds": trials.study.seeds,
                "partial": False, "trials": [trial.as_json() for trial in trials.played]}
    if used := oracles(trials.study, file.folder):
        summary["oracles"] = used
    assumed = _assumed(trials, summary.pop("_study") or trials.study, workload.source.notes)
    summary["assumed"] = assumed
    _write(target, trials, summary, summary.pop("_shown"), started)
    _print(console, summary)
    for name in used:
        console.print(f"ORACLE: {name} uses the true future", style="bold yellow", highlight=False)
    console.print("Assumed:", style="bold")
    for line in assumed:
        console.print(f"  {line}", highlight=False, style="dim", soft_wrap=True)
    console.print(f"Written to {target}: summary.json, trials.csv, plot.png, runs", highlight=False)
    write_json(json, summary)


def _check(percentile: float, find: str, most: int, precision: float, users: float | None) -> None:
    if not 0 < percentile < 100:
        raise ConfigError("--percentile", found=percentile, allowed="above 0 and below 100")
    if find not in FIND:
        raise ConfigError("--find", found=find, allowed=", ".join(FIND))
    if most < 1:
        raise ConfigError("--most", found=most, allowed="at least 1")
    if not 0.001 <= precision <= 0.5:
        raise ConfigError("--precision", found=precision, allowed="0.001 to 0.5")
    if users is not None and not 0 < users < float("inf"):
        raise ConfigError("--users", found=users, allowed="a number above 0")


def _sizes(text: str | None) -> list[int]:
    try:
        found = [int(part) for part in (text or "1,2,4,8").split(",")]
        if min(found) < 1:
            raise ValueError
    except ValueError:
        raise ConfigError(f"--tp {text}", allowed="whole numbers of at least 1, as 1,2,4,8") from None
    return sorted(set(found))


def _answer(
    trials: Trials, find: str, sizes: Sequence[int], most: int, precision: float, users: float | None, *,
    with_headroom: bool,
) -> dict[str, Any]:
    shapes: list[Shape] = []
    if find == "gpus":
        best, shapes = search_gpus(trials, sizes, most)
        found = best.search if best is not None else None
    elif find == "rate":
        found = search(trials, rate_axis(trials.study, trials.file.folder, precision), {})
    else:
        found = search(trials, replicas_axis(most, trials.study), {})
    answer = found.answer if found is not None else None
    more: Headroom | None = None
    if answer is not None and with_headroom and find != "rate":
        more = headroom(trials, answer, precision)
    failed = (more.failed if more is not None else None) or (found.failed if found is not None else None)
    summary: dict[str, Any] = {
        "answer": None if found is None or answer is None else _as_json(found, find),
        "why_none": None if answer is not None else found.why if found is not None else "no size can serve the SLO",
        "headroom": None if more is None else {"times": more.times, "failed_at": more.failed.label if more.failed else None,
                                               "precision": precision, "why": more.why, "of": ""},
        "saturates_first": saturation(answer, failed),
        "cost": costs(answer, trials.study.cost.usd_per_gpu_hour, users) if answer is not None else None,
        "not_monotone": [] if found is None else [{"meets": a, "fails": b} for a, b in found.not_monotone],
        "sizes": [{"tensor_parallel_size": s.size, "gpus": s.gpus, "why": s.why} for s in shapes],
        "notes": list(notes(trials.played, answer)),
    }
    if find == "rate" and found is not None and answer is not None:
        start = found.axis.value(found.axis.start)
        summary["headroom"] = {"times": found.value / start, "failed_at": found.failed.label if found.failed else None,
                               "precision": precision, "why": "", "of": f"{start:.4g} {found.axis.unit}"}
    summary["headline"] = _headline(summary, found, trials.target, str(trials.slo))
    return summary | {"_shown": _points(found, shapes), "_study": answer.study if answer is not None else None}


def _as_json(found: Search, find: str) -> dict[str, Any]:
    assert found.answer is not None
    gpus = found.answer.study.cluster.tensor_parallel_size if find == "gpus" else 1
    low: float | None = found.low * gpus
    high: float | None = found.high * gpus
    if found.sure is None and found.axis.unit == "replicas":
        high = None
    elif found.sure is None:
        low = None
    return {
        "value": found.value * gpus, "unit": "gpus" if find == "gpus" else found.axis.unit, "low": low,
        "high": high, "certain": found.certain,
        "replicas": found.answer.study.cluster.replicas, "gpus": found.answer.gpus,
        "tensor_parallel_size": found.answer.study.cluster.tensor_parallel_size, "gpu": found.answer.study.cluster.gpu,
        "trial": found.answer.as_json(), "next_that_fails": found.failed.label if found.failed is not None else None,
    }


def _headline(summary: dict[str, Any], found: Search | None, target: float, slo: str) -> list[str]:
    answer = summary["answer"]
    if answer is None or found is None or found.answer is None:
        return [f"No answer: {summary['why_none']}."]
    what, unit, trial = f"{100 * target:g}%", answer["unit"].replace("gpus", "GPUs"), found.answer
    kind = {"replicas": "the fewest", "gpus": "the fewest", "workers": "the most"}.get(answer["unit"], "the highest rate")
    shape = f"{answer['replicas']} x {answer['tensor_parallel_size']} {answer['gpu']}"
    if answer["value"] == 1:
        unit = unit.removesuffix("s")
    first = (f"{answer['value']:.4g} {unit} ({shape}): {kind} at which {what} of the requests are within {slo} (ms): "
             f"{trial.level.value:.2%} ({trial.level.low:.2%} .. {trial.level.high:.2%}, {_over(trial)})")
    if found.failed is not None:
        first += f", and {found.failed.level.value:.2%} at {found.failed.label}"
    lines = [first + "."]
    if not found.certain:
        low, high = answer["low"], answer["high"]
        ends = f"{low:.4g} {unit} and more" if high is None else f"{high:.4g} {unit} and less" if low is None else (
            f"{low:.4g} to {high:.4g} {unit}")
        sure = "; nothing that was tried is certain to meet it" if found.sure is None else ""
        lines.append(f"It is a range, {ends}: within it the interval of the share contains {what}{sure}.")
    return lines


def _over(trial: Trial) -> str:
    level = trial.level
    return f"{level.units} {level.method}" if level.units > 1 else level.method


def _points(found: Search | None, shapes: Sequence[Shape]) -> list[tuple[str, list[tuple[float, Trial]]]]:
    """What is drawn: (label, [(value, trial)]) for each search, in the unit of its axis, or in GPUs."""
    if shapes:
        return [(f"TP {s.size}|GPUs", [(float(t.gpus), t) for _, t in sorted(s.search.trials.items())])
                for s in shapes if s.search is not None]
    return [] if found is None else [(f"|{found.axis.unit}", sorted(
        ((found.axis.value(n), trial) for n, trial in found.trials.items()), key=lambda point: point[0]))]


def _print(console: Console, summary: dict[str, Any]) -> None:
    for k, line in enumerate(summary["headline"]):
        console.print(line, style="bold" if k == 0 else None, highlight=False, soft_wrap=True)
    lines = []
    for size in summary["sizes"]:
        lines.append(f"Tensor-parallel size {size['tensor_parallel_size']}: "
                     + (size["why"] or f"{size['gpus']} GPUs"))
    for pair in summary["not_monotone"]:
        lines.append(f"Not monotone: {pair['meets']} meets the SLO and {pair['fails']}, which has more room, does not")
    more, full, cost = summary["headroom"], summary["saturates_first"], summary["cost"]
    if more is not None:
        said = f"carries {more['times']:.3g} times the load" if more["times"] is not None else "not known"
        if more["of"]:
            said = f"{more['times']:.3g} times the study's own {more['of']}"
        lines.append(f"Headroom: {said}" + (f" (to {more['precision']:.0%})" if more["times"] is not None else "")
                     + (f"; {more['why']}" if more["why"] else ""))
    if full is not None:
        beyond = ", ".join(f"{name} {share:.1%}" for name, share in full["beyond"].items())
        lines.append(f"Saturates first: {full['resource']}, seen at {full['at']}"
                     + (" (fails)" if full["fails_there"] else " (meets the SLO)") + f": {full['numbers']}")
        lines.append(f"Beyond a limit there: {beyond}")
    if cost is not None:
        each = cost["usd_per_user_and_month"]
        lines.append(f"Cost: ${cost['usd_per_hour']:,.2f} an hour, ${cost['usd_per_month']:,.0f} a month of "
                     f"{HOURS_A_MONTH} hours" + (f"; ${each:,.4g} a user and month ({cost['users']:,.0f} users: "
                     f"{cost['users_are']})" if each is not None else ""))
        lines.append(f"  ${_money(cost['usd_per_million_output_tokens'])} a million output tokens, "
                     f"${_money(cost['usd_per_million_tokens'])} a million tokens in and out")
    for line in [*lines, *summary["notes"]]:
        console.print(line, highlight=False, soft_wrap=True)


def _money(value: float | None) -> str:
    return "N/A" if value is None else f"{value:,.3g}"


def _assumed(trials: Trials, study: Study, workload_notes: Sequence[str]) -> list[str]:
    from simcore.experiments.report import assumptions

    folder = trials.file.folder
    try:
        _, capacity = build_deployment(study, folder)
    except ConfigError:  # at the study's own tensor-parallel size it need not fit
        return [f"workload: {note}" for note in workload_notes]
    return assumptions(study, capacity, build_cost(study, folder, study_llm(study)).says, workload_notes)


def _write(
    target: Path, trials: Trials, summary: dict[str, Any], points: Sequence[tuple[str, list[tuple[float, Trial]]]],
    started: float,
) -> None:
    import pandas as pd

    from simcore.experiments.output import run_facts, write_config
    from simcore.experiments.sweep import begin_folder, put_whole

    begin_folder(target)
    rows = [{"label": t.label, **t.settings, "gpus": t.gpus, "share": t.level.value, "low": t.level.low,
             "high": t.level.high, "meets": t.meets, "requests": t.requests, **vars(t.pressure)} for t in trials.played]
    frame = pd.DataFrame(rows)
    put_whole(target / "trials.csv", lambda place: frame.to_csv(place, index=False))
    if points:
        put_whole(target / "plot.png", lambda place: draw_capacity(place, trials.study.name, points, trials.target))
    put_whole(target / "summary.json", lambda place: place.write_text(to_json(summary), encoding="utf-8"))
    put_whole(target / "config.yaml", lambda place: write_config(place, trials.study, trials.file.folder))
    facts = run_facts({}, sys.argv[1:], time.perf_counter() - started)
    put_whole(target / "run.json", lambda place: place.write_text(to_json(facts), encoding="utf-8"))


def draw_capacity(
    path: Path, title: str, points: Sequence[tuple[str, list[tuple[float, Trial]]]], target: float
) -> None:
    """Write a PNG: the share of requests within the SLO, with its interval, over what was varied."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, plot = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, line in points:
        label, _, unit = name.partition("|")
        x = [value for value, _ in line]
        y = [100 * trial.level.value for _, trial in line]
        below = [max(0.0, 100 * (t.level.value - t.level.low)) for _, t in line]
        above = [max(0.0, 100 * (t.level.high - t.level.value)) for _, t in line]
        plot.errorbar(x, y, yerr=[below, above], fmt="o-", markersize=4, linewidth=1.2, capsize=3, label=label or None)
        plot.set(xlabel=unit)
        if unit in ("replicas", "GPUs", "workers"):
            plot.xaxis.set_major_locator(MaxNLocator(integer=True))
    plot.axhline(100 * target, color="black", linewidth=0.9, linestyle="--")
    plot.set(title=title, ylabel="requests within the SLO (%), 95% intervals", ylim=(-2, 103))
    plot.grid(alpha=0.3)
    if len(points) > 1:
        plot.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
