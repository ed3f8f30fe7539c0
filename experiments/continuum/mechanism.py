"""Claims about Continuum itself: generated programs on simulated GPUs, at the load of the paper's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simcore.experiments.claims import (
    Claim,
    Estimate,
    Judged,
    Null,
    Outcome,
    Reading,
    Results,
    Run,
    estimate,
    mean,
    ratio,
    shown,
)
from simcore.experiments.continuum.loads import (
    A100,
    A100_RATE,
    B200,
    B200_RATE,
    BFCL_RATES,
    BY_YIELDS,
    HIGH_RATE,
    INPUTS,
    LARGE,
    LARGE_RATE,
    SWE_TTLS,
    best_of,
    causes,
    constants,
    gain,
    moved,
    offload,
    offload_missing,
    part_of,
    times,
)
from simcore.experiments.continuum.setups import (
    FEW,
    SEEDS,
    TTLS,
    of,
    rate,
    runs,
    static,
    variant,
)

# --- a: parity -------------------------------------------------------------------------------------------------------


def claim_a() -> Claim:
    """Nothing to gain where nothing is short."""
    loads = {A100: rate(A100, 0.01), B200: rate(B200, 0.03)}
    arms = ("vllm", "continuum", "continuum-deadlock", "forget")

    def ask() -> list[Run]:
        return [run for setup, load in loads.items() for arm in arms for run in runs(setup, arm, load, SEEDS[:3])]

    def judge(results: Results) -> Judged:
        def played(setup: str, arm: str) -> list[Outcome]:
            return of(results, runs(setup, arm, loads[setup], SEEDS[:3]))

        found = {(s, arm): ratio(played(s, arm), played(s, "vllm"))
                 for s in loads for arm in arms}
        near = {key: 0.95 <= estimate.value <= 1.05 for key, estimate in found.items()}
        readings = [Reading(f"{s}, {arm}", found[s, arm].value, near[s, arm]) for s in loads for arm in arms[1:3]]
        forget = found[A100, "forget"].value
        return Judged(
            found[A100, "continuum"], near[A100, "continuum"], [Null("no reuse at all", forget, near[A100, "forget"])],
            readings, "below the knee nothing is overwritten between two turns: every arm finds its whole context again")

    return Claim(
        "a", "below the knee Continuum and vLLM are equal (Continuum / vLLM, SWE 8B, lowest load)",
        "1.02 at the lowest load of each panel of figure 8", "0.95 - 1.05", "E2", INPUTS, ask, judge)


# --- b: the gain -----------------------------------------------------------------------------------------------------


def _b_places() -> dict[str, tuple[str, float]]:
    return {"8B A100 .09": (A100, A100_RATE), "8B B200 .09": (B200, B200_RATE), "70B 4xB200 .11": (LARGE, LARGE_RATE)}


def _crossed() -> dict[str, str]:
    """What the paper leaves open, crossed: reading -> arm."""
    out = {}
    for yields in BY_YIELDS:
        for ttl in ("fixed:2.0", "lnB"):
            for window in (20, 1000):
                for room in ("pins_first", "rows_first"):
                    arm = variant("continuum", {"room_order": room}, yields=yields, ttl_default=ttl, t_window=window)
                    out[f"{yields} {ttl} T/{window} {room}"] = arm
    return out


FULL = {"engine.scheduler_reserve_full_isl": True}


def _b_runs() -> list[Run]:
    out = []
    for setup, load in _b_places().values():
        out += [run for arm in ("vllm", "program-fcfs", *BY_YIELDS.values()) for run in runs(setup, arm, load)]
    for arm in constants(SWE_TTLS):
        out += [*runs(A100, arm, A100_RATE, FEW), *runs(B200, arm, B200_RATE)]
    out += runs(B200, "clairvoyant-deadlock", B200_RATE)
    out += [run for arm in _crossed().values() for run in runs(B200, arm, B200_RATE, FEW[:1])]
    for arm in ("vllm", *BY_YIELDS.values()):
        out += runs(B200, arm, B200_RATE, FEW, FULL)
        out += [run for more in moved().values() for run in runs(B200, arm, B200_RATE, FEW[:1], more)]
    return out


def _b_inside(value: float) -> bool:
    return 1.4 <= value <= 2.0


def _b_readings(results: Results) -> list[Reading]:
    found: dict[tuple[str, bool], Estimate] = {}
    for place, (setup, load) in _b_places().items():
        for yields, arm in BY_YIELDS.items():
            found[f"{place} {yields}", False] = gain(results, setup, arm, load)
    for name, arm in _crossed().items():
        found[f"8B B200 {name}", False] = gain(results, B200, arm, B200_RATE, FEW[:1])
    for yields, arm in BY_YIELDS.items():
        found[f"8B B200 {yields} whole prompt reserved", False] = gain(results, B200, arm, B200_RATE, FEW, FULL)
        for name, more in moved().items():
            found[f"{yields} {name}", True] = gain(results, B200, arm, B200_RATE, FEW[:1], more)
    return [Reading(name, x.value, _b_inside(x.value), free) for (name, free), x in found.items()]


def claim_b() -> Claim:
    """The gain over vLLM under backlog."""

    def judge(results: Results) -> Judged:
        found = gain(results, A100, "continuum", A100_RATE)
        vllm, here = (of(results, runs(A100, arm, A100_RATE)) for arm in ("vllm", "continuum"))
        best, _ = best_of(results, constants(SWE_TTLS), lambda arm: runs(A100, arm, A100_RATE, FEW))
        values = {
            "program FCFS, no pins": gain(results, A100, "program-fcfs", A100_RATE).value,
            f"best constant: {best}": gain(results, A100, best, A100_RATE, FEW).value}
        oracle = gain(results, B200, "clairvoyant-deadlock", B200_RATE).value
        nulls = [Null("do nothing (vLLM)", 1.0, False), *(Null(name, x, _b_inside(x)) for name, x in values.items()),
                 Null("clairvoyant bound, 8B B200", oracle, _b_inside(oracle), must_fail=False)]
        why = (f"A100: {causes(vllm, here)}. What the null arms reach is not the adaptive TTL's: see f, i. Absolute "
               f"delays: vLLM {shown(mean(vllm).value)} s, Continuum {shown(mean(here).value)} s, published 5,188, 3,339: "
               "all arms are slower here, since a step that reads many long contexts takes the roofline longer")
        return Judged(found, _b_inside(found.value), nulls, _b_readings(results), why, contradicts=found.high < 1)

    return Claim(
        "b", "SWE at >= .09 programs/s: mean delay of vLLM / Continuum (8B A100)",
        "1.55 (8B A100), 1.66-1.71 (8B B200), 1.69 (70B)", "1.4 - 2.0", "E2", INPUTS, _b_runs, judge)


# --- e: turns --------------------------------------------------------------------------------------------------------


def _played(
    results: Results, arm: str, turns: float, seeds: Sequence[int] = SEEDS, more: Mapping[str, Any] | None = None
) -> list[Outcome]:
    return of(results, runs(B200, arm, HIGH_RATE, seeds, {**times(turns), **(more or {})}))


def _rise(
    results: Results, arm: str, seeds: Sequence[int] = SEEDS, more: Mapping[str, Any] | None = None
) -> tuple[Estimate, float]:
    """(vLLM over the arm at 5 times the turns, by how much the arm's own delay grows on the way there)."""
    last = _played(results, arm, 5, seeds, more)
    return ratio(_played(results, "vllm", 5, seeds, more), last), ratio(last, _played(results, arm, 1, seeds, more)).value


def _e_settings() -> dict[str, tuple[Sequence[int], dict[str, Any], bool]]:
    """Beside the default: reading or moved parameter -> seeds, the study's keys, whether it is a moved parameter."""
    out: dict[str, tuple[Sequence[int], dict[str, Any], bool]] = {
        name: (FEW[:1], more, True) for name, more in moved().items() if name.startswith("KV pool")}
    if not offload_missing():
        out["200 GB offload"] = (FEW[:1], offload(B200), False)
    return out


def claim_e() -> Claim:
    """More turns, the same tokens."""
    nulls = {"program FCFS, no pins": "program-fcfs", "constant TTL, 2 s": static()}

    def ask() -> list[Run]:
        out = []
        for turns in (1, 5):
            for arm in ("vllm", *BY_YIELDS.values()):
                out += runs(B200, arm, HIGH_RATE, SEEDS, times(turns))
                for seeds, more, _ in _e_settings().values():
                    out += runs(B200, arm, HIGH_RATE, seeds, {**times(turns), **more})
            out += [run for arm in nulls.values() for run in runs(B200, arm, HIGH_RATE, FEW, times(turns))]
        return out

    def holds(rise: tuple[Estimate, float]) -> bool:
        return rise[0].value >= 2.5 and 0.8 <= rise[1] <= 1.2

    def judge(results: Results) -> Judged:
        readings = []
        for yields, arm in BY_YIELDS.items():
            found = {yields: (_rise(results, arm), False)}
            for name, (seeds, more, free) in _e_settings().items():
                found[f"{yields} {name}"] = _rise(results, arm, seeds, more), free
            readings += [Reading(f"{name} (own x {shown(rise[1])})", rise[0].value, holds(rise), free)
                         for name, (rise, free) in found.items()]
        own = _rise(results, "vllm")
        shown_nulls = [Null(f"do nothing (vLLM, own x {shown(own[1])})", 1.0, holds(own))]
        for name, arm in nulls.items():
            rise = _rise(results, arm, FEW)
            shown_nulls.append(Null(f"{name} (own x {shown(rise[1])})", rise[0].value, holds(rise)))
        rise = _rise(results, "continuum")
        moves = causes(_played(results, "vllm", 5), _played(results, "continuum-deadlock", 5))
        why = (f"from 1 to 5 times the turns Continuum's delay grows x {shown(rise[1])}, vLLM's x {shown(own[1])}. Where "
               "pins yield to any blocked head, most are gone before the tool returns, and each turn pays for its context "
               f"again. Where they yield at a deadlock only, at 5 times the turns: {moves}")
        return Judged(rise[0], holds(rise), shown_nulls, readings, why, contradicts=rise[0].high < 1)

    return Claim(
        "e", "5 times the turns, same tokens: Continuum stays flat, vLLM / Continuum rises (SWE 8B B200 .13)",
        "ratio 1.6 -> 3.7, Continuum's own delay x 0.91 (with 200 GB offload)", "ratio >= 2.5 and own delay x 0.8 - 1.2",
        "E2", INPUTS, ask, judge)


# --- f: the ablation -------------------------------------------------------------------------------------------------


def _f_places() -> dict[str, tuple[str, float, Sequence[int]]]:
    return {"8B B200": (B200, B200_RATE, SEEDS), "8B A100": (A100, A100_RATE, FEW)}


def _f_arms(yields: str) -> tuple[str, str, str]:
    return "program-fcfs", static(2.0, yields), BY_YIELDS[yields]


def _f_runs() -> list[Run]:
    arms = dict.fromkeys(("vllm", *(arm for yields in BY_YIELDS for arm in _f_arms(yields))))
    out = [run for setup, load, seeds in _f_places().values() for arm in arms for run in runs(setup, arm, load, seeds)]
    for more in moved().values():
        out += [run for arm in arms if arm != static(2.0, "blocked") for run in runs(B200, arm, B200_RATE, FEW[:1], more)]
    return out


def _ordered(fcfs: float, fixed: float, full: float) -> bool:
    return fcfs * 1.02 < fixed < full and fixed - 1 >= 0.85 * (full - 1)


def _f_reading(name: str, three: Sequence[Estimate], free: bool = False) -> Reading:
    a, b, c = (x.value for x in three)
    return Reading(f"{name} ({shown(a)} < {shown(b)} < {shown(c)})", part_of(b - 1, c - 1), _ordered(a, b, c), free)


def claim_f() -> Claim:
    """Each part of the policy adds something, pins most of it."""

    def judge(results: Results) -> Judged:
        def gains(place: str, yields: str, more: Mapping[str, Any] | None = None) -> list[Estimate]:
            """vLLM over program FCFS, over the constant TTL and over Continuum."""
            setup, load, seeds = _f_places()[place]
            return [gain(results, setup, arm, load, FEW[:1] if more else seeds, more) for arm in _f_arms(yields)]

        readings = [_f_reading(f"{place} {yields}", gains(place, yields)) for place in _f_places() for yields in BY_YIELDS]
        readings += [_f_reading(name, gains("8B B200", "deadlock", more), True) for name, more in moved().items()]
        literal, released = gains("8B B200", "blocked"), gains("8B B200", "deadlock")
        fcfs, fixed, full = (x.value for x in literal)
        vllm = of(results, runs(B200, "vllm", B200_RATE))
        each = [of(results, runs(B200, arm, B200_RATE)) for arm in _f_arms("blocked")[1:]]
        share = estimate([part_of(v.mean / b.mean - 1, v.mean / c.mean - 1) for v, b, c in zip(vllm, *each, strict=True)])
        why = (f"literal rule (pins yield to any blocked head): {', '.join(map(str, literal))}: under a backlog the head is "
               "always blocked, so that no pin outlives the next step, and program order is all there is. Pins that yield "
               f"only at a deadlock, as the release's: {', '.join(map(str, released))}: pins add to the order, the adaptive "
               "TTL does not")
        nulls = [Null("do nothing (vLLM)", 0.0, False),
                 Null("program FCFS in place of the constant", part_of(fcfs - 1, full - 1), _ordered(fcfs, fcfs, full))]
        return Judged(share, _ordered(fcfs, fixed, full), nulls, readings, why, contradicts=literal[2].high < literal[0].low)

    return Claim(
        "f", "ablation on SWE: program FCFS < static TTL < full, static's share of the full gain (8B B200 .09)",
        "1.26 < 1.69 < 1.78: share 0.88", "in this order, static 2% above FCFS, and share >= 0.85", "E2", INPUTS,
        _f_runs, judge)


# --- i: the adaptive TTL ---------------------------------------------------------------------------------------------


def claim_i() -> Claim:
    """What the title says: an adaptive time-to-live, against one that is not."""
    bfcl = "bfcl-8b-B200"
    places = {"SWE 8B B200 .09": (B200, B200_RATE, SWE_TTLS), "BFCL 8B B200 3.5": (bfcl, BFCL_RATES[bfcl], TTLS)}

    def ask() -> list[Run]:
        out = []
        for setup, load, seconds in places.values():
            arms = [*constants(seconds), *BY_YIELDS.values(), "clairvoyant-deadlock", "program-fcfs"]
            out += [run for arm in arms for run in runs(setup, arm, load)]
        return out

    def judge(results: Results) -> Judged:
        def beats(place: str, arm: str) -> tuple[Estimate, str]:
            setup, load, seconds = places[place]
            best, constant = best_of(results, [*constants(seconds), "program-fcfs"], lambda name: runs(setup, name, load))
            return ratio(constant, of(results, runs(setup, arm, load))), best

        readings, said = [], []
        for place in places:
            for yields, arm in BY_YIELDS.items():
                found, best = beats(place, arm)
                readings.append(Reading(f"{place} {yields}", found.value, found.low > 1))
                said.append(f"{place} {yields} {found} against {best}")
            said.append(f"{place} clairvoyant {beats(place, 'clairvoyant-deadlock')[0]}")
        found, best = beats("BFCL 8B B200 3.5", "continuum")
        return Judged(found, found.low > 1, [Null(f"best constant: {best}", 1.0, False)], readings, "; ".join(said),
                      contradicts=found.high < 1)

    return Claim(
        "i", "the adaptive TTL beats the best constant (delay of the best constant / Continuum, BFCL 8B B200 3.5)",
        "static 2 s / full: BFCL 1.08, SWE 1.05 (figure 16)", "the interval lies above 1", "E2", INPUTS, ask, judge)
