"""`simcore bench`: its workloads, their files for the peers, and what it writes. No test looks at how long anything took."""

from __future__ import annotations

import csv
import json
import random
import sys
from itertools import islice

import numpy as np
import pytest

from simcore.errors import ConfigError, SimcoreError
from simcore.experiments import bench, cli, peers
from simcore.experiments.pages import marks
from simcore.experiments.run import build_deployment, build_policies
from simcore.models.serving import serve
from simcore.traces.read import read
from simcore.traces.transform import head

KEYS = {
    "requests", "completed", "requests_per_cpu_second", "with_tables", "with_python_policies", "requests_per_simpy_timeout",
    "simpy_timeouts_per_cpu_second", "output_tokens", "output_tokens_per_cpu_second", "decisions_per_request",
    "stops_per_request", "steps_per_request", "planned_share", "path", "why_not_planned", "bytes_per_request",
    "table_bytes_per_request", "simulated_seconds", "repeat",
}
MACHINE = {"machine", "system", "cores", "python", "simcore", "numpy", "numba", "simpy", "pandas", "pyarrow"}
COMMON = {"max_num_seqs": 256, "num_gpu_blocks": 28_000, "block_size": 16, "max_num_batched_tokens": 2_048}


# --- workloads ------------------------------------------------------------------------------------------------------


def test_the_arrivals_are_python_s_own_stream():
    """Written out by hand: whoever makes the peers' files needs nothing but these lines."""
    r = random.Random(1)
    gaps = [r.expovariate(8.0) for _ in range(99)]
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    assert times[1:3] == [0.01803638301368865, 0.2530559161912668]
    assert list(bench.rows(100)) == [(i, t, 512, 128) for i, t in enumerate(times)]
    assert bench.find("W1-100-8").workload().arrival.tolist() == times
    assert {t for _, t, _, _ in bench.rows(5, rate=0)} == {0.0}


@pytest.mark.parametrize(("name", "requests", "output", "last"), [
    ("W1-100-8", 100, 8, True), ("W1-1k-32", 1_000, 32, True), ("W2-50", 50, 128, False), ("W2-1k", 1_000, 128, False),
])
def test_a_generated_workload_is_what_its_name_says(name, requests, output, last):
    found = bench.find(name)
    workload = found.workload()
    assert len(workload) == requests and (workload.arrival[-1] > 0) == last
    assert set(workload.input_tokens) == {512} and set(workload.output_tokens) == {output}
    deployment, capacity = build_deployment(found.study())
    assert {key: getattr(deployment.settings, key) for key in COMMON} == COMMON
    assert not deployment.settings.enable_prefix_caching and not capacity.estimated
    assert (deployment.replicas, deployment.gpus_per_replica) == (1, 1)


@pytest.mark.parametrize(("name", "block"), [("W4", 512), ("W4-16", 16)])
def test_the_shipped_trace_runs_as_it_is_on_eight_engines(name, block):
    found = bench.find(name)
    deployment, _ = build_deployment(found.study())
    assert (deployment.replicas, deployment.settings.block_size) == (8, block)
    assert deployment.num_blocks * block == 16_384 * 512 and deployment.settings.enable_prefix_caching
    assert deployment.max_model_len == 131_072
    assert len(found.workload()) == 7_851


@pytest.mark.parametrize("name", ["W1", "W1-0-8", "W1-10-0", "W2-1m", "W3", "W4-32", ""])
def test_an_unknown_workload_is_refused(name):
    with pytest.raises(ConfigError, match="W1-N-O"):
        bench.find(name)


def test_own_policies_serve_as_first_come_first_served_does():
    """So the difference in speed is what asking Python costs, and no other schedule."""
    found = bench.find("W1-100-8")
    results = []
    for policies in ({}, bench.OWN_POLICIES):
        study = found.study(**policies)
        made = build_policies(study, None)
        results.append(serve(found.workload(), build_deployment(study)[0], made))
    assert results[0].requests.equals(results[1].requests)
    assert {type(made.replica_routing()), type(made.admission(0))} == {bench.LeastOutstanding, bench.PriorityThenArrival}


# --- files for the peers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "first"), [("W1-100-8", 100), ("W2-50", 50), ("W4", 60)])
def test_exported_files_hold_the_same_workload(name, first, tmp_path):
    workload = head(bench.find(name).workload(), first)
    peers.export(name, workload, tmp_path)
    back = read(tmp_path / f"{name}.jsonl")
    np.testing.assert_allclose(back.arrival, workload.arrival, rtol=2**-52)  # to ms and back
    runs = ("known_tokens", "run_offsets", "run_first", "run_last")
    for column in ("input_tokens", "output_tokens", "program", "turn", *runs):
        np.testing.assert_array_equal(getattr(back, column), getattr(workload, column), err_msg=column)
    # Vidur's columns are ours by other names.
    text = (tmp_path / f"{name}.vidur.csv").read_text()
    assert text.startswith("arrived_at,num_prefill_tokens,num_decode_tokens\n")
    (tmp_path / "ours.csv").write_text("arrival,input_tokens,output_tokens\n" + text.split("\n", 1)[1])
    back = read(tmp_path / "ours.csv")
    for column in ("arrival", "input_tokens", "output_tokens"):
        np.testing.assert_array_equal(getattr(back, column), getattr(workload, column), err_msg=column)


