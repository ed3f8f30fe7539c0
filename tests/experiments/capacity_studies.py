"""A chat-like study for tests of capacity, and its trials."""

from __future__ import annotations

from pathlib import Path

from small_studies import study_text

from simcore.experiments.capacity_trials import Trials
from simcore.experiments.study import read_study


def small(folder: Path, **changes) -> Path:
    """A chat-like study of a fraction of a second a run."""
    base = {"workload__generate": {"requests": 80, "rate": 20, "input_tokens": {"mean": 600, "sd": 500},
                                   "output_tokens": {"mean": 12, "sd": 8}}, "compare": {}, "cluster": {"gpu": "h100-sxm"}}
    path = folder / "small.yaml"
    path.write_text(study_text(**base | changes), encoding="utf-8")
    return path


def trials(path: Path, folder: Path, share: float = 0.9, **options) -> Trials:
    return Trials(read_study(path), folder, target=share, **options)
