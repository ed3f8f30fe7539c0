"""Sweeps: what is played, what is kept, what is played again, and that nothing is lost by an error or a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from small_studies import BASE, simcore, small_file, write_study

from simcore.errors import BadInput, ConfigError, SimcoreError
from simcore.experiments import cli, load
from simcore.experiments.compare import compare
from simcore.experiments.run import Job, play
from simcore.experiments.statistics import METRICS
from simcore.experiments.study import read_study
from simcore.experiments.sweep import ROOT_MARKER, Sweep, begin_folder, plan_sweep
from simcore.experiments.sweep_report import summary_field

GENERATE = {**BASE["workload"]["generate"], "requests": 40}
VARY = {"workload.generate.rate": [10, 40], "policies.replica_routing": ["round-robin", "least-loaded"]}
OWN = '''
from simcore.models.decision_points import ReplicaRouting

class First(ReplicaRouting):
    """Everything to one replica."""

    def route(self, turn, replicas, now):
        return 0
'''
FAILS = OWN + '''
class Wild(ReplicaRouting):
    """No router at all."""

    def route(self, turn, replicas, now):
        return 99
'''
GATE = OWN + '''
import time
from pathlib import Path

class Gate(First):
    """Plays on only when a file is there."""

    def start(self, site, rng):
        while not Path("open").exists():
            time.sleep(0.02)
'''


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """`simcore sweep` in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(["sweep", *map(str, arguments), "--processes", "1"])
        out, err = capfd.readouterr()
        return (caught.value.code or 0), out, err

    return run


def study(folder: Path, **changes) -> Path:
    return write_study(folder, **{"workload__generate": GENERATE, "compare__vary": VARY, "seeds": [1, 2]} | changes)


def kept(folder: Path) -> dict[str, int]:
    """The runs of a sweep's folder: name -> inode of its manifest, which a run played again replaces."""
    return {path.parent.name: path.stat().st_ino for path in folder.glob("runs/*/done.json")}


# --- what is played -------------------------------------------------------------------------------------------------


def test_every_combination_under_every_seed_and_nothing_twice(call, tmp_path):
    path = study(tmp_path)
    code, out, err = call(path)
    assert (code, err) == (0, "")
    assert out.startswith("4 arms, 8 runs: 0 done before, 8 to play\n8 runs, 320 requests; writes about 1 MB to ")
    root = tmp_path / "out/small-sweep"
    assert {p.name for p in root.iterdir()} == {
        "runs", "sweep.parquet", "sweep.csv", "summary.json", "config.yaml", "plot.png", "report.html", "run.json",
        ROOT_MARKER}
    table = pd.read_parquet(root / "sweep.parquet")
    assert table["workload.generate.rate"].tolist() == [10, 10, 10, 10, 40, 40, 40, 40]
    assert table["policies.replica_routing"].tolist() == ["round-robin", "round-robin", "least-loaded", "least-loaded"] * 2
    assert table["seed"].tolist() == [1, 2] * 4 and (table["window"] == "all").all() and (table["completed"] == 40).all()
    file = read_study(path)
    for k, (arm, seed) in enumerate((arm, seed) for arm in file.arms for seed in (1, 2)):
        summary = play(Job(arm.study, file.folder, seed)).summary
        assert table["mean_ttft_ms"][k] == summary["mean_ttft_ms"]
        assert table["output_throughput"][k] == summary["output_throughput"]
    csv = pd.read_csv(root / "sweep.csv")
    assert csv["mean_ttft_ms"].tolist() == pytest.approx(table["mean_ttft_ms"].tolist())

    before, summary = kept(root), (root / "summary.json").read_bytes()
    assert len(before) == 8
    code, out, err = call(path)
    assert code == 0 and out.startswith("4 arms, 8 runs: 8 done before, 0 to play\nsimcore sweep | small")
    assert kept(root) == before and (root / "summary.json").read_bytes() == summary
    assert not [p for p in root.rglob(".*") if p.name not in (ROOT_MARKER, ".simcore-result")]


