"""Measured runs beside simulations of them. A run of the simulator stands in for the server, so that all is known of it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from against_dumps import bench, dump, write
from small_studies import small_file, write_study
from typer.testing import CliRunner

from simcore.errors import ConfigError, TraceError
from simcore.experiments.against import check, run_against
from simcore.experiments.against_metrics import (
    Row,
    Side,
    bootstrap_requests,
    changes,
    compare_sides,
    gaps_sample,
    relative,
    sample,
)
from simcore.experiments.cli import app, validate_app
from simcore.experiments.output import per_request_lists, write_run
from simcore.experiments.run import Job, build_deployment, build_workload, play
from simcore.files import to_json
from simcore.traces.native import write_csv

PLAIN = {
    "workload": {"generate": {"requests": 150, "rate": 40, "input_tokens": {"mean": 400, "sd": 300},
                              "output_tokens": {"mean": 30, "sd": 20}}},
    "cluster": {"replicas": 1, "gpu": "h100-sxm"},
}
SHORT = {"horizon": 4.0, "engine": {"num_gpu_blocks": 90, "max_num_seqs": 16}}  # refusals, preemptions, unfinished requests


def served(folder, name, *, csv=False, **changes):
    """(study, measured file, run) of the simulator as the server."""
    folder = folder / name
    folder.mkdir()
    file = small_file(folder, **changes)
    result = play(Job(file.study, file.folder, 1))
    write_run(folder / "out", file.study, result, file.folder, facts={}, detailed=True, csv=csv)
    return file, folder / "out" / ("requests.csv" if csv else "summary.json"), result


def as_bench(path, result, **more):
    """The run as `vllm bench serve` would have written it: no identity, a clock of its own, failures without numbers."""
    lists = per_request_lists(result)
    good = [not error for error in lists["errors"]]
    lists = {key: [v for v, ok in zip(values, good, strict=True) if ok] for key, values in lists.items()
             if key not in ("queue_times",)}
    lists["start_times"] = [7e4 + t for t in lists["start_times"]]
    made = {"model_id": "x", "request_rate": 40.0, "burstiness": 1.0, "max_concurrency": None, "duration": 5.0}
    made |= {**lists, **more}
    return write(path, to_json({key: value for key, value in made.items() if value is not ...}))


def errors(checked):
    return [row.error for row in (*checked.rows, *checked.numbers, *checked.split)]


@pytest.mark.parametrize("csv", [False, True])
@pytest.mark.parametrize("changes", [{}, SHORT, PLAIN], ids=["prefixes", "short of memory", "plain"])
def test_what_the_simulator_wrote_has_no_error(tmp_path, csv, changes):
    file, path, result = served(tmp_path, "a", csv=csv, **changes)
    checked = check(file, [path])
    assert set(errors(checked)) == {0.0}
    assert {row.metric for row in checked.rows} == {"ttft", "tpot", "e2e"} | (set() if csv else {"itl"})
    assert {row.metric for row in checked.split} == {"queue", "prefill", "decode"}
    assert all(row.within for row in checked.rows if row.within is not None)
    finished = result.requests[result.requests["status"] == "finished"]
    (mean,) = (row for row in checked.rows if (row.metric, row.statistic) == ("ttft", "mean"))
    assert mean.measured == pytest.approx((1e3 * finished["ttft"].mean(),))


def test_requests_alone_are_enough_where_nothing_is_shared(tmp_path):
    """Without the study's workload: lengths and times of the file itself, through CSV, JSON and the server's clock."""
    file, path, result = served(tmp_path, "a", csv=True, **PLAIN)
    assert set(errors(check(file, [path], workload="file"))) == {0.0}
    checked = check(file, [as_bench(tmp_path / "b.json", result)], workload="file")
    assert max(map(abs, errors(checked))) < 1e-6  # the clock's rounding
    table = result.requests.rename(columns={"arrival": "when"}).assign(arrival=lambda t: t["when"] + 1.7e9)
    table[["arrival", "input_tokens", "output_tokens", "ttft", "e2e", "tpot"]].to_csv(tmp_path / "c.csv", index=False)
    assert max(map(abs, errors(check(file, [tmp_path / "c.csv"], workload="file")))) < 1e-2


def test_identity_of_the_studys_trace_is_used(tmp_path):
    """The server replayed a trace with shared prefixes; the file does not say so, the study's trace does."""
    file, _, result = served(tmp_path, "a")
    measured = as_bench(tmp_path / "b.json", result)
    shared, alone = check(file, [measured]), check(file, [measured], workload="file")
    assert max(map(abs, errors(shared))) < 1e-6
    assert max(map(abs, errors(alone))) > 0.1
    assert any("nothing is shared" in note for note in alone.notes)


