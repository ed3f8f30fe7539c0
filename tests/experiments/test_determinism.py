"""One study and seed: equal bytes, on one process or two, whatever the hash seed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from small_studies import simcore, write_study

from simcore.experiments.html_report_page import SPEED_BEGINS, SPEED_ENDS


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a result but run.json, and the report without its sim_speed: these tell of the run itself."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "run.json"]
    return {str(path.relative_to(folder)): without_speed(path.read_bytes()) for path in files}


def without_speed(content: bytes) -> bytes:
    before, mark, rest = content.partition(SPEED_BEGINS.encode())
    return before + rest.partition(SPEED_ENDS.encode())[2] if mark else content


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("determinism")
    path = write_study(
        folder, seeds=[1, 2], workload__generate__requests=80, engine={"num_gpu_blocks": 150, "max_num_seqs": 16},
        compare__vary={"policies.replica_routing": ["round-robin", "prefix-aware"], "policies.admission": [
            "fcfs", {"name": "shortest-first", "by": "uncached"}]})
    found = {}
    for processes, hash_seed in ((1, 0), (2, 1), (2, 31_337)):
        name = f"{processes} processes, hash seed {hash_seed}"
        done = simcore("compare", path, "--out", name, "--processes", processes, "--save-detailed", cwd=folder,
                       env=os.environ | {"PYTHONHASHSEED": str(hash_seed)})
        assert done.returncode == 0, done.stderr
        found[name] = contents(folder / name)
    return found


def test_results_are_equal_bytes(results):
    first, *others = results.values()
    for other in others:
        assert sorted(first) == sorted(other)
        assert [name for name in first if first[name] != other[name]] == []


def test_everything_was_there_to_be_compared(results):
    names = set(next(iter(results.values())))
    arm = "replica-routing-prefix-aware--admission-fcfs"
    assert {"summary.json", "comparison.parquet", "config.yaml", "plot.png", "report.html", ".simcore-result"} <= names
    assert {f"{arm}/seed-2/{table}.parquet" for table in ("requests", "programs", "steps", "decisions")} <= names
    assert f"{arm}/seed-1/summary.json" in names
