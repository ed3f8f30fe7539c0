"""The planned path equals the step-by-step path to the last bit, over random systems."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from serving_runs import Witness, run
from test_invariants import below, deployments, same, workloads

from simcore.traces.workload import Workload


def explore(examples: int) -> Counter[str]:
    """Run `examples` random cases on both paths and return what they met."""
    met: Counter[str] = Counter()

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(workloads(), deployments(planned=True))
    def one(work: Workload, how: dict[str, Any]) -> None:
        seen = Witness()
        plain = run(work, witness=seen, **how)
        planned = run(work, path="planned", **how)
        assert planned.speed["path"] == "planned", planned.speed["why_not_planned"]
        same(plain, planned)
        met.update(seen.counts)
        met["runs"] += 1
        met["hits"] += int((plain.requests["cached_tokens"] > 0).sum())
        met["evictions"] += sum(s.pool.evictions for s in seen.schedulers)
        met["steps"] += plain.summary["steps"]
        met["planned steps"] += round(planned.speed["planned_share"] * plain.summary["steps"])

    one()
    return met


MINIMA = {
    "preemptions": 60, "yields": 60, "hits": 100, "evictions": 1500, "chunks": 1500, "pins expired": 60,
    "pins consumed": 20, "pins room": 20, "pins program_ended": 30, "blocked while idle": 2, "planned steps": 15000,
}


def test_both_paths_are_equal_in_random_runs() -> None:
    met = explore(300)
    print(dict(met))
    assert below(met, MINIMA) == {}, dict(met)


@pytest.mark.study
def test_both_paths_are_equal_in_many_random_runs() -> None:
    met = explore(5000)
    print(dict(met))
    assert below(met, {name: 25 * least for name, least in MINIMA.items()}) == {}, dict(met)