def test_a_changed_study_plays_only_what_changed(call, tmp_path):
    root = tmp_path / "o"
    assert call(study(tmp_path), "--out", "o")[0] == 0
    before = kept(root)
    more = {**VARY, "workload.generate.rate": [10, 20, 40]}
    code, out, _ = call(study(tmp_path, compare__vary=more, name="renamed"), "--out", "o", "--seeds", "1,2,3")
    assert code == 0 and out.startswith("6 arms, 18 runs: 8 done before, 10 to play\n")
    assert before.items() <= kept(root).items()
    code, out, _ = call(study(tmp_path), "--out", "o", "--set", "engine.max_num_seqs=8")
    assert code == 0 and out.startswith("4 arms, 8 runs: 0 done before, 8 to play\n")
    assert len(pd.read_parquet(root / "sweep.parquet")) == 8  # of this study alone
    code, out, _ = call(study(tmp_path), "--out", "o", "--goodput", "ttft:1")
    assert code == 0 and "0 done before" in out  # the SLO is in the summary
    assert before.items() <= kept(root).items()


def test_a_changed_trace_or_policy_is_played_again(tmp_path):
    (tmp_path / "t.csv").write_text("arrival,input_tokens,output_tokens\n0,5,5\n1,5,5\n")
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "module_of_this_test.py").write_text(OWN)
    path = write_study(tmp_path, workload={"trace": "t.csv"}, compare__vary={
        "policies.replica_routing": ["round-robin", "mine.py:First", "module_of_this_test:First"]})

    def keys() -> list[str]:
        return [run.key for run in plan_sweep(read_study(path), tmp_path / "o").runs]

    first = keys()
    assert len(set(first)) == 3 and keys() == first
    (tmp_path / "mine.py").write_text(OWN + "\n")
    (tmp_path / "module_of_this_test.py").write_text(OWN + "\n\n")
    second = keys()
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, False]
    (tmp_path / "t.csv").write_text("arrival,input_tokens,output_tokens\n0,5,5\n1,5,6\n")
    assert not set(second) & set(keys())


def test_values_that_mean_the_same_are_played_once(tmp_path):
    file = small_file(tmp_path, workload__generate=GENERATE, compare__vary={"horizon": ["60s", "1min", 60]})
    sweep = plan_sweep(file, tmp_path / "o")
    assert len(sweep.runs) == 3 and len(sweep.missing()) == 1


