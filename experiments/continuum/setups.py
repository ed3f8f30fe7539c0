"""What is served, by which policy and at which load: the runs that claims and figures are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from simcore.experiments.claims import Outcome, Results, Run, run_of

FOLDER = Path(__file__).parent
PROGRAMS = 100  # of the paper's traces
SEEDS = (1, 2, 3, 4, 5)
FEW = SEEDS[:2]  # of readings and moved parameters, which are many
OUTPUTS = "outputs"  # no key of a study: what the programs write is multiplied
_WORLD = "simcore.experiments.continuum.worlds"

# Policies and the engine's settings that go with them. `blocked` and `deadlock`: when pins yield (see policies/retention).
ARMS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "forget": {"retention": "none"},
    "program-fcfs": {"admission": "program-fcfs"},
    "continuum": {"retention": "continuum"},
    "continuum-deadlock": {"retention": {"name": "continuum", "yields": "deadlock"}},
    "continuum-released": {"retention": "continuum-released", "engine": {"room_order": "rows_first"}},
    "clairvoyant": {"retention": "clairvoyant"},
    "clairvoyant-deadlock": {"retention": {"name": "clairvoyant", "yields": "deadlock"}},
    "autellix": {"admission": "autellix"},
    "infercept": {"admission": "program-fcfs", "retention": "infercept"},
    "infercept-fcfs": {"retention": "infercept"},
}
TTLS = (0.5, 2.0, 8.0, 1e6)  # of the sweep for the best constant; the last is until the tool returns
YIELDS = ("blocked", "deadlock")


def static(seconds: float = 2.0, yields: str = "deadlock") -> str:
    """The name of the arm that pins every turn for so long."""
    name = f"static {seconds:g} s {yields}"
    ARMS.setdefault(name, {
        "admission": "program-fcfs", "retention": {"name": "static-ttl", "seconds": seconds, "yields": yields}})
    return name


def variant(name: str, engine: Mapping[str, Any] | None = None, **parameters: Any) -> str:
    """The name of the arm that is policy `name` with these parameters of its constructor."""
    kind = "admission" if name == "autellix" else "retention"
    settings = {**parameters, **(engine or {})}
    label = f"{name}({', '.join(f'{k}={v}' for k, v in settings.items())})"
    ARMS.setdefault(label, {kind: {"name": name, **parameters}, "engine": dict(engine or {})})
    return label


# What stands for what. `capacity`: programs/s that Continuum (paper variant) serves when all come at once, found once with
# this version (mean of two seeds; a study test holds it); loads of the paper are carried over at equal load per capacity.
SETUPS: dict[str, dict[str, Any]] = {
    "swe-8b-A100": {"settings": {}, "capacity": 0.0086},
    "swe-8b-B200": {"settings": {"cluster.gpu": "h200-sxm"}, "capacity": 0.0252},
    "swe-70b-4xB200": {
        "settings": {"cluster.gpu": "h200-sxm", "cluster.tensor_parallel_size": 4, "model": "llama-3.1-70b"},
        "capacity": 0.0225},
    "bfcl-8b-A100": {"settings": {"workload.generate.name": "bfcl"}, "capacity": 0.0349},
    "bfcl-8b-B200": {"settings": {"workload.generate.name": "bfcl", "cluster.gpu": "h200-sxm"}, "capacity": 0.1065},
    "openhands-8b-H100": {"settings": {"workload.generate.name": "openhands", "cluster.gpu": "h100-sxm"}, "capacity": None},
}


@cache
def published() -> dict[str, Any]:
    """The numbers of published.yaml."""
    return yaml.safe_load(_text("published.yaml"))


@cache
def fitted() -> dict[str, Any]:
    """The numbers of fit.yaml."""
    return yaml.safe_load(_text("fit.yaml"))


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def paper_capacity(setup: str) -> float:
    """Programs/s that the paper's Continuum serves under backlog, deduced from its delay at the highest load.

    n programs come within n / rate seconds and leave evenly until the makespan M: their mean delay is M / 2 less half of
    n / rate.
    """
    panel = published()["figure_8"][setup]
    return PROGRAMS / (2 * (panel["continuum"][-1] + PROGRAMS / (2 * panel["x"][-1])))


def rate(setup: str, paper_rate: float, *, normalised: bool = True) -> float:
    """The rate here that loads this system as `paper_rate` loads the paper's (or the same rate)."""
    if not normalised:
        return paper_rate
    return round(paper_rate * SETUPS[setup]["capacity"] / paper_capacity(setup), 6)


