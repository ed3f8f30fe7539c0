"""Studies of programs: where they come from, when they start, and what they are judged by."""

import pytest

from simcore.errors import BadInput, ConfigError
from simcore.experiments.cli import main
from simcore.experiments.compare import compare
from simcore.experiments.run import build_workload
from simcore.experiments.study import WorkloadConfig, read_study
from simcore.experiments.winner_map import _cell, draw_map, read_map

STUDY = """
name: agents
seeds: [1, 2]
workload:
  generate: {kind: agents, name: bfcl, programs: 12}
  start: {rate: 2}
model: llama-3.1-8b
engine: {num_gpu_blocks: 9000, max_num_seqs: 16}
compare:
  headline: jct_mean
  vary:
    policies:
      - {retention: lru}
      - {admission: program-fcfs, retention: {name: static-ttl, seconds: 3}}
      - {retention: continuum}
"""


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    return path


def test_arms_are_judged_by_the_jobs_completion_time(study):
    found = compare(read_study(study), processes=1)
    labels = [arm.label for arm in found.arms]
    assert labels == ["lru", "static-ttl(seconds=3) + program-fcfs", "continuum"]
    for k, label in enumerate(labels[1:], 1):
        jct = next(d for d in found.differences[label] if d.metric == "jct_mean")
        means = [sum(run.programs["jct"].mean() for run in found.results[j]) / 2 for j in (0, k)]
        assert (jct.a, jct.b) == pytest.approx(means) and jct.units == 2 and jct.method == "seeds"
    assert "JCT mean" in found.headline[0]
    summary = found.results[0][0].summary
    assert summary["programs"] == summary["programs_completed"] == 12
    parts = sum(summary[f"mean_jct_{part}_ms"] for part in ("queueing", "prefill", "decode", "tool", "reload"))
    assert parts == pytest.approx(summary["mean_jct_ms"])


def test_jct_needs_programs(tmp_path):
    path = tmp_path / "flat.yaml"
    flat = STUDY.replace(
        "{kind: agents, name: bfcl, programs: 12}", "{requests: 9, rate: 1, input_tokens: 9, output_tokens: 9}")
    path.write_text(flat.replace("  start: {rate: 2}\n", ""))
    with pytest.raises(ConfigError, match="no program of this workload has a second turn"):
        compare(read_study(path), processes=1)


def test_a_tool_short_of_slots_makes_its_callers_wait(study):
    arms = read_study(study, ["tools={fetch_url: {slots: 1}, search: {slots: 1}}", "seeds=[1]"]).arms
    free = read_study(study, ["seeds=[1]"]).arms
    from simcore.experiments.run import Job, play

    short, plenty = (play(Job(a[0].study, study.parent, 1)) for a in (arms, free))
    assert short.tools["wait_seconds"].sum() > 0 == plenty.tools["wait_seconds"].sum()
    assert short.programs["tool"].sum() > plenty.programs["tool"].sum()
    with pytest.raises(ConfigError, match="tools: found 'shell'"):
        play(Job(read_study(study, ["tools={shell: {slots: 1}}"]).arms[0].study, study.parent, 1))


@pytest.mark.parametrize(("config", "count", "workers"), [
    ({"trace": "coding-agents", "programs": 3, "start": {"workers": 2}}, 3, 2),
    ({"trace": "coding-agents", "options": {"long": "truncate"}, "programs": 5, "start": {"rate": 1}}, 5, 0),
    ({"generate": {"kind": "agents", "name": "swe-bench", "programs": 4}, "start": {"workers": 1, "time_limit": 9}}, 4, 1),
])
def test_programs_start_as_the_study_says(config, count, workers, tmp_path):
    found = build_workload(WorkloadConfig.model_validate(config), tmp_path, 1)
    assert (found.n_programs, found.workers) == (count, workers)
    assert found.time_limit == config["start"].get("time_limit", float("inf"))


@pytest.mark.parametrize(("workload", "message"), [
    ("{generate: {kind: agents, name: bfcl}}", "say when the agents' programs start"),
    ("{generate: {kind: agents, name: gaia}, start: {rate: 1}}", "gaia"),
    ("{trace: coding-agents, start: {rate: 1, workers: 2}}", "give either rate or workers"),
    ("{trace: coding-agents, options: {color: red}}", "workload.options"),
    ("{trace: coding-agents, options: {long: shrink}}", "shrink"),
    ("{generate: {requests: 9, rate: 1, input_tokens: 9, output_tokens: 9}, options: {long: drop}}", "options are those"),
])
def test_bad_agent_workloads_are_refused(workload, message, tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(f"workload: {workload}\nmodel: llama-3.1-8b\n")
    with pytest.raises(Exception, match=message):
        build_workload(read_study(path).study.workload, tmp_path, 1)


def test_a_map_over_two_axes_of_a_sweep(study, tmp_path):
    out = tmp_path / "sweep"
    axes = ["--vary", "workload.start.rate=1,4", "--vary", "engine.num_gpu_blocks=9000,20000",
            "--vary", "policies={retention: lru},{admission: program-fcfs, retention: static-ttl}"]
    for command in (["sweep", str(study), *axes, "--out", str(out), "--processes", "1"],
                    ["map", str(out), "--x", "workload.start.rate", "--y", "engine.num_gpu_blocks"]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert not ended.value.code
    assert (out / "map.png").is_file()
    cells, field = read_map(out, "workload.start.rate", "engine.num_gpu_blocks", "jct_mean")
    assert field == "mean_jct_ms" and [(c.x, c.y) for c in cells] == [(1, 9000), (1, 20000), (4, 9000), (4, 20000)]
    assert all(c.winner in ("lru", "static-ttl + program-fcfs") and c.winner != c.runner_up and c.seeds == 2 for c in cells)
    draw_map(tmp_path / "map.png", "map", "rate", "blocks", field, cells)
    assert (tmp_path / "map.png").read_bytes()[1:4] == b"PNG"
    for x, y, metric, message in (
            ("rate", "seed", "jct_mean", "--x"), ("workload.start.rate", "policies", "speed", "--metric")):
        with pytest.raises(ConfigError, match=message):
            read_map(out, x, y, metric)
    with pytest.raises(BadInput, match="not the folder"):
        read_map(tmp_path, "a", "b", "jct_mean")


def test_a_lead_is_certain_only_against_everyone():
    import pandas as pd

    table = pd.DataFrame({"a": [1.0, 1.1, 0.9, 1.0], "b": [2.0, 2.1, 1.9, 2.1], "c": [1.0, 1.2, 0.95, 0.9]})
    assert not _cell(0, 0, table, True).sure and _cell(0, 0, table[["a", "b"]], True).sure
    assert _cell(0, 0, table[["a", "b"]], False).winner == "b"