@pytest.mark.parametrize("harm", ["torn", "changed", "emptied", "lost", "no manifest", "foreign manifest", "folder gone"])
def test_a_run_that_is_not_as_it_was_written_is_played_again(tmp_path, harm):
    file = small_file(tmp_path, workload__generate=GENERATE, seeds=[1], compare__vary={"policies.admission": ["fcfs"]})
    sweep = plan_sweep(file, tmp_path / "o", tables=True)
    begin_folder(sweep.folder)
    assert sweep.play(sweep.missing(), processes=1) == [] and sweep.missing() == []
    (run,) = sweep.runs
    good = sweep.summary_of(run)
    place = tmp_path / "o/runs" / run.key
    text = (place / "summary.json").read_text()
    if harm == "torn":
        (place / "summary.json").write_text(text[: len(text) // 2])
    elif harm == "changed":
        (place / "summary.json").write_text(text.replace('"completed": 40', '"completed": 41'))
    elif harm == "emptied":
        (place / "requests.parquet").write_bytes(b"")
    elif harm == "lost":
        (place / "steps.parquet").unlink()
    elif harm == "no manifest":
        (place / "done.json").unlink()
    elif harm == "foreign manifest":
        (place / "done.json").write_text("[1, 2]")
    else:
        for path in place.iterdir():
            path.unlink()
    assert sweep.missing() == [run]
    assert sweep.play([run], processes=1) == []
    assert sweep.missing() == [] and sweep.summary_of(run) == good


def test_tables_are_kept_on_demand_and_asked_for_later(tmp_path):
    file = small_file(tmp_path, workload__generate=GENERATE, seeds=[1], compare__vary={"policies.admission": ["fcfs"]})
    plain, full = (plan_sweep(file, tmp_path / "o", tables=tables) for tables in (False, True))
    begin_folder(plain.folder)
    plain.play(plain.missing(), processes=1)
    place = tmp_path / "o/runs" / plain.runs[0].key
    assert not list(place.glob("*.parquet")) and plain.missing() == [] and full.missing() == full.runs
    full.play(full.missing(), processes=1)
    assert full.missing() == [] == plain.missing()
    requests = pd.read_parquet(place / "requests.parquet")
    pd.testing.assert_frame_equal(requests["ttft"].to_frame(), play(Job(file.study, file.folder, 1)).requests[["ttft"]])
    again = load(place / "config.yaml")  # a run's configuration is that of the run alone
    assert again.file.study.seeds == [1] and len(again.run().requests) == 40


# --- processes, errors, kills ---------------------------------------------------------------------------------------


def test_equal_bytes_on_one_process_and_on_two(tmp_path):
    path = study(tmp_path)
    found = []
    for processes, hash_seed in ((1, "0"), (2, "31337")):
        done = simcore("sweep", path, "--out", f"o{processes}", "--processes", processes, "--tables", cwd=tmp_path,
                       env=os.environ | {"PYTHONHASHSEED": hash_seed})
        assert done.returncode == 0, done.stderr
        root = tmp_path / f"o{processes}"
        found.append({str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*")
                      if p.is_file() and p.name not in ("run.json", "report.html")})  # how fast it was stands in both
    assert found[0] == found[1] and len(found[0]) > 8 * 7


def test_one_failing_run_is_named_and_the_others_are_kept(call, tmp_path):
    (tmp_path / "mine.py").write_text(FAILS)
    path = study(tmp_path, compare__vary={"policies.replica_routing": ["mine.py:Wild", "mine.py:First", "round-robin"]})
    code, _, err = call(path, "--json", "s.json")
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in err
    assert err.startswith("error: 2 of 6 runs failed, the others are kept: mine.py:Wild, seed 1: PolicyError: policy Wild ")
    assert "mine.py:Wild, seed 2: PolicyError" in err
    table = pd.read_parquet(tmp_path / "out/small-sweep/sweep.parquet")
    assert table["arm"].tolist() == ["mine.py:First"] * 2 + ["round-robin"] * 2
    summary = json.loads((tmp_path / "s.json").read_text())
    assert [(f["arm"], f["seed"]) for f in summary["failed"]] == [("mine.py:Wild", 1), ("mine.py:Wild", 2)]
    assert (summary["runs"], summary["finished"]) == (6, 4)
    (tmp_path / "mine.py").write_text(FAILS.replace("99", "1"))  # mended: another file, so both arms of it are played
    done = simcore("sweep", path, "--processes", 1, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("3 arms, 6 runs: 2 done before, 4 to play\n")


def test_a_killed_sweep_goes_on_where_it_was(tmp_path):
    (tmp_path / "gate.py").write_text(GATE)
    path = study(tmp_path, compare__vary={"policies.replica_routing": ["round-robin", "least-loaded", "gate.py:Gate"]})
    command = [sys.executable, "-m", "simcore.experiments.cli", "sweep", str(path), "--out", "o", "--processes", "2"]
    process = subprocess.Popen(
        command, cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    root = tmp_path / "o"
    try:
        for _ in range(1200):  # until four runs are done; the last two wait for the gate
            if len(kept(root)) == 4 or process.poll() is not None:
                break
            time.sleep(0.05)
        assert process.poll() is None, "it ended before it could be killed"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    before = kept(root)
    assert len(before) == 4 and not (root / "sweep.csv").exists()
    (tmp_path / "open").touch()
    done = simcore("sweep", path, "--out", "o", "--processes", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 arms, 6 runs: 4 done before, 2 to play\n")
    assert before.items() <= kept(root).items() and len(kept(root)) == 6
    undisturbed = simcore("sweep", path, "--out", "p", "--processes", 1, cwd=tmp_path)
    assert undisturbed.returncode == 0, undisturbed.stderr
    for name in ("sweep.csv", "sweep.parquet", "summary.json", "plot.png"):
        assert (root / name).read_bytes() == (tmp_path / "p" / name).read_bytes()


def test_an_interrupt_and_a_process_that_dies_say_that_what_is_done_is_kept(call, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FAILS.replace("return 99", "__import__('os')._exit(3)"))
    path = study(tmp_path, compare__vary={"policies.replica_routing": ["mine.py:Wild", "round-robin"]})
    done = simcore("sweep", path, "--processes", 2, cwd=tmp_path)
    assert done.returncode == 2 and "a process died" in done.stderr and "start again" in done.stderr

    def interrupted(*args: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "play", interrupted)
    code, out, _ = call(path)
    assert code == 130 and "PARTIAL: interrupted: 0 of 4 runs; start again to play the rest" in out
    summary = json.loads((tmp_path / "out/small-sweep/summary.json").read_text())
    assert summary["partial"].startswith("interrupted") and summary["finished"] == 0


def test_bad_input_is_refused_before_anything_is_played(call, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years")
    for arguments, message in [
        (("--out", "mine"), "mine: exists and is not a sweep of simcore; nothing was written"),
        (("--seeds", "1,x"), "--seeds 1,x: seeds.1: found 'x'"), (("--seeds", "1,1"), "--seeds 1,1: seeds: found [1, 1]"),
        (("--vary", "cluster.gpu=h100-sxm,b300"), "--vary cluster.gpu=h100-sxm,b300: cluster.gpu: found 'b300'"),
        (("--set", "compare.headline=speed"), "--set compare.headline=speed: compare.headline: found 'speed'"),
    ]:
        code, out, err = call(study(tmp_path), *arguments)
        assert code == 2 and out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"] and not (tmp_path / "out").exists()
    root = tmp_path / "o"
    assert call(study(tmp_path), "--out", "o", "--seeds", 1)[0] == 0
    done = simcore("run", tmp_path / "study.yaml", "--out", "o", cwd=tmp_path)  # would replace all that is kept
    assert done.returncode == 2 and "exists and is not a result of simcore" in done.stderr and len(kept(root)) == 4


# --- what is shown --------------------------------------------------------------------------------------------------


def test_means_have_t_intervals_over_seeds(call, tmp_path):
    code, out, _ = call(study(tmp_path, seeds=[1, 2, 3]), "--json", "s.json")
    assert code == 0 and "mean over 3 seeds ± half of the 95% t interval" in out
    table = pd.read_parquet(tmp_path / "out/small-sweep/sweep.parquet")
    for arm in json.loads((tmp_path / "s.json").read_text())["arms"]:
        values = table.loc[table["arm"] == arm["arm"], "mean_ttft_ms"].to_numpy()
        found = arm["metrics"]["mean_ttft_ms"]
        half = 4.302653 * values.std(ddof=1) / np.sqrt(3)
        assert found["runs"] == 3 and found["mean"] == pytest.approx(values.mean())
        assert (found["low"], found["high"]) == pytest.approx((values.mean() - half, values.mean() + half))


def test_seeds_of_a_fixed_trace_give_no_interval_unless_it_is_resampled(call, tmp_path):
    rows = "".join(f"{k},{20 + k},{3 + k % 2},{k % 9}\n" for k in range(40))
    (tmp_path / "t.csv").write_text("arrival,input_tokens,output_tokens,program\n" + rows)
    path = study(tmp_path, workload={"trace": "t.csv"}, compare__vary={"policies.replica_routing": ["round-robin"]})
    code, out, _ = call(path)
    assert code == 0 and "No intervals: seeds are no independent samples of a fixed trace" in out and "±" not in out
    code, out, _ = call(path, "--set", "workload.resample=true")
    assert code == 0 and "No intervals" not in out and "±" in out and "resampled by whole sessions" in out


def test_arms_may_differ_in_requests_where_nothing_is_paired(call, tmp_path):
    code, out, _ = call(study(tmp_path, compare__vary={"workload.generate.requests": [20, 30]}, seeds=[1]))
    assert code == 0 and "2 runs, 50 requests" in out
    assert pd.read_parquet(tmp_path / "out/small-sweep/sweep.parquet")["completed"].tolist() == [20, 30]


def test_axes_of_mixed_values_and_policies_with_parameters(tmp_path):
    vary = {"workload.generate.input_tokens": [30, [20, 40]], "policies.admission": [
        "fcfs", {"name": "shortest-first", "by": "total"}]}
    loaded = load(study(tmp_path, compare__vary=vary, seeds=[1]))
    table = loaded.sweep(tmp_path / "o", processes=1)
    assert table["workload.generate.input_tokens"].tolist() == ["30", "30", "[20, 40]", "[20, 40]"]
    assert table["policies.admission"].tolist() == ["fcfs", "shortest-first(by=total)"] * 2
    pd.testing.assert_frame_equal(loaded.sweep(tmp_path / "o", processes=1), table)


def test_the_python_call_names_what_failed(tmp_path):
    (tmp_path / "mine.py").write_text(FAILS)
    loaded = load(study(tmp_path, compare__vary={"policies.replica_routing": ["mine.py:Wild"]}))
    with pytest.raises(SimcoreError, match=r"2 of 2 runs failed, the others are kept: mine.py:Wild, seed 1: PolicyError"):
        loaded.sweep(tmp_path / "o", processes=1)


def test_every_headline_has_a_field_in_the_summary(tmp_path):
    file = small_file(tmp_path, workload__generate=GENERATE)
    summary = play(Job(file.study, file.folder, 1)).summary
    assert {summary_field(metric.name) for metric in METRICS} <= set(summary)


# --- steady windows -------------------------------------------------------------------------------------------------

# One sequence at a time, of one step each: a queue (M/D/1) whose load can be set by the rate.
QUEUE = {"workload": {"generate": {"requests": 2500, "rate": 1, "input_tokens": 16, "output_tokens": 1}},
         "engine": {"max_num_seqs": 1}, "cluster": {"replicas": 1}, "window": "steady", "seeds": [1]}


@pytest.fixture(scope="module")
def capacity(tmp_path_factory) -> float:
    """Requests a second of the queue when it is never empty."""
    file = small_file(tmp_path_factory.mktemp("capacity"), **QUEUE | {"window": "all"})
    config = file.study.workload.generate.model_copy(update={"rate": 1e6})
    flooded = file.study.model_copy(update={"workload": file.study.workload.model_copy(update={"generate": config})})
    return play(Job(flooded, file.folder, 1)).summary["request_throughput"]


def test_load_above_one_is_unstable_and_below_is_not(call, tmp_path, capacity):
    rates = [0.6 * capacity, 1.2 * capacity]
    path = write_study(tmp_path, **QUEUE, compare__vary={"workload.generate.rate": rates})
    code, out, _ = call(path, "--json", "s.json")
    assert code == 0 and "unstable: the queue grows; no steady mean" in out and "│ unstable │" in out.replace("  ", "")
    calm, wild = json.loads((tmp_path / "s.json").read_text())["arms"]
    assert calm["windows"][0]["state"] == "steady" and wild["windows"][0]["state"] == "unstable"
    assert calm["metrics"]["mean_ttft_ms"]["mean"] > 0 and wild["metrics"]["output_throughput"]["mean"] > 0
    assert wild["metrics"].get("mean_ttft_ms", {"mean": None})["mean"] is None
    table = pd.read_parquet(tmp_path / "out/small-sweep/sweep.parquet")
    assert table["window"].tolist() == ["steady", "unstable"] and table["mean_ttft_ms"].isna().tolist() == [False, True]

    c = compare(read_study(path), processes=1)
    labels = list(c.windows)
    assert [c.windows[label].state for label in labels] == ["steady", "unstable"]
    assert c.headline[0].startswith(f"{labels[0]} leads with TTFT mean ")
    assert f"({labels[1]} is unstable: the queue grows; no steady mean (" in c.headline[0]
    assert c.headline[1].startswith(f"{labels[1]} against {labels[0]}: TTFT mean ")
    assert " -> N/A ms: " in c.headline[1] and "unstable: the queue grows; no steady mean" in c.headline[1]
    assert c.summary()["window"]["of_arms"][labels[1]]["state"] == "unstable"
    assert c.results[1][0].summary["window"]["state"] == "unstable"


def test_all_arms_unstable_have_no_verdict(tmp_path, capacity):
    generate = {**QUEUE["workload"]["generate"], "rate": 1.5 * capacity}
    c = compare(small_file(
        tmp_path, **QUEUE | {"workload": {"generate": generate}}, compare__vary={"sample_every": [1.0, 2.0]}), processes=1)
    assert c.headline[0].startswith("No policy has a TTFT mean: ") and "unstable" in c.headline[0]


def test_both_arms_count_the_same_requests_from_the_later_truncation_on(tmp_path, capacity):
    c = compare(read_study(write_study(
        tmp_path, **QUEUE | {"seeds": [1, 2, 3]}, compare__vary={
            "workload.generate.rate": [0.5 * capacity, 0.7 * capacity]})), processes=1)
    windows = list(c.windows.values())
    assert {w.state for w in windows} == {"steady"}
    cut = max(w.cut for w in windows)
    for runs in c.results:
        for run in runs:
            assert run.summary["window"]["cut"] == cut and run.summary["completed"] == 2500 - cut
            assert run.summary["mean_ttft_ms"] == pytest.approx(1e3 * run.requests["ttft"].iloc[cut:].mean())
    ttft = c.differences[list(c.windows)[1]][0]
    assert ttft.a == pytest.approx(np.mean([run.summary["mean_ttft_ms"] for run in c.results[0]])) and ttft.method == "seeds"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": {"trace": "mooncake-conversation"}, "window": "steady"},
         r"study.yaml:\d+: window: nothing is cut from a finite trace: found 'steady': allowed: all, or steady with"),
        ({"workload__generate__rate": 0, "window": "steady"}, r"study.yaml:\d+: window: all requests arrive at once"),
        ({"window": "middle"}, r"study.yaml:\d+: window: found 'middle': allowed: 'all' or 'steady'"),
        ({"compare__vary": {"window": ["all", "steady"]}}, r"study.yaml:\d+: compare.vary: found 'window': allowed: keys"),
        ({"workload__clone": 0.5}, r"study.yaml:\d+: workload.clone: found 0.5: allowed: greater than or equal to 1"),
    ],
)
def test_windows_and_clones_that_make_no_sense_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_study(write_study(tmp_path, **changes))


# --- replicates of a trace ------------------------------------------------------------------------------------------


def test_a_resampled_trace_is_compared_by_seed(tmp_path):
    rows = "".join(f"{k / 4},{200 + k},{3 + k % 2},{k % 30}\n" for k in range(120))
    (tmp_path / "t.csv").write_text("arrival,input_tokens,output_tokens,program\n" + rows)
    c = compare(small_file(tmp_path, workload={"trace": "t.csv", "resample": True, "clone": 1.5}, seeds=[1, 2, 3]),
                processes=1)
    assert {d.method for d in c.differences["least-loaded"]} == {"seeds"}
    assert len({int(run.requests["input_tokens"].sum()) for run in c.results[0]}) == 3
    fixed = compare(small_file(tmp_path, workload={"trace": "t.csv"}, seeds=[1, 2, 3]), processes=1)
    assert {d.method for d in fixed.differences["least-loaded"]} == {"time blocks"}


def test_a_folder_of_something_else_is_never_swept_into(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="file: exists and is not a sweep"):
        plan_sweep(small_file(tmp_path), tmp_path / "file")
