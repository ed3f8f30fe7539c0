"""Cost models fitted to a profile: the fit, its file, and studies that name one."""

from __future__ import annotations

import json

import numpy as np
import pytest
from made_up_profile import HOST, LLM, TRUTH, profile

from simcore.errors import ConfigError
from simcore.experiments import cli, load
from simcore.experiments.calibrate import fit, median_error, predict
from simcore.experiments.sweep import plan_sweep
from simcore.models.calibrated import read_calibrated
from simcore.models.hf_config import load_llm
from simcore.models.operator_profile import read_profile, write_profile
from simcore.models.serving import serve


def test_what_made_the_times_is_found_again():
    model = fit(profile(), LLM)
    found = {op.name: op.seconds for op in model.operators}
    assert found["attention"] == pytest.approx(TRUTH["attention"], rel=1e-3)
    assert found["lm_head"] == pytest.approx(TRUTH["lm_head"])
    (table,) = model.tables_of_tokens
    assert table.name == "qkv_proj" and table.seconds == pytest.approx([2e-3 + 4e-5 * n for n in table.tokens])
    assert table.at(np.array([table.tokens[-1] * 2]))[0] == pytest.approx(2 * table.seconds[-1])
    assert [model.step_overhead, model.sequence_overhead] == pytest.approx([HOST["constant"], HOST["sequences"]])
    assert model.fitted_on["held_out_median_error"] < 1e-6 and model.fitted_on["held_out_rows"] == 20


def test_held_out_rows_do_not_move_the_fit():
    whole = profile(noise=0.1)
    bent = [row.model_copy(update={"seconds": 9.0}) if row.held_out else row for row in whole.rows]
    a, b = fit(whole, LLM), fit(whole.model_copy(update={"rows": bent}), LLM)
    assert a.operators == b.operators and a.fitted_on["held_out_median_error"] < 0.2 < b.fitted_on["held_out_median_error"]


def test_predictions_are_those_of_a_run():
    model = fit(profile(), LLM)
    row = profile().rows[3]
    (seconds,) = predict(model, [(row.counts, row.before, [True] * len(row.counts))], LLM)
    assert seconds == pytest.approx(row.seconds, rel=1e-6) and median_error(model, [row], LLM) < 1e-6
    assert predict(model, [([10], [0], [True])], LLM) > predict(model, [([9], [0], [True])], LLM)


def test_too_few_rows_and_other_models_are_refused(tmp_path):
    few = profile().model_copy(update={"rows": profile().rows[:4]})
    with pytest.raises(ConfigError, match="at least 8"):
        fit(few, LLM)
    with pytest.raises(ConfigError, match="tiny-moe"):
        fit(profile(), load_llm("tiny-moe"))
    (tmp_path / "torn.json").write_text(profile().model_dump_json()[:500])
    with pytest.raises(ConfigError, match=r"torn\.json"):
        read_profile(tmp_path / "torn.json")
    (tmp_path / "bad.json").write_text(fit(profile(), LLM).model_dump_json().replace('"kv_read":', '"bytes":', 1))
    with pytest.raises(ConfigError, match=r"bad\.json: operators\.\d"):
        read_calibrated(tmp_path / "bad.json")


STUDY = """
workload: {generate: {requests: 30, rate: 20.0, input_tokens: 100, output_tokens: 8}}
model: tiny-llama
engine: {max_model_len: 1024, max_num_seqs: 4}
cost_model: {kind: calibrated, file: machine.json}
"""


@pytest.fixture
def study(tmp_path):
    (tmp_path / "machine.json").write_text(fit(profile(), LLM).model_dump_json())
    (tmp_path / "study.yaml").write_text(STUDY)
    return tmp_path / "study.yaml"


def test_a_study_names_one_and_both_paths_agree(study):
    from simcore.experiments.run import build_deployment, build_policies, build_workload

    file = load(study).file
    deployment, _ = build_deployment(file.study, file.folder)
    work = build_workload(file.study.workload, file.folder, 1)
    planned, plain = (serve(work, deployment, build_policies(file.study, file.folder), path=path)
                      for path in ("planned", "step-by-step"))
    assert planned.requests.equals(plain.requests) and planned.speed["planned_share"] > 0.9
    assert planned.summary["duration"] > 0


def test_what_is_wrong_with_the_file_is_said(study):
    def refused(part, **change):
        with pytest.raises(ConfigError, match=part):
            load(study, set={key.replace("__", "."): value for key, value in change.items()}).run()

    refused("tiny-moe", model="tiny-moe")
    refused("tensor_parallel_size", cluster__tensor_parallel_size=2)
    refused("nothing.json", cost_model__file="nothing.json")
    refused("kind", cost_model__kind="guessed")


def test_a_sweep_sees_that_the_file_has_changed(study, tmp_path):
    file = load(study).file
    before = plan_sweep(file, tmp_path / "sweep").runs[0].key
    machine = json.loads((tmp_path / "machine.json").read_text())
    (tmp_path / "machine.json").write_text(json.dumps(machine | {"step_overhead": 1.0}))
    assert plan_sweep(file, tmp_path / "sweep").runs[0].key != before


def call(*arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main([str(a) for a in arguments])
    return caught.value.code or 0


def test_the_command_fits_and_lists(study, tmp_path, capsys):
    write_profile(tmp_path / "profile.json", profile())
    assert call("calibrate", tmp_path / "profile.json", "--out", tmp_path / "new.json") == 0
    assert read_calibrated(tmp_path / "new.json") == fit(profile(), LLM)
    capsys.readouterr()
    for source, part in ((tmp_path / "profile.json", "calibrated.lm_head.sampled"),
                         (tmp_path / "new.json", "calibrated.step_overhead"), (study, "calibrated.attention.kv_read")):
        assert call("calibrate", source, "--show") == 0
        assert part in capsys.readouterr().out
    assert call("calibrate", "experiments/quickstart/study.yaml", "--show") == 0
    out = capsys.readouterr().out
    assert "roofline.memory_efficiency" in out and "memory.runtime_bytes" in out
    assert call("calibrate", study) == 2 and call("calibrate", tmp_path / "none.json") == 2
