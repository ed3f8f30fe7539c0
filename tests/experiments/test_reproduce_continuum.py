"""The claims of Continuum: what they ask for, that they can fail, a few real runs; all of them under the marker `study`."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from simcore.experiments import load, reproduce
from simcore.experiments.claims import Outcome, Run
from simcore.experiments.continuum import fit, loads, setups, worlds
from simcore.experiments.continuum.claims import CLAIMS, FIGURES
from simcore.experiments.reproduce import judge, play_runs
from simcore.traces.agent_generator import generate_agents

PARTS = dict.fromkeys(("queueing", "prefill", "decode", "tool", "reload"), 1.0)
CLAIM = {claim.key: claim for claim in CLAIMS}


def outcome(mean: float, stall: float = 1.0) -> Outcome:
    return Outcome(np.array([mean]), mean, PARTS, 0.5, 0.5, 1, 1.0, 1.0, stall, 10.0, 0)


def policy(run: Run) -> str:
    """vllm, program-fcfs, static, continuum, released, clairvoyant, autellix, infercept or forget."""
    named = json.loads(run.settings)["policies"]
    text = json.dumps(named)
    order = ("released", "continuum", "clairvoyant", "static", "infercept", "autellix")
    found = next((name for name in order if name in text), None)
    return found or ("forget" if named.get("retention") == "none" else "program-fcfs" if "admission" in named else "vllm")


def told(key: str, seconds: Callable[[Run], float]) -> dict[Run, Outcome]:
    return {run: outcome(seconds(run), stall=2.0 if policy(run) == "released" else 1.0) for run in CLAIM[key].runs()}


def as_published(run: Run) -> float:
    """Delays in the proportions that the paper reports."""
    settings = json.loads(run.settings)
    name, turns = policy(run), settings.get("workload.generate.turn_multiplier", 1)
    bfcl = "bfcl" in run.settings
    low_load = settings.get("workload.start.rate", 1) < loads.B200_RATE / 2 and not bfcl
    if run.study == "replay.yaml":
        return {"vllm": 100.0, "released": 98.0}[name]
    if "openhands" in run.settings:
        return {"vllm": 100, "continuum": 107, "forget": 300}[name]
    if low_load and settings.get("cluster.tensor_parallel_size", 1) == 1 and not np.isclose(
            settings["workload.start.rate"], loads.A100_RATE):
        return {"forget": 200}.get(name, 100)
    grows = 1 + (turns - 1) * 0.3 if name in ("vllm", "program-fcfs") else 1.0
    large = settings.get("cluster.tensor_parallel_size", 1) > 1
    return grows * {
        "vllm": 180, "program-fcfs": 145, "static": 106, "continuum": 100, "released": 83, "clairvoyant": 95,
        "autellix": 165 if bfcl else 320, "infercept": 180 if large else 155}[name]


@pytest.mark.parametrize("key", CLAIM)
def test_a_claim_agrees_with_the_papers_own_proportions(key, monkeypatch):
    (shown,) = judge([CLAIM[key]], told(key, as_published))
    if CLAIM[key].missing():
        assert shown.verdict == "not run" and "kv_offloading_size" in shown.why_not
        return
    assert shown.verdict == "agrees", shown.judged
    assert shown.as_json()["readings"]["free_of"] or not shown.judged.share(True)[1]


@pytest.mark.parametrize("key", CLAIM)
def test_no_claim_agrees_if_every_policy_does_the_same(key):
    """The do-nothing policy misses the band of every claim but that of equality, whose null is forgetting."""
    if CLAIM[key].missing():
        pytest.skip(CLAIM[key].missing())
    (shown,) = judge([CLAIM[key]], {run: outcome(100) for run in CLAIM[key].runs()})
    assert shown.verdict != "agrees" or not shown.judged.counts


@pytest.mark.parametrize("key", CLAIM)
def test_claims_say_where_their_inputs_come_from(key):
    claim = CLAIM[key]
    assert set(claim.inputs) <= {"measured", "published", "assumed"} and claim.grade in ("E2", "E3")
    assert claim.text and claim.published and claim.band
    assert {run.seed for run in claim.runs()}.isdisjoint(fit.SEEDS)


def test_every_run_is_one_that_a_study_can_name():
    seen = {(run.study, run.settings) for claim in CLAIMS if not claim.missing() for run in claim.runs()}
    folder = setups.FOLDER
    for study, settings in list(seen)[::5]:
        load(folder / study, set=json.loads(settings))


@pytest.mark.parametrize("number", FIGURES)
def test_points_of_a_figure_stand_beside_the_published_ones(number):
    figure = FIGURES[number]
    points = figure.points({run: outcome(100) for run in figure.runs()})
    assert points and all(point.found.value == 100 for point in points)
    assert sum(point.published == point.published for point in points) >= len(points) // 2


def test_loads_are_carried_over_by_capacity():
    assert setups.paper_capacity("swe-8b-A100") == pytest.approx(1 / 77.9, rel=0.01)
    assert setups.rate("swe-8b-A100", 0.09) / setups.SETUPS["swe-8b-A100"]["capacity"] == pytest.approx(
        0.09 / setups.paper_capacity("swe-8b-A100"), rel=1e-3)


# --- worlds ----------------------------------------------------------------------------------------------------------


def test_unscaled_programs_are_the_generators():
    ours = worlds.scaled_agents("swe-bench", 5, seed=3, workers=2)
    theirs = generate_agents("swe-bench", 5, workers=2, seed=3)
    for column in ("input_tokens", "output_tokens", "program", "turn", "call_seconds"):
        assert (getattr(ours, column) == getattr(theirs, column)).all()
    assert ours.workers == 2 and ours.ends_known


def test_scaling_keeps_turns_tools_and_the_first_prompt():
    whole, half = (worlds.scaled_agents("swe-bench", 20, seed=3, rate=0.1, outputs=x, inputs=x) for x in (1.0, 0.5))
    first = whole.turn == 0
    assert (whole.input_tokens[first] == half.input_tokens[first]).all()
    assert (whole.arrival[first] == half.arrival[first]).all()
    assert half.output_tokens.sum() == pytest.approx(whole.output_tokens.sum() / 2, rel=0.01)
    assert (whole.call_seconds == half.call_seconds).all()


def test_a_spread_makes_programs_uneven_but_not_longer_than_the_context():
    even, uneven = (worlds.scaled_agents("swe-bench", 200, seed=3, workers=8, spread=x) for x in (0.0, 1.0))
    assert np.bincount(uneven.program, uneven.output_tokens).std() > 2 * np.bincount(even.program, even.output_tokens).std()
    assert uneven.total_tokens.max() <= worlds.LONGEST + 200


def test_replayed_programs_have_the_measured_rounds_and_lengths():
    w = worlds.replayed_agents(300, workers=32, seed=1)
    assert len(w) / 300 == pytest.approx(33, rel=0.1)  # 9,890 requests of 300 jobs
    assert w.output_tokens.mean() == pytest.approx(146.8, rel=0.1)
    assert worlds.replayed_agents(300, workers=32, seed=1, returned=0.5).input_tokens.sum() < w.input_tokens.sum()


def test_bisection_and_its_nesting_find_a_known_point():
    assert fit.bisect(0, 4, lambda x: x - 1, steps=30) == pytest.approx(1)
    x, y = fit.nested((0, 2), (0, 2), lambda x, y: y - x / 2, lambda x, y: x + y - 1.5)
    assert x == pytest.approx(1.0, abs=0.1) and y == pytest.approx(x / 2, abs=0.05)


# --- real runs -------------------------------------------------------------------------------------------------------


def test_pins_that_hold_beat_vllm_and_results_do_not_depend_on_processes():
    runs = [setups.run(loads.A100, arm, loads.A100_RATE, 1, {"workload.generate.programs": 25})
            for arm in ("vllm", "continuum-deadlock")]
    one, two = (play_runs("continuum", runs, processes=n) for n in (1, 2))
    vllm, continuum = (one[run] for run in runs)
    assert vllm.mean > 1.1 * continuum.mean and continuum.reuse > 0.8 > vllm.reuse
    assert all((one[run].jct == two[run].jct).all() for run in runs)


@pytest.mark.study
def test_all_claims_run():
    claims, _ = reproduce.load_paper("continuum")
    shown = judge(claims, play_runs("continuum", reproduce.needed(claims), processes=2))
    found = {item.claim.key: item.verdict for item in shown}
    assert found["a"] == "agrees"
    assert all(item.judged is not None for item in shown if not item.claim.missing())


@pytest.mark.study
@pytest.mark.parametrize("setup", [name for name, given in setups.SETUPS.items() if given["capacity"]])
def test_capacities_are_those_written_down(setup):
    runs = setups.runs(setup, "continuum", 0.0, setups.FEW)
    found = play_runs("continuum", runs, processes=2)
    capacity = np.mean([setups.PROGRAMS / found[run].makespan for run in runs])
    assert capacity == pytest.approx(setups.SETUPS[setup]["capacity"], rel=0.05)


@pytest.mark.study
@pytest.mark.parametrize("way", setups.WAYS)
def test_the_fitted_arm_has_the_mean_that_it_was_fitted_to(way):
    world, limit = setups.WAYS[way]
    given = setups.fitted()["closed_loop"][way]
    runs = [setups.closed_loop_run("vllm", seed, world, given, limit) for seed in fit.SEEDS]
    found = play_runs("continuum", runs, processes=2)
    target = setups.published()["closed_loop"]["vllm"]["mean"]
    assert np.mean([found[run].mean for run in runs]) == pytest.approx(target, rel=0.03)
