"""Metric definitions on a table small enough to work by hand."""

from __future__ import annotations

from math import isnan, nan

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_runs import run, tables, workload

from simcore.models.metrics import (
    Gaps,
    Slo,
    distribution,
    distribution_of_gaps,
    summarise,
    token_times,
    with_metrics,
)

# Requests 0-3 finish; 4 is refused, 5 cancelled, 6 cut by the horizon after two tokens.
ROWS = pd.DataFrame({
    "request": range(7),
    "program": [0, 0, 1, 2, 3, 3, 2],
    "turn": [0, 1, 0, 0, 0, 1, 1],
    "status": ["finished"] * 4 + ["refused", "cancelled", "unfinished"],
    "input_tokens": [100, 200, 50, 50, 900, 10, 40],
    "output_tokens": [5, 1, 11, 2, 7, 7, 9],
    "generated_tokens": [5, 1, 11, 2, 0, 0, 2],
    "cached_tokens": [0, 96, 0, 48, 0, 0, 16],
    "preemptions": [0, 0, 2, 0, 0, 0, 1],
    "arrival": [10.0, 14.0, 11.0, 13.0, 12.0, nan, 15.0],
    "admitted": [10.0, 14.5, 11.0, 13.0, nan, nan, 16.0],
    "first_token": [11.0, 15.0, 13.0, 13.5, nan, nan, 17.0],
    "ended": [13.0, 15.0, 18.0, 14.0, 12.0, 12.0, nan],
})


@pytest.fixture
def requests() -> pd.DataFrame:
    return with_metrics(ROWS)


def test_times_of_a_request(requests: pd.DataFrame) -> None:
    np.testing.assert_array_equal(requests["ttft"], [1.0, 1.0, 2.0, 0.5, nan, nan, 2.0])
    np.testing.assert_array_equal(requests["e2e"], [3.0, 1.0, 7.0, 1.0, nan, nan, nan])
    np.testing.assert_array_equal(requests["queue_time"], [0.0, 0.5, 0.0, 0.0, nan, nan, 1.0])
    # (3 - 1) / 4; undefined for one token; (7 - 2) / 10; (1 - 0.5) / 1; undefined unless finished.
    np.testing.assert_array_equal(requests["tpot"], [0.5, nan, 0.5, 0.5, nan, nan, nan])


@pytest.mark.parametrize(
    ("slo", "met"),
    [(Slo(), [1, 1, 1, 1]), (Slo(ttft_ms=1000), [1, 1, 0, 1]), (Slo(tpot_ms=499.9), [0, 1, 0, 0]),
     (Slo(tpot_ms=500), [1, 1, 1, 1]), (Slo(e2el_ms=2999), [0, 1, 0, 1]), (Slo(ttft_ms=999, e2el_ms=5000), [0, 0, 0, 1])],
)
def test_an_slo_is_met_at_its_limit_and_only_by_finished_requests(requests: pd.DataFrame, slo: Slo, met: list[int]) -> None:
    assert slo.met(requests).astype(int).tolist() == [*met, 0, 0, 0]


def test_summary(requests: pd.DataFrame) -> None:
    gaps = Gaps(np.array([0.0, 0.5, 1.0]), np.array([1, 2, 1]))
    rates = np.array([2, 1, 0, 0, 0, 0, 0, 1])
    summary = summarise(
        requests, gaps, rates, slo=Slo(ttft_ms=1000), gpus=4, usd_per_gpu_hour=9.0, busy_seconds=[4.0, 2.0])
    assert summary["duration"] == 8.0  # 10 -> 18
    assert (summary["completed"], summary["failed"]) == (4, 3)
    assert summary["max_output_tokens_per_s"] == 2
    assert (summary["refused"], summary["cancelled"], summary["unfinished"]) == (1, 1, 1)
    assert summary["request_throughput"] == 4 / 8
    assert summary["request_goodput"] == 3 / 8 and summary["slo_attainment"] == 3 / 7
    assert summary["total_input_tokens"] == 400
    assert summary["prefix_cache_hit_rate"] == (96 + 48 + 16) / (100 + 200 + 50 + 50 + 40)  # the admitted ones
    assert summary["preemptions"] == 3
    assert summary["utilization"] == 3.0 / 8
    assert summary["max_concurrent_requests"] == 2  # only finished ones count: 0 and 2 until 13, where 0 ends and 3 comes
    assert summary["mean_itl_ms"] == 500 and summary["median_itl_ms"] == 500
    assert summary["mean_tpot_ms"] == 500 and summary["median_ttft_ms"] == 1000
    assert summary["usd"] == 9.0 * 4 * 8 / 3600
    good_tokens = 5 + 1 + 2
    assert summary["usd_per_million_output_tokens_within_slo"] == pytest.approx(summary["usd"] / good_tokens * 1e6)
    assert summary["slo"] == "ttft:1000"


