"""Studies whose workload is generated: kinds gamma, diurnal and fitted, by keys of the study; and logs named by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_studies import write_study

from simcore.errors import BadInput, ConfigError
from simcore.experiments.run import build_workload
from simcore.experiments.study import Study, WorkloadConfig, read_study

GAMMA = {"kind": "gamma", "requests": 40, "rate": 4.0, "cv": 2.5, "input_tokens": {"mean": 50, "sd": 20}, "output_tokens": 5}
DIURNAL = {"kind": "diurnal", "requests": 40, "rates": [0.0, 4.0], "period": "2min", "begin": "70s", "input_tokens": [5, 9],
           "output_tokens": 5, "cv": 1.5}


def study(folder: Path, **workload: Any) -> Study:
    return read_study(write_study(folder, workload=workload)).study


def made(config: WorkloadConfig, folder: Path = Path(), seed: int = 1):
    return build_workload(config, folder, seed)


def test_gamma_and_diurnal(tmp_path: Path) -> None:
    config = study(tmp_path, generate=GAMMA).workload
    assert config.replicated_by_seed
    w = made(config)
    assert len(w) == 40 and "Gamma gaps of CV 2.5, 40 requests at 4/s, seed 1" in w.source.notes[0]
    assert not np.array_equal(w.arrival, made(config, seed=2).arrival)
    w = made(study(tmp_path, generate=DIURNAL).workload)
    assert w.arrival[0] < 10 and set(w.input_tokens.tolist()) == {5, 9}
    assert (((w.arrival + 70) % 120) >= 60).all()


def test_a_gamma_workload_has_a_steady_window_and_others_have_none(tmp_path: Path) -> None:
    assert read_study(write_study(tmp_path, workload={"generate": GAMMA}, window="steady")).study.window == "steady"
    with pytest.raises(ConfigError, match=r"window: nothing is cut from a finite trace"):
        read_study(write_study(tmp_path, workload={"generate": DIURNAL}, window="steady"))


def fitted(folder: Path, **change: Any) -> dict[str, Any]:
    rows = [{"timestamp": 500 * k, "session_id": k // 2, "input_length": 100 + k, "output_length": 5,
             "hash_ids": [k // 2 * 10]} for k in range(40)]
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"kind": "fitted", "trace": "trace.jsonl", "programs": 12, "window": "5s"} | change


def test_fitted_to_a_trace_of_the_studys_folder(tmp_path: Path) -> None:
    config = study(tmp_path, generate=fitted(tmp_path)).workload
    w = made(config, tmp_path)
    assert w.n_programs == 12 and len(w) == 24 and "programs like those of trace.jsonl" in w.source.notes[0]
    fast = made(study(tmp_path, generate=fitted(tmp_path, rate_factor=2)).workload, tmp_path)
    assert np.allclose(fast.arrival[fast.turn == 0] * 2, w.arrival[w.turn == 0])
    long = made(study(tmp_path, generate=fitted(tmp_path, options={"block_tokens": 256})).workload, tmp_path)
    assert long.block_tokens == 256


@pytest.mark.parametrize(("generate", "message"), [
    (GAMMA | {"cv": 0}, "workload.generate.gamma.cv"), (GAMMA | {"rate": 0}, "rate"), (DIURNAL | {"rates": []}, "rates"),
    (DIURNAL | {"rate": 3}, "rate"), (GAMMA | {"kind": "gama"}, "generate"),
])
def test_keys_that_are_refused(tmp_path: Path, generate: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as error:
        study(tmp_path, generate=generate)
    assert message.split(".")[-1] in str(error.value)


@pytest.mark.parametrize(("change", "message"), [
    ({"trace": "nowhere.jsonl"}, "workload.generate.trace: no such file in"),
    ({"format": "csv"}, "workload.generate.trace: .*trace.jsonl:1"),
    ({"options": {"clok": 1}}, "workload.generate.trace: option: found 'clok'"),
    ({"window": "0s"}, "window"),
])
def test_fits_that_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(study(tmp_path, generate=fitted(tmp_path, **change)).workload, tmp_path)


def test_rates_that_are_all_zero_are_refused_under_the_studys_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workload\.generate: .*rates"):
        made(study(tmp_path, generate=DIURNAL | {"rates": [0.0]}).workload)


def test_a_study_names_a_log_directly(tmp_path: Path) -> None:
    rows = [{"startTime": 1_730_000_000 + k, "endTime": 1_730_000_002 + k, "prompt_tokens": 20, "completion_tokens": 4}
            for k in range(6)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    w = made(study(tmp_path, trace="log.jsonl", options={"clock": "recorded"}).workload, tmp_path)
    assert w.arrival.tolist() == [0, 1, 2, 3, 4, 5]
