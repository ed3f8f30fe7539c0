"""The console command: what goes to stdout, to stderr and into the result folder, and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from small_studies import simcore, write_study

from simcore.experiments import cli, commands

TRACE = "arrival,input_tokens,output_tokens,program\n" + "".join(f"{t},{20 + t},{3 + t % 2},{t % 5}\n" for t in range(40))


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """The command in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main([str(a) for a in arguments])
        out, err = capfd.readouterr()
        return (caught.value.code or 0), out, err

    return run


def refused(result: tuple[int, str, str], *parts: str) -> None:
    code, out, err = result
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err
    for part in parts:
        assert part in err


# --- run and compare ------------------------------------------------------------------------------------------------


def test_run_writes_a_result_folder_and_tables(call, tmp_path):
    code, out, err = call("run", write_study(tmp_path))
    assert (code, err) == (0, "")
    assert out.startswith("1 run of 120 requests; writes about 1 MB to out/small\n")
    for part in ("Time To First Token (ms)", "Assumed:", "Written to out/small"):
        assert part in out
    files = {p.name for p in (tmp_path / "out/small").iterdir()}
    tables = {f"{table}.parquet" for table in ("requests", "programs", "tools", "steps", "decisions")}
    assert files == tables | {"summary.json", "run.json", "config.yaml", "plot.png", "report.html", ".simcore-result"}
    facts = json.loads((tmp_path / "out/small/run.json").read_text())
    assert set(facts) >= {"command", "host", "versions", "sim_speed", "wall_seconds"}
    summary = json.loads((tmp_path / "out/small/summary.json").read_text())
    assert not set(summary) & set(facts)
    assert summary["kv_pool"]["estimated"] and summary["assumed"] and summary["workload"]["notes"]


@pytest.mark.parametrize("arguments", [("run",), ("compare", "--processes", 1)])
def test_json_to_stdout_is_only_json(call, tmp_path, arguments):
    code, out, err = call(arguments[0], write_study(tmp_path), *arguments[1:], "--json", "-")
    assert code == 0 and "Time To First Token (ms)" in err
    assert json.loads(out) == json.loads((tmp_path / "out/small/summary.json").read_text())


def test_json_to_a_file(call, tmp_path):
    code, out, _ = call("run", write_study(tmp_path), "--json", "deep/down/s.json", "--out", "o", "--seed", 7)
    assert code == 0 and "Time To First Token (ms)" in out
    assert (tmp_path / "deep/down/s.json").read_bytes() == (tmp_path / "o/summary.json").read_bytes()


def test_save_detailed_and_csv(call, tmp_path):
    code, _, _ = call("run", write_study(tmp_path), "--out", "o", "--save-detailed", "--csv", "--arm", "least-loaded")
    assert code == 0
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    requests = pd.read_csv(tmp_path / "o/requests.csv")
    assert len(summary["ttfts"]) == len(summary["itls"]) == len(requests) == 120
    for ttft, itls, latency, tokens in zip(
        summary["ttfts"], summary["itls"], summary["latencies"], summary["output_lens"], strict=True
    ):
        assert len(itls) == tokens - 1 and ttft + sum(itls) == pytest.approx(latency)
    assert not list((tmp_path / "o").glob("*.parquet"))


def test_compare_prints_the_headline_last_and_writes_arms(call, tmp_path):
    code, out, _ = call("compare", write_study(tmp_path), "--processes", 1, "--out", "o", "--goodput", "ttft:40 tpot:50",
                        "--vary", "engine.max_num_seqs=1,8", "--set", "workload.generate.requests=30")
    assert code == 0
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    assert out.rstrip().split("\n")[-3:-1] == summary["headline"]
    assert summary["arms"]["8"][0]["slo"] == "ttft:40 tpot:50"
    assert {p.name for p in (tmp_path / "o").iterdir() if p.is_dir()} == {"1", "8"}
    assert json.loads((tmp_path / "o/8/summary.json").read_text())["completed"] == 30


def test_several_arms_with_pools_of_their_own_are_told_apart(call, tmp_path):
    code, out, _ = call("compare", write_study(tmp_path), "--processes", 1, "--vary", "engine.num_gpu_blocks=3000,4000")
    assert code == 0 and "KV pool: 47,984 tokens a replica" in out and "4000: KV pool: 63,984 tokens a replica" in out
    for blocks in (3000, 4000):
        pool = json.loads((tmp_path / f"out/small/{blocks}/summary.json").read_text())["kv_pool"]
        assert pool["num_gpu_blocks"] == blocks
    assert "kv_pool" not in json.loads((tmp_path / "out/small/summary.json").read_text())


