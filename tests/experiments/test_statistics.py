"""Intervals on queues of known answer, and what they are built from, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from simcore.experiments import statistics
from simcore.experiments.statistics import FEWEST_BLOCKS, METRICS, MOST_BLOCKS, Difference, compare_metric, time_blocks
from simcore.models.metrics import Slo

METRIC = {metric.name: metric for metric in METRICS}
NO_SLO = Slo()


def waits(arrival: np.ndarray, service: np.ndarray) -> np.ndarray:
    """Waiting times of a first-come queue (Lindley): W[n+1] = max(0, W[n] + S[n] - A[n])."""
    steps = np.concatenate(([0.0], service[:-1] - np.diff(arrival)))
    walk = np.cumsum(steps)
    return walk - np.minimum.accumulate(walk)


def table(arrival: np.ndarray, ttft: np.ndarray, e2e: np.ndarray | None = None, **columns: object) -> pd.DataFrame:
    e2e = ttft if e2e is None else e2e
    return pd.DataFrame({"arrival": arrival, "ttft": ttft, "e2e": e2e, "status": "finished"} | columns)


def queue_pair(kind: str, loads: tuple[float, float], n: int, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The same arrivals (rate 1) and jobs at two service rates: ttft = wait, e2e = wait + service."""
    rng = np.random.default_rng([seed, n])
    arrival = np.cumsum(rng.exponential(size=n))
    job = rng.exponential(size=n) if kind == "M/M/1" else np.ones(n)
    tables = [table(arrival, w := waits(arrival, load * job), w + load * job) for load in loads]
    return tables[0], tables[1]


def mean_wait(kind: str, load: float) -> float:
    """Pollaczek-Khinchine, arrivals at rate 1."""
    return load**2 / (1 - load) / (1 if kind == "M/M/1" else 2)


def coverage(kind: str, loads: tuple[float, float], n: int, metric: str, truth_ms: float, replications: int) -> float:
    hits = 0
    for seed in range(replications):
        a, b = queue_pair(kind, loads, n, seed)
        d = compare_metric(METRIC[metric], [a], [b], NO_SLO, by_seed=False)
        assert d.why == "" and FEWEST_BLOCKS <= d.units <= MOST_BLOCKS and d.method == "time blocks"
        hits += d.low <= truth_ms <= d.high
    return hits / replications


def test_lindley_recursion_is_the_queue_it_claims_to_be():
    rng = np.random.default_rng(1)
    arrival, service = np.cumsum(rng.exponential(size=500)), rng.exponential(size=500) * 0.9
    free, expected = 0.0, []
    for at, length in zip(arrival, service, strict=True):
        expected.append(max(0.0, free - at))
        free = max(free, at) + length
    np.testing.assert_allclose(waits(arrival, service), expected, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "loads", "n"),
    [("M/D/1", (0.6, 0.5), 6_000), ("M/D/1", (0.8, 0.7), 20_000),
     ("M/M/1", (0.6, 0.5), 8_000), ("M/M/1", (0.8, 0.7), 30_000)],
)
def test_the_interval_of_a_mean_covers_the_true_difference(kind, loads, n, record_property):
    truth = 1e3 * (mean_wait(kind, loads[1]) - mean_wait(kind, loads[0]))
    found = coverage(kind, loads, n, "ttft_mean", truth, 240)
    record_property("coverage", float(found))
    print(f"coverage {kind} loads {loads}, {n} requests, mean wait: {found:.3f}")
    assert 0.90 <= found <= 0.99


def test_the_interval_of_a_quantile_covers_the_true_difference(record_property):
    loads = (0.5, 0.4)  # the time in an M/M/1 system is exponential with mean load / (1 - load)
    truth = 1e3 * np.log(10) * (loads[1] / (1 - loads[1]) - loads[0] / (1 - loads[0]))
    found = coverage("M/M/1", loads, 3_000, "e2e_p90", truth, 200)
    record_property("coverage", float(found))
    print(f"coverage M/M/1 loads {loads}, 3000 requests, p90 of E2E: {found:.3f}")
    assert 0.85 <= found <= 0.99