def test_a_closed_loop_is_simulated_as_one(tmp_path):
    folder = tmp_path / "loop"
    folder.mkdir()
    file = small_file(folder, **PLAIN)
    write_csv(build_workload(file.study.workload, folder, 1), folder / "t.csv")
    loop = small_file(folder, cluster=PLAIN["cluster"], workload={"trace": "t.csv", "start": {"workers": 3}})
    result = play(Job(loop.study, folder, 1))
    measured = as_bench(tmp_path / "b.json", result, request_rate="inf", max_concurrency=3)
    checked = check(file, [measured])
    assert any("closed loop, 3 clients" in note for note in checked.notes)
    assert max(map(abs, errors(checked))) < 1e-9
    slower = small_file(folder, **PLAIN, cost_model={"memory_efficiency": 0.4})
    later = {(r.metric, r.statistic): r.error for r in check(slower, [measured]).rows}
    assert later["e2e", "mean"] > 0.3


def test_drawn_arrivals_use_every_seed(tmp_path):
    file, _, result = served(tmp_path, "a", **PLAIN)
    measured = as_bench(tmp_path / "b.json", result, start_times=...)
    three = small_file(tmp_path / "a", **PLAIN, seeds=[1, 2, 3])
    checked = check(three, [measured])
    assert checked.seeds == (1, 2, 3)
    assert len(checked.simulated[0]) == 3
    assert all(row.seeds > 0 for row in checked.rows if row.statistic == "mean")
    assert any("the same process, not the same arrivals" in note for note in checked.notes)
    assert check(three, [as_bench(tmp_path / "c.json", result)]).seeds == (1,)  # recorded times: nothing else to draw
    assert {row.metric for row in checked.numbers} == {"request_throughput", "output_throughput"}
    assert file.study.seeds == [1]


def test_repeats_give_the_spread(tmp_path):
    file, path, _ = served(tmp_path, "a", **PLAIN)
    _, other, _ = served(tmp_path, "b", **PLAIN, cost_model={"step_overhead": 0.0012})
    checked = check(file, [path, other])
    assert checked.spread == "between the 2 measured files"
    row = checked.rows[0]
    assert row.spread == pytest.approx((row.measured[1] - row.measured[0]) / np.mean(row.measured))
    assert row.error == pytest.approx(row.simulated[0] / np.mean(row.measured) - 1)
    assert all(r.within for r in checked.rows)
    assert not any("other loads" in note for note in checked.notes)
    _, more, _ = served(tmp_path, "c", **{**PLAIN, "workload": {"generate": {
        "requests": 100, "rate": 40, "input_tokens": 200, "output_tokens": 9}}})
    assert any("other loads" in note for note in check(file, [path, more]).notes)
    with pytest.raises(ConfigError, match="twice"):
        check(file, [path, path])


def test_a_server_slower_than_its_model_is_seen(tmp_path):
    _, path, _ = served(tmp_path, "a", **PLAIN, cost_model={"memory_efficiency": 0.5})
    checked = check(small_file(tmp_path / "a", **PLAIN), [path])
    row = {(r.metric, r.statistic): r for r in checked.rows}["tpot", "mean"]
    assert row.error < -0.2
    assert row.within is False
    assert 0 < row.spread < 0.2
    assert "bootstrap over requests" in checked.spread


def test_requests_that_do_not_end_in_the_simulation_are_left_out_and_said(tmp_path):
    _, path, _ = served(tmp_path, "a", **PLAIN)
    tight = small_file(tmp_path / "a", **PLAIN, engine={"num_gpu_blocks": 30, "max_num_seqs": 4})
    checked = check(tight, [path])
    assert any("do not end in the simulation" in note and "left out on both sides" in note for note in checked.notes)
    assert len({len(side.spreads["e2e"].values) for side in (*checked.measured, *checked.simulated[0])}) == 1
    none = small_file(tmp_path / "a", **PLAIN, engine={"num_gpu_blocks": 3, "max_num_seqs": 1})
    with pytest.raises(ConfigError, match="no request that the server answered"):
        check(none, [path])


