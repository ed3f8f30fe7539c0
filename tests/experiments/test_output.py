"""Result folders: tables as they were in memory, lists of vllm bench serve, a configuration that can be run again."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import yaml
from small_studies import small_file, write_study

import simcore.experiments
from simcore.experiments.compare import compare
from simcore.experiments.output import folder_names, per_request_lists, shared, write_comparison, write_run
from simcore.experiments.run import Job, build_workload, play
from simcore.experiments.study import read_study
from simcore.files import to_json

# `vllm bench serve` (peers' features, section 6): aggregates, then statistics of four metrics, then --save-detailed
AGGREGATES = [
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput", "max_concurrent_requests",
]
STATISTICS = [f"{s}_{m}_ms" for s in ("mean", "median", "std", "p50", "p75", "p90", "p95", "p99")
              for m in ("ttft", "tpot", "itl", "e2el")]
LISTS = ["input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "errors"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run with refusals, preemptions and unfinished requests beside finished ones."""
    folder = tmp_path_factory.mktemp("run")
    file = small_file(folder, horizon=4.0, engine={"num_gpu_blocks": 90, "max_num_seqs": 16})
    return file, play(Job(file.study, file.folder, 1))


def read_back(folder, name, like: pd.DataFrame) -> pd.DataFrame:
    path = folder / f"{name}.parquet"
    if path.exists():
        return pd.read_parquet(path)
    table = pd.read_csv(folder / f"{name}.csv", dtype=str, keep_default_na=False)  # a CSV does not tell its columns' types
    for column, dtype in like.dtypes.items():
        values = [float(v) if v else np.nan for v in table[column]] if dtype == "float64" else table[column]
        table[column] = pd.Series(values).astype(dtype)
    return table


def test_the_run_meets_every_end(run):
    _, result = run
    assert set(result.requests["status"]) == {"finished", "refused", "unfinished"}
    assert result.summary["preemptions"] > 0


@pytest.mark.parametrize("csv", [False, True])
def test_tables_come_back_as_they_were(run, tmp_path, csv):
    file, result = run
    write_run(tmp_path, file.study, result, file.folder, facts={}, detailed=False, csv=csv)
    for name, table in result.tables.items():
        pd.testing.assert_frame_equal(read_back(tmp_path, name, table), table, check_exact=True)
    assert {p.suffix for p in tmp_path.iterdir()} == {".csv" if csv else ".parquet", ".json", ".yaml"}


def test_the_summary_has_the_fields_of_vllm_bench_serve(run, tmp_path):
    file, result = run
    write_run(tmp_path, file.study, result, file.folder, facts={"fact": 1}, detailed=True, csv=False)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) >= {*AGGREGATES, *STATISTICS, *LISTS, "fact"}
    assert summary["completed"] + summary["failed"] == len(result.requests)
    assert summary["median_ttft_ms"] == summary["p50_ttft_ms"]


def test_the_lists_have_one_entry_a_request_and_add_up(run):
    _, result = run
    requests, lists = result.requests, per_request_lists(result)
    assert {len(values) for values in lists.values()} == {len(requests)}
    assert list(lists) == LISTS
    for i, status in enumerate(requests["status"]):
        tokens = lists["output_lens"][i]
        assert len(lists["itls"][i]) == max(0, tokens - 1)
        assert lists["start_times"][i] == pytest.approx(
            requests["arrival"][i] - requests["arrival"][0], nan_ok=True)  # none if it had not arrived by the horizon
        if status == "finished":
            assert lists["ttfts"][i] + sum(lists["itls"][i]) == pytest.approx(lists["latencies"][i], rel=1e-12)
            assert tokens == requests["output_tokens"][i] and lists["errors"][i] == ""
            assert lists["queue_times"][i] <= lists["ttfts"][i]
        else:
            assert lists["errors"][i].startswith(f"{status}: ") and len(lists["errors"][i]) > len(status) + 2
            assert np.isnan(lists["latencies"][i])
    json.loads(to_json(lists))


def test_aggregates_follow_from_the_lists(run):
    _, result = run
    lists, summary = per_request_lists(result), result.summary
    finished = (result.requests["status"] == "finished").to_numpy()
    assert summary["completed"] == finished.sum()
    assert summary["total_output_tokens"] == np.array(lists["output_lens"])[finished].sum()
    assert summary["total_input_tokens"] == np.array(lists["input_lens"])[finished].sum()
    assert summary["output_throughput"] == pytest.approx(summary["total_output_tokens"] / summary["duration"])
    gaps = np.concatenate(lists["itls"])
    assert summary["mean_itl_ms"] == pytest.approx(1e3 * gaps.mean())
    assert summary["p99_itl_ms"] == pytest.approx(1e3 * np.percentile(gaps, 99))
    assert summary["mean_ttft_ms"] == pytest.approx(1e3 * np.nanmean(lists["ttfts"]))
    tpot = [(lists["latencies"][i] - lists["ttfts"][i]) / (lists["output_lens"][i] - 1)
            for i in np.flatnonzero(finished) if lists["output_lens"][i] > 1]
    assert summary["mean_tpot_ms"] == pytest.approx(1e3 * np.mean(tpot))


