"""MSER-5 on cases of known answer, the growth of queues below and above their limit, and what a window leaves of a run."""

from __future__ import annotations

from math import inf, isnan, nan

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_runs import run, tables, workload

from simcore.files import to_json
from simcore.models.metrics import Slo
from simcore.models.steady import Window, apply_window, find_window, growth, mser5, window_line


def batches(means: list[float]) -> np.ndarray:
    """Values whose batches of five have these means."""
    return np.concatenate([mean + np.array([-2.0, -1.0, 0.0, 1.0, 2.0]) for mean in means])


def slow_mser5(values: np.ndarray) -> int | None:
    """The definition, term by term."""
    z = [float(np.mean(values[k : k + 5])) for k in range(0, len(values) // 5 * 5, 5)]
    if len(z) < 6:
        return None
    errors = [sum((x - np.mean(z[d:])) ** 2 for x in z[d:]) / (len(z) - d) ** 2 for d in range(len(z) - 5)]
    best = min(range(len(errors)), key=lambda d: errors[d])
    return 5 * best if best <= len(z) / 2 else None


def test_a_case_by_hand() -> None:
    """z = 8, 2, 4, 2, 4, 2, 4, 2. Whole: mean 3.5, squares 20.25 + 4 x 2.25 + 3 x 0.25 = 30, / 64 = 0.469. Without the
    first: mean 20/7, squares 6.857, / 49 = 0.140. Without two: mean 3, squares 6, / 36 = 0.167."""
    assert mser5(batches([8, 2, 4, 2, 4, 2, 4, 2])) == 5
    assert mser5(batches([2, 4, 2, 4, 2, 4, 2, 4])) == 0
    assert mser5(np.append(batches([8, 2, 4, 2, 4, 2, 4, 2]), [900.0, 900.0])) == 5  # of an incomplete batch


def test_too_short_and_constant_series() -> None:
    assert mser5([]) is None and mser5([1.0] * 29) is None
    assert mser5([1e9 + 0.1] * 500) == 0


def test_a_minimum_in_the_last_half_shows_no_steady_state() -> None:
    assert mser5(batches([9.0] * 12 + [1.0] * 9)) is None
    assert mser5(batches([9.0] * 9 + [1.0] * 12)) == 45
    assert mser5(np.arange(500.0)) is None


@given(st.lists(st.floats(0, 100), max_size=120))
def test_against_the_definition(values: list[float]) -> None:
    series = np.round(np.array(values), 1)
    fast, slow = mser5(series), slow_mser5(series)
    if fast != slow:  # two truncations of one error, told apart by rounding
        z = series[: len(series) // 5 * 5].reshape(-1, 5).mean(axis=1)
        error = [np.var(z[d:]) / (len(z) - d) for d in range(len(z) - 5)]
        assert np.sort(error)[1] == pytest.approx(np.sort(error)[0], rel=1e-6, abs=1e-9)


def ar1(rng: np.random.Generator, n: int, correlation: float) -> np.ndarray:
    noise, out, x = rng.standard_normal(n), np.empty(n), 0.0
    for k in range(n):
        x = correlation * x + noise[k]
        out[k] = x
    return out


def test_a_transient_before_correlated_noise_is_cut_and_its_bias_removed() -> None:
    """Mean 10, AR(1) noise of correlation 0.7, and a start-up of +15 that fades over 100 values."""
    rng = np.random.default_rng(1)
    cuts, biased, unbiased = [], [], []
    for _ in range(40):
        values = 10 + ar1(rng, 4000, 0.7) + 15 * np.exp(-np.arange(4000) / 100)
        cut = mser5(values)
        assert cut is not None
        cuts.append(cut)
        biased.append(values.mean() - 10)
        unbiased.append(values[cut:].mean() - 10)
    assert 150 < np.median(cuts) < 700
    assert np.mean(biased) > 0.3 and abs(np.mean(unbiased)) < 0.05


# --- growth ---------------------------------------------------------------------------------------------------------


def queue(load: float, n: int, seed: int) -> pd.DataFrame:
    """The requests table of an M/M/1 queue: 1 arrival a second."""
    rng = np.random.default_rng(seed)
    arrival, service = np.cumsum(rng.exponential(size=n)), rng.exponential(load, size=n)
    ended, admitted, free = np.empty(n), np.empty(n), 0.0
    for k in range(n):
        admitted[k] = max(free, arrival[k])
        free = ended[k] = admitted[k] + service[k]
    return pd.DataFrame({"arrival": arrival, "admitted": admitted, "ended": ended, "e2e": ended - arrival,
                         "status": "finished"})


@pytest.mark.parametrize(("load", "least", "most"), [(0.6, 0, 0), (0.8, 0, 0), (0.9, 0, 2), (1.2, 28, 30)])
def test_a_queue_above_its_limit_is_unstable_and_one_below_is_not(load: float, least: int, most: int) -> None:
    states = [find_window([queue(load, 2000, seed)]).state for seed in range(30)]
    assert least <= states.count("unstable") <= most
    if load == 0.6:
        assert states.count("steady") >= 24


def test_growth_counts_what_came_and_has_not_left() -> None:
    """Ten arrivals, of which the first five leave at once and the others never: 1, 2, 3, 4, 5 are there."""
    table = pd.DataFrame({"arrival": np.arange(10.0), "ended": [*np.arange(5.0), *[nan] * 5], "admitted": nan})
    found = growth(table, "ended")
    assert found.rise == pytest.approx(5) and found.arrivals == 5 and found.allowed == pytest.approx(2 * 5**0.5)
    refused = table.assign(ended=table["arrival"])  # never admitted, gone at once
    assert growth(refused, "admitted").rise == 0
    assert growth(table[:1], "ended").rise == 0 and growth(table[:0], "ended").rise == 0


def test_a_system_that_still_fills_is_not_called_unstable() -> None:
    """Everybody is served at once and stays for long."""
    arrival = np.arange(1000.0)
    table = pd.DataFrame({"arrival": arrival, "admitted": arrival, "ended": arrival + 900, "e2e": 900.0})
    window = find_window([table])
    assert window.state == "none" and "still grows" in window.why


def test_seeds_are_averaged() -> None:
    """One truncation for all seeds: start-ups of noisy runs that none of them shows as clearly alone."""
    runs = [queue(0.5, 2000, seed) for seed in range(8)]
    for table in runs:
        table["e2e"] += 20 * np.exp(-np.arange(2000) / 60)
    window = find_window(runs)
    assert window.state == "steady" and 60 <= window.cut <= 600 and window.cut % 5 == 0


def test_requests_without_an_e2e_do_not_count_but_keep_their_rows() -> None:
    table = queue(0.5, 1000, 3)
    table["e2e"] = np.where(np.arange(1000) < 100, 50.0, 1.0) + ar1(np.random.default_rng(1), 1000, 0.1) / 10
    table.loc[:9, "e2e"] = nan
    assert find_window([table]).cut == 100  # row 100 is the 91st with a value


# --- what a window leaves ------------------------------------------------------------------------------------------


def played():
    rows = [{"at": float(k), "prompt": 4, "output": 1 + k % 3} for k in range(12)]
    return run(workload(rows), cost=tables(0.25))


def apply(result, window: Window) -> None:
    apply_window(result, window, slo=Slo(ttft_ms=300), gpus=2, usd_per_gpu_hour=3.0, horizon=inf)


def test_everything_counts() -> None:
    result = played()
    before = to_json(result.summary)
    apply(result, Window("all"))
    window = result.summary.pop("window")
    assert to_json(result.summary) == before
    assert (window["state"], window["cut"], window["requests"], window["of"]) == ("all", 0, 12, 12)
    assert window_line(window) == "Window: all 12 requests; nothing is cut"


def test_a_steady_window_is_summarised_as_if_the_rest_had_not_been_there() -> None:
    result = played()
    whole = dict(result.summary)
    apply(result, Window("steady", 5))
    kept, summary = result.requests.iloc[5:], result.summary
    assert summary["completed"] == 7 and summary["total_output_tokens"] == kept["generated_tokens"].sum()
    assert summary["mean_ttft_ms"] == pytest.approx(1e3 * kept["ttft"].mean())
    gaps = np.concatenate([result.itls(i) for i in range(5, 12)])
    assert summary["p99_itl_ms"] == pytest.approx(1e3 * np.percentile(gaps, 99))
    assert summary["duration"] == kept["ended"].max() - 5.0
    assert summary["usd"] == pytest.approx(3.0 * 2 * summary["duration"] / 3600)
    for name in ("utilization", "steps", "computed_tokens"):
        assert summary[name] == whole[name]
    assert len(result.requests) == 12  # the tables keep all
    assert summary["window"]["from"] == 5.0 and summary["window"]["cut"] == 5
    assert window_line(summary["window"]) == ("Window: steady (MSER-5 over E2E in order of arrival): the first 5 of 12 "
                                              "requests are cut; 7 count, arrived from 5 s on")


@pytest.mark.parametrize("state", ["unstable", "none"])
def test_without_a_steady_state_no_mean_is_shown(state: str) -> None:
    result = played()
    whole = dict(result.summary)
    apply(result, Window(state, why="the reason"))
    summary = result.summary
    assert all(isnan(value) for name, value in summary.items() if name.endswith("_ms"))
    for name in ("request_goodput", "slo_attainment", "prefix_cache_hit_rate"):
        assert isnan(summary[name])
    for name in ("completed", "duration", "output_throughput", "utilization"):
        assert summary[name] == whole[name]
    assert summary["window"]["cut"] is None and summary["window"]["requests"] == 0
    assert window_line(summary["window"]) == "Window: steady: the reason"


def test_a_run_that_the_horizon_cuts_lasts_until_the_horizon() -> None:
    rows = [{"at": float(k), "prompt": 4, "output": 2} for k in range(12)]
    result = run(workload(rows), cost=tables(0.25), horizon=9.75)
    apply_window(result, Window("steady", 4), slo=Slo(), gpus=1, usd_per_gpu_hour=None, horizon=9.75)
    assert result.summary["duration"] == 5.75 and result.summary["unfinished"] == 2


def test_a_window_of_a_table_without_arrivals() -> None:
    table = pd.DataFrame({"arrival": [nan], "admitted": [nan], "ended": [nan], "e2e": [nan]})
    assert find_window([table]).state == "none"
    assert Window("all").described(table)["of"] == 1
