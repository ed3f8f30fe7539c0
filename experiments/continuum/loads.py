"""Where and how hard the claims about the mechanism load the system, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any

from simcore.experiments.claims import Estimate, Outcome, Results, Run, mean, ratio, shown
from simcore.experiments.continuum.setups import OUTPUTS, SEEDS, TTLS, of, rate, runs, static

INPUTS = {
    "published": "turns, tokens and tool times of the programs (table 2, figure 5); engine, models, GPUs, loads (section 6)",
    "assumed": "output tokens (inferred from unloaded delays), shapes of distributions, tokens of the first prompt; "
               "roofline efficiencies, KV pool; H200 for B200, at equal load per capacity of Continuum",
}
B200_BLOCKS = 55_783  # the estimate for Llama-3.1-8B on the H200 that stands for it
OFFLOAD_GIB = {"swe-8b-A100": 93.1, "swe-8b-B200": 186.3, "swe-70b-4xB200": 745.1}  # 100 GB; 200 GB a GPU

A100, B200, LARGE = "swe-8b-A100", "swe-8b-B200", "swe-70b-4xB200"
A100_RATE = 0.09  # as the paper's: deep in overload in both
B200_RATE, LARGE_RATE = rate(B200, 0.09), rate(LARGE, 0.11)
HIGH_RATE = rate(B200, 0.13)
BFCL_RATES = {"bfcl-8b-A100": rate("bfcl-8b-A100", 2.0), "bfcl-8b-B200": rate("bfcl-8b-B200", 3.5)}
BY_YIELDS = {"blocked": "continuum", "deadlock": "continuum-deadlock"}


def moved() -> dict[str, dict[str, Any]]:
    """Each free parameter of the 8B B200 set-up 20% down and up: keys of the study."""
    out: dict[str, dict[str, Any]] = {}
    for key, value in (("attention_memory_efficiency", 0.70), ("compute_efficiency", 0.70)):
        for sign, factor in (("-", 0.8), ("+", 1.2)):
            out[f"{key} {sign}20%"] = {f"cost_model.{key}": round(value * factor, 4)}
    for sign, factor in (("-", 0.8), ("+", 1.2)):
        out[f"KV pool {sign}20%"] = {"engine.num_gpu_blocks": round(B200_BLOCKS * factor)}
        out[f"output tokens {sign}20%"] = {OUTPUTS: factor}
    return out


SWE_TTLS = TTLS[1:]  # its tools are fast: half a second is nearly as good as two


def best_of(results: Results, arms: Sequence[str], ask: Callable[[str], Sequence[Run]]) -> tuple[str, list[Outcome]]:
    """The arm of the least mean delay, and its outcomes."""
    each = {arm: of(results, ask(arm)) for arm in arms}
    best = min(each, key=lambda arm: mean(each[arm]).value)
    return best, each[best]


def constants(times: Sequence[float] = TTLS) -> list[str]:
    """Constant TTLs: pins that yield as the release's do, and 2 s under the literal rule."""
    return [*(static(seconds) for seconds in times), static(2.0, "blocked")]


def causes(vllm: Sequence[Outcome], other: Sequence[Outcome]) -> str:
    """Where the difference comes from, in words."""
    def both(part: str) -> tuple[float, float]:
        return mean(vllm, lambda o: o.parts[part]).value, mean(other, lambda o: o.parts[part]).value

    parts = {part: both(part) for part in ("queueing", "prefill", "decode")}
    hits = mean(vllm, lambda o: o.reuse).value, mean(other, lambda o: o.reuse).value
    text = ", ".join(f"{part} {shown(a)} -> {shown(b)} s" for part, (a, b) in parts.items())
    return f"{text}; own context found again {100 * hits[0]:.0f}% -> {100 * hits[1]:.0f}%"


def offload_missing() -> str:
    """Why runs with a CPU tier cannot be played; "" = they can."""
    from simcore.models.engine import EngineSettings

    if "kv_offloading_size" in EngineSettings.model_fields:
        return ""
    return "needs a CPU tier for KV: this version's engine has no kv_offloading_size"


def offload(setup: str) -> dict[str, Any]:
    return {"engine.kv_offloading_size": OFFLOAD_GIB[setup], "engine.kv_offloading_backend": "lmcache"}


def gain(
    results: Results, setup: str, arm: str, load: float, seeds: Sequence[int] = SEEDS, more: Mapping[str, Any] | None = None
) -> Estimate:
    """Mean delay of vLLM over that of an arm."""
    return ratio(of(results, runs(setup, "vllm", load, seeds, more)), of(results, runs(setup, arm, load, seeds, more)))


def part_of(some: float, whole: float) -> float:
    """some / whole; NaN of nothing."""
    return some / whole if whole else nan


def times(turns: float) -> dict[str, Any]:
    """The study's keys for so many times the turns."""
    return {"workload.generate.turn_multiplier": turns} if turns != 1 else {}
