"""Capacity: against queues of known answer, early ends that change nothing, intervals, searches, what saturates."""

from __future__ import annotations

from dataclasses import replace
from math import exp, factorial, inf
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from capacity_studies import small, trials
from hypothesis import given
from hypothesis import strategies as st

from simcore.errors import ConfigError
from simcore.experiments.capacity_search import (
    Axis,
    costs,
    headroom,
    rate_axis,
    replicas_axis,
    saturation,
    search,
    search_gpus,
)
from simcore.experiments.capacity_trials import (
    GOODPUT_SHARE,
    Pressure,
    decided_by,
    longest_good,
    share_level,
    wilson,
)
from simcore.experiments.run import Job, build_workload, play
from simcore.experiments.statistics import level_of
from simcore.experiments.study import read_study
from simcore.models.metrics import Slo
from simcore.randomness import generator
from simcore.traces.workload import Source, build

STEP = 1.0  # s, of every step of a queue


def queue_study(folder: Path, *, step: float = STEP, **changes) -> Path:
    """A cluster on which a step takes `step` seconds of the host (and of the device some 30 us), whatever is in it."""
    study = {
        "name": "queue", "model": "tiny-llama", "cost_model": {"step_overhead": step, "sequence_overhead": 0.0},
        "workload": {"generate": {"requests": 2000, "rate": 2.5, "input_tokens": 1, "output_tokens": 1}},
        "engine": {"max_num_seqs": 1, "num_gpu_blocks": 1000}, "seeds": [1, 2, 3],
    } | changes
    path = folder / "queue.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
    return path


# --- queues of known answer -------------------------------------------------------------------------------------------


def wait_of_m_d_c(rate: float, servers: int, longest: float) -> float:
    """P(wait <= longest) of M/D/c with service 1 (Franx, "A simple solution for the M/D/c waiting time distribution", OR
    Letters 29, 2001), from the number in the system, which over a service time loses all that were served."""
    size = 200
    arrive = np.array([exp(-rate) * rate**k / factorial(k) for k in range(100)] + [0.0] * (size - 100))
    move = np.zeros((size, size))
    for i in range(size):
        left = max(i - servers, 0)
        move[i, left:] = arrive[: size - left]
        move[i, -1] += max(0.0, 1 - move[i].sum())
    p = np.full(size, 1 / size)
    for _ in range(3000):
        p = p @ move
    up_to = np.cumsum(p)
    k = int(longest) + 1
    left = k - longest
    return exp(-rate * left) * sum(
        up_to[servers + (k * servers - 1 - j)] * (rate * left) ** j / factorial(j) for j in range(k * servers))


def test_the_formula_is_that_of_the_queue():
    """Against Lindley's recursion of first-come service by c servers."""
    rng, servers, rate = np.random.default_rng(1), 3, 2.5
    free, met, at = [0.0] * servers, 0, 0.0
    for _ in range(60_000):
        at += rng.exponential(1 / rate)
        start = max(at, min(free))
        free[free.index(min(free))] = start + 1
        met += start - at <= 0.75
    assert met / 60_000 == pytest.approx(wait_of_m_d_c(rate, servers, 0.75), abs=0.015)


@pytest.mark.parametrize(("rate", "longest", "share"), [(2.5, 0.75, 0.8), (4.2, 0.5, 0.9)])
def test_the_fewest_servers_of_m_d_c(tmp_path, rate, longest, share):
    """Round robin over deterministic servers is first-come service by all of them: the answer is that of M/D/c."""
    path = queue_study(tmp_path, workload={"generate": {
        "requests": 2000, "rate": rate, "input_tokens": 1, "output_tokens": 1}}, slo={"ttft_ms": 1e3 * (STEP + longest) + 1})
    known = {c: wait_of_m_d_c(rate, c, longest) for c in range(int(rate) + 1, int(rate) + 8)}
    least = min(c for c, met in known.items() if met >= share)
    assert min(abs(met - share) for met in known.values()) > 0.015, "too close to call for a run of this length"
    found = search(trials(path, tmp_path / "o", share), replicas_axis(64), {})
    assert found.value == least and found.low <= least <= found.high and found.not_monotone == []
    assert found.answer.level.method == "seeds" and found.answer.level.units == 3
    for trial in found.trials.values():
        if (met := known.get(trial.study.cluster.replicas)) is not None:  # 95% of them; none is far off
            assert trial.level.low - 0.02 <= met <= trial.level.high + 0.02


