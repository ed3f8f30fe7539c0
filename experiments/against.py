"""`simcore validate against FILE`: a simulation of the workload of a measured run, laid beside the run.

No parameter is fitted here. Where the study's cost model was calibrated on other runs, its report says on which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simcore.errors import ConfigError
from simcore.experiments import against_metrics as metrics
from simcore.experiments.against_files import CSV, Requests, begins_as_json, documents, read_bench, read_requests_csv
from simcore.experiments.against_load import draw_load, window_side
from simcore.experiments.against_metrics import LATENCIES, SPLIT, Change, Row, Side
from simcore.experiments.against_prometheus import Metrics, is_answer, read_prometheus
from simcore.experiments.against_workload import plan_requests
from simcore.experiments.run import Job, build_cost, build_deployment, build_workload, play, study_llm
from simcore.experiments.study import Study, StudyFile, read_study
from simcore.files import to_json, whole_folder, write_whole
from simcore.models.calibrated import CalibratedConfig
from simcore.traces.workload import Workload

if TYPE_CHECKING:
    from simcore.models.serving import RunResult

ALIKE = 0.02  # repeats of one load differ by less than this in requests and lengths
Report = Callable[[str, float], Any]


@dataclass(frozen=True)
class Checked:
    """Measured files (repeats of one another) beside simulations of them."""

    paths: tuple[str, ...]
    kind: str
    rows: list[Row]  # latencies
    numbers: list[Row]  # throughput, load
    split: list[Row]  # where the time goes, as far as it was measured
    simulated_split: dict[str, float]  # mean s a request, of the simulation
    spread: str  # what stands behind `spread` of the rows
    measured: tuple[Side, ...]
    simulated: tuple[tuple[Side, ...], ...]  # of each file, one a seed
    requests: int
    seeds: tuple[int, ...]
    assumed: dict[str, float]
    says: str  # of the cost model
    notes: tuple[str, ...]

    @property
    def within(self) -> tuple[int, int]:
        """(latencies within the spread, latencies for which that is known)."""
        known = [row.within for row in self.rows if row.within is not None]
        return sum(known), len(known)

    def as_json(self) -> dict[str, Any]:
        return {
            "files": list(self.paths), "kind": self.kind, "requests": self.requests, "seeds": list(self.seeds),
            "spread_is": self.spread, "rows": [row.as_json() for row in (*self.rows, *self.numbers)],
            "split": [row.as_json() for row in self.split], "simulated_split_ms": {
                key: 1e3 * value for key, value in self.simulated_split.items()},
            "within_spread": dict(zip(("rows", "of"), self.within, strict=True)),
            "fitted_parameters": 0, "step_times": self.says, "assumed": self.assumed, "notes": list(self.notes),
        }


def read_measured(path: Path, match: Sequence[str] = ()) -> Requests | Metrics:
    """A measured run of any format that is known, told by its content. Raises TraceError with file and line."""
    if not begins_as_json(path):
        return read_requests_csv(path)
    found = documents(path)
    if all(is_answer(value) for _, value in found):
        return read_prometheus(str(path), found, match)
    return read_bench(path, found)


def check(file: StudyFile, paths: Sequence[Path], *, match: Sequence[str] = (), arrivals: str = "auto",
          workload: str = "auto", report: Report = lambda what, share: None) -> Checked:
    """Simulate what was measured, under every seed of the study where arrivals are drawn, and compare. Raises TraceError for
    a bad file, ConfigError for a study or an option that cannot be."""
    if len({str(path) for path in paths}) < len(paths):
        raise ConfigError("FILE", found=", ".join(map(str, paths)), why="a file stands twice: it is no repeat of itself")
    measured = [read_measured(path, match) for path in paths]
    kinds = {isinstance(m, Metrics) for m in measured}
    if len(kinds) > 1:
        raise ConfigError("FILE", found=", ".join(map(str, paths)), allowed="repeats of one kind: requests, or metrics")
    runner = _Runner(file, arrivals, workload, report)
    pairs = [runner.metrics(m) if isinstance(m, Metrics) else runner.requests(m) for m in measured]
    sides, simulated = [side for side, _ in pairs], [seeds for _, seeds in pairs]
    single: dict[tuple[str, str], float] = {}
    spread = f"between the {len(paths)} measured files"
    if len(measured) == 1 and isinstance(measured[0], Metrics):
        single, spread = metrics.bootstrap_intervals(measured[0]), "bootstrap over intervals, half of 95%"
    elif len(measured) == 1:
        single = metrics.bootstrap_requests(sides[0], int(sides[0].spreads["e2e"].count))
        spread = "bootstrap over requests, half of 95%"
    notes = [*runner.notes, *_alike(measured, sides)]
    cost = build_cost(file.study, file.folder, study_llm(file.study))
    if isinstance(file.study.cost_model, CalibratedConfig):
        notes.append("the cost model was calibrated before: if on these very runs, this is no test of it")
    return Checked(
        tuple(map(str, paths)), "metrics" if True in kinds else measured[0].kind,  # type: ignore[union-attr]
        metrics.compare_sides(sides, simulated, single, LATENCIES), metrics.compare_numbers(sides, simulated, single),
        metrics.compare_sides(sides, simulated, single, {k: v for k, v in SPLIT.items() if k != "again"}, ("mean",)),
        {key: float(np.mean([s.spreads[key].mean for seeds in simulated for s in seeds]))
         for key in SPLIT if all(key in s.spreads for seeds in simulated for s in seeds)},
        spread, tuple(sides), tuple(map(tuple, simulated)), runner.played, tuple(sorted(runner.seeds)), cost.listed,
        cost.says, tuple(dict.fromkeys(notes)))


class _Runner:
    """Plays the workloads of measured files under one study; remembers what was played and what there is to say of it."""

    def __init__(self, file: StudyFile, arrivals: str, workload: str, report: Report) -> None:
        # The window of a study is for its own, generated load; here the measured requests are those that count.
        self.study: Study = file.study.model_copy(update={"window": "all"})
        self.folder, self.arrivals, self.workload, self.report = file.folder, arrivals, workload, report
        self.deployment, capacity = build_deployment(self.study, self.folder)
        self.notes: list[str] = []
        if capacity.estimated:
            self.notes.append(f"KV pool: {capacity.blocks:,} blocks, estimated ({capacity.low:,} to {capacity.high:,}): the "
                              "server's log has num_gpu_blocks, give it as engine.num_gpu_blocks")
        self.seeds: set[int] = set()
        self.played = 0
        self._own: Workload | None = None
        self._of_own: dict[int, RunResult] = {}  # by seed: repeats of the study's own workload are played once

    def own(self) -> Workload:
        if self._own is None:
            self._own = build_workload(self.study.workload, self.folder, self.study.seeds[0])
        return self._own

    def play(self, workload: Workload, seed: int, what: str) -> RunResult:
        self.seeds.add(seed)
        if workload is self._own and seed in self._of_own:
            return self._of_own[seed]
        self.played += len(workload)
        result = play(Job(self.study, self.folder, seed), lambda share: self.report(what, share), workload)
        if workload is self._own:
            self._of_own[seed] = result
        return result

    def say(self, where: str, notes: Sequence[str]) -> None:
        self.notes += [f"{where}: {note}" for note in notes]

    def requests(self, m: Requests) -> tuple[Side, list[Side]]:
        plans = []
        for seed in self.study.seeds:
            plans.append((seed, plan_requests(m, self.own, seed, self.arrivals, self.workload)))
            if not plans[0][1].drawn:
                break  # another seed would play the same
        self.say(m.path, [*m.notes, *plans[0][1].notes])
        if m.model is not None:
            self.say(m.path, [f"measured on {m.model}, simulated as {self.study.llm.name}"])
        if m.itls is not None and not metrics.gaps_are_tokens(m):
            self.say(m.path, ["its gaps are not between single tokens (speculation, or several tokens a chunk): no ITL is "
                              "compared"])
        results = [(plan, self.play(plan.workload, seed, f"{m.path}, seed {seed}")) for seed, plan in plans]
        judged, sides = None, []
        for plan, result in results:  # the requests that ended well on the server and in every simulation
            done = (result.requests["status"] == "finished").to_numpy(dtype=bool)
            ended = np.zeros(len(m), dtype=bool)
            ended[plan.rows[done]] = True
            judged = ended & m.good if judged is None else judged & ended
        assert judged is not None
        self._say_lost(m, results, judged)
        rows = np.flatnonzero(judged)
        for plan, result in results:
            place = np.full(len(m), -1)
            place[plan.rows] = np.arange(len(plan.rows))
            at = place[rows]
            table = {name: result.requests[name].to_numpy(dtype=float) for name in (
                "arrival", "admitted", "first_token", "ended", "service", "ttft", "tpot", "e2e", "queue_time", "preemptions",
                "generated_tokens")}
            sides.append(metrics.simulated_side(table, [result.itls(int(i)) for i in at], at, m.arrival is None))
        return metrics.measured_side(m, rows), sides

    def _say_lost(self, m: Requests, results: Sequence[Any], judged: np.ndarray) -> None:
        lost = int(m.good.sum() - judged.sum())
        if not lost:
            return
        table = results[0][1].requests
        reasons = table.loc[table["status"] != "finished", ["status", "reason"]].agg(": ".join, axis=1).value_counts()
        why = f", most of them {reasons.index[0]}" if len(reasons) else ""
        if not judged.any():
            raise ConfigError(m.path, why=f"no request that the server answered ends in the simulation{why}")
        self.say(m.path, [f"{lost} of {int(m.good.sum())} requests that the server answered do not end in the simulation"
                          f"{why}: they are left out on both sides"])

    def metrics(self, m: Metrics) -> tuple[Side, list[Side]]:
        sides: list[Side] = []
        for seed in self.study.seeds:
            load = draw_load(m, seed, self.deployment.max_model_len)
            if not sides:
                self.say(m.path, [*m.notes, *load.notes])
                replicas = self.study.cluster.replicas
                if m.engines not in (0, replicas):
                    self.say(m.path, [f"the metrics are of {m.engines} engines, the study has {replicas} replicas"])
                if m.model is not None:
                    self.say(m.path, [f"measured on {m.model}, simulated as {self.study.llm.name}"])
            result = self.play(load.workload, seed, f"{m.path}, seed {seed}")
            refused = int((result.requests["status"] == "refused").sum())
            if refused:
                self.say(m.path, [f"{refused} of {len(load.workload)} requests were refused in the simulation, seed {seed}"])
            sides.append(window_side(result, load, m, self.deployment.num_blocks, self.study.sample_every))
        return metrics.of_metrics(m), sides


def _alike(measured: Sequence[Requests | Metrics], sides: Sequence[Side]) -> list[str]:
    """What to say where files given as repeats are not of one load."""
    if len(measured) < 2:
        return []
    if isinstance(measured[0], Metrics):
        rates = [side.numbers["request_throughput"] for side in sides]
        return [] if max(rates) <= min(rates) * (1 + ALIKE) else [
            f"the files are of other loads ({min(rates):.3g} to {max(rates):.3g} requests/s): their difference is more than "
            "a spread"]
    sizes = [(len(m), int(m.input_tokens.sum()), int(m.output_tokens.sum())) for m in measured if isinstance(m, Requests)]
    if all(max(column) <= min(column) * (1 + ALIKE) for column in zip(*sizes, strict=True)):
        return []
    loads = " and ".join(f"{n} requests of {i + o:,} tokens" for n, i, o in sizes)
    return [f"the files are of other loads ({loads}): their difference is more than a spread"]


def run_against(
    files: Sequence[Path], study: Path, settings: Sequence[str], *, before: Sequence[Path] = (), after: Sequence[Path] = (),
    after_study: Path | None = None, set_after: Sequence[str] = (), seeds: str | None = None, arrivals: str = "auto",
    workload: str = "auto", match: Sequence[str] = (), out: Path | None = None, json: Path | None = None,
) -> None:
    """`simcore validate against`: `files` are one measured run or its repeats; or `before` and `after` those of a change,
    which `after_study` or `set_after` makes in the study."""
    from simcore.experiments import against_report as pages
    from simcore.experiments.terminal import console_of, progress_bar, write_json

    if bool(before) != bool(after):
        raise ConfigError("--before, --after", allowed="both, or neither")
    if bool(files) == bool(before):
        raise ConfigError("FILE", found=", ".join(map(str, files)) or None,
                          allowed="measured files, or --before and --after, each with their own")
    if (after_study or set_after) and not before:
        raise ConfigError("--after-study, --set-after", allowed="together with --before and --after")
    first = read_study(study, settings, seeds=seeds)
    second = read_study(after_study or study, [*settings, *set_after], seeds=seeds) if before else None
    if second is not None and after_study is None and not set_after:
        raise ConfigError("--set-after", why="nothing says what the change is",
                          allowed="--set-after key=value, or --after-study FILE")
    target = out or Path("out") / f"{first.study.name}-against"
    console = console_of(json)
    options: dict[str, Any] = {"match": match, "arrivals": arrivals, "workload": workload}
    with whole_folder(target) as folder:
        with progress_bar(console) as bar:
            tasks: dict[str, Any] = {}

            def report(what: str, share: float) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, total=1.0)
                bar.update(tasks[what], completed=share)

            checked = check(first, before or files, report=report, **options)
            other = check(second, after, report=report, **options) if second is not None else None
        found: list[Change] = []
        if other is not None:
            found = metrics.changes([*checked.rows, *checked.numbers], [*other.rows, *other.numbers])
        value = pages.as_json(first.study.name, checked, other, found)
        write_whole(folder / "against.json", to_json(value))
        pages.draw(folder / "against.png", first.study.name, {"before": checked, "after": other} if other else {"": checked})
    if other is None:
        pages.print_checked(console, first.study.name, checked)
    else:
        pages.print_checked(console, f"{first.study.name}, before", checked)
        pages.print_checked(console, f"{first.study.name}, after", other)
        pages.print_changes(console, found)
    console.print(f"Written to {target}: against.json, against.png", highlight=False, soft_wrap=True)
    write_json(json, value)


__all__ = ["CSV", "Checked", "check", "read_measured", "run_against"]