def test_metrics_of_a_server(tmp_path):
    loaded = {**PLAIN, "workload": {"generate": {"requests": 1500, "rate": 30, "input_tokens": {"mean": 400, "sd": 400},
                                                 "output_tokens": {"mean": 40, "sd": 20}}}}
    file, _, result = served(tmp_path, "a", **loaded, engine={"max_num_seqs": 16})
    blocks = build_deployment(file.study, file.folder)[0].num_blocks
    path = write(tmp_path / "m.json", dump(result, 2.0, 4.0, 44.0, blocks))
    checked = check(small_file(tmp_path / "a", **loaded, engine={"max_num_seqs": 16}, seeds=[1, 2]), [path])
    assert checked.kind == "metrics"
    assert {row.metric for row in checked.rows} == {"ttft", "tpot", "itl", "e2e"}
    assert {row.metric for row in checked.split} == {"queue", "prefill", "decode"}
    assert {row.metric for row in checked.numbers} == {
        "request_throughput", "output_throughput", "running", "waiting", "kv_use", "hit_rate", "preemptions"}
    found = {(r.metric, r.statistic): r for r in (*checked.rows, *checked.split, *checked.numbers)}
    for key in (("tpot", "mean"), ("itl", "mean"), ("e2e", "mean"), ("decode", "mean"), ("request_throughput", ""),
                ("output_throughput", "")):
        assert abs(found[key].error) < 0.05, key
    assert abs(found["ttft", "mean"].error) < 0.25
    assert found["itl", "p50"].bucket == (0.0, 10.0)
    assert found["itl", "p50"].within
    assert "intervals" in checked.spread
    assert any("weaker check" in note for note in checked.notes)
    assert any("lead-in" in note for note in checked.notes)
    slow = small_file(tmp_path / "a", **loaded, engine={"max_num_seqs": 16}, cost_model={"memory_efficiency": 0.5})
    slower = check(slow, [path])
    assert {(r.metric, r.statistic): r.error for r in slower.rows}["itl", "mean"] > 0.2
    with pytest.raises(ConfigError, match="repeats of one kind"):
        check(file, [path, as_bench(tmp_path / "b.json", result)])


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_tables_json_and_picture(tmp_path, capsys):
    file, path, _ = served(tmp_path, "a", **PLAIN)
    run_against([path], file.path, [], out=tmp_path / "out", json=tmp_path / "j.json")
    printed = capsys.readouterr().out
    for words in ("TTFT p99 (ms)", "bootstrap over requests", "No parameter was fitted", "Where a request's time goes",
                  "step times: roofline", "a second run may be further off"):
        assert words in printed
    found = json.loads((tmp_path / "j.json").read_text())
    assert found == json.loads((tmp_path / "out" / "against.json").read_text())
    assert (tmp_path / "out" / "against.png").read_bytes()[:4] == b"\x89PNG"
    assert {row["error"] for row in found["rows"]} == {0.0}
    assert found["fitted_parameters"] == 0
    assert found["within_spread"]["rows"] == found["within_spread"]["of"] > 10
    assert set(found["simulated_split_ms"]) == {"queue", "prefill", "decode", "again"}
    assert 0.8 in found["assumed"].values()  # the roofline's share of memory bandwidth


def test_without_a_measured_split_the_simulated_one_is_named_so(tmp_path, capsys):
    file, _, result = served(tmp_path, "a", **PLAIN)
    run_against([as_bench(tmp_path / "b.json", result)], file.path, [], out=tmp_path / "out")
    assert "SIMULATED ONLY" in capsys.readouterr().out


def test_a_change_measured_and_predicted(tmp_path, capsys):
    """Half the batch on the server; the study is told of the change, and of one that did not happen."""
    crowded = {**PLAIN, "workload": {"generate": {**PLAIN["workload"]["generate"], "rate": 120}}}
    file, before, _ = served(tmp_path, "a", **crowded, engine={"max_num_seqs": 64})
    _, after, _ = served(tmp_path, "b", **crowded, engine={"max_num_seqs": 8})
    run_against([], file.path, [], before=[before], after=[after], set_after=["engine.max_num_seqs=8"], out=tmp_path / "o1",
                json=tmp_path / "j1.json")
    printed = capsys.readouterr().out
    assert "The change: measured and predicted" in printed
    found = json.loads((tmp_path / "j1.json").read_text())
    ttft = next(c for c in found["changes"] if (c["metric"], c["statistic"]) == ("ttft", "mean"))
    assert ttft["measured"] == pytest.approx(ttft["predicted"])
    assert ttft["measured"] > 1
    assert (ttft["sign"], ttft["size"]) == ("agrees", True)
    assert "contradicts in 0" in found["verdict"]
    run_against([], file.path, [], before=[before], after=[after], set_after=["engine.max_num_seqs=128"],
                out=tmp_path / "o2", json=tmp_path / "j2.json")
    wrong = json.loads((tmp_path / "j2.json").read_text())
    ttft = next(c for c in wrong["changes"] if (c["metric"], c["statistic"]) == ("ttft", "mean"))
    assert (ttft["sign"], ttft["size"]) == ("contradicts", False)
    other = write_study(tmp_path / "b", **crowded, engine={"max_num_seqs": 8})
    run_against([], file.path, [], before=[before], after=[after], after_study=other, out=tmp_path / "o3",
                json=tmp_path / "j3.json")
    assert json.loads((tmp_path / "j3.json").read_text())["changes"] == found["changes"]