def test_a_longer_run_is_announced_with_its_duration(call, tmp_path):
    code, out, _ = call("run", write_study(tmp_path, workload__generate__requests=300))
    assert code == 0 and out.startswith("1 run of 300 requests: about ") and "on 1 process; writes about 1 MB" in out


def test_bad_rows_are_listed_with_the_result(call, tmp_path):
    (tmp_path / "t.csv").write_text(TRACE + "41,-3,5,1\n")
    path = write_study(tmp_path, workload={"trace": "t.csv", "skip_bad": True})
    code, out, _ = call("run", path)
    assert code == 0 and "1 bad rows left out, first: " in out
    assert len(json.loads((tmp_path / "out/small/summary.json").read_text())["workload"]["skipped"]) == 1
    refused(call("run", path, "--set", "workload.skip_bad=false"), "t.csv:42: input_tokens", "found -3")


# --- refusals -------------------------------------------------------------------------------------------------------


def test_errors_are_one_line_and_exit_code_two(call, tmp_path):
    path = write_study(tmp_path)
    refused(call("run", "none.yaml"), "none.yaml: cannot be read (No such file or directory)")
    refused(call("run", path, "--set", "engine.blocks=3"), "--set engine.blocks=3: engine.blocks: unknown key: allowed: ")
    refused(call("run", path, "--set", "horizon=[1"), "--set horizon=[1: the value is not valid YAML")
    refused(call("run", path, "--arm", "random"), "--arm random: allowed: round-robin, least-loaded")
    refused(call("compare", path, "--set", "compare.vary={}"), "compare.vary: found {}: allowed: a key with at least")
    refused(call("compare", path, "--vary", "cluster.gpu=h100-sxm,b300"), "--vary cluster.gpu=h100-sxm,b300: cluster.gpu: ")
    refused(call("run", path, "--goodput", "ttft"), "--goodput ttft: allowed: ttft:MS")
    refused(call("trace", "info", "none.csv"), "trace: found 'none.csv': allowed: a shipped trace")
    refused(call("policies", "scheduling"), "policies: found 'scheduling': allowed: admission, retention, replica_routing")
    assert not (tmp_path / "out").exists()


def test_wrong_usage_is_exit_code_two(call, tmp_path):
    for arguments in (("run",), ("run", "x.yaml", "--fast"), ("compare", "x.yaml", "--processes", 0), ("fly",)):
        code, out, err = call(*arguments)
        assert code == 2 and out == "" and "Traceback" not in err and err