def test_a_difference_of_nothing_is_covered_too():
    """Two arms that differ by noise of mean zero: a false alarm in about one of twenty."""
    known = 0
    for seed in range(200):
        rng = np.random.default_rng([3, seed])
        arrival = np.arange(2_000.0)
        a, b = (table(arrival, rng.exponential(size=2_000)) for _ in range(2))
        known += compare_metric(METRIC["ttft_mean"], [a], [b], NO_SLO, by_seed=False).known
    assert 0.01 <= known / 200 <= 0.10


def test_on_independent_data_the_interval_is_the_t_interval_of_the_batch_means():
    rng = np.random.default_rng(5)
    arrival = np.arange(5_000.0)
    a, b = rng.gamma(2, size=5_000), rng.gamma(2, size=5_000) + 0.1
    d = compare_metric(METRIC["ttft_mean"], [table(arrival, a)], [table(arrival, b)], NO_SLO, by_seed=False)
    means = 1e3 * (b - a).reshape(MOST_BLOCKS, -1).mean(axis=1)
    low, high = stats.t.interval(0.95, MOST_BLOCKS - 1, means.mean(), stats.sem(means))
    assert d.units == MOST_BLOCKS
    assert d.difference == pytest.approx(means.mean())
    assert (d.high - d.low) == pytest.approx(high - low, rel=0.08)  # 1,000 resamples know a width to about 2.5%
    assert (d.high + d.low) / 2 == pytest.approx(d.difference)


def test_seeds_are_paired_as_in_scipy():
    rng = np.random.default_rng(6)
    arms = [[table(np.arange(50.0), rng.exponential(size=50) + k * 0.3) for _ in range(7)] for k in range(2)]
    d = compare_metric(METRIC["ttft_mean"], *arms, NO_SLO, by_seed=True)
    a, b = ([1e3 * t["ttft"].mean() for t in arm] for arm in arms)
    interval = stats.ttest_rel(b, a).confidence_interval(0.95)
    assert (d.low, d.high) == pytest.approx((interval.low, interval.high))
    assert (d.a, d.b, d.difference) == pytest.approx((np.mean(a), np.mean(b), np.mean(b) - np.mean(a)))
    assert (d.units, d.method, d.why) == (7, "seeds", "")


def test_one_seed_gives_no_interval_over_seeds():
    t = table(np.arange(50.0), np.arange(50.0))
    d = compare_metric(METRIC["ttft_mean"], [t], [t], NO_SLO, by_seed=True)
    assert d.why == "one seed" and np.isnan(d.low) and not d.known


def test_a_seed_in_which_nothing_can_be_paired_gives_no_interval():
    good, none = table(np.arange(9.0), np.ones(9)), table(np.arange(9.0), np.full(9, np.nan))
    d = compare_metric(METRIC["ttft_mean"], [good, good], [good, none], NO_SLO, by_seed=True)
    assert "no request has this metric" in d.why and not d.known


def test_a_short_trace_gets_no_interval_but_the_reason():
    arrival = np.linspace(0, 49.9, 100)  # five blocks of ten mean E2E of 1 s need 50 s
    t = table(arrival, np.ones(100))
    d = compare_metric(METRIC["ttft_mean"], [t], [t.assign(ttft=2.0)], NO_SLO, by_seed=False)
    assert d.why == "trace of 49.9 s; an interval needs 50 s"
    assert (d.a, d.b, d.difference) == (1000, 2000, 1000)
    assert np.isnan([d.low, d.high]).all() and not d.known
    longer = t.assign(arrival=np.linspace(0, 50.1, 100))
    assert compare_metric(METRIC["ttft_mean"], [longer], [longer], NO_SLO, by_seed=False).why == ""


