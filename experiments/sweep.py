"""A sweep: every combination of the axes under every seed, each run kept as soon as it is done.

A run's folder is named by a hash of all that its result depends on: the resolved study (without its name, its axes and the
folder it lies in), the seed, the content of the files that it names (trace, model, GPU, policies) and simcore's version. So
a sweep that was killed and is started again plays what is missing, and a changed study what has changed. What the modules of
a policy import in their turn is not looked at, nor are changes of simcore's code under one version.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import simcore
from simcore.errors import BadInput
from simcore.experiments.output import study_facts, write_run
from simcore.experiments.run import Job, build_workload, play
from simcore.experiments.study import Arm, CompareConfig, FittedWorkload, Study, StudyFile, label
from simcore.files import to_json, whole_folder
from simcore.models.calibrated import CalibratedConfig
from simcore.models.decision_points import KINDS
from simcore.parallel import fan_out
from simcore.traces.read import SHIPPED

if TYPE_CHECKING:
    import pandas as pd

ROOT_MARKER = ".simcore-sweep"
DONE = "done.json"  # a run's manifest: the SHA-256 of its files
TABLES = ("requests", "programs", "tools", "steps", "decisions")


@dataclass(frozen=True)
class Run:
    """One arm under one seed. `values`: the arm's value of each axis; `key`: the name of its folder."""

    arm: Arm
    seed: int
    values: dict[str, Any]
    key: str


