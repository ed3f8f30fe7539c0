"""The three-line API, in this process and in a script of its own."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
import pytest
from small_studies import write_study

import simcore.experiments
from simcore.errors import ConfigError


def test_load_run_and_look(tmp_path):
    result = simcore.experiments.load(write_study(tmp_path)).run()
    assert len(result.requests) == 120 and result.summary["completed"] == 120
    assert {"ttft", "tpot", "e2e", "queue_time"} <= set(result.requests.columns)
    for table in (result.requests, result.programs, result.steps, result.decisions):
        assert isinstance(table, pd.DataFrame) and len(table)


def test_an_arm_and_a_seed_can_be_chosen(tmp_path):
    study = simcore.experiments.load(write_study(tmp_path, seeds=[5, 6]))
    plain, arm = study.run(), study.run("round-robin")
    pd.testing.assert_frame_equal(plain.requests, arm.requests)  # round-robin is the default
    assert not study.run("least-loaded").requests["replica"].equals(arm.requests["replica"])
    assert study.run(seed=5).summary == plain.summary != study.run(seed=6).summary
    with pytest.raises(ConfigError, match=r"arm: found 'random': allowed: round-robin, least-loaded"):
        study.run("random")


def test_compare_gives_a_table(tmp_path):
    c = simcore.experiments.load(write_study(tmp_path)).compare(processes=1)
    assert set(c.table["arm"]) == {"least-loaded"} and c.headline
    assert c.table.set_index("metric").loc["ttft_mean", "unit"] == "ms"


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("cluster.replicas", 4, lambda s: s.cluster.replicas), ("name", "é 😀: #1", lambda s: s.name),
        ("name", "a\nb", lambda s: s.name), ("name", "5", lambda s: s.name), ("name", "null", lambda s: s.name),
        ("cost.usd_per_gpu_hour", None, lambda s: s.cost.usd_per_gpu_hour),
        ("cost_model.allreduce_latency", 1e-05, lambda s: s.cost_model.allreduce_latency),
        ("engine.enable_prefix_caching", False, lambda s: s.engine.enable_prefix_caching),
        ("horizon", float("inf"), lambda s: s.horizon), ("seeds", [3, 4], lambda s: s.seeds),
        ("policies.admission", {"name": "shortest-first", "patience": 1e-05, "by": "total"},
         lambda s: {"name": s.policies.admission.name, **s.policies.admission.parameters}),
        ("policies.retention", {"name": "x" * 200, "words": ["a, b", "c: d"]},
         lambda s: {"name": s.policies.retention.name, **s.policies.retention.parameters}),
    ],
)
def test_set_overrides_any_key_with_any_value(tmp_path, key, value, read):
    found = read(simcore.experiments.load(write_study(tmp_path), set={key: value}).file.study)
    assert found == value and type(found) is type(value)


def test_set_is_checked(tmp_path):
    path = write_study(tmp_path)
    with pytest.raises(ConfigError, match=r"--set cluster.replicas=0: cluster.replicas: found 0: allowed: greater than"):
        simcore.experiments.load(path, set={"cluster.replicas": 0})
    with pytest.raises(ConfigError, match=r"set: cluster.replicas: found .*object.*: allowed: text, numbers"):
        simcore.experiments.load(path, set={"cluster.replicas": object()})
    with pytest.raises(ConfigError, match=r"study.yaml:\d+: cluster.gpu: found 'b300'"):
        simcore.experiments.load(write_study(tmp_path, cluster__gpu="b300")).run()


OWN = '''
from simcore.models.decision_points import ReplicaRouting

class Last(ReplicaRouting):
    """Everything to the replica with the highest id."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    def route(self, turn, replicas, now):
        return replicas[-1 - self.offset].id
'''


def test_a_policy_beside_the_study(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    path = write_study(tmp_path, compare__vary={"policies.replica_routing": [
        "mine.py:Last", {"name": "mine.py:Last", "offset": 1}]})
    study = simcore.experiments.load(path)
    assert set(study.run("mine.py:Last").requests["replica"]) == {1}
    assert set(study.run("mine.py:Last(offset=1)").requests["replica"]) == {0}
    wrong = simcore.experiments.load(write_study(tmp_path, policies__replica_routing="mine.py:First"))
    with pytest.raises(ConfigError, match=r"study.yaml:\d+: policies.replica_routing: mine.py has no First.*allowed"):
        wrong.run()


def test_a_script_without_a_main_guard(tmp_path):
    """Comparing on two processes from a plain script: the workers do not run it again."""
    (tmp_path / "mine.py").write_text(OWN)
    write_study(tmp_path, compare__vary={"policies.replica_routing": ["round-robin", "mine.py:Last"]})
    script = tmp_path / "script.py"
    script.write_text(
        "import simcore.experiments\n"
        "print('once')\n"
        "study = simcore.experiments.load('study.yaml', set={'workload.generate.requests': 30})\n"
        "print(len(study.run().requests), len(study.compare(processes=2).results))\n"
    )
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("once\n30 2\n", "", 0)
