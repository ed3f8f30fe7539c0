"""Points of the paper's figures 8, 14 and 16, found beside published."""

from __future__ import annotations

from math import nan
from typing import Any

from simcore.experiments.claims import Results, Run, mean
from simcore.experiments.continuum.setups import of, published, rate, runs, static
from simcore.experiments.reproduce import Figure, Point

FIGURE_SEEDS = (1, 2, 3)
STANDS = "H200 stands for B200, and all loads are carried over at equal load per capacity of Continuum"
# Published arm -> the arms here that it is read as.
READ_AS = {
    "vllm": ["vllm"], "autellix": ["autellix"], "program-fcfs": ["program-fcfs"], "static-ttl": [static(2.0)],
    "continuum": ["continuum", "continuum-deadlock"],
}


def _panel(setup: str, x: float, arm: str, more: dict[str, Any] | None = None) -> list[Run]:
    return runs(setup, arm, rate(setup, x), FIGURE_SEEDS, more)


def _points(results: Results, panel: str, setup: str, data: dict[str, list[float]]) -> list[Point]:
    return [
        Point(panel, arm, x, data[line][k] if arm == READ_AS[line][0] else nan, mean(of(results, _panel(setup, x, arm))))
        for line in data if line != "x" for arm in READ_AS[line] for k, x in enumerate(data["x"])
    ]


def _ask(setup: str, data: dict[str, list[float]]) -> list[Run]:
    return [run for line in data if line != "x" for arm in READ_AS[line] for x in data["x"] for run in _panel(setup, x, arm)]


def figure_8() -> Figure:
    def ask() -> list[Run]:
        return [run for setup, data in published()["figure_8"].items() for run in _ask(setup, data)]

    def points(results: Results) -> list[Point]:
        return [point for setup, data in published()["figure_8"].items() for point in _points(results, setup, setup, data)]

    return Figure("Figure 8: mean delay without offload", "programs/s (of the paper)", "mean delay (s)",
                  f"{STANDS}; without the panels of Gemma-3-12B and BFCL on 70B", ask, points)


def figure_14() -> Figure:
    """The paper's run has 200 GB of CPU offload; this one none."""
    setup, load = "swe-8b-B200", rate("swe-8b-B200", 0.13)
    lines = ("vllm", "continuum", "autellix")

    def played(arm: str, turns: float) -> list[Run]:
        more = {"workload.generate.turn_multiplier": turns} if turns != 1 else {}
        return runs(setup, arm, load, FIGURE_SEEDS, more)

    def ask() -> list[Run]:
        turns = published()["figure_14"]["x"]
        return [run for line in lines for arm in READ_AS[line] for x in turns for run in played(arm, x)]

    def points(results: Results) -> list[Point]:
        data = published()["figure_14"]
        return [
            Point("SWE 8B B200, 0.13 programs/s", arm, x, data[line][k] if arm == READ_AS[line][0] else nan,
                  mean(of(results, played(arm, x))))
            for line in lines for arm in READ_AS[line] for k, x in enumerate(data["x"])
        ]

    return Figure("Figure 14: turns multiplied, tokens of a program unchanged", "turn multiplier", "mean delay (s)",
                  f"{STANDS}; without the paper's 200 GB of CPU offload", ask, points)


def figure_16() -> Figure:
    setups = {"swe": "swe-8b-B200", "bfcl": "bfcl-8b-B200"}

    def ask() -> list[Run]:
        return [run for name, setup in setups.items() for run in _ask(setup, published()["figure_16"][name])]

    def points(results: Results) -> list[Point]:
        return [point for name, setup in setups.items()
                for point in _points(results, setup, setup, published()["figure_16"][name])]

    return Figure("Figure 16: ablation", "programs/s (of the paper)", "mean delay (s)",
                  f"{STANDS}; pins of the constant TTL yield at a deadlock only", ask, points)