@dataclass(frozen=True)
class Sweep:
    """The runs of a study, and where they are kept. `tables`: the result tables are kept too."""

    file: StudyFile
    folder: Path
    runs: list[Run]
    tables: bool = False

    @property
    def axes(self) -> list[str]:
        return list(self.file.study.compare.vary)

    def summary_of(self, run: Run) -> dict[str, Any] | None:
        """The kept summary of a run; None if it was not done, or if a file of it is missing or not as it was written."""
        place = self.folder / "runs" / run.key
        try:
            done = json.loads((place / DONE).read_text(encoding="utf-8"))
            files = dict(done["files"])
            if done["key"] != run.key or not {"summary.json", "config.yaml"} <= set(files):
                return None
            if self.tables and not {f"{table}.parquet" for table in TABLES} <= set(files):
                return None
            if any(_digest((place / name).read_bytes()) != digest for name, digest in files.items()):
                return None
            return json.loads((place / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # whatever a torn or foreign file may raise
            return None

    def missing(self) -> list[Run]:
        """The runs that are still to be played, each once, in order."""
        first: dict[str, Run] = {}  # two values of an axis may mean the same run, as 3s and 3 do
        for run in self.runs:
            first.setdefault(run.key, run)
        return [run for run in first.values() if self.summary_of(run) is None]

    def play(
        self, runs: Sequence[Run], *, processes: int, report: Callable[[int, float], Any] | None = None
    ) -> list[tuple[Run, str]]:
        """Play runs and keep each when it is done. Returns those that failed, with what they said: the others go on."""
        jobs = [_SweepJob(run, self.file.folder, self.folder / "runs" / run.key, self.tables) for run in runs]
        said = fan_out(_play_and_keep, jobs, processes=processes, report=report)
        return [(run, error) for run, error in zip(runs, said, strict=True) if error]

    @cached_property
    def results(self) -> list[tuple[Run, dict[str, Any]]]:
        """The finished runs with their summaries. Ask for them when all has been played."""
        return [(run, summary) for run in self.runs if (summary := self.summary_of(run)) is not None]

    def table(self) -> pd.DataFrame:
        """One row a finished run: arm, axes, seed, and every number and word of its summary."""
        import pandas as pd

        rows = []
        for run, summary in self.results:
            window = {"window": summary["window"]["state"], "window_cut": summary["window"]["cut"]}
            plain = {key: value for key, value in summary.items() if not isinstance(value, (dict, list))}
            rows.append({"arm": run.arm.label, **run.values, "seed": run.seed, **plain, **window})
        frame = pd.DataFrame(rows)
        for name in frame.columns:
            kinds = {type(value) for value in frame[name] if value is not None}
            if kinds <= {int, float}:
                frame[name] = pd.to_numeric(frame[name]) if kinds else frame[name].astype("float64")
            elif kinds != {str} and kinds != {bool}:
                frame[name] = [None if value is None else str(value) for value in frame[name]]
        return frame

    def arms(self) -> list[dict[str, Any]]:
        """One entry an arm that has a finished run: its axes, seeds, windows, and each number's mean over the seeds.

        A mean has a 95% t interval where seeds are independent samples and there are several; it is None where some run
        has no such number (an unsteady one has no latencies).
        """
        out = []
        of_arm = itertools.groupby(self.results, key=lambda result: result[0].arm.label)
        for name_of_arm, group in ((name, list(group)) for name, group in of_arm):
            summaries = [summary for _, summary in group]
            names = [name for name, value in summaries[0].items()
                     if any(isinstance(s.get(name), (int, float)) for s in summaries) and not isinstance(value, bool)]
            sampled = group[0][0].arm.study.workload.replicated_by_seed
            out.append({
                "arm": name_of_arm, "axes": group[0][0].values, "seeds": [run.seed for run, _ in group],
                "windows": [summary["window"] for summary in summaries],
                "metrics": {name: _interval([s.get(name) for s in summaries], sampled) for name in names},
            })
        return out


@dataclass(frozen=True)
class _SweepJob:
    run: Run
    origin: Path
    place: Path
    tables: bool


def plan_sweep(file: StudyFile, folder: Path, *, tables: bool = False) -> Sweep:
    """The runs of a study. Raises BadInput when `folder` holds something that is not a sweep."""
    if folder.exists() and not (folder / ROOT_MARKER).is_file() and not (folder.is_dir() and not any(folder.iterdir())):
        raise BadInput(str(folder), why="exists and is not a sweep of simcore; nothing was written",
                       allowed="a new folder, an empty one, or an earlier sweep")
    combinations = itertools.product(*file.study.compare.vary.values())
    contents: dict[Path, str] = {}
    runs = []
    for arm, chosen in zip(file.arms, combinations, strict=True):
        values = {axis: _plain(axis, value) for axis, value in zip(file.study.compare.vary, chosen, strict=True)}
        named = dict(_inputs(arm.study, file.folder))
        for path in set(named.values()) - set(contents):
            contents[path] = _digest(path.read_bytes())
        inputs = {name: contents[path] for name, path in named.items()}
        runs += [Run(arm, seed, values, _key(arm.study, seed, inputs)) for seed in arm.study.seeds]
    return Sweep(file, folder, runs, tables)


def begin_folder(folder: Path) -> None:
    """Make the folder of a sweep, with the mark by which the next one knows it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ROOT_MARKER).write_text("A sweep of simcore: runs/ holds what is done, and is used again.\n", encoding="utf-8")


def put_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` make a file beside `path`, then put it in its place."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        write(Path(folder) / path.name)
        os.replace(Path(folder) / path.name, path)


def failures(sweep: Sweep, failed: list[tuple[Run, str]]) -> str:
    """Which runs failed, and what they said, in one line."""
    named = "; ".join(f"{run.arm.label}, seed {run.seed}: {' '.join(error.split())}" for run, error in failed)
    return f"{len(failed)} of {len(sweep.runs)} runs failed, the others are kept: {named}"


def _key(study: Study, seed: int, inputs: dict[str, str]) -> str:
    """64 bits in hexadecimal of what the result depends on."""
    config = study.model_dump(mode="json", exclude={"name", "folder", "compare", "seeds"})
    return _digest(to_json({"study": config, "seed": seed, "inputs": inputs, "simcore": simcore.__version__}).encode())[:16]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _inputs(study: Study, folder: Path) -> Iterator[tuple[str, Path]]:
    """The files that a study names, by their key: trace, model, GPU, cost model, modules of policies outside the tree."""
    if isinstance(study.cost_model, CalibratedConfig):
        yield "cost_model.file", folder / study.cost_model.file
    if study.workload.trace is not None and study.workload.trace not in SHIPPED:
        yield "workload.trace", folder / study.workload.trace
    generated = study.workload.generate
    if isinstance(generated, FittedWorkload) and generated.trace not in SHIPPED:
        yield "workload.generate.trace", folder / generated.trace
    for key, name in (("model", study.llm.name), ("cluster.gpu", study.cluster.gpu)):
        path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        if path.is_file():
            yield key, path
    for kind in KINDS:
        policy = study.policy(kind)
        if policy is not None and ":" in policy.name:
            module = _module_file(policy.name.rpartition(":")[0], folder)
            if module is not None:
                yield f"policies.{kind}", module


def _module_file(module: str, folder: Path) -> Path | None:
    if module.endswith(".py"):
        return folder / module
    sys.path.insert(0, str(folder))  # as simcore.lookup finds it
    try:
        spec = importlib.util.find_spec(module)
    finally:
        sys.path.remove(str(folder))
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None


def _plain(axis: str, value: Any) -> Any:
    """A value of an axis for a table: numbers and words as they are, a policy as it is named, the rest as text."""
    if axis == "policies" or axis.startswith("policies."):
        return label(axis, value)
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def _play_and_keep(job: _SweepJob, progress: Callable[[float], Any]) -> str | None:
    """Play a run and put its folder in its place whole. Returns what went wrong, or None."""
    study, seed = job.run.arm.study, job.run.seed
    try:
        workload = build_workload(study.workload, job.origin, seed)
        result = play(Job(study, job.origin, seed), progress, workload)
        alone = study.model_copy(update={"seeds": [seed], "compare": CompareConfig()})
        with whole_folder(job.place) as folder:
            write_run(folder, alone, result, job.origin, facts=study_facts(study, workload, job.origin), detailed=False,
                      csv=False, tables=job.tables)
            files = {path.name: _digest(path.read_bytes()) for path in sorted(folder.iterdir())}
            done = {"key": job.run.key, "arm": job.run.arm.label, "seed": seed, "files": files}
            (folder / DONE).write_text(to_json(done), encoding="utf-8")
    except Exception as error:  # a policy of the user's may fail in any way, and must not take the other runs with it
        return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return None


def _interval(values: list[Any], sampled: bool) -> dict[str, Any]:
    """Mean of a number over runs, and its 95% t interval."""
    from scipy.special import stdtrit

    n = len(values)
    if any(value is None for value in values):
        return {"mean": None, "low": None, "high": None, "runs": n}
    mean = sum(values) / n
    if n < 2 or not sampled:
        return {"mean": mean, "low": None, "high": None, "runs": n}
    deviation = (sum((value - mean) ** 2 for value in values) / (n - 1)) ** 0.5
    half = float(stdtrit(n - 1, 0.975)) * deviation / n**0.5
    return {"mean": mean, "low": mean - half, "high": mean + half, "runs": n}
