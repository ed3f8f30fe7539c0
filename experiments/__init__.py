"""Studies, comparisons, reports and the command line.

In a notebook:

    import simcore.experiments
    study = simcore.experiments.load("study.yaml")
    result = study.run()
    result.requests            # a pandas table; result.summary, result.steps, result.decisions likewise
    study.compare().table      # the arms of the study, with paired differences
    study.sweep("out/sweep")   # one row an arm and seed; kept there, and played only once
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from simcore.experiments.compare import Comparison
    from simcore.experiments.study import StudyFile
    from simcore.models.serving import RunResult


class LoadedStudy:
    """A checked study file, ready to run."""

    def __init__(self, file: StudyFile) -> None:
        self.file = file

    def run(self, arm: str | None = None, seed: int | None = None) -> RunResult:
        """Play one arm (a label; None = the study as written, without `compare.vary`) under one seed (None = the first)."""
        from simcore.errors import ConfigError
        from simcore.experiments.compare import check
        from simcore.experiments.run import Job, play
        from simcore.experiments.study import Arm

        arms = {a.label: a for a in self.file.arms} | {None: Arm(self.file.study.name, self.file.study)}
        if arm not in arms:
            raise ConfigError(str(self.file.path), "arm", found=arm, allowed=", ".join(map(str, arms)))
        study = arms[arm].study
        seed = study.seeds[0] if seed is None else seed
        check(self.file, [arms[arm]], seed)
        return play(Job(study, self.file.folder, seed))

    def compare(self, processes: int | None = None) -> Comparison:
        """Play every arm under every seed and compare each with the first."""
        from simcore.experiments.compare import compare

        return compare(self.file, processes=processes)

    def sweep(self, out: str | Path, processes: int | None = None) -> pd.DataFrame:
        """Play every arm under every seed that is not yet kept in the folder `out`; one row a run. Raises SimcoreError
        naming the runs that failed."""
        import os

        from simcore.errors import SimcoreError
        from simcore.experiments.compare import check
        from simcore.experiments.sweep import begin_folder, failures, plan_sweep

        check(self.file, self.file.arms, paired=False)
        sweep = plan_sweep(self.file, Path(out))
        begin_folder(sweep.folder)
        failed = sweep.play(sweep.missing(), processes=processes or os.cpu_count() or 1)
        if failed:
            raise SimcoreError(failures(sweep, failed))
        return sweep.table()


def load(path: str | Path, set: dict[str, object] | None = None) -> LoadedStudy:
    """Read a study file; `set` overrides keys, e.g. {"cluster.replicas": 4}. Raises ConfigError naming what is wrong."""
    import yaml

    from simcore.errors import ConfigError
    from simcore.experiments.study import read_study

    settings = []
    for key, value in (set or {}).items():
        try:
            text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
        except yaml.YAMLError:
            raise ConfigError("set", key, found=value, allowed="text, numbers, true, false, None, lists and dicts") from None
        settings.append(f"{key}={text.removesuffix(chr(10)).removesuffix(chr(10) + '...')}")
    return LoadedStudy(read_study(path, settings))