def test_no_two_generated_requests_share_a_block(tmp_path):
    peers.export("W1-100-8", bench.find("W1-100-8").workload(), tmp_path)
    ids = [h for line in (tmp_path / "W1-100-8.jsonl").open() for h in json.loads(line)["hash_ids"]]
    assert len(ids) == len(set(ids)) == 100


def test_the_peer_gets_our_settings(tmp_path):
    command = peers.dynosim_command(bench.find("W1-100-8"), tmp_path / "python", tmp_path / "w", tmp_path / "r")
    given = json.loads(command[command.index("--extra-engine-args") + 1])
    assert given == COMMON | {"enable_prefix_caching": False, "enable_chunked_prefill": True}
    assert command[command.index("--num-workers") + 1] == "1"
    for name, peer in (("W2-50", True), ("W4", False)):
        text = peers.commands(bench.find(name), tmp_path)
        assert "dynamo.replay" in text and ("vidur" in text) == ("blis" in text) == peer


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_every_key(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    begin, end = marks("bench")
    (tmp_path / "page.md").write_text(f"Before.\n\n{begin}\nold\n{end}\n\nAfter.\n")
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "--workloads", "W1-100-8", "--repeat", "1", "--json", "out.json", "--export", "files",
                  "--page", "page.md"])
    assert not caught.value.code
    results = json.loads((tmp_path / "out.json").read_text())
    assert list(results) == ["W1-100-8", "machine"] and set(results["machine"]) == MACHINE
    found = results["W1-100-8"]
    assert set(found) == KEYS
    assert found["requests"] == found["completed"] == 100 and found["output_tokens"] == 800
    assert found["path"] == "planned" and found["why_not_planned"] == []
    assert found["table_bytes_per_request"] > 0
    assert found["requests_per_cpu_second"] >= found["with_tables"] > 0  # parts of one run
    printed = capsys.readouterr().out
    assert "dynamo.replay files/W1-100-8.jsonl" in printed and "simcore bench | simcore" in printed
    assert {path.name for path in (tmp_path / "files").iterdir()} == {"W1-100-8.jsonl", "W1-100-8.vidur.csv"}
    page = (tmp_path / "page.md").read_text()
    assert page.startswith(f"Before.\n\n{begin}\nsimcore ") and page.endswith(f"|\n{end}\n\nAfter.\n")
    assert "| W1-100-8 |" in page and "old" not in page


def test_memory_is_measured_for_w1_only(monkeypatch):
    monkeypatch.setattr(bench, "TIMEOUTS", 1_000)
    monkeypatch.setattr(bench, "_in_own_process", bench.play)
    found = bench.measure(bench.find("W2-50"), repeat=2)
    assert set(found) == KEYS and found["repeat"] == 2
    assert found["bytes_per_request"] is found["table_bytes_per_request"] is None


def test_the_step_by_step_path_is_taken_when_asked_for(monkeypatch):
    monkeypatch.setattr(bench, "TIMEOUTS", 1_000)
    facts = bench.play("W2-50", "step-by-step")["facts"]
    assert (facts["path"], facts["planned_share"]) == ("step-by-step", 0.0) and facts["why_not_planned"]


def test_a_run_that_fails_is_one_error(capfd):
    with pytest.raises(SimcoreError, match="W3: the run failed with exit code 1"):
        bench._in_own_process("W3", "planned")
    assert "W1-N-O" in capfd.readouterr().err


@pytest.mark.parametrize(("options", "said"), [
    (["--workloads", "W9"], "W1-N-O"), (["--path", "fast"], "planned, step-by-step"),
    (["--dynosim", "nowhere"], "ai-dynamo"), (["--page", __file__], "bench: begin"),
])
def test_wrong_options_are_refused_before_anything_runs(options, said, monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure", None)
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *options])
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == "" and said in err and err.count("\n") == 1


def test_a_peer_s_rate_stands_beside_ours():
    numbers = dict.fromkeys(KEYS, 2.0) | {"path": "planned"}
    results = {"W2-50": numbers, "machine": dict.fromkeys(MACHINE, "x")}
    table = bench.markdown(results, {"DynoSim": {"W2-50": 4.0}}).splitlines()
    cells = [row.strip("| ").split(" | ") for row in table if row.startswith("|")]
    assert cells[0][-2:] == ["DynoSim, requests / s", "simcore / DynoSim"] and cells[2][-2:] == ["4", "0.50"]
    assert {len(row) for row in cells} == {len(cells[0])}


def test_a_peer_that_plays_fewer_requests_is_refused(tmp_path):
    """A stand-in for its Python: reads the exported file and writes a report, as the peer does."""
    script = tmp_path / "peer"
    for lost in (0, 1):
        script.write_text(f"#!{sys.executable}\nimport json, sys\nn = len(open(sys.argv[3]).readlines()) - {lost}\n"
                          "json.dump({'completed_requests': n, 'wall_time_ms': 500.0}, open(sys.argv[-1], 'w'))\n")
        script.chmod(0o755)
        if lost:
            with pytest.raises(ConfigError, match="49 requests completed"):
                peers.dynosim_rate(script, bench.find("W2-50"), 1)
        else:
            assert peers.dynosim_rate(script, bench.find("W2-50"), 1) == 100.0


def test_rows_of_the_vidur_file_are_plain_numbers(tmp_path):
    peers.export("W1-100-8", bench.find("W1-100-8").workload(), tmp_path)
    with open(tmp_path / "W1-100-8.vidur.csv") as stream:
        second = next(islice(csv.reader(stream), 2, None))
    assert second == ["0.01803638301368865", "512", "8"]