def erlang_c(servers: int, load: float) -> float:
    from scipy.stats import poisson

    blocked = poisson.pmf(servers, load) / poisson.cdf(servers, load)  # Erlang B
    return float(blocked / (1 - load / servers * (1 - blocked)))


def test_the_highest_rate_of_m_m_c(tmp_path):
    """One replica with c places and steps that cost the same however full: c servers, and one queue."""
    servers, mean, step, longest, share = 4, 50, 0.02, 0.4, 0.9
    lengths = [max(1, round(-mean * float(np.log(1 - (k + 0.5) / 2000)))) for k in range(2000)]
    path = queue_study(tmp_path, step=step, engine={"max_num_seqs": servers, "num_gpu_blocks": 10_000}, workload={
        "generate": {"requests": 1500, "rate": 3.0, "input_tokens": 1, "output_tokens": lengths}},
        slo={"ttft_ms": 1e3 * (longest + 1.5 * step)})  # a first token takes a step, and the wait for its beginning

    def met(rate: float) -> float:
        service = step * float(np.mean(lengths))
        return 1 - erlang_c(servers, rate * service) * exp(-(servers / service - rate) * longest)

    found_trials = trials(path, tmp_path / "o", share)
    found = search(found_trials, rate_axis(found_trials.study, tmp_path, 0.1), {})
    assert found.answer is not None and found.failed is not None
    rates = np.linspace(0.5, 3.9, 2000)
    known = max(rate for rate in rates if met(rate) >= share)
    assert found.low / 1.1 <= known <= found.high * 1.1  # rates stand on a grid
    assert found.value == pytest.approx(known, rel=0.15)
    full = saturation(found.answer, found.failed)
    assert full is not None and full["resource"] == "max_num_seqs" and full["fails_there"]


# --- early ends -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 500), st.sampled_from([None, 20.0, 900.0]), st.sampled_from([None, 5.0, 30.0]),
       st.sampled_from([None, 800.0]), st.floats(0, 3), st.floats(0, 0.1))
def test_what_has_not_finished_by_then_is_late(tokens, ttft, tpot, e2el, first, gap):
    slo = Slo(ttft, tpot, e2el)
    end = longest_good(slo, np.array([tokens]))[0]
    e2e = first + gap * (tokens - 1)
    row = pd.DataFrame({"status": ["finished"], "ttft": [first], "e2e": [e2e],
                        "tpot": [gap if tokens > 1 else np.nan]})
    if slo.met(row)[0]:
        assert e2e <= end * (1 + 1e-9) + 1e-6


def test_when_all_is_decided():
    def workload(**more):
        return build(arrival=np.array([0.0, 5.0]), input_tokens=np.ones(2), output_tokens=np.array([11, 1]),
                     source=Source("t"), **more)

    assert decided_by(workload(), Slo(1000, 50)) == pytest.approx(6.0)
    assert decided_by(workload(), Slo(1000, 1000)) == pytest.approx(11.0)
    assert decided_by(workload(), Slo(1000)) == inf and decided_by(workload(), Slo(tpot_ms=1)) == inf
    assert decided_by(workload(), Slo(e2el_ms=200)) == pytest.approx(5.2)
    closed = build(arrival=np.array([0.0, np.nan]), input_tokens=np.ones(2), output_tokens=np.ones(2),
                   gap=np.array([0, 1.0]), waits=[[], [0]], program=np.zeros(2), turn=np.arange(2), source=Source("t"))
    assert decided_by(closed, Slo(e2el_ms=200)) == inf


