"""What `simcore capacity` says, keeps and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml
from capacity_studies import small

from simcore.errors import ConfigError, SimcoreError
from simcore.experiments.capacity import run_capacity
from simcore.experiments.capacity_trials import Trials


def test_the_command_keeps_its_runs_and_says_the_same_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = small(tmp_path, seeds=[1, 2], slo={"ttft_ms": 60, "tpot_ms": 8})
    found = []
    for _ in range(2):
        run_capacity(path, [], [], percentile=90, processes=1, users=50, precision=0.2)
        root = tmp_path / "out/small-capacity"
        found.append((capsys.readouterr().out, (root / "summary.json").read_bytes(),
                      {p.parent.name: p.stat().st_ino for p in root.glob("runs/*/done.json")}))
    assert found[0] == found[1]
    out, summary = found[0][0], json.loads(found[0][1])
    assert not summary["partial"] and summary["answer"]["unit"] == "replicas" and summary["cost"]["users"] == 50
    assert out.startswith("At least 90% of 80 requests within ttft:60 tpot:8 (ms), 2 seeds\n1 replica: ")
    for said in ("the fewest at which 90% of the requests", "Headroom: carries", "Saturates first: ", "a user and month (50",
                 "a million output tokens", "Assumed:", "step times: roofline, assumed", "Written to out/small-capacity"):
        assert said in out, said
    assert {"summary.json", "trials.csv", "plot.png", "config.yaml", "run.json", "runs"} <= {p.name for p in root.iterdir()}
    csv = pd.read_csv(root / "trials.csv")
    assert len(csv) == len(summary["trials"]) and csv["share"].between(0, 1).all()
    # another percentile needs no run that was made before
    run_capacity(path, [], [], percentile=80, processes=1, with_headroom=False)
    assert found[0][2].items() <= {p.parent.name: p.stat().st_ino for p in root.glob("runs/*/done.json")}.items()


def test_json_to_stdout_is_all_that_is_there(tmp_path, capsys):
    run_capacity(small(tmp_path), [], ["ttft:200"], find="rate", precision=0.5, processes=1, out=tmp_path / "o",
                 json=Path("-"))
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary["answer"]["unit"] == "requests/s" and "Assumed:" in err
    assert summary["headroom"]["times"] == pytest.approx(summary["answer"]["value"] / 20)


def test_an_interrupt_leaves_what_was_found_marked_as_partial(tmp_path, monkeypatch, capsys):
    asked = []
    real = Trials._play

    def interrupted(self, label, settings):
        asked.append(label)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(self, label, settings)

    monkeypatch.setattr(Trials, "_play", interrupted)
    path = small(tmp_path, slo={"ttft_ms": 60, "tpot_ms": 6}, workload__generate__rate=200)
    with pytest.raises(SystemExit) as caught:
        run_capacity(path, [], [], processes=1, out=tmp_path / "o")
    assert caught.value.code == 130 and "start again to go on" in capsys.readouterr().err
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    assert summary["partial"] and [t["label"] for t in summary["trials"]] == ["1 replica"]


def test_an_arm_can_be_sized_and_an_oracle_is_named(tmp_path, capsys):
    vary = {"policies.admission": ["fcfs", "shortest-first"]}
    path = small(tmp_path, slo={"ttft_ms": 200}, compare={"vary": vary})
    run_capacity(path, [], [], arm="shortest-first", with_headroom=False, processes=1, out=tmp_path / "o")
    kept = yaml.safe_load((tmp_path / "o/config.yaml").read_text())
    assert kept["policies"]["admission"] == "shortest-first"
    with pytest.raises(ConfigError, match="--arm lifo: allowed: fcfs, shortest-first"):
        run_capacity(path, [], [], arm="lifo", out=tmp_path / "o")
    capsys.readouterr()


@pytest.mark.parametrize(("options", "message"), [
    ({"percentile": 100}, "--percentile: found 100: allowed: above 0 and below 100"),
    ({"find": "speed"}, "--find: found 'speed': allowed: replicas, rate, gpus"),
    ({"most": 0}, "--most: found 0"),
    ({"precision": 0.9}, "--precision: found 0.9: allowed: 0.001 to 0.5"),
    ({"users": 0}, "--users: found 0"),
    ({"sizes": "1,x"}, "--tp 1,x: allowed: whole numbers"),
])
def test_options_that_make_no_sense_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        run_capacity(small(tmp_path), [], [], out=tmp_path / "o", **options)
    assert not (tmp_path / "o").exists()


def test_a_study_without_an_slo_and_a_model_that_does_not_fit_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="slo: there is no SLO to size for: allowed: limits here, or --goodput"):
        run_capacity(small(tmp_path, slo={}), [], [], out=tmp_path / "o")
    with pytest.raises(ConfigError, match="leaves no room for a KV block"):
        run_capacity(small(tmp_path, model="llama-3.1-70b"), [], [], out=tmp_path / "o")


def test_a_run_that_fails_says_which(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from simcore.models.decision_points import ReplicaRouting\n\n\nclass Wild(ReplicaRouting):\n"
        "    def route(self, turn, replicas, now):\n        return 99\n")
    path = small(tmp_path, policies={"replica_routing": "mine.py:Wild"})
    with pytest.raises(SimcoreError, match="1 of 1 runs failed, the others are kept: 1 replica, seed 1: PolicyError"):
        run_capacity(path, [], [], processes=1, out=tmp_path / "o")
