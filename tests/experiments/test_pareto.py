"""The front: what dominates, what is left undecided, what does not fit; and the command around it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_studies import study_text

from simcore.errors import ConfigError, SimcoreError
from simcore.experiments.pareto import (
    DOMINATED,
    FRONT,
    NO_MEAN,
    THROUGHPUT,
    TTFT_P95,
    UNDECIDED,
    Front,
    Point,
    fitting,
    run_pareto,
)
from simcore.experiments.study import Arm, Study, read_study
from simcore.models.metrics import Slo
from simcore.models.steady import Window

STUDY = Study.model_validate({"workload": {"generate": {"requests": 1, "rate": 1, "input_tokens": 1, "output_tokens": 1}},
                              "model": "llama-3.1-8b"})


def requests(ttft: np.ndarray, **columns) -> pd.DataFrame:
    arrival = np.arange(len(ttft), dtype=float)
    return pd.DataFrame({"arrival": arrival, "status": "finished", "ttft": ttft, "tpot": 0.01, "e2e": ttft + 0.1,
                         "ended": arrival + ttft + 0.1, "generated_tokens": 10} | columns)


def point(name: str, cost: float, runs: list[pd.DataFrame], window: Window | None = None) -> Point:
    return Point(Arm(name, STUDY), {}, 1, cost, runs, runs, window or Window("all"))


def seeds(mean: float, noise: float, own: int, count: int = 6) -> list[pd.DataFrame]:
    """Runs of equal workloads: what they share is drawn by the seed, what is their own by `own`."""
    out = []
    for seed in range(count):
        shared, alone = np.random.default_rng([seed]), np.random.default_rng([seed, own])
        out.append(requests(np.abs(mean + 0.2 * shared.random(60) + noise * alone.normal())))
    return out


def statuses(points: list[Point], *, by_seed: bool = True, slo: Slo | None = None) -> dict[str, str]:
    front = Front(points, slo or Slo(), by_seed=by_seed)
    return {p.arm.label: front.place(TTFT_P95, p).status for p in points}


def test_a_point_is_dominated_only_where_the_difference_is_certain():
    cheap, slow, noisy, best = (point("cheap", 1, seeds(1.0, 0.01, 1)), point("slow", 2, seeds(2.0, 0.01, 2)),
                                point("noisy", 2, seeds(1.1, 1.0, 3)), point("best", 3, seeds(0.1, 0.01, 4)))
    assert statuses([cheap, slow]) == {"cheap": FRONT, "slow": DOMINATED}
    assert statuses([cheap, noisy]) == {"cheap": FRONT, "noisy": UNDECIDED}
    assert statuses([cheap, slow, best]) == {"cheap": FRONT, "slow": DOMINATED, "best": FRONT}
    place = Front([cheap, slow], Slo(), by_seed=True).place(TTFT_P95, slow)
    assert place.by == ("cheap",) and place.level.low < place.level.value < place.level.high


def test_equal_results_at_a_higher_price_are_dominated_and_at_the_same_price_undecided():
    runs = seeds(1.0, 0.1, 1)
    assert statuses([point("a", 1, runs), point("b", 2, runs)]) == {"a": FRONT, "b": DOMINATED}
    assert statuses([point("a", 1, runs), point("b", 1, runs)]) == {"a": UNDECIDED, "b": UNDECIDED}


def test_pairs_decide_what_the_intervals_of_the_points_do_not():
    """Between seeds all differs by much, within a seed one is always faster: pairing sees it."""
    a, b = [], []
    for seed in range(6):
        base = np.random.default_rng(seed).gamma(2, 2, 1) + np.random.default_rng(seed).random(50)
        a.append(requests(base))
        b.append(requests(base + 0.2))
    cheap, dear = point("cheap", 1, a), point("dear", 2, b)
    front = Front([cheap, dear], Slo(), by_seed=True)
    low, high = front.level(TTFT_P95, dear), front.level(TTFT_P95, cheap)
    assert low.low < high.value < low.high
    assert front.place(TTFT_P95, dear).status == DOMINATED


def test_one_seed_of_a_generated_workload_decides_nothing():
    one = [point("a", 1, seeds(1.0, 0.0, 1, 1)), point("b", 2, seeds(5.0, 0.0, 2, 1))]
    front = Front(one, Slo(), by_seed=True)
    assert front.place(TTFT_P95, one[1]).status == UNDECIDED
    assert front.place(THROUGHPUT, one[1]).status == UNDECIDED


def test_a_fixed_trace_is_decided_over_blocks_of_time():
    rng = np.random.default_rng(1)
    base = rng.random(400)
    fast, slow = requests(base), requests(base + 1)
    cheap, dear = point("cheap", 1, [fast]), point("dear", 2, [slow])
    front = Front([cheap, dear], Slo(), by_seed=False)
    assert front.place(TTFT_P95, dear).status == DOMINATED
    halved = requests(base, generated_tokens=5)
    front = Front([cheap, point("half", 2, [halved])], Slo(), by_seed=False)
    assert front.difference(THROUGHPUT, *front.points).units >= 5
    assert front.place(THROUGHPUT, front.points[1]).status == DOMINATED


def test_a_point_that_sheds_requests_is_not_shown_faster():
    whole = seeds(1.0, 0.01, 1)
    shed = [run.assign(status=np.where(run.index % 2, "finished", "refused"),
                       ttft=np.where(run.index % 2, run["ttft"] / 9, np.nan),
                       e2e=np.where(run.index % 2, run["e2e"], np.nan)) for run in whole]
    assert statuses([point("whole", 1, whole), point("shed", 1, shed)]) == {"whole": UNDECIDED, "shed": UNDECIDED}
    front = Front([point("whole", 1, whole), point("shed", 1, shed)], Slo(ttft_ms=5000), by_seed=True)
    goodput = front.metrics[0]
    assert goodput.name == "goodput"
    assert [front.place(goodput, p).status for p in front.points] == [FRONT, DOMINATED]
    assert front.level(goodput, front.points[1]).value == pytest.approx(0.5)  # of one request a second


def test_an_unsteady_point_has_no_mean_and_dominates_nothing():
    unsteady = point("unsteady", 1, seeds(0.1, 0.0, 1), Window("unstable", why="the queue grows"))
    steady = point("steady", 2, seeds(1.0, 0.0, 2))
    assert statuses([unsteady, steady]) == {"unsteady": NO_MEAN, "steady": FRONT}


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0.1, 5)), min_size=2, max_size=6), st.floats(0, 0.5))
def test_whatever_the_points(found, noise):
    """The cheapest-and-best is never dominated; a dominated one names one that costs no more and looks better or equal."""
    points = [point(f"p{k}", cost, seeds(mean, noise, k)) for k, (cost, mean) in enumerate(found)]
    front = Front(points, Slo(), by_seed=True)
    places = {p.arm.label: front.place(TTFT_P95, p) for p in points}
    named = {p.arm.label: p for p in points}
    least = min(points, key=lambda p: (p.cost, front.level(TTFT_P95, p).value))
    assert places[least.arm.label].status != DOMINATED
    for label, place in places.items():
        if place.status == DOMINATED:
            (other,) = place.by
            assert named[other].cost <= named[label].cost and places[other].level.value <= place.level.value
        if place.status == FRONT:
            cheaper = [q for q in points if q is not named[label] and q.cost <= named[label].cost]
            assert all(front.level(TTFT_P95, q).value > place.level.value for q in cheaper)


# --- the command ------------------------------------------------------------------------------------------------------


def small(folder: Path, **changes) -> Path:
    base = {"workload__generate": {"requests": 40, "rate": 20, "input_tokens": {"mean": 600, "sd": 500},
                                   "output_tokens": {"mean": 12, "sd": 8}}, "compare": {}, "cluster": {"gpu": "h100-sxm"},
            "seeds": [1, 2, 3]}
    path = folder / "small.yaml"
    path.write_text(study_text(**base | changes), encoding="utf-8")
    return path


VARY = ["cluster.replicas=1,2", "model=llama-3.1-8b,llama-3.1-70b"]


def test_the_command_lists_what_does_not_fit_and_keeps_its_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = small(tmp_path)
    found = []
    for _ in range(2):
        run_pareto(path, [], VARY, [], processes=1)
        root = tmp_path / "out/small-pareto"
        found.append((capsys.readouterr().out.split("\n", 1), (root / "summary.json").read_bytes(),
                      {p.parent.name: p.stat().st_ino for p in root.glob("runs/*/done.json")}))
    assert found[0][1:] == found[1][1:]
    assert found[0][0][0] == "4 combinations, 2 that do not fit; 6 runs to play"
    assert found[1][0][0] == "4 combinations, 2 that do not fit; 0 runs to play"
    out, summary = found[0][0][1], json.loads(found[0][1])
    assert "* on the front, ? undecided" in out and "Goodput against cost: " in out
    assert "Does not fit: replicas=1, model=llama-3.1-70b: kv_capacity: llama-3.1-70b leaves no room" in out
    assert summary["cost"] == "usd_per_hour" and [p["usd_per_hour"] for p in summary["points"]] == [2, 4]
    assert [m["name"] for m in summary["metrics"]] == ["goodput", "ttft_p95", "throughput"]
    assert {m["status"] for p in summary["points"] for m in p["metrics"].values()} <= {FRONT, DOMINATED, UNDECIDED}
    assert [e["arm"] for e in summary["do_not_fit"]] == [f"replicas={n}, model=llama-3.1-70b" for n in (1, 2)]
    assert {"summary.json", "pareto.csv", "plot.png", "config.yaml", "run.json", "runs"} <= {p.name for p in root.iterdir()}
    csv = pd.read_csv(root / "pareto.csv")
    assert len(csv) == 4 and csv["does_not_fit"].notna().sum() == 2


def test_prices_of_gpus_and_json_to_stdout(tmp_path, capsys):
    vary = ["cluster.gpu=h100-sxm,a100-80gb-sxm"]
    run_pareto(small(tmp_path, seeds=[1]), [], vary, [], prices=["h100-sxm=3,a100-80gb-sxm=1"], processes=1,
               out=tmp_path / "o", json=Path("-"))
    summary = json.loads(capsys.readouterr().out)
    assert [p["usd_per_hour"] for p in summary["points"]] == [3, 1] and summary["notes"]
    run_pareto(small(tmp_path, seeds=[1], cost={}), [], vary, [], processes=1, out=tmp_path / "o", json=Path("-"))
    summary = json.loads(capsys.readouterr().out)
    assert summary["cost"] == "gpus" and "counted alike" in summary["notes"][0]
    run_pareto(small(tmp_path, seeds=[1]), [], vary, [], processes=1, out=tmp_path / "o", json=Path("-"))
    assert "one price for a100-80gb-sxm, h100-sxm" in json.loads(capsys.readouterr().out)["notes"][0]


def test_a_run_that_fails_is_named_and_the_others_are_shown(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from simcore.models.decision_points import ReplicaRouting\n\n\nclass Wild(ReplicaRouting):\n"
        "    def route(self, turn, replicas, now):\n        return 99\n")
    path = small(tmp_path, seeds=[1, 2])
    with pytest.raises(SimcoreError, match=r"2 of 4 runs failed, the others are kept: mine\.py:Wild, seed 1: Policy"):
        run_pareto(path, [], ["policies.replica_routing=round-robin,mine.py:Wild"], [], processes=1, out=tmp_path / "o")
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    assert [p["arm"] for p in summary["points"]] == ["round-robin"] and len(summary["failed"]) == 2
    capsys.readouterr()


@pytest.mark.parametrize(("vary", "message"), [
    ([], "compare.vary: found {}: allowed: at least two combinations"),
    (["workload.generate.rate=1,2"], "compare.vary: all combinations must serve the same requests: found 'workload.gen"),
    (["cluster.gpu=h100-sxm,h1000"], "cluster.gpu: found 'h1000'"),
    (["model=llama-3.1-70b,mixtral-8x7b"], "compare.vary: no combination fits; the first: kv_capacity: llama-3.1-70b"),
])
def test_axes_that_make_no_sense_are_refused(tmp_path, vary, message):
    with pytest.raises(ConfigError, match=message):
        run_pareto(small(tmp_path), [], vary, [], out=tmp_path / "o")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(("prices", "message"), [
    (["h100-sxm"], "--price h100-sxm: allowed: GPU=dollars an hour"),
    (["h100-sxm=-1"], "--price h100-sxm=-1: allowed"),
    (["b200=5"], "--price b200: allowed: a100-80gb-sxm, h100-sxm"),
    (["h100-sxm=5"], "--price: no price for a100-80gb-sxm"),
])
def test_prices_that_make_no_sense_are_refused(tmp_path, prices, message):
    with pytest.raises(ConfigError, match=message):
        run_pareto(small(tmp_path), [], ["cluster.gpu=h100-sxm,a100-80gb-sxm"], [], prices=prices, out=tmp_path / "o")


def test_what_fits_is_told_from_what_is_wrong(tmp_path):
    path = small(tmp_path, compare={"vary": {"cluster.tensor_parallel_size": [1, 3, 8]}})
    fits, unfit = fitting(read_study(path))
    assert [arm.label for arm in fits] == ["1", "8"] and unfit[0][0].label == "3"
    assert "tensor_parallel_size: found 3: allowed: 1, 2, 4, 8" in unfit[0][1]