def test_the_resolved_configuration_runs_again_to_the_same_summary(run, tmp_path):
    file, result = run
    write_run(tmp_path / "first", file.study, result, file.folder, facts={}, detailed=True, csv=False)
    again = read_study(tmp_path / "first" / "config.yaml")
    assert again.study == file.study.model_copy(update={"folder": str(file.folder)})
    result = play(Job(again.study, again.folder, 1))
    write_run(tmp_path / "second", again.study, result, file.folder, facts={}, detailed=True, csv=False)
    for name in ("summary.json", "config.yaml", "requests.parquet"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_the_resolved_configuration_has_every_default(run, tmp_path):
    file, result = run
    write_run(tmp_path, file.study, result, file.folder, facts={}, detailed=False, csv=False)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert set(config) == set(type(file.study).model_fields)
    assert set(config["engine"]) == set(type(file.study.engine).model_fields)
    assert config["engine"]["max_num_batched_tokens"] == 8192 and config["horizon"] == 4.0


def test_an_arms_configuration_is_that_arm(tmp_path):
    file = small_file(tmp_path, workload__generate__requests=20)
    c = compare(file, processes=1)
    write_comparison(tmp_path / "out", c, facts=[{}, {}], detailed=False, csv=False)
    for arm, label in zip(file.arms, ("round-robin", "least-loaded"), strict=True):
        again = simcore.experiments.load(tmp_path / "out" / label / "config.yaml")
        assert again.file.study.model_copy(update={"folder": None}) == arm.study
        assert again.file.study.policies.replica_routing == label
        summary = json.loads((tmp_path / "out" / label / "summary.json").read_text())
        assert json.loads(to_json(again.run().summary)) == summary
    assert [arm.label for arm in read_study(tmp_path / "out" / "config.yaml").arms] == [arm.label for arm in file.arms]


@pytest.mark.parametrize("csv", [False, True])
def test_a_comparison_has_a_folder_an_arm_and_seed(tmp_path, csv):
    models = ["llama-3.1-8b", "qwen3-8b"]
    file = small_file(tmp_path, workload__generate__requests=20, seeds=[3, 4], compare__vary={"model": models})
    c = compare(file, processes=1)
    facts = [{"kv_pool": 1, "same": 0}, {"kv_pool": 2, "same": 0}]
    write_comparison(tmp_path / "out", c, facts=facts, detailed=False, csv=csv)
    for k, label in enumerate(("llama-3.1-8b", "qwen3-8b")):
        for s, seed in enumerate((3, 4)):
            place = tmp_path / "out" / label / f"seed-{seed}"
            pd.testing.assert_frame_equal(
                read_back(place, "requests", c.results[k][s].requests), c.results[k][s].requests, check_exact=True)
            assert json.loads((place / "summary.json").read_text())["kv_pool"] == k + 1  # each arm has its own
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["same"] == 0 and "kv_pool" not in summary
    assert summary["headline"] == c.headline and set(summary["differences"]) == {"qwen3-8b"}
    table = pd.read_csv(tmp_path / "out/comparison.csv") if csv else pd.read_parquet(tmp_path / "out/comparison.parquet")
    assert table["difference"].tolist() == pytest.approx(c.table["difference"].tolist(), nan_ok=True)


def test_shared_facts():
    assert shared([{"a": 1, "b": [2]}, {"a": 1, "b": [3]}]) == {"a": 1}


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["round-robin", "shortest-first(by=total)"], ["round-robin", "shortest-first-by-total"]),
        (["mine.py:A", "mine.py-A", "mine.py/A"], ["mine.py-A", "mine.py-A-2", "mine.py-A-3"]),
        (["x-2", "x", "x"], ["x-2", "x", "x-3"]), (["a", "A"], ["a", "A-2"]),
        (["..", "../..", ""], ["arm", "arm-2", "arm-3"]),
        (["5", "-5"], ["5", "5-2"]), (["é b"], ["é-b"]),
    ],
)
def test_arms_never_share_a_folder(labels, names):
    assert folder_names(labels) == names


def test_long_labels_are_cut_to_what_a_file_system_takes():
    names = folder_names(["a" * 400, "a" * 401])
    assert len(set(names)) == 2 and all(len(name) < 200 for name in names)


def test_slice_thin_head_and_dequantise_apply_in_order(tmp_path):
    rows = "\n".join(f"{t // 4 * 4},8,3,{t % 10}" for t in range(200))
    (tmp_path / "trace.csv").write_text("arrival,input_tokens,output_tokens,program\n" + rows + "\n")
    path = write_study(tmp_path, workload={
        "trace": "trace.csv", "dequantise": 4, "slice": {"start": 20, "end": "100s"}, "thin": 0.5, "head": 30})
    file = read_study(path)
    w = build_workload(file.study.workload, file.folder, 1)
    assert len(w) == 30 and w.arrival.min() >= 0 and np.ptp(w.arrival) < 80
    assert len(set(w.arrival.tolist())) > 20  # spread over their ticks
    assert len(set(w.program.tolist())) <= 9  # sessions were left out
    run = simcore.experiments.load(path).run()
    assert len(run.requests) == 30 and run.summary["completed"] == 30