@pytest.mark.parametrize("limits", [{"ttft_ms": 60, "tpot_ms": 6}, {"e2el_ms": 150}, {"ttft_ms": 30, "tpot_ms": 30}])
def test_an_overloaded_run_ends_early_and_is_judged_as_if_it_had_not(tmp_path, limits):
    path = small(tmp_path, workload__generate__rate=300, slo=limits, engine={"max_num_seqs": 4})
    trial = trials(path, tmp_path / "o").at("one", {})
    file = read_study(path)
    whole = play(Job(file.study, file.folder, 1))
    kept = pd.read_parquet(tmp_path / "o/runs" / trial.keys[0] / "requests.parquet")
    assert trial.cut and (kept["status"] == "unfinished").any() and (whole.requests["status"] == "finished").all()
    assert trial.level.value == whole.summary["slo_attainment"]
    np.testing.assert_array_equal(file.study.limits.met(kept), file.study.limits.met(whole.requests))


def test_a_horizon_of_the_users_own_judges_what_was_decided_by_then(tmp_path):
    path = small(tmp_path, horizon=2.0, slo={"ttft_ms": 60, "tpot_ms": 30})
    trial = trials(path, tmp_path / "o").at("one", {})
    assert not trial.cut and 20 < trial.requests < 80 and trial.level.value > 0.5