def test_a_folder_that_is_not_ours_is_never_touched(call, tmp_path):
    path = write_study(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years")
    refused(call("run", path, "--out", "mine"), "mine: exists and is not a result of simcore; nothing was written")
    refused(call("compare", path, "--out", "study.yaml"), "study.yaml: exists and is not a result of simcore")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_result_of_ours_and_an_empty_folder_are_replaced(call, tmp_path):
    path = write_study(tmp_path)
    (tmp_path / "o").mkdir()
    assert call("compare", path, "--processes", 1, "--out", "o")[0] == 0
    assert (tmp_path / "o/round-robin").is_dir()
    assert call("run", path, "--out", "o", "--csv")[0] == 0
    assert not (tmp_path / "o/round-robin").exists() and (tmp_path / "o/requests.csv").is_file()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_places_that_cannot_be_written_are_one_line(call, tmp_path):
    path = write_study(tmp_path)
    refused(call("run", path, "--out", "study.yaml/below"))
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x").touch()
    code, _, err = call("run", path, "--out", "o", "--json", "d")
    assert code == 2 and err.startswith("error: ") and "Traceback" not in err


def test_a_failing_run_leaves_nothing(call, tmp_path):
    (tmp_path / "bad.py").write_text(
        "from simcore.models.decision_points import ReplicaRouting\n"
        "class Wild(ReplicaRouting):\n"
        "    def route(self, turn, replicas, now):\n"
        "        return 99\n"
    )
    result = call("run", write_study(tmp_path), "--set", "policies.replica_routing=bad.py:Wild")
    assert result[0] == 2 and result[2].startswith("error: policy Wild at t=") and "Traceback" not in result[2]
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_an_interrupt_is_exit_code_130(call, tmp_path, monkeypatch):
    def interrupted(*args: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "play", interrupted)
    code, _, err = call("run", write_study(tmp_path))
    assert code == 130 and "Traceback" not in err
    assert list((tmp_path / "out").iterdir()) == []


def test_a_killed_compare_leaves_no_result_and_can_be_started_again(tmp_path):
    path = write_study(tmp_path, workload__generate__requests=20_000, workload__generate__rate=60, engine={})
    command = [sys.executable, "-m", "simcore.experiments.cli", "compare", str(path), "--out", "o", "--processes", "2"]
    process = subprocess.Popen(
        command, cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):  # until it is in the middle: its hidden folder stands
            if list(tmp_path.glob(".o.partial-*")) or process.poll() is not None:
                break
            time.sleep(0.05)
        time.sleep(0.5)
        assert process.poll() is None, "it ended before it could be killed"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "o").exists() and list(tmp_path.glob(".o.partial-*"))
    done = simcore("compare", path, "--out", "o", "--processes", 2, "--set", "workload.generate.requests=30", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o/summary.json").is_file() and not list(tmp_path.glob(".o.partial-*"))


# --- traces and policies --------------------------------------------------------------------------------------------


def test_trace_info(call, tmp_path):
    (tmp_path / "t.csv").write_text(TRACE)
    code, out, err = call("trace", "info", "t.csv")
    assert (code, err) == (0, "") and "requests  40" in out
    code, out, err = call("trace", "info", "t.csv", "--json", "-")
    info = json.loads(out)
    assert (code, err) == (0, "") and info["requests"] == 40 and info["sessions"] == 5 and info["span"] == 39
    (tmp_path / "t.csv").write_text(TRACE + "x,1,1,1\n")
    refused(call("trace", "info", "t.csv"), "t.csv:42: arrival", "found 'x'")
    code, out, _ = call("trace", "info", "t.csv", "--skip-bad", "--json", "-")
    assert code == 0 and json.loads(out)["skipped"] == 1
    assert call("trace", "info", "mooncake-conversation", "--json", "i.json")[0] == 0
    assert json.loads((tmp_path / "i.json").read_text())["requests"] == 7_851


def test_trace_cut(call, tmp_path):
    (tmp_path / "t.csv").write_text(TRACE)
    code, out, _ = call("trace", "cut", "t.csv", "c.jsonl.gz", "--start", "10s", "--end", "0.5min", "--head", 12)
    assert code == 0 and out == "12 requests written to c.jsonl.gz\n"
    code, out, _ = call("trace", "cut", "c.jsonl.gz", "c.csv", "--thin", 0.5, "--dequantise", "500ms", "--json", "-")
    info = json.loads(out)
    assert code == 0 and 0 < info["requests"] < 12 and len(info["notes"]) >= 3
    assert (tmp_path / "c.csv").read_text().count("\n") == 1 + info["requests"]
    code, out, _ = call("trace", "cut", "t.csv", "d.csv", "--clone", 2.0)
    assert code == 0 and out == "80 requests written to d.csv\n"
    refused(call("trace", "cut", "t.csv", "d.csv", "--clone", 0.5), "factor: found 0.5: allowed: a finite number of at")
    refused(call("trace", "cut", "t.csv", "c.parquet"), "output: found 'c.parquet': allowed: a file ending in")
    refused(call("trace", "cut", "t.csv", "c.csv", "--start", "soon"), "--start: found 'soon': allowed: a duration such")
    refused(call("trace", "cut", "t.csv", "c.csv", "--end", "3 d"), "--end: found '3 d': allowed: a duration such as 3s")
    refused(call("trace", "cut", "t.csv", "c.csv", "--start", "1h"), "found (3600.0, inf)")
    refused(call("trace", "cut", "t.csv", "c.csv", "--thin", "2"), "found 2.0")
    refused(call("trace", "cut", "mooncake-conversation", "m.csv", "--head", 5), "CSV carries no token identity")


def test_policies(call):
    code, out, err = call("policies")
    assert (code, err) == (0, "")
    for part in ("admission\n", "retention\n", "replica_routing\n", "  shortest-first         Shortest job first.", " lru "):
        assert part in out
    code, out, _ = call("policies", "admission", "--json", "-")
    assert code == 0 and list(json.loads(out)) == ["admission"]
    assert set(json.loads(out)["admission"]) >= {"fcfs", "priority", "shortest-first"}
    assert all(json.loads(out)["admission"].values())


# --- start-up -------------------------------------------------------------------------------------------------------


def test_help_and_version_import_nothing_heavy(tmp_path):
    script = (
        "import sys\nfrom simcore.experiments import cli\n"
        "try:\n    cli.main([sys.argv[1]])\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'pandas', 'numba', 'matplotlib', 'scipy', 'pyarrow', 'numpy', 'pydantic', 'yaml', 'simpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    for option, part in (("--help", "compare"), ("--version", "simcore 0.")):
        command = [sys.executable, "-c", script, option]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0 and part in done.stdout, done.stderr


def test_the_installed_command_says_the_same(tmp_path):
    done = simcore("run", "none.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: none.yaml: cannot be read (No such file or directory)\n"