def test_arrivals_in_few_blocks_get_no_interval():
    arrival = np.concatenate((np.zeros(50), np.full(50, 1000.0)))
    _, why = time_blocks(arrival, 1.0)
    assert why == f"requests arrive in 2 of {MOST_BLOCKS} blocks of time; an interval needs {FEWEST_BLOCKS}"


@pytest.mark.parametrize("arrival", [np.zeros(30), np.zeros(1), np.zeros(0)])
def test_no_span_of_time_gives_no_interval(arrival):
    t = table(arrival, np.ones(len(arrival)))
    d = compare_metric(METRIC["ttft_p90"], [t], [t], NO_SLO, by_seed=False)
    assert d.why and np.isnan(d.low)


def test_metric_of_requests_that_never_finish_gives_no_interval():
    t = table(np.arange(100.0), np.ones(100), np.full(100, np.nan), status="unfinished")
    d = compare_metric(METRIC["ttft_mean"], [t], [t], NO_SLO, by_seed=False)
    assert d.why == "no request of this metric finished in both runs" and d.a == 1000


@given(
    st.lists(st.floats(0, 1e4), min_size=1, max_size=60).map(sorted), st.floats(1e-3, 1e3),
)
def test_blocks_are_in_order_long_enough_and_not_empty(arrival, e2e):
    at = np.array(arrival)
    blocks, why = time_blocks(at, e2e)
    assert len(blocks) == len(at) and (np.diff(blocks) >= 0).all()
    if not why:
        assert FEWEST_BLOCKS <= len(set(blocks)) == blocks.max() + 1 <= MOST_BLOCKS
        assert np.ptp(at) / (10 * e2e) >= FEWEST_BLOCKS
        for block in set(blocks):
            inside = at[blocks == block]
            assert np.ptp(inside) <= np.ptp(at) / FEWEST_BLOCKS * (1 + 1e-9)


def test_requests_unfinished_in_one_arm_are_left_out_of_pairs():
    n = 1_000
    rng = np.random.default_rng(7)
    a, b = table(np.arange(float(n)), rng.random(n)), table(np.arange(float(n)), rng.random(n))
    lost_a, lost_b = rng.random(n) < 0.1, rng.random(n) < 0.1
    a.loc[lost_a, ["ttft", "e2e"]] = np.nan
    b.loc[lost_b, ["ttft", "e2e"]] = np.nan
    both = ~(lost_a | lost_b)
    for name, fold in (("e2e_mean", np.mean), ("e2e_p90", lambda v: np.percentile(v, 90))):
        d = compare_metric(METRIC[name], [a], [b], NO_SLO, by_seed=False)
        assert d.a == pytest.approx(1e3 * fold(a["e2e"][both]))
        assert d.b == pytest.approx(1e3 * fold(b["e2e"][both]))
    kept = compare_metric(METRIC["e2e_mean"], [a[both]], [b[both]], NO_SLO, by_seed=False)
    paired = compare_metric(METRIC["e2e_mean"], [a], [b], NO_SLO, by_seed=False)
    assert kept.left_out == 0 and paired.left_out == int((lost_a | lost_b).sum())
    assert replace(kept, units=0) == replace(paired, units=0, left_out=0)


def test_goodput_counts_unfinished_requests_as_missed():
    a = table(np.arange(100.0), np.full(100, 0.1))
    b = a.copy()
    b.loc[:24, "status"] = "unfinished"
    b.loc[25:49, "ttft"] = 0.3
    d = compare_metric(METRIC["goodput_share"], [a], [b], Slo(ttft_ms=200), by_seed=False)
    assert (d.a, d.b, d.difference) == (100, 50, -50) and not d.better


