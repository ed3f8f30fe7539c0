"""Measured runs as they are read: vllm bench serve, our summary, CSV; what is torn or wrong is refused with its place."""

from __future__ import annotations

import gzip
import json
from math import inf

import numpy as np
import pytest
from against_dumps import bench, write
from hypothesis import given, settings
from hypothesis import strategies as st

from simcore.errors import ConfigError, TraceError
from simcore.experiments.against import read_measured
from simcore.experiments.against_files import BENCH, CSV, OURS, Client
from simcore.experiments.against_metrics import gaps_are_tokens, measured_side
from simcore.experiments.against_workload import draw_arrivals, plan_requests
from simcore.traces.workload import Source, build

HEADER = "arrival,input_tokens,output_tokens,ttft,e2e"


def refused(path, *words):
    with pytest.raises(TraceError) as error:
        read_measured(path)
    for word in (str(path), *words):
        assert word in str(error.value)


def test_a_result_of_vllm_bench_serve(tmp_path):
    m = read_measured(write(tmp_path / "r.json", bench(4)))
    assert (m.kind, len(m), m.model, m.notes) == (BENCH, 4, "meta-llama/Llama-3.1-8B", ())
    assert m.arrival.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(m.ttft, [0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(m.e2e, m.ttft + 0.08)
    side = measured_side(m, np.arange(4))
    assert side.spreads["tpot"].mean == pytest.approx(0.02)
    assert side.spreads["itl"].count == 16
    assert side.numbers["request_throughput"] == pytest.approx(4 / 3.48)  # first sending to last token
    assert m.split is None


def test_a_packed_file_reads_the_same(tmp_path):
    path = tmp_path / "r.json.gz"
    path.write_bytes(gzip.compress(json.dumps(bench(4)).encode()))
    assert read_measured(path).ttft.tolist() == read_measured(write(tmp_path / "r.json", bench(4))).ttft.tolist()


def test_failed_requests_are_known_by_their_error(tmp_path):
    made = bench(3, errors=["", "Service Unavailable", ""], output_lens=[5, 0, 5], ttfts=[0.1, 0.0, 0.3], completed=2,
                 itls=[[0.02] * 4, [], [0.02] * 4], mean_ttft_ms=200.0)
    m = read_measured(write(tmp_path / "r.json", made))
    assert m.good.tolist() == m.played.tolist() == [True, False, True]
    assert np.isnan(m.ttft[1])
    assert m.notes == ()


def test_newer_results_have_latencies_and_the_clients_queue(tmp_path):
    made = bench(2, latencies=[0.2, 0.3], queue_times=[0.0, 4.0])
    m = read_measured(write(tmp_path / "r.json", made))
    assert m.e2e.tolist() == [0.2, 0.3]
    assert m.split is None  # the client's semaphore is no queue of the server


def test_our_summary_has_nulls_and_a_queue(tmp_path):
    made = bench(2, mean_queue_time_ms=1.0, ttfts=[0.1, None], latencies=[0.2, None], queue_times=[0.05, None],
                 errors=["", "refused: too long"], output_lens=[5, 0], itls=[[0.02] * 4, []], start_times=[1.0, None])
    m = read_measured(write(tmp_path / "r.json", made))
    assert m.kind == OURS
    assert m.arrival[0] == 1.0  # not moved
    assert m.split["queue"][0] == 0.05
    assert m.good.tolist() == [True, False]


def test_a_file_that_was_changed_by_hand_is_told_so(tmp_path):
    m = read_measured(write(tmp_path / "r.json", bench(3, completed=9, mean_ttft_ms=7.0)))
    assert "counts 9 completed" in m.notes[0]
    assert "mean_ttft_ms is 7" in m.notes[1]


def test_chunks_of_several_tokens_are_no_itl(tmp_path):
    m = read_measured(write(tmp_path / "r.json", bench(3, itls=[[0.02] * 2] * 3, spec_decode_acceptance_rate=50.0)))
    assert not gaps_are_tokens(m)
    assert "itl" not in measured_side(m, np.arange(3)).spreads
    assert any("speculative" in note for note in m.notes)


@pytest.mark.parametrize(("changes", "words"), [
    ({"ttfts": ...}, ["ttfts", "missing", "--save-detailed"]),
    ({"input_lens": ...}, ["input_lens", "--save-detailed"]),
    ({"output_lens": [5, 5]}, ["output_lens", "2 entries", "3"]),
    ({"input_lens": [100, 0, 1]}, ["input_lens[1]", "1 to"]),
    ({"input_lens": [100, 1.5, 1]}, ["input_lens[1]", "1.5"]),
    ({"input_lens": [], "output_lens": [], "ttfts": [], "itls": [], "errors": []}, ["no requests"]),
    ({"ttfts": [0.1, -1, 0.1]}, ["ttfts[1]", "-1"]),
    ({"ttfts": [0.1, None, 0.1]}, ["ttfts[1]"]),
    ({"itls": [[0.1], 3, []]}, ["itls[1]", "a list"]),
    ({"itls": [[0.1], [True], []]}, ["itls[1][0]"]),
    ({"latencies": [0.01, 1, 1]}, ["latencies[0]", "TTFT"]),
    ({"errors": ["x", "y", "z"]}, ["no request was answered", "'x'"]),
    ({"max_concurrency": 0}, ["max_concurrency"]),
    ({"burstiness": 0}, ["burstiness"]),
    ({"request_rate": -1}, ["request_rate", '"inf"']),
    ({"request_rate": "fast"}, ["request_rate", "'fast'"]),
    ({"ramp_up_strategy": "exponential", "ramp_up_start_rps": 0, "ramp_up_end_rps": 2}, ["ramp_up_start_rps", "above 0"]),
    ({"ramp_up_strategy": "steep", "ramp_up_start_rps": 1, "ramp_up_end_rps": 2}, ["ramp_up_strategy", "linear"]),
])
def test_a_wrong_result_is_refused(tmp_path, changes, words):
    refused(write(tmp_path / "r.json", bench(3, **changes)), *words)


def test_torn_and_joined_files_are_refused(tmp_path):
    whole = json.dumps(bench(2))
    refused(write(tmp_path / "torn.json", whole[:-30]), ":1", "torn")
    refused(write(tmp_path / "two.json", f"{whole}\n{whole}"), ":2", "2 results", "--append-result")
    refused(write(tmp_path / "empty.json", " \n"), "empty")
    refused(write(tmp_path / "list.json", [1, 2]), "--save-detailed")
    refused(tmp_path / "none.json", "cannot be read")
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(gzip.compress(whole.encode())[:-20])
    refused(cut, "torn")


def test_a_csv_of_ones_own(tmp_path):
    path = write(tmp_path / "r.csv", f"{HEADER},tpot,user\n1.7e9,100,3,0.5,1.5,0.5,a\n1700000001,7,1,0.25,0.25,,b\n"
                                     "1700000002,7,0,,,,c\n")
    m = read_measured(path)
    assert (m.kind, m.arrival.tolist(), m.good.tolist()) == (CSV, [0, 1, 2], [True, True, False])
    assert m.tpot[0] == 0.5
    assert np.isnan(m.tpot[1])


@pytest.mark.parametrize(("text", "words"), [
    ("arrival,input_tokens\n1,2\n", [":1", "output_tokens", "no such column"]),
    (f"{HEADER},ttft\n", [":1", "ttft", "twice"]),
    (f"{HEADER}\n", ["no requests"]),
    (f"{HEADER}\n0,1,1,1\n", [":2", "torn", "4 cells"]),
    (f"{HEADER}\n0,1,1,1,1\n0,x,1,1,1\n", [":3", "input_tokens", "'x'"]),
    (f"{HEADER}\n0,1,1,2,1\n", [":2", "e2e", "TTFT"]),
    (f"{HEADER}\n0,1,1,-2,1\n", [":2", "ttft"]),
    (f"{HEADER}\n,1,1,1,1\n", [":2", "arrival", "blank"]),
    (f"{HEADER}\n0,1,1,inf,inf\n", [":2", "ttft"]),
    (f"{HEADER}\n0,1,1,,\n", ["at least one request that ended well"]),
])
def test_a_wrong_csv_is_refused(tmp_path, text, words):
    refused(write(tmp_path / "r.csv", text), *words)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 9999), st.integers(1, 99), st.floats(0, 100), st.floats(0, 100)),
                min_size=1, max_size=8))