def run(setup: str, arm: str, programs_per_second: float, seed: int, more: Mapping[str, Any] | None = None) -> Run:
    """100 programs of a set-up under an arm; `more`: further keys of the study, and OUTPUTS: a factor on output tokens."""
    more = dict(more or {})
    outputs = more.pop(OUTPUTS, None)
    settings = {**SETUPS[setup]["settings"], "workload.start.rate": programs_per_second, **_keys(arm), **more}
    if outputs is None:
        return run_of("study.yaml", settings, seed)
    name = SETUPS[setup]["settings"].get("workload.generate.name", "swe-bench")
    return run_of("study.yaml", settings, seed, f"{_WORLD}:scaled_agents", name=name, programs=PROGRAMS,
                  rate=programs_per_second, outputs=outputs)


def runs(
    setup: str, arm: str, programs_per_second: float, seeds: Sequence[int] = SEEDS, more: Mapping[str, Any] | None = None
) -> list[Run]:
    return [run(setup, arm, programs_per_second, seed, more) for seed in seeds]


def of(results: Results, some: Sequence[Run]) -> list[Outcome]:
    return [results[run] for run in some]


def _keys(arm: str) -> dict[str, Any]:
    parts = ARMS[arm]
    policies = {kind: parts[kind] for kind in ("admission", "retention") if kind in parts}
    return {"policies": policies, **{f"engine.{key}": value for key, value in parts.get("engine", {}).items()}}


# --- runs of others on real engines ----------------------------------------------------------------------------------


def closed_loop_run(
    arm: str, seed: int, world: str, parameters: Mapping[str, float], time_limit: float | None,
    more: Mapping[str, Any] | None = None,
) -> Run:
    """The authors' 500 jobs. `world`: "trajectories" (parameter returned: tool results x that) or "generator" (scale of
    tokens, spread of programs); `time_limit`: s after which a client gives up, None = it does not."""
    given: dict[str, Any] = {"programs": 500, "workers": 64} | ({"time_limit": time_limit} if time_limit else {})
    settings = {**_keys(arm), **(more or {})}
    if world == "trajectories":
        given["returned"] = parameters["returned"]
        return run_of("closed-loop.yaml", settings, seed, f"{_WORLD}:replayed_agents", **given)
    return run_of(
        "closed-loop.yaml", settings, seed, f"{_WORLD}:scaled_agents", name="swe-bench", outputs=parameters["scale"],
        inputs=parameters["scale"], spread=parameters["spread"], **given)


# How the runs on real engines are read: (programs, time limit in s), and (GPU, what is fitted beside the mean).
WAYS = {
    "trajectories, limit": ("trajectories", 900.0), "trajectories": ("trajectories", None),
    "generator, limit": ("generator", 900.0), "generator": ("generator", None),
}
REPLAYS = {
    "A100, KV use": ("a100-80gb-sxm", "held"), "H100, KV use": ("h100-sxm", "held"), "A100, TTFT": ("a100-80gb-sxm", "ttft"),
}
POOLS = {"a100-80gb-sxm": 445_000, "h100-sxm": 445_000}  # tokens of KV beside Llama-3.1-8B, estimated


def replay_run(arm: str, workers: int, seed: int, gpu: str, parameters: Mapping[str, float]) -> Run:
    """The third party's 300 jobs at so many at a time."""
    settings = {
        "cluster.gpu": gpu, "cost_model.step_overhead": parameters["step_overhead"], "workload.start.workers": workers}
    return run_of(
        "replay.yaml", {**settings, **_keys(arm)}, seed, f"{_WORLD}:replayed_agents", programs=300, workers=workers,
        returned=parameters["returned"])
