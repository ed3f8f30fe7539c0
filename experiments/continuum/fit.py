"""Fits the two unknowns of each run on a real engine to its vLLM arm alone, and writes them to fit.yaml.

Run by hand: python -m simcore.experiments.continuum.fit. The claims read the file and judge the other arms with it, under
other seeds. What was fitted is a property of the workload or of the host, never of a policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import yaml

from simcore.errors import SimcoreError
from simcore.experiments.claims import Outcome, Run
from simcore.experiments.continuum.setups import FOLDER, POOLS, REPLAYS, WAYS, closed_loop_run, published, replay_run
from simcore.experiments.reproduce import play_runs

SEEDS = (11, 12, 13)  # the claims are judged under others
STEPS = 9  # halvings of an interval
FILE = "fit.yaml"
HEAD = """\
# Fitted to the vLLM arms alone by experiments/continuum/fit.py, under seeds 11 to 13; what was fitted is not judged.
# closed_loop: to the mean of 500 job durations (trajectories: what tools return x `returned`), or to their mean and sd
# (generator: tokens x `scale`, programs spread by `spread`).
# replay: to mean duration, and TTFT or use of the KV pool, at 32 at a time: tool results x `returned`, host time a step.
"""


def bisect(low: float, high: float, rises: Callable[[float], float], steps: int = STEPS) -> float:
    """Where `rises`, a growing function, crosses 0 between low and high; an end if it does not."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < 0 else (low, middle)
    return (low + high) / 2


def nested(
    outer: tuple[float, float], inner: tuple[float, float], first: Callable[[float, float], float],
    second: Callable[[float, float], float],
) -> tuple[float, float]:
    """(x, y) at which both are 0: for each x, y solves `first`; x solves `second` along that."""
    at: dict[float, float] = {}

    def along(x: float) -> float:
        at[x] = bisect(*inner, lambda y: first(x, y))
        return second(x, at[x])

    x = bisect(*outer, along, steps=5)
    return x, bisect(*inner, lambda y: first(x, y))


def _mean(runs: list[Run], of: Callable[[Outcome], float]) -> float:
    found = play_runs("continuum", runs, processes=1)
    for said in found.values():
        if isinstance(said, str):
            raise SimcoreError(said)
    return float(np.mean([of(value) for value in found.values() if isinstance(value, Outcome)]))


def fit_trajectories(time_limit: float | None) -> dict[str, float]:
    """Share of what tools return, from the mean of the authors' vLLM arm."""
    target = published()["closed_loop"]["vllm"]["mean"]

    def rises(returned: float) -> float:
        runs = [closed_loop_run("vllm", seed, "trajectories", {"returned": returned}, time_limit) for seed in SEEDS]
        return _mean(runs, lambda o: o.mean) - target

    return {"returned": round(bisect(0.1, 0.9, rises), 4)}


def fit_generator(time_limit: float | None) -> dict[str, float]:
    """Scale of tokens and spread of programs, from mean and standard deviation of the authors' vLLM arm."""
    target = published()["closed_loop"]["vllm"]

    def runs(spread: float, scale: float) -> list[Run]:
        given = {"scale": scale, "spread": spread}
        return [closed_loop_run("vllm", seed, "generator", given, time_limit) for seed in SEEDS]

    spread, scale = nested(
        (0.2, 1.4), (0.1, 0.5), lambda x, y: _mean(runs(x, y), lambda o: o.mean) - target["mean"],
        lambda x, y: _mean(runs(x, y), lambda o: float(o.jct.std())) - target["sd"])
    return {"scale": round(scale, 4), "spread": round(spread, 3)}


def fit_replay(gpu: str, by: str) -> dict[str, float]:
    """Share of what tools return and host seconds a step, from mean duration and `by` (held or ttft) of the third party's
    vLLM arm at 32 at a time."""
    target = published()["replay"]["vllm-32"]
    unit = POOLS[gpu] if by == "held" else 1.0

    def runs(returned: float, overhead: float) -> list[Run]:
        return [replay_run("vllm", 32, seed, gpu, {"returned": returned, "step_overhead": overhead}) for seed in SEEDS]

    returned, overhead = nested(
        (0.3, 1.1), (0.0, 0.06), lambda x, y: _mean(runs(x, y), lambda o: o.mean) - target["mean"],
        lambda x, y: _mean(runs(x, y), lambda o: getattr(o, by)) / unit - target[by])
    return {"returned": round(returned, 4), "step_overhead": round(overhead, 5)}


def main() -> None:
    fitted: dict[str, Any] = {"closed_loop": {}, "replay": {}}
    for name, (world, limit) in WAYS.items():
        fitted["closed_loop"][name] = fit_trajectories(limit) if world == "trajectories" else fit_generator(limit)
        print(name, fitted["closed_loop"][name], flush=True)
    for name, (gpu, by) in REPLAYS.items():
        fitted["replay"][name] = fit_replay(gpu, by)
        print(name, fitted["replay"][name], flush=True)
    (FOLDER / FILE).write_text(HEAD + yaml.safe_dump(fitted, sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    main()