def test_what_a_csv_says_is_what_is_read(tmp_path_factory, rows):
    text = "\n".join([HEADER, *(f"{a!r},{i},{o},{t!r},{t + d!r}" for a, i, o, t, d in rows)])
    m = read_measured(write(tmp_path_factory.mktemp("csv") / "r.csv", text + "\n"))
    first = min(row[0] for row in rows)
    assert m.arrival.tolist() == [row[0] - first for row in rows]
    assert list(zip(m.input_tokens, m.output_tokens, m.ttft, m.e2e, strict=True)) == [
        (i, o, t, t + d) for _, i, o, t, d in rows]


# --- the workload ----------------------------------------------------------------------------------------------------


def own(inputs, *, arrival=None, outputs=None, shared=0):
    n = len(inputs)
    known = np.minimum(np.full(n, shared), inputs)
    return build(arrival=np.arange(n, dtype=float) if arrival is None else arrival, input_tokens=np.array(inputs),
                 output_tokens=np.array(outputs or [5] * n), source=Source("own"), known_tokens=known,
                 block_ids=[np.arange(-(-int(k) // 16)) for k in known])


def planned(tmp_path, base=None, arrivals="auto", workload="auto", seed=1, **changes):
    m = read_measured(write(tmp_path / "r.json", bench(4, **changes)))
    other = base if base is not None else own([1, 2])
    return plan_requests(m, lambda: other, seed, arrivals, workload)


def test_recorded_times_are_played_in_order(tmp_path):
    plan = planned(tmp_path, start_times=[50.0, 53.0, 52.0, 51.0])
    assert plan.workload.arrival.tolist() == [0, 1, 2, 3]
    assert plan.rows.tolist() == [0, 3, 2, 1]
    assert plan.workload.input_tokens.tolist() == [100, 103, 102, 101]
    assert not plan.drawn
    assert any("another (2 requests, measured 4)" in note for note in plan.notes)


def test_a_closed_loop_is_played_as_one(tmp_path):
    plan = planned(tmp_path, request_rate="inf", max_concurrency=2)
    assert plan.workload.workers == 2
    assert np.isnan(plan.workload.arrival).all()
    assert planned(tmp_path, request_rate="inf", max_concurrency=9).workload.workers == 0  # never holds anything back
    kept = planned(tmp_path, request_rate=1.0, max_concurrency=2)
    assert kept.workload.workers == 0
    assert any("depend on the server's answers" in note for note in kept.notes)


def test_without_times_the_process_is_drawn(tmp_path):
    plan = planned(tmp_path, start_times=..., request_rate=2.0)
    assert plan.drawn
    assert plan.workload.arrival[-1] == pytest.approx(2.0)  # vLLM stretches the gaps to n / rate
    assert any("same process, not the same arrivals" in note for note in plan.notes)
    assert (planned(tmp_path, start_times=..., request_rate=2.0, seed=2).workload.arrival != plan.workload.arrival).any()
    at_once = planned(tmp_path, start_times=..., request_rate="inf")
    assert not at_once.workload.arrival.any()
    assert not at_once.drawn


def test_nothing_is_guessed_where_nothing_says_when(tmp_path):
    with pytest.raises(TraceError, match="nothing says when"):
        planned(tmp_path, start_times=..., request_rate=...)


@pytest.mark.parametrize(("options", "word"), [
    ({"arrivals": "recorded", "start_times": ...}, "no start_times"),
    ({"arrivals": "process", "request_rate": ...}, "no request_rate"),
    ({"arrivals": "clients"}, "no max_concurrency"), ({"arrivals": "magic"}, "auto, recorded"),
    ({"workload": "mine"}, "auto, file, study"), ({"workload": "study"}, "2 requests, measured 4"),
])
def test_an_option_that_the_file_cannot_meet_is_refused(tmp_path, options, word):
    with pytest.raises(ConfigError, match=word):
        planned(tmp_path, **options)


def test_identity_comes_from_the_studys_workload_where_prompts_are_as_long(tmp_path):
    base = own([100, 101, 102, 103], arrival=np.array([0.0, 5, 6, 7]), shared=48)
    plan = planned(tmp_path, base, output_lens=[5, 5, 5, 5], errors=["", "", "", "bad"], completed=3)
    w = plan.workload
    assert len(w) == 3
    assert w.known_tokens.tolist() == [48] * 3
    assert w.ids(0).tolist() == w.ids(2).tolist() == [0, 1, 2]
    assert w.arrival.tolist() == [0, 1, 2]  # the file's, not the study's
    assert planned(tmp_path, base, workload="file").workload.known_tokens.tolist() == [0] * 4
    other = own([100, 101, 102, 104], shared=48)
    assert planned(tmp_path, other).workload.known_tokens.tolist() == [0] * 4


def test_the_studys_own_workload_is_recognised(tmp_path):
    base = own([100, 101, 102, 103], arrival=np.array([7.0, 8, 9, 10 + 1e-8]), shared=48)
    assert planned(tmp_path, base).workload is base
    assert planned(tmp_path, base, arrivals="recorded").workload is not base
    later = own([100, 101, 102, 103], arrival=np.array([7.0, 8, 9, 11]), shared=48)
    assert planned(tmp_path, later).workload is not later
    assert planned(tmp_path, later, workload="study").workload is later
    longer = own([100, 101, 102, 103], outputs=[5, 5, 5, 6])
    assert planned(tmp_path, longer).workload is not longer


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.floats(0.1, 100), st.sampled_from([0.2, 1.0, 4.0, inf]), st.integers(0, 5))
def test_drawn_arrivals_are_those_of_the_client(n, rate, burstiness, seed):
    times = draw_arrivals(n, Client(rate, burstiness), seed)
    assert (np.diff(times) >= 0).all()
    assert times[-1] == pytest.approx(n / rate)
    if burstiness == inf:
        np.testing.assert_allclose(np.diff(times), 1 / rate)


def test_a_ramp_rises(tmp_path):
    for how in ("linear", "exponential"):
        gaps = np.diff(draw_arrivals(100, Client(None, inf, None, (how, 1.0, 10.0)), 1))
        assert (np.diff(gaps) < 0).all()
        assert gaps[-1] == pytest.approx(0.1)
    plan = planned(tmp_path, start_times=..., ramp_up_strategy="linear", ramp_up_start_rps=0, ramp_up_end_rps=4)
    assert np.isfinite(plan.workload.arrival).all()
