"""Claims of papers: what is run for one, how it is judged beside its nulls and over its readings, and how that is shown.

A claim's number counts only if the policies that do not have the paper's idea miss the band that the paper's policy meets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from simcore.experiments.statistics import CONFIDENCE

if TYPE_CHECKING:
    from rich.console import Console

    from simcore.models.serving import RunResult

Verdict = Literal["agrees", "differs", "contradicts", "not run"]
GRADES = {
    "E0": "arithmetic on the paper's own numbers", "E1": "calibrated on the same figure or table",
    "E2": "the mechanism, with inputs from elsewhere", "E3": "against measurements by others",
    "E4": "against measurements that were not at hand",
}


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One run that a claim asks for: a study file of the paper's folder, keys set over it (JSON), and a seed. `world`: a
    function that builds the workload where no study can say it, as module:name, called with the seed and `given` (JSON)."""

    study: str
    settings: str
    seed: int
    world: str = ""
    given: str = "{}"


def run_of(study: str, settings: Mapping[str, Any], seed: int, world: str = "", **given: Any) -> Run:
    return Run(study, json.dumps(settings, sort_keys=True), seed, world, json.dumps(given, sort_keys=True))


@dataclass(frozen=True)
class Outcome:
    """What claims look at in a run. Times in s; `jct`: float64[programs], first arrival to last end."""

    jct: np.ndarray
    makespan: float
    parts: dict[str, float]  # mean seconds a program: queueing, prefill, decode, tool, reload
    hit_rate: float
    reuse: float  # of what the programs' own turns could reuse
    preemptions: int
    waiting: float  # requests that wait, mean over time
    ttft: float
    ttft_max: float
    held: float  # tokens of requests that run, mean over time
    unfinished: int  # programs whose client gave up, or that were refused

    @property
    def mean(self) -> float:
        return float(self.jct.mean())


def measure(result: RunResult) -> Outcome:
    """The outcome of a run."""
    from simcore.models.programs import PARTS

    programs, requests, summary = result.programs, result.requests, result.summary
    ideal = float(programs["ideal_reuse_tokens"].sum())
    whole = programs[programs["finished_turns"] == programs["turns"]]
    held = requests["service"] * (requests["input_tokens"] + requests["generated_tokens"] / 2)
    return Outcome(
        (programs["ended"] - programs["arrival"]).dropna().to_numpy(), summary["duration"],
        {part: float(whole[part].mean()) for part in PARTS}, summary["prefix_cache_hit_rate"],
        float(programs["reused_tokens"].sum()) / ideal if ideal else nan, summary["preemptions"],
        float(requests["queue_time"].sum()) / summary["duration"], float(requests["ttft"].mean()),
        float(requests["ttft"].max()), float(held.sum()) / summary["duration"], len(programs) - len(whole),
    )


Results = Mapping[Run, Outcome]


# --- statistics ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its t-interval; NaN ends where there is one seed."""

    value: float
    low: float = nan
    high: float = nan
    seeds: int = 1

    def __str__(self) -> str:
        if not isfinite(self.low):
            return shown(self.value)
        return f"{shown(self.value)} ({shown(self.low)} .. {shown(self.high)})"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and t-interval of one value a seed."""
    from scipy.special import stdtrit

    x, n = np.asarray(values, dtype=float), len(values)
    centre = float(x.mean())
    if n < 2:
        return Estimate(centre)
    half = float(stdtrit(n - 1, 1 - (1 - CONFIDENCE) / 2) * x.std(ddof=1) / np.sqrt(n))
    return Estimate(centre, centre - half, centre + half, n)


def ratio(a: Sequence[Outcome], b: Sequence[Outcome], of: Callable[[Outcome], float] = lambda o: o.mean) -> Estimate:
    """A over B, paired by seed."""
    return estimate([of(x) / of(y) for x, y in zip(a, b, strict=True)])


def mean(runs: Sequence[Outcome], of: Callable[[Outcome], float] = lambda o: o.mean) -> Estimate:
    return estimate([of(x) for x in runs])


# --- judging ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Null:
    """A policy without the paper's idea, and what it reaches. `must_fail`: the band is worth nothing if it is met."""

    name: str
    value: float
    in_band: bool
    must_fail: bool = True


@dataclass(frozen=True)
class Reading:
    """What is found under one reading of what the paper leaves open, or with one free parameter moved."""

    name: str
    value: float
    holds: bool
    free: bool = False  # a parameter moved by 20%, not a reading


@dataclass(frozen=True)
class Judged:
    """What a claim's runs say. `holds`: under the default reading; `contradicts`: the effect has the other sign."""

    found: Estimate
    holds: bool
    nulls: Sequence[Null] = ()
    readings: Sequence[Reading] = ()
    why: str = ""
    contradicts: bool = False

    @property
    def counts(self) -> bool:
        """Whether every null that has to miss the band does."""
        return not any(null.in_band and null.must_fail for null in self.nulls)

    @property
    def verdict(self) -> Verdict:
        """A claim agrees if it holds under the default reading and under at least half of all readings."""
        held, count = self.share(False)
        if self.holds and 2 * held >= count:
            return "agrees"
        return "contradicts" if self.contradicts else "differs"

    def share(self, free: bool) -> tuple[int, int]:
        """(held, all) of the readings, or of the moved parameters."""
        some = [reading for reading in self.readings if reading.free == free]
        return sum(reading.holds for reading in some), len(some)


