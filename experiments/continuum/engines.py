"""Claims against measurements on real engines: the authors' closed loop, and a third party's replay.

What no one published of the two workloads was fitted to their vLLM arms alone (fit.py, fit.yaml), under other seeds; the
fitted numbers are inputs and are not judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simcore.experiments.claims import Claim, Estimate, Judged, Null, Outcome, Reading, Results, Run, mean, ratio, shown
from simcore.experiments.continuum.setups import (
    FEW,
    REPLAYS,
    SEEDS,
    WAYS,
    closed_loop_run,
    fitted,
    of,
    published,
    replay_run,
    static,
)

RELEASED = "continuum-released"
THREE = SEEDS[:3]


# --- g: the authors' own run -----------------------------------------------------------------------------------------

LATE = 880.0  # s: a job that took longer has timed out
POOL = 29_854  # KV blocks of Llama-3.1-70B on 4 x H100, estimated
DEFAULT = next(iter(WAYS))
ABLATED = {"program FCFS, no pins": "program-fcfs", "constant TTL, 2 s": static()}


def _seeds(way: str) -> Sequence[int]:
    return SEEDS if way == DEFAULT else THREE


def _loop(way: str, arm: str, seeds: Sequence[int], more: Mapping[str, Any] | None = None) -> list[Run]:
    world, limit = WAYS[way]
    return [closed_loop_run(arm, seed, world, fitted()["closed_loop"][way], limit, more) for seed in seeds]


def _moved() -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for sign, factor in (("-", 0.8), ("+", 1.2)):
        out[f"KV pool {sign}20%"] = {"engine.num_gpu_blocks": round(POOL * factor)}
        out[f"attention_memory_efficiency {sign}20%"] = {"cost_model.attention_memory_efficiency": round(0.7 * factor, 2)}
        out[f"compute_efficiency {sign}20%"] = {"cost_model.compute_efficiency": round(0.7 * factor, 2)}
    return out


def _arm(runs: Sequence[Outcome], real: Mapping[str, float]) -> str:
    """An arm's numbers, in brackets the measured ones."""
    of_arm = {
        "mean": lambda o: o.mean, "sd": lambda o: float(o.jct.std()), "p95": lambda o: float(np.quantile(o.jct, 0.95)),
        "makespan": lambda o: o.makespan, "timeouts": lambda o: float((o.jct > LATE).sum()),
    }
    return ", ".join(f"{name} {mean(runs, value).value:,.0f} ({real[name]:,.0f})" for name, value in of_arm.items())


def claim_g() -> Claim:
    """The release against vLLM where the vLLM arm is known: 2.16 times, within 20%."""

    def ask() -> list[Run]:
        out = [run for way in WAYS for arm in ("vllm", RELEASED) for run in _loop(way, arm, _seeds(way))]
        out += [run for arm in ABLATED.values() for run in _loop(DEFAULT, arm, FEW)]
        for more in _moved().values():
            out += [run for arm in ("vllm", RELEASED) for run in _loop(DEFAULT, arm, FEW[:1], more)]
        return out

    def judge(results: Results) -> Judged:
        def gain(way: str, arm: str, seeds: Sequence[int], more: Mapping[str, Any] | None = None) -> Estimate:
            return ratio(of(results, _loop(way, "vllm", seeds, more)), of(results, _loop(way, arm, seeds, more)))

        def inside(value: float) -> bool:
            return 1.73 <= value <= 2.59

        real = published()["closed_loop"]
        readings, said = [], []
        for way in WAYS:
            value = gain(way, RELEASED, _seeds(way)).value
            readings.append(Reading(way, value, inside(value)))
            vllm, released = (of(results, _loop(way, arm, _seeds(way))) for arm in ("vllm", RELEASED))
            faster = ratio(vllm, released, lambda o: o.makespan)
            said.append(f"{way} (measured in brackets): vLLM {_arm(vllm, real['vllm'])}; released "
                        f"{_arm(released, real[RELEASED])}; throughput x {faster} (1.61)")
        for name, more in _moved().items():
            value = gain(DEFAULT, RELEASED, FEW[:1], more).value
            readings.append(Reading(name, value, inside(value), free=True))
        nulls = [Null("do nothing (vLLM)", 1.0, False)]
        for name, arm in ABLATED.items():
            value = gain(DEFAULT, arm, FEW).value
            # The release is itself nearly a constant TTL of 2 s, so that this one need not miss the band.
            nulls.append(Null(name, value, inside(value), must_fail="constant" not in name))
        found = gain(DEFAULT, RELEASED, SEEDS)
        said.append("The generator's programs, with two fitted numbers, were tried first; the trajectories of other SWE "
                    "agents, with one, are the default because their rounds and lengths are measured and the vLLM arm's sd "
                    "and p95 come out without being fitted. Without the limit the best fit lies below the knee under some "
                    "seeds")
        return Judged(found, inside(found.value), nulls, readings, ". ".join(said), contradicts=found.high < 1)

    return Claim(
        "g", "the authors' closed loop, 500 jobs by 64 workers, Llama-70B on 4 x H100: mean of vLLM / released variant, "
        "predicted from the vLLM arm", "2.16 (mean 465 -> 215 s; makespan 3783 -> 2346 s; 94 -> 9 jobs over 880 s)",
        "1.73 - 2.59 (2.16 +-20%)", "E3",
        {"measured": "500 job durations an arm (of the vLLM arm the mean is fitted and not judged); rounds and turns of "
                     "other SWE trajectories (replay_rounds.csv, replay_turns.csv)",
         "published": "model, GPUs, workers, the limit of 15 minutes",
         "assumed": "that these agents act like those; tool results x one fitted number; roofline, KV pool"},
        ask, judge)


