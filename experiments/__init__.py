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