# --- intervals --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 2000), st.floats(0, 1))
def test_wilson_is_that_of_scipy(n, share):
    from scipy.stats import binomtest

    good = round(share * n)
    expected = binomtest(good, n).proportion_ci(0.95, "wilson")
    assert wilson(good / n, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


def table(good: np.ndarray, seconds: float = 0.01) -> pd.DataFrame:
    return pd.DataFrame({"arrival": np.arange(len(good), dtype=float), "status": "finished",
                         "ttft": np.where(good, 0.01, 9.0), "tpot": 0.0, "e2e": seconds})


def test_the_interval_of_a_share_is_over_seeds_or_blocks_and_never_too_narrow():
    rng, slo = np.random.default_rng(1), Slo(ttft_ms=1000)
    runs = [table(rng.random(400) < 0.9) for _ in range(5)]
    level = share_level(runs, slo, by_seed=True)
    assert (level.method, level.units) == ("seeds", 5) and level.low < 0.9 < level.high
    bursts = table(np.repeat(rng.random(10) < 0.5, 100))  # blocks of time that are all good or all bad
    wide = share_level([bursts], slo, by_seed=False)
    assert wide.method == "time blocks" and wide.high - wide.low > 5 * np.diff(wilson(wide.value, 1000))[0]
    perfect = share_level([table(np.ones(40, dtype=bool)) for _ in range(3)], slo, by_seed=True)
    assert perfect.value == perfect.high == 1 and perfect.low == pytest.approx(wilson(1.0, 120)[0])
    short = share_level([table(np.ones(40, dtype=bool), seconds=30.0)], slo, by_seed=False)
    assert short.method == "independent requests" and "an interval needs" in short.why


def test_a_level_covers_the_truth():
    """Blocks of time: batch means of an autocorrelated sequence with mean 0.8."""
    hits = 0
    for seed in range(150):
        good = generator(seed, "level").random(1000) < np.repeat(0.6 + 0.4 * generator(seed, "slow").random(100), 10)
        level = level_of(GOODPUT_SHARE, [table(good)], Slo(ttft_ms=1000), by_seed=False)
        hits += level.low <= 80 <= level.high
    assert 0.88 <= hits / 150 <= 0.99


# --- searches ---------------------------------------------------------------------------------------------------------


def test_a_range_where_the_interval_contains_the_target(tmp_path):
    """Few requests know a share badly: the answer is a range, and the command says so."""
    path = small(tmp_path, seeds=[1, 2], slo={"ttft_ms": 60, "tpot_ms": 8})
    found = search(trials(path, tmp_path / "o", 0.9), replicas_axis(64), {})
    assert found.answer is not None and not found.certain and found.low < found.value
    of = {trial.study.cluster.replicas: trial for trial in found.trials.values()}
    assert of[found.low].may_meet and not of[found.low].meets and (found.low == 1 or not of[found.low - 1].may_meet)
    assert of[found.high].surely_meets == (found.sure is not None)


def test_what_is_not_monotone_is_reported(tmp_path):
    """A set-up in which five replicas are worse than four: the neighbour of the answer is looked at, and named."""
    shares = {1: 0.2, 2: 0.5, 3: 0.8, 4: 0.97, 5: 0.6}
    real = trials(small(tmp_path, slo={"ttft_ms": 60, "tpot_ms": 30}), tmp_path / "o", 0.9)
    base = real.at("one", {})

    class Scripted:
        def at(self, label, settings):
            value = shares.get(settings["cluster.replicas"], 0.99)
            return replace(base, label=label, settings=settings, level=replace(
                base.level, value=value, low=value - 0.01, high=value + 0.01))

    found = search(Scripted(), replicas_axis(64), {})
    assert found.value == 4 and found.not_monotone == [("4 replicas", "5 replicas")]


def test_an_slo_that_no_number_of_replicas_meets_ends_the_search(tmp_path):
    path = small(tmp_path, slo={"ttft_ms": 1, "tpot_ms": 30}, workload__generate__rate=2)
    found = search(trials(path, tmp_path / "o", 0.9), replicas_axis(1 << 20), {})
    assert found.answer is None and "nothing waits at 4 replicas" in found.why and len(found.trials) == 3
    limited = search(trials(small(tmp_path, slo={"ttft_ms": 60, "tpot_ms": 6}, workload__generate__rate=500),
                            tmp_path / "o", 0.9), replicas_axis(1), {})
    assert limited.answer is None and limited.why.startswith("not met at 1 replica, the most that was allowed: ")


def test_rates_of_generated_requests_keep_the_requests_of_lower_ones(tmp_path):
    path = small(tmp_path)
    t = trials(path, tmp_path / "o")
    axis = rate_axis(t.study, tmp_path, 0.05)
    assert (axis.unit, axis.settings(0), axis.value(0)) == ("requests/s", {}, 20)
    faster, slower = (t.variant(axis.settings(n)).workload for n in (-14, 14))
    assert faster.generate.rate == pytest.approx(20 * 1.05**14) and faster.generate.requests == 159
    assert slower.generate.rate == pytest.approx(20 / 1.05**14) and slower.generate.requests == 80
    base, more = (build_workload(w, tmp_path, 1) for w in (t.study.workload, faster))
    np.testing.assert_array_equal(more.input_tokens[:80], base.input_tokens)
    np.testing.assert_allclose(more.arrival[:80] * 1.05**14, base.arrival)


def test_rates_of_a_trace_clone_and_thin_and_never_compress(tmp_path):
    rows = "".join(f"{k / 4},{200 + k},{3 + k % 2},{k % 30}\n" for k in range(120))
    (tmp_path / "t.csv").write_text("arrival,input_tokens,output_tokens,program\n" + rows)
    path = small(tmp_path, workload={"trace": "t.csv", "clone": 1.5})
    t = trials(path, tmp_path / "o")
    axis = rate_axis(t.study, tmp_path, 0.1)
    assert axis.unit == "sessions/s" and axis.settings(0) == {}
    assert axis.settings(-1) == {"workload.clone": pytest.approx(1.65)}
    assert axis.settings(1) == {"workload.thin": pytest.approx(1 / 1.1)}
    assert axis.most < 1000  # not thinner than two sessions
    base, more = (build_workload(t.variant(axis.settings(n)).workload, tmp_path, 1) for n in (0, -7))
    assert more.n_programs > 1.5 * base.n_programs and np.ptp(more.arrival) == pytest.approx(np.ptp(base.arrival))


def test_rates_of_programs_and_numbers_of_workers(tmp_path):
    agents = {"generate": {"kind": "agents", "name": "bfcl", "programs": 10}, "start": {"rate": 0.5}}
    t = trials(small(tmp_path, workload=agents), tmp_path / "o")
    axis = rate_axis(t.study, tmp_path, 0.5)
    assert axis.settings(-2) == {"workload.start.rate": pytest.approx(0.5 * 2.25), "workload.generate.programs": 23}
    workers = trials(small(tmp_path, workload={**agents, "start": {"workers": 3}}), tmp_path / "o")
    axis = rate_axis(workers.study, tmp_path, 0.5)
    assert (axis.unit, axis.value(axis.start), axis.settings(-5)) == ("workers", 3, {"workload.start.workers": 5})
    with pytest.raises(ConfigError, match="arrive at once"):
        rate_axis(trials(small(tmp_path, workload__generate__rate=0), tmp_path / "o").study, tmp_path, 0.05)


def test_rates_of_the_other_generators(tmp_path):
    lengths = {"input_tokens": 50, "output_tokens": 5, "requests": 60}
    diurnal = trials(small(tmp_path, workload={"generate": {"kind": "diurnal", "rates": [1, 3], "period": 60, **lengths}}),
                     tmp_path / "o")
    asked = rate_axis(diurnal.study, tmp_path, 0.5).settings(-1)
    assert asked == {"workload.generate.rates": [1.5, 4.5], "workload.generate.requests": 90}
    gamma = trials(small(tmp_path, workload={"generate": {"kind": "gamma", "rate": 2, "cv": 3, **lengths}}), tmp_path / "o")
    assert rate_axis(gamma.study, tmp_path, 0.5).settings(-1) == {
        "workload.generate.rate": 3, "workload.generate.requests": 90}


def test_events_need_the_replicas_that_they_name_and_clients_that_return_are_waited_for(tmp_path):
    path = small(tmp_path, events=[{"at": 1, "kill": "replica1"}], cluster={"gpu": "h100-sxm", "replicas": 2},
                 slo={"ttft_ms": 500, "tpot_ms": 30})
    t = trials(path, tmp_path / "o", 0.5)
    found = search(t, replicas_axis(8, t.study), {})
    assert found.axis.fewest == 2 and found.value == 2 and found.answer.cut
    with pytest.raises(ConfigError, match="--most: found 1: allowed: at least 2: the study's events name replica 1"):
        replicas_axis(1, t.study)
    again = small(tmp_path, clients={"timeout": 5, "retries": 1}, slo={"ttft_ms": 500, "tpot_ms": 30})
    assert not trials(again, tmp_path / "o", 0.5).at("one", {}).cut


def test_gpus_over_tensor_parallel_sizes(tmp_path):
    path = small(tmp_path, model="llama-3.1-70b", slo={"ttft_ms": 2000, "tpot_ms": 60},
                 workload__generate__requests=30, workload__generate__rate=3)
    best, shapes = search_gpus(trials(path, tmp_path / "o", 0.9), [1, 2, 3, 4], 16)
    assert best is not None and best.size == 2 and best.gpus == 2 and best.search.answer.gpus == 2
    assert "kv_capacity: llama-3.1-70b leaves no room" in shapes[0].why
    assert "tensor_parallel_size: found 3" in shapes[2].why
    assert shapes[3].why == "a replica has 4 GPUs: fewer GPUs already meet the SLO"


def test_headroom_is_where_the_rate_fails(tmp_path):
    t = trials(small(tmp_path, slo={"ttft_ms": 60, "tpot_ms": 30}), tmp_path / "o", 0.9)
    answer = t.at("one", {})
    assert answer.meets
    more = headroom(t, answer, 0.1)
    assert more.times is not None and more.times >= 1 and more.failed is not None and not more.failed.meets
    rate = answer.study.workload.generate.rate
    assert more.failed.study.workload.generate.rate == pytest.approx(rate * more.times * 1.1)


def test_costs_by_hand(tmp_path):
    t = trials(small(tmp_path, slo={"ttft_ms": 60}), tmp_path / "o").at("one", {})
    t = replace(t, sessions_per_hour=720.0, output_throughput=100.0, total_throughput=1000.0,
                study=t.study.model_copy(update={"cluster": t.study.cluster.model_copy(update={"replicas": 3})}))
    cost = costs(t, 2.0, None)
    assert cost["usd_per_hour"] == 6 and cost["usd_per_month"] == 4380 and cost["users"] == 720
    assert cost["usd_per_user_and_month"] == pytest.approx(4380 / 720)
    assert cost["usd_per_million_output_tokens"] == pytest.approx(6 / 0.36)
    assert cost["usd_per_million_tokens"] == pytest.approx(6 / 3.6)
    assert costs(t, 2.0, 100)["usd_per_user_and_month"] == 43.8 and costs(t, 2.0, 100)["users_are"] == "--users"
    assert costs(t, None, 100) is None


IDLE = Pressure(0.3, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(("changes", "beyond", "resource"), [
    ({}, {"ttft": 0.0}, "none"),
    ({"slots_full": 0.3, "kv_blocked": 0.1, "device_busy": 1.0}, {"ttft": 0.2}, "max_num_seqs"),
    ({"kv_blocked": 0.3, "device_busy": 1.0}, {"ttft": 0.2}, "KV pool"),
    ({"preemptions": 0.2, "device_busy": 1.0}, {"ttft": 0.0, "tpot": 0.3}, "KV pool"),
    ({"host_link": 0.95, "device_busy": 0.9}, {"ttft": 0.2}, "host link"),
    ({"device_busy": 0.95}, {"ttft": 0.2}, "device"),
    ({"slots_full": 0.05, "device_busy": 0.95}, {"ttft": 0.0, "tpot": 0.2}, "device"),
])
def test_what_saturates_is_decided_from_numbers(changes, beyond, resource):
    found, numbers = replace(IDLE, **changes).saturated(beyond)
    assert found == resource and "%" in numbers


@pytest.mark.parametrize(("engine", "slo", "rate", "resource"), [
    ({"max_num_seqs": 2}, {"ttft_ms": 60}, 120, "max_num_seqs"),
    ({"num_gpu_blocks": 260, "max_model_len": 4000}, {"ttft_ms": 100}, 200, "KV pool"),
    ({}, {"tpot_ms": 6}, 150, "device"),
])
def test_the_saturated_resource_of_runs_made_for_it(tmp_path, engine, slo, rate, resource):
    path = small(tmp_path, engine=engine, slo=slo, workload__generate__rate=rate,
                 workload__generate__input_tokens={"mean": 600, "sd": 100})
    trial = trials(path, tmp_path / "o", 0.9).at("one", {})
    assert not trial.meets and trial.pressure.saturated(trial.misses)[0] == resource


def test_a_queue_that_grows_fails_under_a_steady_window(tmp_path):
    path = small(tmp_path, window="steady", workload__generate__rate=300, workload__generate__requests=400,
                 slo={"ttft_ms": 1e6}, engine={"max_num_seqs": 4})
    trial = trials(path, tmp_path / "o", 0.9).at("one", {})
    assert not trial.meets and not trial.may_meet and trial.unsteady.startswith("unstable: the queue grows")


def test_axes_say_what_they_are():
    axis = replicas_axis(8)
    assert isinstance(axis, Axis) and [axis.label(n) for n in (1, 2)] == ["1 replica", "2 replicas"]