def test_hit_rate_is_a_ratio_of_sums():
    columns = {"admitted": [0.0, 1.0, 2.0, np.nan], "input_tokens": [100, 300, 600, 1000]}
    a = table(np.arange(4.0), np.ones(4), cached_tokens=[0, 150, 0, 0], **columns)
    b = table(np.arange(4.0), np.ones(4), cached_tokens=[100, 150, 150, 1000], **columns)
    d = compare_metric(METRIC["hit_rate"], [a], [b], NO_SLO, by_seed=False)
    assert (d.a, d.b) == pytest.approx((15.0, 40.0))  # of 1,000 tokens: the one never admitted does not count
    assert d.unit == "points" and d.better


def test_ratio_interval_agrees_with_the_delta_method():
    rng = np.random.default_rng(8)
    n = 4_000
    inputs = rng.integers(100, 2_000, n)
    columns = {"admitted": np.zeros(n), "input_tokens": inputs}
    arms = [
        table(np.arange(float(n)), np.ones(n), cached_tokens=inputs * rng.random(n) ** power, **columns) for power in (2, 1)
    ]
    d = compare_metric(METRIC["hit_rate"], [arms[0]], [arms[1]], NO_SLO, by_seed=False)
    residual = [100 * (t["cached_tokens"] - inputs * t["cached_tokens"].sum() / inputs.sum()) / inputs.mean() for t in arms]
    blocks = (residual[1] - residual[0]).to_numpy().reshape(MOST_BLOCKS, -1).mean(axis=1)
    half = stats.t.ppf(0.975, MOST_BLOCKS - 1) * stats.sem(blocks)
    assert (d.high - d.low) / 2 == pytest.approx(half, rel=0.1)


@pytest.mark.parametrize("metric", list(METRIC))
def test_identical_arms_differ_by_exactly_nothing(metric):
    rng = np.random.default_rng(9)
    n = 600
    t = table(
        np.arange(float(n)), rng.random(n), rng.random(n) + 1, tpot=rng.random(n), admitted=np.zeros(n),
        input_tokens=rng.integers(1, 99, n), cached_tokens=np.zeros(n, dtype=int),
    )
    for by_seed in (False, True):
        d = compare_metric(METRIC[metric], [t, t], [t.copy(), t.copy()], Slo(ttft_ms=500), by_seed=by_seed)
        assert (d.difference, d.low, d.high) == (0, 0, 0) and not d.known and d.why == ""


@pytest.mark.parametrize("metric", ["ttft_mean", "ttft_p50", "ttft_p99"])
def test_the_same_tables_give_the_same_interval_and_arms_can_be_swapped(metric):
    a, b = queue_pair("M/M/1", (0.6, 0.5), 2_000, 1)
    first = compare_metric(METRIC[metric], [a], [b], NO_SLO, by_seed=False)
    assert first == compare_metric(METRIC[metric], [a.copy()], [b.copy()], NO_SLO, by_seed=False)
    swapped = compare_metric(METRIC[metric], [b], [a], NO_SLO, by_seed=False)
    assert (swapped.difference, swapped.low, swapped.high) == pytest.approx((-first.difference, -first.high, -first.low))


def test_the_resampled_quantile_is_the_quantile_of_the_repeated_blocks():
    rng = np.random.default_rng(10)
    values, blocks = rng.random(300), np.repeat(np.arange(6), 50)
    draws = rng.multinomial(6, np.full(6, 1 / 6), size=20)
    found = statistics._resampled(METRIC["ttft_p90"], values, np.ones(300), blocks, draws)
    for draw, q in zip(draws, found, strict=True):
        repeated = np.sort(np.repeat(values, draw[blocks]))
        assert q == pytest.approx(np.percentile(repeated, 90, method="inverted_cdf"))


@pytest.mark.parametrize(
    ("low", "high", "difference", "less", "known", "better"),
    [(1, 3, 2, True, True, False), (-3, -1, -2, True, True, True), (-1, 3, 1, True, False, False),
     (1, 3, 2, False, True, True)],
)
def test_known_and_better(low, high, difference, less, known, better):
    d = Difference("m", "M", "ms", 5, 5 + difference, difference, low, high, 9, "seeds", less)
    assert (d.known, d.better) == (known, better)
