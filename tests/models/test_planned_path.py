"""The planned path equals the step-by-step path to the last bit, over random systems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_runs import Witness, run
from test_invariants import below, deployments, same, tier_counts, workloads

from simcore.traces.workload import Workload


def _slowed(make: Callable[[], Any], seconds: float) -> Callable[[], Any]:
    """The same policy, each decision of which costs simulated time."""

    def made() -> Any:
        policy = make()
        policy.decision_seconds = seconds
        return policy

    return made


@st.composite
def more(draw: st.DrawFn) -> dict[str, Any]:
    """What the invariants' systems do not vary: a horizon, sampled steps, decisions that cost time, newer settings."""
    cost = st.sampled_from([0.0, 0.0, 0.0, 0.25, 0.1])
    return {
        "horizon": draw(st.sampled_from([inf, inf, 3.0, 4.75, 10.1])),
        "sample_every": draw(st.sampled_from([0.0, 1.0, inf])),
        "admission": draw(cost), "retention": draw(cost), "router": draw(cost),
        "settings": {
            "max_num_active_seqs": draw(st.sampled_from([None, 2])),
            "long_prefill_token_threshold_adaptive": draw(st.booleans()),
        },
    }


def explore(examples: int, tier: bool = False) -> Counter[str]:
    """Run `examples` random cases on both paths and return what they met."""
    met: Counter[str] = Counter()

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(workloads(), deployments(planned=True, tier=tier), more())
    def one(work: Workload, how: dict[str, Any], extra: dict[str, Any]) -> None:
        seen = Witness()
        extra = dict(extra)
        newer = extra.pop("settings")
        engine = how["settings"] | (newer if how["settings"]["version"] == "0.33.0" else {})
        slow = {kind: _slowed(how[kind], extra.pop(kind)) for kind in ("admission", "retention", "router")}
        how = how | extra | slow | {"settings": engine}
        plain = run(work, witness=seen, **how)
        planned = run(work, path="planned", **how)
        assert planned.speed["path"] == "planned", planned.speed["why_not_planned"]
        same(plain, planned)
        met.update(seen.counts)
        met["runs"] += 1
        met["cut by a horizon"] += int((plain.requests["status"] == "unfinished").any())
        met["hits"] += int((plain.requests["cached_tokens"] > 0).sum())
        met["evictions"] += sum(s.pool.evictions for s in seen.schedulers)
        met.update(tier_counts(seen))
        met["steps"] += plain.summary["steps"]
        met["planned steps"] += round(planned.speed["planned_share"] * plain.summary["steps"])

    one()
    return met


MINIMA = {
    "preemptions": 60, "yields": 60, "hits": 100, "evictions": 1500, "chunks": 1500, "pins expired": 60,
    "pins consumed": 20, "pins room": 20, "pins program_ended": 30, "blocked while idle": 2,
    "blocked heads": 1000, "heads that lost hits": 20, "cut by a horizon": 50, "planned steps": 13000,
}
TIER_MINIMA = {
    "loads": 50, "loads after hits": 10, "loads at once": 10, "loads of preempted": 4, "blocked loads": 60,
    "ready and held back": 60, "stores": 500, "tier evictions": 500, "chunks not stored": 400, "blocked heads": 1000,
    "cut by a horizon": 50, "planned steps": 6000,
}


def test_both_paths_are_equal_in_random_runs() -> None:
    met = explore(500)
    print(dict(met))
    assert below(met, MINIMA) == {}, dict(met)


def test_both_paths_are_equal_in_random_runs_with_a_host_tier() -> None:
    met = explore(400, tier=True)
    print(dict(met))
    assert below(met, TIER_MINIMA) == {}, dict(met)


@pytest.mark.study
def test_both_paths_are_equal_in_many_random_runs() -> None:
    met = explore(5000)
    print(dict(met))
    minima = {name: 9 * least for name, least in MINIMA.items()}  # ten times the cases of the quick test
    assert below(met, minima) == {}, dict(met)


@pytest.mark.study
def test_both_paths_are_equal_in_many_random_runs_with_a_host_tier() -> None:
    met = explore(4000, tier=True)
    print(dict(met))
    assert below(met, {name: 7 * least for name, least in TIER_MINIMA.items()}) == {}, dict(met)
