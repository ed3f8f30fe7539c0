"""The built-in retention policies: what of an ended turn the next one still finds."""

from __future__ import annotations

from typing import Any

import pytest
from serving_runs import Witness, run, workload

from simcore.models.decision_points import Release, Retention
from simcore.policies.retention.lru import Lru
from simcore.policies.retention.none import None_

TURNS = [
    {"at": 0.0, "prompt": 12, "output": 5, "program": 0, "ids": [0, 1, 2, 3]},  # 16 tokens known, all computed
    {"after": [0], "gap": 5.0, "prompt": 21, "output": 1, "program": 0, "turn": 1, "ids": [0, 1, 2, 3]},
]


def cached(rows: list[dict[str, Any]], retention: Any, **options: Any) -> list[int]:
    return run(workload(rows), retention=retention, **options).requests["cached_tokens"].tolist()


def test_lru_keeps_the_whole_context_for_the_next_turn() -> None:
    assert cached(TURNS, Lru) == [0, 16]


def test_none_keeps_nothing() -> None:
    seen = Witness()
    run(workload(TURNS), retention=None_, witness=seen)
    assert cached(TURNS, None_) == [0, 0]
    assert all(key is None for key in seen.schedulers[0].pool.key) and seen.schedulers[0].pool.evictions == 0


@pytest.mark.parametrize("retention", [Lru, None_])
def test_requests_that_run_together_share_under_either(retention: Any) -> None:
    assert cached([{"at": 0.0, "prompt": 13, "output": 3, "ids": [0, 1, 2]}] * 2, retention) == [0, 12]


def test_under_pressure_lru_overwrites_the_oldest_turn_and_its_tail_first() -> None:
    """Pool of 9. Programs 0 and 1 leave 4 blocks each; 6 blocks for a stranger take the free one, all of 0 and the last
    of 1: the next turn of 0 finds nothing, that of 1 its first 3 blocks. (Order of arrival: 1's next turn first.)"""
    rows = [
        {"at": 0.0, "prompt": 16, "output": 1, "program": 0, "ids": [0, 1, 2, 3]},
        {"at": 2.0, "prompt": 16, "output": 1, "program": 1, "ids": [10, 11, 12, 13]},
        {"at": 4.0, "prompt": 24, "output": 1, "program": 2},
        {"at": 6.0, "prompt": 17, "output": 1, "program": 1, "turn": 1, "ids": [10, 11, 12, 13]},
        {"at": 8.0, "prompt": 17, "output": 1, "program": 0, "turn": 1, "ids": [0, 1, 2, 3]},
    ]
    assert cached(rows, Lru, blocks=9) == [0, 0, 0, 12, 0]


@pytest.mark.parametrize(("reuse", "kept"), [("lru", [16, 0]), ("first", [0, 16]), ("never", [0, 16])])
def test_release_decides_whose_blocks_go_first(reuse: str, kept: list[int]) -> None:
    """Pool of 8, two turns of 4 blocks; the second is released as told, then a stranger takes 4 blocks. Returns what the
    next turns of the (second, first) program find."""

    class Told(Retention):
        def at_turn_end(self, turn: Any, engine: Any) -> Release:
            return Release(reuse if turn.program == 1 and turn.index == 0 else "lru")  # type: ignore[arg-type]

    rows = [
        {"at": 0.0, "prompt": 16, "output": 1, "program": 0, "ids": [0, 1, 2, 3]},
        {"at": 2.0, "prompt": 16, "output": 1, "program": 1, "ids": [10, 11, 12, 13]},
        {"at": 4.0, "prompt": 16, "output": 1, "program": 2},
    ]
    following = [{"at": 6.0, "prompt": 17, "output": 1, "program": p, "turn": 1, "ids": [10 * p + j for j in range(4)]}
                 for p in (1, 0)]
    assert [cached([*rows, turn], Told, blocks=8)[3] for turn in following] == kept
