"""Claims in general: verdicts, nulls, JSON, playing each run once, and the command."""

from __future__ import annotations

import json
import math
import sys
import types

import numpy as np
import pytest
from rich.console import Console

from simcore.errors import ConfigError
from simcore.experiments import cli, reproduce
from simcore.experiments.claims import (
    Claim,
    Estimate,
    Judged,
    Null,
    Outcome,
    Reading,
    Run,
    Shown,
    estimate,
    markdown,
    print_claims,
    ratio,
    run_of,
)
from simcore.experiments.reproduce import Figure, Point

STUDY = """
workload:
  generate: {kind: agents, name: swe-bench, programs: 3}
  start: {rate: 1.0}
model: llama-3.1-8b
sample_every: 1h
"""


def outcome(mean: float) -> Outcome:
    return Outcome(np.array([mean - 1, mean + 1]), 2 * mean, {}, 0.5, 0.5, 0, 0.0, 0.1, 0.2, 10.0, 0)


def claim(key: str = "x", runs: tuple[Run, ...] = (), judged: Judged | None = None, missing: str = "") -> Claim:
    judged = judged or Judged(Estimate(1.5, 1.4, 1.6, 5), True)
    return Claim(key, f"claim {key}", "1.5", "1 - 2", "E2", {"assumed": "all"}, lambda: runs, lambda results: judged,
                 lambda: missing)


def test_an_estimate_is_a_mean_with_its_t_interval():
    found = estimate([1.0, 2.0, 3.0, 4.0])
    half = 3.182446 * np.std([1, 2, 3, 4], ddof=1) / 2
    assert found.value == 2.5 and found.high - 2.5 == pytest.approx(half, rel=1e-6) and found.seeds == 4
    assert math.isnan(estimate([1.0]).low)


def test_ratios_are_paired_by_seed():
    found = ratio([outcome(100), outcome(300)], [outcome(50), outcome(150)])
    assert found.value == found.low == found.high == 2.0


@pytest.mark.parametrize("holds, contradicts, verdict", [
    (True, False, "agrees"), (False, False, "differs"), (False, True, "contradicts")])
def test_verdicts(holds, contradicts, verdict):
    assert Judged(Estimate(1.0), holds, contradicts=contradicts).verdict == verdict


def test_a_claim_that_most_readings_deny_does_not_agree():
    held, denied = Reading("a", 1.5, True), Reading("b", 1.0, False)
    assert Judged(Estimate(1.5), True, readings=[held, denied]).verdict == "agrees"
    assert Judged(Estimate(1.5), True, readings=[held, denied, denied]).verdict == "differs"


def test_a_claim_counts_only_if_its_nulls_miss_the_band():
    missed, met = Null("nothing", 1.0, False), Null("constant", 1.5, True)
    assert Judged(Estimate(1.5), True, [missed]).counts
    assert not Judged(Estimate(1.5), True, [missed, met]).counts
    assert Judged(Estimate(1.5), True, [missed, Null("bound", 1.6, True, must_fail=False)]).counts


def test_readings_and_moved_parameters_are_counted_apart():
    judged = Judged(Estimate(1.5), True, readings=[
        Reading("a", 1.5, True), Reading("b", 1.0, False), Reading("pool -20%", 1.4, True, free=True)])
    assert judged.share(False) == (1, 2) and judged.share(True) == (1, 1)


def test_json_has_the_keys_of_the_design():
    judged = Judged(Estimate(1.5, 1.4, 1.6, 5), True, [Null("n", 1.0, False)], [Reading("r", 1.5, True)])
    entry = Shown(claim(), judged).as_json()
    assert set(entry) == {"claim", "published", "found", "low", "high", "interval", "null", "grade", "readings", "inputs",
                          "verdict", "why"}
    assert (entry["found"], entry["low"], entry["high"], entry["verdict"]) == (1.5, 1.4, 1.6, "agrees")
    assert entry["readings"]["held"] == entry["readings"]["of"] == 1 and entry["readings"]["counts"]
    not_run = Shown(claim(), None, "needs a tier").as_json()
    assert (not_run["verdict"], not_run["why"], not_run["found"]) == ("not run", "needs a tier", None)
    assert set(not_run) == set(entry)


def test_a_claim_that_cannot_run_says_why_and_the_others_go_on():
    run = run_of("study.yaml", {}, 1)
    bad, good = claim("bad", (run,)), claim("good")
    shown = reproduce.judge([bad, claim("tier", missing="no tier"), good], {run: "it broke"})
    assert [(s.verdict, s.why_not) for s in shown] == [
        ("not run", "a run failed: it broke"), ("not run", "no tier"), ("agrees", "")]
    assert reproduce.needed([bad, bad, claim("tier", (run_of("study.yaml", {}, 2),), missing="no tier")]) == [run]