@pytest.mark.parametrize(("options", "word"), [
    ({}, "measured files, or --before and --after"),
    ({"before": ["x"]}, "both, or neither"),
    ({"files": ["x"], "before": ["x"], "after": ["x"]}, "measured files, or"),
    ({"files": ["x"], "set_after": ["a=1"]}, "together with --before"),
    ({"before": ["x"], "after": ["y"]}, "nothing says what the change is"),
])
def test_options_that_make_no_sense_are_refused(tmp_path, options, word):
    study = write_study(tmp_path, **PLAIN)
    with pytest.raises(ConfigError, match=word):
        run_against(options.pop("files", []), study, [], out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_bad_file_leaves_nothing_behind(tmp_path):
    study = write_study(tmp_path, **PLAIN)
    bad = write(tmp_path / "r.json", bench(3, ttfts=...))
    with pytest.raises(TraceError, match="--save-detailed"):
        run_against([bad], study, [], out=tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.json", "study.yaml"]


@pytest.mark.skipif(all(command.name != "against" for command in validate_app.registered_commands),
                    reason="the command is not on the command line")
def test_the_page_of_the_docs_holds(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "check-against-my-server.md").read_text(encoding="utf-8")
    section = page.split("## Try it without a server")[1]
    study, commands = (re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)[1] for kind in ("yaml", "sh"))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "study.yaml", study)
    for line in commands.replace("\\\n", " ").splitlines():
        done = CliRunner().invoke(app, shlex.split(line)[1:])
        assert done.exit_code == 0, (line, done.output, done.exception)
    compared = json.loads((tmp_path / "compared" / "against.json").read_text())
    tpot = next(row for row in compared["rows"] if (row["metric"], row["statistic"]) == ("tpot", "mean"))
    assert tpot["error"] < -tpot["spread"]
    found = json.loads((tmp_path / "changed" / "against.json").read_text())["changes"]
    assert {c["sign"] for c in found} == {"agrees"}
    assert all(c["size"] for c in found if c["metric"] in ("tpot", "itl", "e2e"))
    assert all(c["predicted"] < c["measured"] for c in found if c["metric"] == "ttft")


# --- figures ---------------------------------------------------------------------------------------------------------


def test_the_bootstrap_knows_the_spread_of_a_mean():
    rng = np.random.default_rng(1)
    values = rng.exponential(size=400)
    side = Side({"ttft": sample(values), "itl": gaps_sample([rng.exponential(size=5) for _ in range(400)])})
    half = bootstrap_requests(side, 400)
    assert half["ttft", "mean"] == pytest.approx(1.96 / np.sqrt(400), rel=0.2)
    assert half["itl", "mean"] == pytest.approx(1.96 / np.sqrt(2000), rel=0.25)
    assert half["ttft", "p99"] > half["ttft", "mean"]


def row(measured, simulated, spread):
    return Row("ttft", "TTFT", "mean", "ms", (measured,), (simulated,), relative(simulated, measured), spread)


def test_signs_and_sizes_of_changes():
    def change(before, after):
        (found,) = changes([before], [after])
        return found.sign, found.size

    assert change(row(100, 90, 0.05), row(150, 135, 0.05)) == ("agrees", True)
    assert change(row(100, 90, 0.05), row(150, 91, 0.05)) == ("agrees", False)
    assert change(row(100, 90, 0.05), row(150, 60, 0.05)) == ("contradicts", False)
    assert change(row(100, 90, 0.05), row(102, 92, 0.05)) == ("none measured", True)
    assert change(row(100, 90, float("nan")), row(150, 135, 0.05))[1] is None
    assert change(row(0, 0, 0.05), row(1, 1, 0.05)) == ("not known", None)


def test_only_what_both_sides_have_is_compared():
    one = Side({"ttft": sample(np.array([1.0])), "itl": sample(np.array([1.0]))})
    other = Side({"ttft": sample(np.array([2.0]))})
    (mean,) = compare_sides([one], [[other]], {}, {"ttft": "TTFT", "itl": "ITL"}, ("mean",))
    assert (mean.measured, mean.simulated, mean.error, mean.within) == ((1e3,), (2e3,), 1.0, None)
    assert relative(0.0, 0.0) == 0.0
    assert np.isnan(relative(1.0, 0.0))
    assert pd.isna(sample(np.zeros(0)).mean)