# --- h: the replay ---------------------------------------------------------------------------------------------------


def _replay(way: str, workers: int, arm: str) -> list[Run]:
    return [replay_run(arm, workers, seed, REPLAYS[way][0], fitted()["replay"][way]) for seed in THREE]


def _replayed(key: str, runs: Sequence[Outcome]) -> str:
    real = published()["replay"][key]
    waiting, longest = mean(runs, lambda o: o.waiting).value, mean(runs, lambda o: o.ttft_max).value
    return (f"{key.rsplit('-', 1)[0]} {shown(mean(runs).value)} s ({shown(real['mean'])}), waiting {shown(waiting)} "
            f"({real['waiting']:g}), longest TTFT {shown(longest)} s ({shown(real['ttft_max'])}), "
            f"{mean(runs, lambda o: float(o.preemptions)).value:.0f} preemptions")


def claim_h() -> Claim:
    """Others found next to nothing, more waiting and longer stalls: does that come out?"""
    measured = {32: 1.9, 48: 1.7}

    def ask() -> list[Run]:
        return [run for way in REPLAYS for n in measured for arm in ("vllm", RELEASED) for run in _replay(way, n, arm)]

    def judge(results: Results) -> Judged:
        def pair(way: str, workers: int) -> tuple[list[Outcome], list[Outcome]]:
            return of(results, _replay(way, workers, "vllm")), of(results, _replay(way, workers, RELEASED))

        def saved(way: str, workers: int) -> Estimate:
            """Percent of the mean duration."""
            vllm, released = pair(way, workers)
            left = ratio(released, vllm)
            return Estimate(100 * (1 - left.value), 100 * (1 - left.high), 100 * (1 - left.low), left.seeds)

        def holds(way: str) -> bool:
            vllm, released = pair(way, 48)
            stalls = ratio(released, vllm, lambda o: o.ttft_max).value
            return all(abs(saved(way, n).value) < 5 for n in measured) and stalls > 1

        readings, said = [], []
        for way in REPLAYS:
            readings.append(Reading(way, saved(way, 48).value, holds(way)))
            for n, real in measured.items():
                found = saved(way, n)
                zero = "contains 0" if found.low <= 0 <= found.high else "does not contain 0"
                vllm, released = pair(way, n)
                said.append(f"{way}, {n} at a time: saves {found} %, {zero} (measured {real}): "
                            f"{_replayed(f'vllm-{n}', vllm)}; {_replayed(f'{RELEASED}-{n}', released)}")
        said.append("At 32 nothing is lost between turns and nothing can be gained, as measured. At 48 the contexts stand "
                    "at the edge of the pool: a few percent more or less of it decide between 5 and 60% saved. Both real "
                    "arms slow down there by 1.76 without losing context, which no part of the model does")
        first = next(iter(REPLAYS))
        nulls = [Null("do nothing (vLLM): saves 0, longest TTFT the same", 0.0, False)]
        return Judged(saved(first, 48), holds(first), nulls, readings, ". ".join(said))

    return Claim(
        "h", "a third party's replay: the release saves 2% or less at 32 and at 48 jobs at a time, and stalls a few for "
        "long (% saved at 48)", "1.9% at 32, 1.7% at 48; longest TTFT 19 -> 174 s at 48",
        "less than 5% at 32 and at 48, and the longest TTFT grows", "E3",
        {"measured": "durations, TTFT, waiting, use of the pool at 32; rounds of 300 jobs; turns of 5 trajectories",
         "published": "model, numbers of jobs at a time",
         "assumed": "the GPU (two readings); fitted to vLLM at 32: what tools return, host time a step"},
        ask, judge)