@dataclass(frozen=True)
class Claim:
    """One claim of a paper. `runs` says what has to be played; `judge` is called with all of it. `missing`: why it cannot
    be run with this version ("" = it can)."""

    key: str
    text: str
    published: str
    band: str
    grade: str
    inputs: Mapping[str, str]  # measured, published, assumed -> what
    runs: Callable[[], Sequence[Run]]
    judge: Callable[[Results], Judged]
    missing: Callable[[], str] = field(default=lambda: "")


@dataclass(frozen=True)
class Shown:
    """A claim and what came of it; `judged` is None where it was not run, and `why_not` says why."""

    claim: Claim
    judged: Judged | None
    why_not: str = ""

    @property
    def verdict(self) -> Verdict:
        return self.judged.verdict if self.judged else "not run"

    def as_json(self) -> dict[str, Any]:
        """One entry of `claims` in the JSON of `simcore reproduce` (DESIGN, section 4)."""
        c, j = self.claim, self.judged
        out: dict[str, Any] = {
            "claim": f"{c.key}: {c.text}", "published": f"{c.published}; agrees if {c.band}", "grade": c.grade,
            "inputs": dict(c.inputs), "verdict": self.verdict, "why": j.why if j else self.why_not,
            "found": None, "low": None, "high": None, "interval": "", "null": [], "readings": None,
        }
        if j is None:
            return out
        held, count = j.share(False)
        free_held, free_count = j.share(True)
        return out | {
            "found": j.found.value, "low": j.found.low, "high": j.found.high, "interval": _interval(j.found),
            "null": [vars(null) for null in j.nulls],
            "readings": {
                "held": held, "of": count, "free_held": free_held, "free_of": free_count, "counts": j.counts,
                "each": [vars(reading) for reading in j.readings],
            },
        }


def _interval(found: Estimate) -> str:
    return f"95% t over {found.seeds} seeds" if found.seeds > 1 else "one seed"


# --- showing ---------------------------------------------------------------------------------------------------------

_STYLES = {"agrees": "green", "differs": "yellow", "contradicts": "red", "not run": "dim"}


def print_claims(console: Console, paper: str, shown_: Sequence[Shown]) -> None:
    """The table of verdicts, then each claim with its nulls, readings and inputs."""
    from rich.table import Table

    table = Table(title=f"simcore reproduce {paper}", title_justify="left")
    for name in ("", "claim", "published", "found", "grade", "readings", "+-20%", "verdict", "counts"):
        table.add_column(name, no_wrap=name not in ("claim", "published"))
    for item in shown_:
        c, j = item.claim, item.judged
        cells = [str(j.found), c.grade, _share(j.share(False)), _share(j.share(True))] if j else ["", c.grade, "", ""]
        counts = ("yes" if j.counts else "no") if j and j.holds else ""
        style = _STYLES[item.verdict]
        table.add_row(c.key, c.text, c.published, *cells, f"[{style}]{item.verdict}[/]", counts)
    console.print(table)
    for item in shown_:
        _print_claim(console, item)
    console.print("counts: whether the nulls that lack the paper's idea miss the band. "
                  + "; ".join(f"{g}: {text}" for g, text in GRADES.items()), style="dim", highlight=False, soft_wrap=True)


def _print_claim(console: Console, item: Shown) -> None:
    c, j = item.claim, item.judged

    def line(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    line(f"\n{c.key}: {c.text}", "bold")
    line(f"  {item.verdict}: {j.why if j else item.why_not}")
    line(f"  agrees if {c.band}; published: {c.published}")
    if j is not None:
        line(f"  found {j.found}, {_interval(j.found)}")
        for null in j.nulls:
            says = "in the band" if null.in_band else "misses the band"
            aside = "" if null.must_fail else " (shown, need not miss it)"
            line(f"  null {null.name}: {shown(null.value)}, {says}{aside}")
        for free, name in ((False, "readings"), (True, "+-20%")):
            each = [f"{r.name} {shown(r.value)}{'' if r.holds else ' !'}" for r in j.readings if r.free == free]
            if each:
                line(f"  {name} ({_share(j.share(free))} hold, ! = does not): {'; '.join(each)}")
    for kind, what in c.inputs.items():
        line(f"  {kind}: {what}", "dim")


def markdown(shown_: Sequence[Shown]) -> str:
    """The table of verdicts and, below it, what stands behind each, for a page of the docs."""
    lines = ["| | claim | published | found | grade | nulls | readings | +-20% | verdict | counts |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for item in shown_:
        c, j = item.claim, item.judged
        if j is None:
            cells = ["", c.grade, "", "", "", item.verdict, ""]
        else:
            nulls = "; ".join(f"{n.name}: {shown(n.value)}{' (in the band)' if n.in_band else ''}" for n in j.nulls)
            counts = ("yes" if j.counts else "no") if j.holds else ""
            shares = [_share(j.share(free)) for free in (False, True)]
            cells = [str(j.found), c.grade, nulls, *shares, f"**{item.verdict}**", counts]
        lines.append(f"| {c.key} | {' | '.join([c.text, c.published, *cells]).replace('<', '&lt;')} |")
    lines.append("")
    for item in shown_:
        why = (item.judged.why if item.judged else item.why_not).replace("<", "&lt;")
        lines.append(f"- **{item.claim.key}** agrees if {item.claim.band.replace('<', '&lt;')}. {why[:1].upper()}{why[1:]}.")
    return "\n".join(lines) + "\n"


def _share(held: tuple[int, int]) -> str:
    return f"{held[0]}/{held[1]}" if held[1] else "-"


def shown(value: float) -> str:
    """A number in three or four digits."""
    if value != value:
        return "N/A"
    if abs(value) == inf:
        return "inf"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
