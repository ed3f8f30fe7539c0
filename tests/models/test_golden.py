"""The scheduler decides, step by step and block by block, what the recorded vLLM releases decided."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from golden import Driver, first_difference, read_lines

COPIED = Path(__file__).parents[1] / "data" / "vllm_scheduler_golden"
ALL = Path(__file__).parents[3] / "shared" / "data" / "vllm_scheduler_golden"


@cache
def workloads(root: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in read_lines(root / "workloads.jsonl.gz")}


def recordings(root: Path) -> list[Any]:
    paths = sorted(root.glob("*/*.jsonl.gz"))
    return [pytest.param(root, path, id=f"{path.parent.name}-{path.name.split('.')[0]}") for path in paths]


def replay(root: Path, path: Path) -> Driver:
    driver = Driver(workloads(root)[path.name.split(".")[0]], path.parent.name).run()
    assert first_difference(read_lines(path), driver) == ""
    return driver


@pytest.mark.parametrize(("root", "path"), recordings(COPIED))
def test_a_copied_recording_is_reproduced(root: Path, path: Path) -> None:
    replay(root, path)


def test_the_copied_recordings_cover_what_they_should() -> None:
    runs = [replay(COPIED, path) for path in sorted(COPIED.glob("*/*.jsonl.gz"))]
    assert len(runs) == 14
    assert {run.settings.version for run in runs} == {"0.19.0", "0.24.0", "0.33.0"}
    assert sum(run.scheduler.preemptions for run in runs) >= 80
    assert sum(run.scheduler.pool.evictions for run in runs) >= 2000
    assert sum(run.settings.async_scheduling for run in runs) == 3
    assert sum(r.cached_all for run in runs for r in run.requests.values()) >= 20_000  # tokens


@pytest.mark.skipif(not ALL.is_dir(), reason=f"the whole data set is not at {ALL}")
@pytest.mark.parametrize(("root", "path"), recordings(ALL) if ALL.is_dir() else [])
def test_every_recording_is_reproduced(root: Path, path: Path) -> None:
    replay(root, path)


@pytest.mark.parametrize(
    ("change", "differs"),
    [({"block_size": 32}, "scheduled|ev|free|sched"), ({"max_num_seqs": 3}, "sched"), ({"watermark": 0.2}, "sched|wait")],
)
def test_the_comparison_notices_another_setting(change: dict[str, Any], differs: str) -> None:
    """The null of this file: a scheduler with other rules must not pass for vLLM's."""
    workload = dict(workloads(COPIED)["turns_no_reserve"])
    workload["settings"] = workload["settings"] | change
    path = COPIED / "0.33.0" / "turns_no_reserve.jsonl.gz"
    difference = first_difference(read_lines(path), Driver(workload, "0.33.0").run())
    assert any(word in difference for word in differs.split("|"))
