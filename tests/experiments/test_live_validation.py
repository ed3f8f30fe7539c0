"""`simcore validate live` on a tiny model: what it measures, keeps and refuses. No test looks at how long anything took."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("torch")

from made_up_profile import LLM, profile

from simcore.errors import ConfigError
from simcore.experiments import cli, live_validation
from simcore.experiments.calibrate import fit
from simcore.experiments.live_validation import at_load, build_decoder, compare_runs
from simcore.experiments.run import build_workload, study_llm
from simcore.experiments.study import read_study
from simcore.kernels.executor import RealStep
from simcore.kernels.measure import drawn, grid, measure
from simcore.models.hf_config import load_llm
from simcore.models.operator_profile import read_profile, write_profile

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97,
          "max_position_embeddings": 256}
STUDY = """
name: small
workload: {trace: mooncake-conversation, dequantise: 3s, head: 6, shrink: 128}
model: MODEL
engine: {block_size: 4, max_num_seqs: 4, max_num_batched_tokens: 32, max_model_len: 256, num_gpu_blocks: 200}
"""


@pytest.fixture
def study(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.replace("MODEL", str(tmp_path / "config.json")))
    return path


def call(*arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main([str(a) for a in arguments])
    return caught.value.code or 0


def test_the_command_measures_plays_and_compares(study, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(live_validation, "HELD_OUT", 3)
    page = tmp_path / "page.md"
    page.write_text("<!-- small: begin -->\n<!-- small: end -->\n")
    profile, out = tmp_path / "profile.json", tmp_path / "out"
    command = ("validate", "live", "--study", study, "--profile", profile, "--out", out, "--json", tmp_path / "live.json",
               "--page", page)
    assert call(*command) == 0
    printed = capsys.readouterr().out
    assert "The engine against its model on one machine" in printed
    found = json.loads((tmp_path / "live.json").read_text())
    assert found == json.loads((out / "live.json").read_text())
    rows = {row["metric"]: row for row in found["rows"]}
    assert [rows[name]["target"] for name in ("step, median error", "TTFT mean", "TPOT mean")] == [0.12, 0.15, 0.15]
    assert all(row["measured"] > 0 and row["predicted"] > 0 for row in rows.values())
    assert found["requests"] == 6 and found["steps"] > 6 and found["fit_held_out_rows"] == 3
    assert found["drift"] > 0 and "of what they took when it was measured" in printed
    assert (out / "live.png").read_bytes()[:4] == b"\x89PNG" and (out / "cost_model.json").is_file()
    assert "| TTFT mean |" in page.read_text()
    # What is measured is kept: a profile that lacks rows is gone on with.
    whole = read_profile(profile)
    write_profile(profile, whole.model_copy(update={"rows": whole.rows[:-2]}))
    assert call(*command) == 0
    again = read_profile(profile)
    assert again.rows[:-2] == whole.rows[:-2] and len(again.rows) == len(whole.rows)


def test_a_profile_of_another_model_is_begun_anew(study, tmp_path, monkeypatch):
    llm = load_llm(tmp_path / "config.json")
    decoder, limits = build_decoder(read_study(study), llm, "cpu", 1)
    points = grid(**limits)[:2]
    first = measure(decoder, points, tmp_path / "p.json", repeats=1)
    write_profile(tmp_path / "p.json", first.model_copy(update={"device": "another"}))
    second = measure(decoder, points, tmp_path / "p.json", repeats=1)
    assert second.device == first.device and len(second.rows) == 2


def test_batches_to_measure_fit_the_engine():
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 500, "pool_tokens": 1200}
    for points in (grid(**limits), drawn(50, **limits, seed=3)):
        assert len(points) >= 20
        for counts, before in points:
            assert len(counts) == len(before) <= 8 and sum(counts) <= 64 and sum(counts) + sum(before) <= 1200
            assert max(c + b for c, b in zip(counts, before, strict=True)) <= 500
    assert len(set(grid(**limits))) == len(grid(**limits)) and drawn(5, **limits, seed=3) != drawn(5, **limits, seed=4)


@pytest.mark.parametrize("setting, part", [
    ("engine.async_scheduling=true", "async_scheduling"), ("cluster.replicas=2", "replicas"),
    ("engine.num_gpu_blocks=null", "num_gpu_blocks"), ("model={name: tiny-llama, weight_dtype: fp8}", "weight_dtype"),
    ("cluster.tensor_parallel_size=2", "tensor_parallel_size")])
def test_what_real_execution_lacks_is_refused(study, setting, part):
    file = read_study(study, [setting])
    with pytest.raises(ConfigError, match=part):
        build_decoder(file, study_llm(file.study), "cpu", 1)


def test_no_gpu_is_said(study, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call("validate", "live", "--device", "cuda", "--study", study) == 2
    assert call("validate", "live", "--device", "abacus", "--study", study) == 2
    assert call("validate", "live", "--load", 1.5, "--study", study) == 2


def test_steps_of_two_runs_are_paired_by_what_they_computed():
    def step(count, seconds):
        return RealStep((count,), (0,), (True,), seconds)

    first = [step(5, 1.0), step(5, 2.0), step(7, 4.0)]
    pairs = live_validation._paired(first, [step(7, 5.0), step(5, 1.5), step(9, 1.0), step(5, 3.0), step(5, 8.0)])
    assert pairs.tolist() == [[4.0, 5.0], [1.0, 1.5], [2.0, 3.0]]


def test_errors_are_relative_to_what_was_measured():
    class Run:
        def __init__(self, ttft):
            self.requests = pd.DataFrame({"ttft": ttft, "tpot": [0.1, 0.1], "e2e": [1.0, 1.0]})

    steps = [RealStep((1,), (0,), (True,), seconds) for seconds in (1.0, 2.0, 4.0)]
    runs = Run([1.0, 3.0]), Run([2.0, 4.0])
    rows, paired = compare_runs([steps, steps], np.array([1.1, 2.0, 5.0]), runs, Run([2.0, 4.0]))
    found = {row.metric: row for row in rows}
    assert paired == 3 and found["step, median error"].error == pytest.approx(0.1) and found["step, median error"].ok
    assert found["TTFT mean"].error == pytest.approx(0.2) and found["TTFT mean"].spread == pytest.approx(0.4)
    assert found["TTFT mean"].ok is False and found["TTFT p90"].ok is None


def test_the_load_is_what_was_asked_for(study):
    file = read_study(study, ["model=tiny-llama"])
    deployment = live_validation.live_deployment(file, LLM, fit(profile(), LLM))
    work = build_workload(file.study.workload, file.folder, 1)
    spans = [float(np.ptp(at_load(work, file, deployment, load).arrival)) for load in (0.25, 0.5)]
    assert spans[0] == pytest.approx(2 * spans[1])
