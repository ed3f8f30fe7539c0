"""Dumps of a server's metrics: every shape they come in, what is refused, and the load that is drawn from them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from against_dumps import EPOCH, answer, histogram, series, write
from hypothesis import given, settings
from hypothesis import strategies as st

from simcore.errors import ConfigError, TraceError
from simcore.experiments.against import read_measured
from simcore.experiments.against_load import MOST_REQUESTS, arrivals_of, draw_load
from simcore.experiments.against_metrics import Binned, bootstrap_intervals, into_buckets, of_metrics, whole
from simcore.experiments.against_prometheus import Metrics

STEP = 10.0
TIMES = np.arange(0.0, 51.0, STEP)


def small(**labels):
    """Ten requests, one every five seconds: TTFT 30 ms or 3 s, E2E 4 s, 100 prompt and 20 output tokens."""
    at = np.arange(1.0, 51.0, 5.0)
    ttft = np.where(np.arange(10) < 8, 0.03, 3.0)
    return [
        *histogram("time_to_first_token_seconds", [0.02, 0.04, 2.5, 5.0], at, ttft, TIMES, STEP, **labels),
        *histogram("e2e_request_latency_seconds", [2.5, 5.0], at, np.full(10, 4.0), TIMES, STEP, **labels),
        series("vllm:prompt_tokens_total", [200.0 * k for k in range(6)], **labels),
        series("vllm:generation_tokens_total", [1000.0 + 40.0 * k for k in range(6)], **labels),
        series("vllm:request_success_total", [1.0 * k for k in range(6)], finished_reason="stop", **labels),
        series("vllm:request_success_total", [1.0 * k for k in range(6)], finished_reason="length", **labels),
        series("vllm:num_requests_running", [1, 2, 1, 1, 1, 0], **labels),
        series("vllm:num_requests_waiting", [0, 0, 1, 0, 0, 0], **labels),
    ]


def read(tmp_path, value, match=()) -> Metrics:
    found = read_measured(write(tmp_path / "m.json", value), match)
    assert isinstance(found, Metrics)
    return found


def without(found, name):
    return [s for s in found if not s["metric"]["__name__"].startswith(f"vllm:{name}")]


def test_figures_of_a_dump(tmp_path):
    m = read(tmp_path, answer(*small()))
    side = of_metrics(m)
    assert (m.span, m.engines, m.model, m.notes) == (50.0, 1, "m", ())
    assert side.spreads["ttft"].mean == pytest.approx((8 * 0.03 + 2 * 3.0) / 10)
    assert side.spreads["ttft"].quantile(0.5) == pytest.approx(0.02 + 0.02 * 5 / 8)  # as histogram_quantile
    assert side.spreads["ttft"].bucket(0.9) == (2.5, 5.0)
    assert side.numbers["request_throughput"] == pytest.approx(10 / 50)
    assert side.numbers["output_throughput"] == pytest.approx(200 / 50)
    assert side.numbers["running"] == pytest.approx((1.5 + 1.5 + 1 + 1 + 0.5) / 5)
    assert set(bootstrap_intervals(m)) >= {("ttft", "mean"), ("e2e", "p99"), ("running", "")}


def test_every_shape_of_a_dump_reads_the_same(tmp_path):
    found = small()
    wanted = of_metrics(read(tmp_path, answer(*found))).numbers
    some, rest = found[:5], found[5:]
    shapes = [
        [answer(*some), answer(*rest)],
        {"ttft": answer(*some), "others": answer(*rest)},
        "\n".join(json.dumps(answer(one)) for one in found),
        json.dumps(answer(*some), indent=1) + json.dumps(answer(*rest)),
        answer(*found)["data"],
    ]
    for shape in shapes:
        assert of_metrics(read(tmp_path, shape)).numbers == wanted
    renamed = json.dumps(answer(*found))
    for prefix in ("kserve_vllm:", "vllm_"):
        assert of_metrics(read(tmp_path, renamed.replace("vllm:", prefix))).numbers == wanted


def test_engines_are_added(tmp_path):
    m = read(tmp_path, answer(*small(), *small(instance="b")))
    one, two = of_metrics(read(tmp_path, answer(*small()))), of_metrics(m)
    assert m.engines == 2
    assert two.numbers["request_throughput"] == pytest.approx(2 * one.numbers["request_throughput"])
    assert two.spreads["ttft"].mean == pytest.approx(one.spreads["ttft"].mean)
    only = read(tmp_path, answer(*small(), *small(instance="b")), ["instance=b"])
    assert of_metrics(only).numbers == one.numbers


def test_a_restart_is_no_loss(tmp_path):
    found = without(small(), "generation_tokens")
    found.append(series("vllm:generation_tokens_total", [1000, 1040, 1080, 30, 70, 110]))
    m = read(tmp_path, answer(*found))
    assert m.counters["generation_tokens"].tolist() == [40, 40, 30, 40, 40]
    assert any("restarted" in note for note in m.notes)


def test_missing_scrapes_are_spread(tmp_path):
    found = without(small(), "generation_tokens")
    holed = series("vllm:generation_tokens_total", [0, 40, 80, 120, 160, 200])
    del holed["values"][2:4]
    m = read(tmp_path, answer(*found, holed))
    np.testing.assert_allclose(m.counters["generation_tokens"], [40] * 5)


def test_older_names_are_understood(tmp_path):
    at = np.arange(1.0, 51.0, 5.0)
    older = [
        series("vllm:gpu_cache_usage_perc", [0.5] * 6),
        series("vllm:gpu_prefix_cache_queries_total", [100.0 * k for k in range(6)]),
        series("vllm:gpu_prefix_cache_hits_total", [25.0 * k for k in range(6)]),
        *histogram("time_per_output_token_seconds", [0.1], at, np.full(10, 0.05), TIMES, STEP),
    ]
    side = of_metrics(read(tmp_path, answer(*small(), *older)))
    assert side.numbers["kv_use"] == 0.5
    assert side.numbers["hit_rate"] == 0.25
    assert side.spreads["itl"].mean == pytest.approx(0.05)


@pytest.mark.parametrize(("value", "words"), [
    ({"status": "error", "error": "query timed out", "data": {}}, ["status", "query timed out"]),
    ({"status": "success", "data": {"resultType": "vector", "result": []}}, ["vector", "query_range"]),
    ({"status": "success", "data": {"resultType": "matrix", "result": 3}}, ["result", "a list"]),
    (answer(), ["no series of vLLM"]),
    (answer(series("node_load1", [1, 2])), ["no series of vLLM among 1"]),
    (answer({"metric": {}, "values": [[EPOCH, "1"]]}), ["without a name", "rate()"]),
    (answer({"metric": {"__name__": "vllm:x"}, "values": [[EPOCH, "abc"]]}), ["vllm:x", "values[0]", "abc"]),
    (answer({"metric": {"__name__": "vllm:x"}, "values": [[2, "1"], [1, "1"]]}), ["time goes backwards"]),
    (answer({"metric": {"__name__": "vllm:x"}, "values": []}), ["values"]),
    (answer(series("vllm:num_requests_running", [1])), ["1 times", "at least two"]),
    (answer(*without(small(), "time_to_first"), *small(model_name="n")), ["model_name", "m, n", "--match"]),
    (answer(*without(without(small(), "time_to_first"), "e2e")), ["no histogram of TTFT or E2E"]),
    (answer(*without(small(), "prompt_tokens")), ["vllm:prompt_tokens_total", "lengths are not known"]),
    (answer(*[s for s in small() if s["metric"].get("le") != "+Inf"]), ['no bucket le="+Inf"']),
    (answer(*without(small(), "time_to_first_token_seconds_sum")), ["_sum", "no mean"]),
    (answer(*small(), *[s for s in small(instance="b") if s["metric"].get("le") != "0.02"]), ["different buckets"]),
])
def test_a_wrong_dump_is_refused(tmp_path, value, words):
    with pytest.raises(TraceError) as error:
        read(tmp_path, value)
    for word in ("m.json", *words):
        assert word in str(error.value)


def test_a_bad_match_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="label=value"):
        read(tmp_path, answer(*small()), ["model"])
    with pytest.raises(TraceError, match="no series of vLLM with model_name=z"):
        read(tmp_path, answer(*small()), ["model_name=z"])


# --- the load --------------------------------------------------------------------------------------------------------


def test_arrivals_count_first_tokens_and_the_queue(tmp_path):
    m = read(tmp_path, answer(*small()))
    assert arrivals_of(m).tolist() == [2, 3, 1, 2, 2]
    emptied = replace(m, gauges={"waiting": np.array([9.0, 0, 0, 0, 0, 0])})
    assert arrivals_of(emptied).sum() == pytest.approx(1)  # ten answers, of which nine had come before
    without_ttft = replace(m, histograms={"e2e": m.histograms["e2e"]})
    assert arrivals_of(without_ttft).sum() == pytest.approx(10 - 1)  # one was in the engine at the start


def test_the_drawn_load_is_like_the_measured(tmp_path):
    m = read(tmp_path, answer(*small()))
    load = draw_load(m, 1, 8192)
    w = load.workload
    assert load.lead == pytest.approx(40.0)  # ten mean E2E
    inside = w.arrival - load.lead
    assert np.histogram(inside[inside >= 0], TIMES)[0].tolist() == [2, 3, 1, 2, 2]
    assert (w.input_tokens[inside >= 0].mean(), set(w.output_tokens)) == (pytest.approx(100, rel=0.25), {20})
    assert (draw_load(m, 2, 8192).workload.arrival != w.arrival).any()
    idle = replace(m, gauges={"running": np.zeros(6), "waiting": np.zeros(6)})
    assert draw_load(idle, 1, 8192).lead == 0.0
    assert any("cut to the 50 tokens" in note for note in draw_load(m, 1, 50).notes)
    assert draw_load(m, 1, 50).workload.total_tokens.max() <= 50


def test_lengths_follow_the_servers_buckets(tmp_path):
    rng = np.random.default_rng(1)
    at, lengths = np.sort(rng.uniform(0, 50, 4000)), np.rint(rng.lognormal(5, 1, 4000))
    edges = [1.0, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]
    found = [
        *histogram("time_to_first_token_seconds", [1.0], at, np.full(4000, 0.5), TIMES, STEP),
        *histogram("request_prompt_tokens", edges, at, lengths, TIMES, STEP),
        series("vllm:generation_tokens_total", [8000.0 * k for k in range(6)]),
    ]
    drawn = draw_load(read(tmp_path, answer(*found)), 1, 100_000).workload.input_tokens
    assert drawn.mean() == pytest.approx(lengths.mean(), rel=0.05)
    for q in (0.1, 0.5, 0.9):
        assert np.quantile(drawn, q) == pytest.approx(np.quantile(lengths, q), rel=0.25)


def test_hits_become_a_common_prefix(tmp_path):
    more = [series("vllm:prefix_cache_queries_total", [200.0 * k for k in range(6)]),
            series("vllm:prefix_cache_hits_total", [100.0 * k for k in range(6)])]
    load = draw_load(read(tmp_path, answer(*small(), *more)), 1, 8192)
    assert (load.workload.known_tokens <= load.workload.input_tokens / 2).all()
    assert load.workload.known_tokens.sum() > 0
    assert any("50.0%" in note and "flattered" in note for note in load.notes)


def test_a_load_too_large_to_play_is_refused(tmp_path):
    m = read(tmp_path, answer(*small()))
    many = replace(m, gauges={"waiting": np.array([0, MOST_REQUESTS, 0, 0, 0, MOST_REQUESTS], dtype=float)})
    with pytest.raises(ConfigError, match="narrow start and end"):
        draw_load(many, 1, 8192)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=12), st.lists(st.integers(0, 9), min_size=2, max_size=12))
def test_counters_and_totals_are_kept(tmp_path_factory, grown, queue):
    n = min(len(grown), len(queue))
    first = np.concatenate(([0], np.cumsum(grown[:n])))[:n].astype(float)
    if not first[-1]:
        return
    found = [
        series("vllm:time_to_first_token_seconds_bucket", first.tolist(), le="1.0"),
        series("vllm:time_to_first_token_seconds_bucket", first.tolist(), le="+Inf"),
        series("vllm:time_to_first_token_seconds_sum", (first / 2).tolist()),
        series("vllm:prompt_tokens_total", (9 * first).tolist()),
        series("vllm:generation_tokens_total", (9 * first).tolist()),
        series("vllm:num_requests_waiting", [float(q) for q in queue[:n]]),
    ]
    m = read(tmp_path_factory.mktemp("m"), answer(*found))
    assert whole(m.histograms["ttft"]).count == first[-1]
    came = arrivals_of(m)
    assert (came >= 0).all()
    assert came.sum() >= first[-1] + queue[n - 1] - queue[0] - 1e-9


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.001, 40), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values, q):
    like = Binned(np.array([0.01, 0.1, 1.0, 10.0, 100.0, np.inf]), np.zeros(6), 0.0)
    binned = into_buckets(np.array(values), like)
    low, high = binned.bucket(q)
    true = float(np.quantile(values, q, method="inverted_cdf"))
    assert low - 1e-12 <= true <= high + 1e-12
    assert low <= binned.quantile(q) <= high
    assert binned.mean == pytest.approx(np.mean(values))
