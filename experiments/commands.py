"""What the commands of the command line do."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from simcore.config import parse_seconds
from simcore.errors import ConfigError, SimcoreError
from simcore.experiments.compare import check, compare, require_arms, require_headline
from simcore.experiments.html_report import write_report, write_run_report, write_sweep_report
from simcore.experiments.output import run_facts, shared, study_facts, write_comparison, write_config, write_run
from simcore.experiments.plot import draw
from simcore.experiments.report import assumptions, metrics_table, number, print_comparison
from simcore.experiments.run import Job, build_cost, build_deployment, oracles, play, study_llm
from simcore.experiments.study import Arm, Study, StudyFile, read_study
from simcore.experiments.sweep import Run, begin_folder, failures, plan_sweep, put_whole
from simcore.experiments.sweep_report import MOST_LINES, draw_sweep, summary_field, sweep_table
from simcore.experiments.terminal import console_of, progress_bar, to_stdout, write_json
from simcore.experiments.winner_map import draw_map, read_map
from simcore.files import to_json, whole_folder
from simcore.models.decision_points import KINDS
from simcore.models.metrics import Slo
from simcore.models.steady import window_line
from simcore.traces.transform import head as first_requests
from simcore.traces.workload import Workload

PILOT_REQUESTS = 100
BYTES_PER_REQUEST = 250  # of Parquet, all tables together
BYTES_PER_SUMMARY = 8_000  # summary.json, config.yaml and the manifest of a run


def run_study(
    path: Path, settings: list[str], goodput: list[str], out: Path | None, json: Path | None, arm: str | None,
    seed: int | None, *, detailed: bool, csv: bool,
) -> None:
    started = time.perf_counter()
    file = read_study(path, settings, goodput=goodput)
    chosen = {a.label: a for a in file.arms}.get(arm or "") if arm else Arm(file.study.name, file.study)
    if chosen is None:
        raise ConfigError(f"--arm {arm}", allowed=", ".join(a.label for a in file.arms))
    for setting in settings if arm else ():
        if setting.split("=")[0].strip() in file.study.compare.vary:
            raise ConfigError(f"--set {setting}", why=f"the arm {arm} sets this key", allowed="either --arm or --set")
    study = chosen.study
    seed = study.seeds[0] if seed is None else seed
    (workload,) = check(file, [chosen], seed)
    target = out or Path("out") / study.name
    console = console_of(json)
    facts, assumed = _facts(study, workload, file.folder)
    with whole_folder(target) as folder:
        _announce(console, file, [chosen], workload, 1, 1, target)
        with progress_bar(console) as bar:
            task = bar.add_task(chosen.label, total=1.0)
            result = play(Job(study, file.folder, seed), lambda share: bar.update(task, completed=share), interruptible=True)
        cut_at = result.summary.get("interrupted_at")
        partial = f"interrupted at {cut_at:.3f} s of simulated time" if cut_at is not None else ""
        write_run(folder, study, result, file.folder, facts=facts, detailed=detailed, csv=csv)
        draw(folder / "plot.png", study.name, {chosen.label: result}, {})
        write_run_report(folder / "report.html", study, result, facts, assumed, label=chosen.label, seed=seed,
                         oracles=oracles(study, file.folder), partial=partial)
        run_json = run_facts({chosen.label: result.speed}, sys.argv[1:], time.perf_counter() - started)
        (folder / "run.json").write_text(to_json(run_json), encoding="utf-8")
    named = ", ".join(f"{kind} {study.policy(kind) or 'default'}" for kind in KINDS)
    console.print(metrics_table(f"simcore | {study.name} | {named}", {chosen.label: result.summary}))
    console.print(window_line(result.summary["window"]), highlight=False, soft_wrap=True)
    for name in oracles(study, file.folder):
        console.print(f"ORACLE: {name} uses the true future", style="bold yellow")
    console.print("Assumed:", style="bold")
    for line in assumed:
        console.print(f"  {line}", highlight=False, style="dim", soft_wrap=True)
    console.print(f"Written to {target}", highlight=False)
    write_json(json, {**result.summary, **facts})
    _end_partial(console, partial)


def compare_study(
    path: Path, settings: list[str], vary: list[str], goodput: list[str], out: Path | None, json: Path | None,
    processes: int | None, *, detailed: bool, csv: bool,
) -> None:
    started = time.perf_counter()
    file = read_study(path, settings, vary, goodput)
    require_arms(file)
    workloads = check(file, file.arms)
    study = file.study
    target = out or Path("out") / study.name
    console = console_of(json)
    found = [_facts(arm.study, workload, file.folder) for arm, workload in zip(file.arms, workloads, strict=True)]
    facts, lines = zip(*found, strict=True)
    assumed = [*lines[0], *(f"{arm.label}: {line}" for arm, of_arm in zip(file.arms, lines, strict=True)
                            for line in of_arm if line not in lines[0])]
    processes = processes or os.cpu_count() or 1
    jobs = [(arm, seed) for arm in file.arms for seed in arm.study.seeds]
    with whole_folder(target) as folder:
        _announce(console, file, file.arms, workloads[0], len(jobs), min(processes, len(jobs)), target)
        with progress_bar(console) as bar:
            tasks = [bar.add_task(a.label if len(study.seeds) == 1 else f"{a.label}, seed {s}", total=1.0) for a, s in jobs]
            whole = bar.add_task("all", total=float(len(jobs)))

            def report(number: int, share: float) -> None:
                bar.update(tasks[number], completed=share)
                bar.update(whole, completed=sum(bar.tasks[task].completed for task in tasks))

            comparison = compare(file, processes=processes, report=report)
        arms = {arm.label for arm in comparison.arms}
        facts = [fact for arm, fact in zip(file.arms, facts, strict=True) if arm.label in arms]
        jobs = [(arm, seed) for arm in comparison.arms for seed in arm.study.seeds]
        write_comparison(folder, comparison, facts=list(facts), detailed=detailed, csv=csv)
        runs = {arm.label: results[0] for arm, results in zip(comparison.arms, comparison.results, strict=True)}
        draw(folder / "plot.png", study.name, runs, comparison.differences)
        write_report(folder / "report.html", comparison, list(facts), assumed, partial=comparison.partial)
        results = [result for of_arm in comparison.results for result in of_arm]
        speeds = {f"{arm.label}, seed {seed}": r.speed for (arm, seed), r in zip(jobs, results, strict=True)}
        run_json = run_facts(speeds, sys.argv[1:], time.perf_counter() - started)
        (folder / "run.json").write_text(to_json(run_json), encoding="utf-8")
    print_comparison(console, comparison, assumed)
    console.print(f"Written to {target}: tables, summary.json, run.json, config.yaml, plot.png, report.html",
                  highlight=False)
    write_json(json, {**comparison.summary(), **shared(list(facts))})
    _end_partial(console, comparison.partial)


def sweep_study(
    path: Path, settings: list[str], vary: list[str], seeds: str | None, goodput: list[str], out: Path | None,
    json: Path | None, processes: int | None, *, tables: bool,
) -> None:
    started = time.perf_counter()
    file = read_study(path, settings, vary, goodput, seeds)
    require_headline(file)
    study = file.study
    target = out or Path("out") / f"{study.name}-sweep"
    console = console_of(json)
    workloads = check(file, file.arms, paired=False)
    sweep = plan_sweep(file, target, tables=tables)
    missing = sweep.missing()
    done = len({run.key for run in sweep.runs}) - len(missing)
    console.print(f"{len(file.arms)} arms, {len(sweep.runs)} runs: {done} done before, {len(missing)} to play",
                  highlight=False)
    begin_folder(target)
    failed: list[tuple[Run, str]] = []
    partial = ""
    if missing:
        processes = min(processes or os.cpu_count() or 1, len(missing))
        of_arm = {arm.label: workload for arm, workload in zip(file.arms, workloads, strict=True)}
        requests = sum(len(of_arm[run.arm.label]) for run in missing)
        size = len(missing) * BYTES_PER_SUMMARY + (requests * BYTES_PER_REQUEST if tables else 0)
        first = of_arm[missing[0].arm.label]
        try:
            seconds = _seconds(file, missing[0].arm.study, first, requests / len(first))
        except Exception:  # a policy that fails in the pilot fails in its run, which says so and leaves the others
            seconds = None
        of = f"{len(missing)} run{'s' if len(missing) > 1 else ''}, {requests:,} requests"
        _say(console, of, seconds, processes, size, target)
        shares = [0.0] * len(missing)
        with progress_bar(console) as bar:
            task = bar.add_task("runs", total=len(missing))

            def report(number: int, share: float) -> None:
                shares[number] = share
                bar.update(task, completed=sum(shares))

            try:
                failed = sweep.play(missing, processes=processes, report=report)
            except BrokenExecutor as error:
                raise SimcoreError(f"a process died ({error}); finished runs are kept in {target}: start again") from None
            except KeyboardInterrupt:
                partial = f"interrupted: {len(sweep.results)} of {len(sweep.runs)} runs; start again to play the rest"
    arms = sweep.arms()
    summary: dict[str, Any] = {
        "axes": {axis: list(dict.fromkeys(run.values[axis] for run in sweep.runs)) for axis in sweep.axes},
        "window": study.window, "runs": len(sweep.runs), "finished": len(sweep.results), "arms": arms,
        "oracles": {arm.label: found for arm in file.arms if (found := oracles(arm.study, file.folder))},
        **({"partial": partial} if partial else {}),
        "failed": [{"arm": run.arm.label, "seed": run.seed, "error": error} for run, error in failed],
    }
    if arms:
        frame = sweep.table()
        put_whole(target / "sweep.parquet", lambda place: frame.to_parquet(place, index=False))
        put_whole(target / "sweep.csv", lambda place: frame.to_csv(place, index=False))
        field = summary_field(study.compare.headline)
        put_whole(target / "plot.png", lambda place: draw_sweep(place, study.name, sweep.axes, arms, field))
        assumed = _facts(file.arms[0].study, workloads[0], file.folder)[1]
        speed = {"wall_seconds": time.perf_counter() - started}
        put_whole(target / "report.html", lambda place: write_sweep_report(
            place, study, arms, assumed, speed=speed, partial=partial))
        console.print(sweep_table(f"simcore sweep | {study.name}", arms, with_slo=study.limits != Slo()))
    if len(arms) > MOST_LINES:
        console.print(f"... and {len(arms) - MOST_LINES} arms more, in sweep.csv", highlight=False)
    put_whole(target / "summary.json", lambda place: place.write_text(to_json(summary), encoding="utf-8"))
    put_whole(target / "config.yaml", lambda place: write_config(place, study, file.folder))
    facts = run_facts({}, sys.argv[1:], time.perf_counter() - started)
    put_whole(target / "run.json", lambda place: place.write_text(to_json(facts), encoding="utf-8"))
    _print_windows(console, arms)
    if len(study.seeds) > 1 and not all(arm.study.workload.replicated_by_seed for arm in file.arms):
        console.print("No intervals: seeds are no independent samples of a fixed trace (workload.resample makes them so)",
                      style="bold yellow", highlight=False)
    for label, found in summary["oracles"].items():
        console.print(f"ORACLE: {label} uses the true future ({', '.join(found)})", style="bold yellow", highlight=False)
    console.print("Assumed, of the first arm:", style="bold")
    for line in _facts(file.arms[0].study, workloads[0], file.folder)[1]:
        console.print(f"  {line}", highlight=False, style="dim", soft_wrap=True)
    console.print(f"Written to {target}: sweep.parquet, sweep.csv, summary.json, plot.png, report.html, runs",
                  highlight=False)
    write_json(json, summary)
    _end_partial(console, partial)
    if failed:
        raise SimcoreError(failures(sweep, failed))


def _print_windows(console: Console, arms: list[dict[str, Any]]) -> None:
    """The window of the runs, once where it is the same for all."""
    lines = {(arm["arm"], seed): window_line(window) for arm in arms
             for seed, window in zip(arm["seeds"], arm["windows"], strict=True)}
    if len(set(lines.values())) == 1:
        console.print(next(iter(lines.values())), highlight=False, soft_wrap=True)
        return
    for (label, seed), line in list(lines.items())[:MOST_LINES]:
        console.print(f"{label}, seed {seed}: {line}", highlight=False, soft_wrap=True)
    if len(lines) > MOST_LINES:
        console.print(f"... and {len(lines) - MOST_LINES} runs more, in summary.json", highlight=False)


def _end_partial(console: Console, partial: str) -> None:
    """What Ctrl-C left has been written and says so; the exit code is that of an interrupt."""
    if partial:
        console.print(f"PARTIAL: {partial}", style="bold yellow", highlight=False)
        raise SystemExit(130)


def map_sweep(folder: Path, x: str, y: str, metric: str, json: Path | None) -> None:
    """Draw the winners over two axes of a sweep into its folder, and print them."""
    from dataclasses import asdict

    cells, field = read_map(folder, x, y, metric)
    put_whole(folder / "map.png", lambda place: draw_map(place, f"best {metric}", x, y, field, cells))
    console = console_of(json)
    table = Table(title=f"Best {metric} over {x} and {y}", title_justify="left")
    for heading in (x, y, "best", field, "better than the first (%)", "than the runner-up (%)", "best oracle"):
        table.add_column(heading)
    for cell in cells:
        certain = ["" if known else " (not certain)" for known in (cell.gains, cell.sure)]
        table.add_row(number(cell.x), number(cell.y), cell.winner, number(cell.value), f"{number(cell.gain)}{certain[0]}",
                      f"{number(cell.lead)}{certain[1]}: {cell.runner_up}", number(cell.oracle))
    console.print(table)
    console.print(f"Written to {folder / 'map.png'}", highlight=False)
    write_json(json, [asdict(cell) for cell in cells])


def list_policies(kind: str | None, json: Path | None) -> None:
    from simcore.lookup import find_class, names

    if kind is not None and kind not in KINDS:
        raise ConfigError("policies", found=kind, allowed=", ".join(KINDS))
    listed: dict[str, dict[str, str]] = {}
    for point in [kind] if kind else list(KINDS):
        listed[point] = {}
        for name in names(point):
            module = sys.modules[find_class(point, name, KINDS[point]).__module__]
            listed[point][name] = (module.__doc__ or "").strip().split("\n")[0]
    console = console_of(json)
    for point, found in listed.items():
        console.print(point, style="bold")
        for name, text in found.items():
            console.print(f"  {name:22s} {text}", highlight=False, soft_wrap=True)
    console.print("A policy of your own: package.module:Class or file.py:Class (docs/your-first-policy.md)", style="dim")
    write_json(json, listed)


def reproduce_paper(
    paper: str, figure: int | None, csv: Path | None, claims: str | None, json: Path | None, processes: int | None,
    page: Path | None,
) -> None:
    from simcore.experiments import reproduce
    from simcore.experiments.claims import markdown, print_claims
    from simcore.experiments.pages import fill_page, read_page

    if figure is not None and claims is not None:
        raise ConfigError("--claims", found=claims, allowed="either --figure or --claims")
    if csv is not None and figure is None:
        raise ConfigError("--csv", found=str(csv), allowed="together with --figure")
    if page is not None and figure is not None:
        raise ConfigError("--page", found=str(page), allowed="without --figure: it takes the table of claims")
    known, figures = reproduce.load_paper(paper)
    chosen = reproduce.choose(known, claims)
    shown = reproduce.figure_of(figures, figure) if figure is not None else None
    runs = list(shown.runs()) if shown else reproduce.needed(chosen)
    before = read_page(page, paper) if page else ""
    console = console_of(json)
    processes = min(reproduce.default_processes(processes), max(1, len(runs)))
    console.print(f"{len(dict.fromkeys(runs))} runs on {processes} process{'es' if processes > 1 else ''}", highlight=False)
    results = _play_all(console, paper, runs, processes)
    if shown is None:
        verdicts = reproduce.judge(chosen, results)
        print_claims(console, paper, verdicts)
        if page is not None:
            fill_page(page, paper, before, markdown(verdicts))
        write_json(json, reproduce.as_json(paper, verdicts))
        return
    failed = [said for said in results.values() if isinstance(said, str)]
    if failed:
        raise SimcoreError(f"figure {figure}: a run failed: {failed[0]}")
    points = shown.points(results)
    target = csv or Path("out") / f"{paper}-figure-{figure}"
    target.mkdir(parents=True, exist_ok=True)
    name = f"figure_{figure}"
    put_whole(target / f"{name}.csv", lambda place: reproduce.write_points(place, points))
    put_whole(target / f"{name}.png", lambda place: reproduce.draw_points(place, shown, points))
    console.print(reproduce.points_table(shown, points))
    console.print(f"{shown.note}\nWritten to {target}: {name}.csv, {name}.png", highlight=False, soft_wrap=True)
    write_json(json, {"paper": paper, "figure": figure, "note": shown.note, "points": [p.as_json() for p in points]})


def _play_all(console: Console, paper: str, runs: list[Any], processes: int) -> dict[Any, Any]:
    from simcore.experiments.reproduce import play_runs

    with progress_bar(console) as bar:
        task = bar.add_task("runs", total=max(1, len(dict.fromkeys(runs))))
        shares: dict[int, float] = {}

        def report(number: int, share: float) -> None:
            shares[number] = share
            bar.update(task, completed=sum(shares.values()))

        return play_runs(paper, runs, processes=processes, report=report)


def describe_trace(trace: str, format: str | None, block_size: int, json: Path | None, *, skip_bad: bool) -> None:
    from simcore.traces.info import describe, render
    from simcore.traces.read import read

    info = describe(read(trace, format, skip_bad=skip_bad), block_size)
    if not to_stdout(json):
        print(render(info))
    write_json(json, info)


def cut_trace(
    trace: str, output: Path, format: str | None, start: str, end: str | None, thin: float | None, clone: float | None,
    head: int | None, dequantise: str | None, seed: int, json: Path | None, *, skip_bad: bool,
) -> None:
    from simcore.traces import transform
    from simcore.traces.clone import clone_sessions
    from simcore.traces.info import describe
    from simcore.traces.native import write_csv, write_jsonl
    from simcore.traces.read import read

    def seconds(option: str, text: str) -> float:
        try:
            return parse_seconds(text)
        except ValueError as error:
            raise ConfigError(option, found=text, allowed=str(error)) from None

    writers = {".jsonl": write_jsonl, ".csv": write_csv}
    suffix = Path(output.name.removesuffix(".gz")).suffix
    if suffix not in writers:
        raise ConfigError("output", found=str(output), allowed="a file ending in .jsonl, .jsonl.gz, .csv or .csv.gz")
    workload = read(trace, format, skip_bad=skip_bad)
    if dequantise:
        workload = transform.dequantise(workload, seconds("--dequantise", dequantise), seed)
    begin = seconds("--start", start)
    if begin > 0 or end:
        workload = transform.slice_time(workload, begin, seconds("--end", end) if end else float("inf"))
    if thin is not None:
        workload = transform.thin(workload, thin, seed)
    if clone is not None:
        workload = clone_sessions(workload, clone, seed)
    if head is not None and head < len(workload):
        workload = transform.head(workload, head)
    writers[suffix](workload, output)
    if not to_stdout(json):
        print(f"{len(workload):,} requests written to {output}")
    write_json(json, describe(workload))


def _facts(study: Study, workload: Workload, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What goes with every result: notes on the workload, the KV pool, assumed numbers; as data and as lines to print."""
    _, capacity = build_deployment(study, folder)
    notes = [*workload.source.notes]
    if workload.skipped:
        notes.append(f"{len(workload.skipped)} bad rows left out, first: {workload.skipped[0]}")
    cost = build_cost(study, folder, study_llm(study)).says
    return study_facts(study, workload, folder), assumptions(study, capacity, cost, notes)


