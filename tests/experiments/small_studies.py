"""A small study for tests: prefix groups on two replicas, a few hundred requests, a fraction of a second to play."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from simcore.experiments.study import StudyFile, read_study

BASE: dict[str, Any] = {
    "name": "small",
    "workload": {
        "generate": {
            "requests": 120, "rate": 30, "input_tokens": {"mean": 400, "sd": 400}, "output_tokens": {"mean": 12, "sd": 8},
            "prefix_groups": 6, "prefix_tokens": 512,
        },
    },
    "model": "llama-3.1-8b",
    "cluster": {"replicas": 2, "gpu": "h100-sxm"},
    "engine": {"max_num_seqs": 4},
    "compare": {"vary": {"policies.replica_routing": ["round-robin", "least-loaded"]}},
    "slo": {"ttft_ms": 60, "tpot_ms": 30},
    "cost": {"usd_per_gpu_hour": 2.0},
}


def study_text(**changes: Any) -> str:
    """BASE as YAML, with dotted keys set (`workload__generate__rate=3`)."""
    data = yaml.safe_load(yaml.safe_dump(BASE))
    for key, value in changes.items():
        place, parts = data, key.split("__")
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = value
    return yaml.safe_dump(data, sort_keys=False)


def write_study(folder: Path, **changes: Any) -> Path:
    path = folder / "study.yaml"
    path.write_text(study_text(**changes), encoding="utf-8")
    return path


def small_file(folder: Path, **changes: Any) -> StudyFile:
    return read_study(write_study(folder, **changes))


def simcore(*arguments: object, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The console command in a process of its own."""
    command = [sys.executable, "-m", "simcore.experiments.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False, **options)