def test_what_is_printed(capsys):
    readings = [Reading("r", 2.5, False), Reading("s", 1.5, True)]
    judged = Judged(Estimate(1.5, 1.4, 1.6, 5), True, [Null("constant", 1.6, True)], readings, "pins do it")
    print_claims(Console(width=200), "paper", [Shown(claim(), judged), Shown(claim("y"), None, "no tier")])
    out = capsys.readouterr().out
    for part in ("1.50 (1.40 .. 1.60)", "agrees", "no", "1/2", "pins do it", "null constant: 1.60, in the band", "r 2.50 !",
                 "not run: no tier", "assumed: all"):
        assert part in out


@pytest.fixture
def paper(tmp_path, monkeypatch):
    """A paper with one study, one claim and one figure, found as any other."""
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "study.yaml").write_text(STUDY)
    runs = (run_of("study.yaml", {}, 1), run_of("study.yaml", {"policies.admission": "program-fcfs"}, 1))
    module = types.ModuleType("simcore.experiments.demo.claims")
    module.CLAIMS = [Claim("x", "equal", "1", "0.9 - 1.1", "E2", {}, lambda: runs, lambda results: Judged(
        ratio([results[runs[0]]], [results[runs[1]]]), True))]
    module.FIGURES = {1: Figure("Figure 1", "x", "s", "a note", lambda: runs, lambda results: [
        Point("p", "vllm", 1.0, 5.0, Estimate(results[runs[0]].mean)),
        Point("p", "new", 1.0, math.nan, Estimate(2.0, 1.0, 3.0, 5))])}
    package = types.ModuleType("simcore.experiments.demo")
    package.__path__ = [str(folder)]
    for name, value in (("simcore.experiments.demo", package), ("simcore.experiments.demo.claims", module)):
        monkeypatch.setitem(sys.modules, name, value)
    monkeypatch.setattr(reproduce, "papers", lambda: ["demo"])
    monkeypatch.chdir(tmp_path)
    return module


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main([str(a) for a in arguments])
    return caught.value.code or 0


def test_the_command_prints_verdicts_and_writes_json(paper, tmp_path, capsys):
    assert call("reproduce", "demo", "--processes", 1, "--json", tmp_path / "out.json") == 0
    out = capsys.readouterr().out
    assert "2 runs on 1 process" in out and "agrees" in out
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["paper"] == "demo" and written["claims"][0]["found"] == pytest.approx(1.0, abs=0.1)


def test_a_page_takes_the_verdicts(paper, tmp_path):
    page = tmp_path / "page.md"
    assert call("reproduce", "demo", "--page", page) == 2  # no marks
    page.write_text("Before.\n<!-- demo: begin -->\nold\n<!-- demo: end -->\nAfter.\n")
    assert call("reproduce", "demo", "--processes", 1, "--page", page) == 0
    text = page.read_text()
    assert text.startswith("Before.") and text.endswith("After.\n") and "old" not in text and "| x | equal |" in text


def test_a_table_says_whether_a_number_counts():
    judged = Judged(Estimate(1.5), True, [Null("nothing < something", 1.2, True)], why="because")
    text = markdown([Shown(claim("k", judged=judged), judged), Shown(claim("m"), None, "it cannot be run")])
    assert "nothing &lt; something: 1.20 (in the band)" in text and "| **agrees** | no |" in text
    assert "| not run |" in text and "It cannot be run." in text


def test_the_command_writes_a_figure(paper, tmp_path, capsys):
    assert call("reproduce", "demo", "--figure", 1, "--csv", tmp_path / "fig", "--processes", 1) == 0
    assert "a note" in capsys.readouterr().out
    lines = (tmp_path / "fig/figure_1.csv").read_text().splitlines()
    assert lines[0] == "panel,arm,x,published,found,low,high,seeds" and lines[2] == "p,new,1.0,,2,1,3,5"
    assert (tmp_path / "fig/figure_1.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("arguments, part", [
    (["nothing"], "demo"), (["demo", "--claims", "y"], "found 'y'"), (["demo", "--figure", "2"], "found 2"),
    (["demo", "--csv", "x"], "together with --figure"), (["demo", "--claims", "x", "--figure", "1"], "either"),
    (["demo", "--page", "x", "--figure", "1"], "without --figure")])
def test_what_is_refused(paper, capsys, arguments, part):
    assert call("reproduce", *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and part in err


def test_a_run_that_is_refused_is_told_in_words(paper):
    run = run_of("study.yaml", {"model": "no-such-model"}, 1)
    found = reproduce.play_runs("demo", [run, run], processes=1)
    assert list(found) == [run] and "no-such-model" in found[run]


def test_the_papers_of_this_project_are_found():
    assert "continuum" in reproduce.papers()
    with pytest.raises(ConfigError):
        reproduce.choose(reproduce.load_paper("continuum")[0], "zz")