def _announce(
    console: Console, file: StudyFile, arms: list[Arm], workload: Workload, runs: int, processes: int, target: Path
) -> None:
    """Say beforehand how long it will take and how much it will write."""
    of = f"{runs} run{'s' if runs > 1 else ''} of {len(workload):,} requests"
    _say(console, of, _seconds(file, arms[0].study, workload, runs), processes,
         len(workload) * runs * BYTES_PER_REQUEST, target)


def _say(console: Console, of: str, seconds: float | None, processes: int, size_bytes: float, target: Path) -> None:
    size = f"writes about {max(1, round(size_bytes / 1e6)):,} MB to {target}"
    if seconds is None:
        console.print(f"{of}; {size}", highlight=False)
        return
    console.print(f"{of}: about {_duration(seconds / processes)} on {processes} "
                  f"process{'es' if processes > 1 else ''}; {size}", highlight=False)


def _seconds(file: StudyFile, study: Study, workload: Workload, runs: float) -> float | None:
    """CPU seconds of `runs` runs, from a pilot run of the first requests; None where they are few, or wait for others."""
    if len(workload) <= 2 * PILOT_REQUESTS or len(workload.wait_for):
        return None
    pilot = first_requests(workload, PILOT_REQUESTS)
    from simcore.experiments.run import build_policies
    from simcore.models.serving import serve

    deployment, _ = build_deployment(study, file.folder)
    speed = serve(pilot, deployment, build_policies(study, file.folder), seed=study.seeds[0]).speed
    share = float(workload.output_tokens.sum() / pilot.output_tokens.sum())
    return speed["cpu_seconds"] * share * runs


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
