"""Studies, comparisons, reports and the command line.

In a notebook:

    import simcore.experiments
    study = simcore.experiments.load("study.yaml")
    result = study.run()
    result.requests            # a pandas table; result.summary, result.steps, result.decisions likewise
    study.compare().table      # the arms of the study, with paired differences
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
        from simcore.experiments.run import Job, play

        studies = {a.label: a.study for a in self.file.arms} | {None: self.file.study}
        if arm not in studies:
            raise ConfigError(str(self.file.path), "arm", found=arm, allowed=", ".join(map(str, studies)))
        study = studies[arm]
        return play(Job(study, self.file.folder, study.seeds[0] if seed is None else seed))

    def compare(self, processes: int | None = None) -> Comparison:
        """Play every arm under every seed and compare each with the first."""
        from simcore.experiments.compare import compare

        return compare(self.file, processes=processes)


def load(path: str | Path, set: dict[str, object] | None = None) -> LoadedStudy:
    """Read a study file; `set` overrides keys, e.g. {"cluster.replicas": 4}. Raises ConfigError naming what is wrong."""
    import json

    from simcore.experiments.study import read_study

    return LoadedStudy(read_study(path, [f"{key}={json.dumps(value)}" for key, value in (set or {}).items()]))