def test_what_a_run_without_a_finished_request_reports() -> None:
    empty = with_metrics(ROWS[4:])
    none = Gaps(np.zeros(0), np.zeros(0, dtype=np.int64))
    summary = summarise(empty, none, np.zeros(0), slo=Slo(), gpus=1, usd_per_gpu_hour=1.0, busy_seconds=[0.0])
    assert summary["completed"] == 0 and summary["max_concurrent_requests"] == 0
    assert isnan(summary["duration"]) and isnan(summary["request_throughput"])
    assert summary["p99_ttft_ms"] == 2000  # the unfinished request had its first token
    assert summary["usd_per_million_output_tokens_within_slo"] is None
    assert all(isnan(v) for v in distribution(np.array([nan, nan])).values())


def test_ends_come_before_arrivals_at_one_instant() -> None:
    rows = [{"at": float(k), "prompt": 4, "output": 1} for k in range(5)]
    assert run(workload(rows)).summary["max_concurrent_requests"] == 1


def test_percentiles_are_those_of_numpy() -> None:
    values = np.array([1.0, 2.0, 4.0, 8.0, nan])
    spread = distribution(values)
    assert spread["mean"] == 3.75 and spread["p50"] == 3.0 and spread["max"] == 8.0
    assert spread["p99"] == np.percentile(values[:4], 99) and spread["std"] == values[:4].std()


@given(st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 5)), min_size=1, max_size=30))
def test_gaps_told_together_have_the_distribution_of_those_told_one_by_one(told: list[tuple[float, int]]) -> None:
    told.sort()
    seconds, counts = np.array([t for t, _ in told]), np.array([c for _, c in told])
    spread, plain = distribution_of_gaps(Gaps(seconds, counts)), distribution(np.repeat(seconds, counts))
    for name, value in plain.items():
        if name in ("mean", "std"):
            assert spread[name] == pytest.approx(value, rel=1e-9, abs=1e-9)
        else:
            assert spread[name] == value


def test_token_times_over_runs_of_steps() -> None:
    ends = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    assert token_times([1, 3], ends).tolist() == [2.0, 4.0]
    assert token_times([0, 1, 2, 4, 5, 6], ends).tolist() == [1.0, 4.0, 8.0, 32.0]


def test_gaps_of_a_request_that_was_preempted_and_came_back() -> None:
    """Three blocks for two requests of one block and a growing need: the second loses its place, and its gap shows it."""
    rows = [{"at": 0.0, "prompt": 4, "output": 5}, {"at": 0.0, "prompt": 4, "output": 3}]
    result = run(workload(rows), blocks=3, cost=tables(0.5))
    assert result.token_steps[0] == [0, 5] and result.token_steps[1] == [0, 1, 5, 7]
    assert result.itls(1).tolist() == [2.5, 0.5]
    assert result.requests["tpot"][1] == (3.5 - 0.5) / 2
    gaps = np.concatenate([result.itls(0), result.itls(1)])
    assert result.summary["mean_itl_ms"] == gaps.mean() * 1e3
    assert result.summary["total_output_tokens"] == 8
