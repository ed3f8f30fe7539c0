"""What the HTML report draws, from result tables: plain arrays and rows, no HTML."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from simcore.experiments.study import Arm, Study, label

if TYPE_CHECKING:
    import pandas as pd

MOST_PROGRAMS = 60
MOST_DECISIONS = 4000  # rows in the page, over all arms
CDF_POINTS = 400
TIME_POINTS, LOOKS = 300, 20
PARTING_COLUMNS = ("time", "kind", "replica", "request", "answer")

# Keys of a study that set how much arrives.
RATE_AXES = ("workload.generate.rate", "workload.start.rate", "workload.start.workers", "workload.clone", "workload.thin")

# Columns of the steps table that would split the KV pool further; a table without them is drawn without them.
CACHED, PINNED = "cached_free_blocks", "pinned_blocks"

FEWEST_FOR_KNEE = 4
KNEE_RISE = 1.5  # latency at the highest rate over that at the lowest, below which no knee is named
KNEE_RULE = (
    "The knee is the point furthest below the straight line from the first to the last point, with rate and latency each "
    f"scaled to 0..1 (Kneedle, Satopää et al. 2011); it needs {FEWEST_FOR_KNEE} points and a rise by {KNEE_RISE:g} times."
)


def cdf(values: np.ndarray, most: int = CDF_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """(values above 0, ascending; share at or below each), at most `most` points, the first and the last among them."""
    v = np.sort(values[np.isfinite(values) & (values > 0)])
    if not len(v):
        return v, v
    rank = np.arange(len(v)) if len(v) <= most else np.unique(np.linspace(0, len(v) - 1, most).round().astype(int))
    return v[rank], (rank + 1) / len(v)


@dataclass(frozen=True)
class Occupancy:
    """KV blocks by state over all replicas, float64[times] each; they sum to `usable`. `notes`: what is not told apart."""

    times: np.ndarray  # middles of equal spans
    states: dict[str, np.ndarray]  # held, pinned, cached, free: those that are known
    usable: int
    of_replica: dict[int, np.ndarray] = field(default_factory=dict)  # held share of each replica's pool
    notes: tuple[str, ...] = ()


def occupancy(
    steps: pd.DataFrame, decisions: pd.DataFrame, requests: pd.DataFrame, *, usable: int, replicas: int, block_size: int,
    points: int = TIME_POINTS,
) -> Occupancy:
    """The pool's states from the steps table, means over `points` equal spans of time (of LOOKS looks each); a state holds
    until the next sampled step of its replica. `usable`: blocks a replica. Without the column of pinned blocks they are
    taken from the decision log."""
    if not len(steps):
        return Occupancy(np.zeros(0), {}, usable * replicas, notes=("The steps table is empty: no step was sampled.",))
    times = (np.arange(points * LOOKS) + 0.5) * (float(steps["time"].max()) / (points * LOOKS))
    columns = {name: np.zeros(len(times)) for name in ("not_free", CACHED, PINNED)}
    has = {name: name in steps for name in (CACHED, PINNED)}
    of_replica = {}
    for replica in range(replicas):
        own = steps[steps["replica"] == replica]
        at = np.searchsorted(own["time"].to_numpy(), times, side="right") - 1
        seen = at >= 0
        not_free = np.zeros(len(times))
        not_free[seen] = usable - own["free_blocks"].to_numpy()[at[seen]]
        of_replica[replica] = _mean_of(not_free, points) / max(usable, 1)
        columns["not_free"] += not_free
        for name in (CACHED, PINNED):
            if has[name]:
                columns[name][seen] += own[name].to_numpy()[at[seen]]
    pinned = columns[PINNED] if has[PINNED] else np.minimum(
        pinned_by_log(decisions, requests, block_size, times), columns["not_free"])
    states = {"held": columns["not_free"] - pinned, "pinned": pinned, "cached": columns[CACHED]}
    states["free"] = usable * replicas - columns["not_free"] - states["cached"]
    notes = [f"Means over {points} equal spans of time. Between sampled steps, and while a replica is idle, its last sample "
             "stands (sample_every: 0 samples every step)."]
    if not has[CACHED]:
        del states["cached"]
        notes.append("Free includes blocks that are free and still hold a findable prefix (cached-free): the steps table "
                     f"has no column {CACHED}.")
    if not has[PINNED]:
        notes.append("Pinned comes from the decision log (blocks of the turns whose pins stand; one that two pins share "
                     f"counts twice): the steps table has no column {PINNED}.")
    states = {name: _mean_of(values, points) for name, values in states.items()}
    return Occupancy(_mean_of(times, points), states, usable * replicas, of_replica, tuple(notes))


def _mean_of(values: np.ndarray, points: int) -> np.ndarray:
    return values.reshape(points, LOOKS).mean(axis=1)


def pinned_by_log(decisions: pd.DataFrame, requests: pd.DataFrame, block_size: int, times: np.ndarray) -> np.ndarray:
    """Blocks under pins at each time, float64[times]: `retention` decisions pin a turn's blocks, `unpin` lets go of its
    program's."""
    log = decisions[((decisions["kind"] == "retention") & decisions["answer"].str.startswith("pin until"))
                    | (decisions["kind"] == "unpin")]
    if not len(log):
        return np.zeros(len(times))
    programs = requests["program"].to_numpy()
    tokens = (requests["input_tokens"] + requests["generated_tokens"]).to_numpy() - 1  # the last token's KV is never written
    standing: dict[tuple[int, int], int] = {}
    at, change = [], []
    for time, kind, replica, request in log[["time", "kind", "replica", "request"]].itertuples(index=False, name=None):
        key = (replica, request if kind == "unpin" else int(programs[request]))
        before = standing.pop(key, 0)
        after = 0
        if kind == "retention":
            after = standing[key] = -(-int(tokens[request]) // block_size)
        at.append(time)
        change.append(after - before)
    order = np.argsort(at, kind="stable")
    total = np.concatenate(([0.0], np.cumsum(np.array(change, dtype=float)[order])))
    return total[np.searchsorted(np.array(at)[order], times, side="right")]


def replica_rows(requests: pd.DataFrame, replicas: int) -> list[dict[str, Any]]:
    """Of each replica: requests routed to it, prefix hit rate (NaN if it admitted none), preemptions, tokens, mean TTFT (s).
    """
    rows = []
    for replica in range(replicas):
        own = requests[requests["replica"] == replica]
        admitted = own[own["admitted"].notna()]
        prompt = int(admitted["input_tokens"].sum())
        rows.append({
            "replica": replica, "requests": len(own), "finished": int((own["status"] == "finished").sum()),
            "hit_rate": int(admitted["cached_tokens"].sum()) / prompt if prompt else float("nan"),
            "preemptions": int(own["preemptions"].sum()), "output_tokens": int(own["generated_tokens"].sum()),
            "ttft": float(own["ttft"].mean()) if own["ttft"].notna().any() else float("nan"),
        })
    return rows


@dataclass(frozen=True)
class Waterfall:
    """`rows`: (label, words) a program; `parts`: state -> (row, start, stop), s since the program came; `longest`: s."""

    rows: list[tuple[str, str]]
    parts: dict[str, list[tuple[int, float, float]]]
    longest: float
    of: int


def waterfall(requests: pd.DataFrame, most: int = MOST_PROGRAMS) -> Waterfall:
    """The first programs, turn by turn: queueing, reload (the end of the first wait), prefill, decode (waits after
    preemptions included), and the time between turns. A turn that did not end is drawn as far as it came."""
    parts: dict[str, list[tuple[int, float, float]]] = {k: [] for k in ("tool", "queueing", "reload", "prefill", "decode")}
    rows: list[tuple[str, str]] = []
    came = requests[requests["arrival"].notna()]
    numbers = np.unique(came["program"].to_numpy())
    longest = 0.0
    columns = ["arrival", "admitted", "first_token", "ended", "reload_time", "preemptions", "status"]
    for program in numbers[:most].tolist():
        turns = came[came["program"] == program].sort_values(["arrival", "request"], kind="stable")
        zero = float(turns["arrival"].iloc[0])
        k, until = len(rows), zero
        for arrival, admitted, first, ended, reload, _, _ in turns[columns].itertuples(index=False, name=None):
            if arrival > until:
                parts["tool"].append((k, until - zero, arrival - zero))
            marks = [arrival, admitted, first, ended]
            known = [m for m in marks if m == m]
            for name, a, b in zip(("queueing", "prefill", "decode"), marks, marks[1:], strict=False):
                if a == a and b == b and b > a:
                    cut = min(reload, b - a) if name == "queueing" and reload == reload else 0.0
                    parts[name].append((k, a - zero, b - cut - zero))
                    if cut > 0:
                        parts["reload"].append((k, b - cut - zero, b - zero))
            until = max(until, *known)
        longest = max(longest, until - zero)
        done = int((turns["status"] == "finished").sum())
        rows.append((str(program), f"program {program}: came at {zero:.3f} s, {len(turns)} turns, {done} finished, "
                                   f"{int(turns['preemptions'].sum())} preemptions, {until - zero:.3f} s"))
    return Waterfall(rows, parts, longest, len(numbers))


def parting_place(a: pd.DataFrame, b: pd.DataFrame) -> int | None:
    """The row at which two decision logs differ first; None if they are equal."""
    n = min(len(a), len(b))
    differs = np.zeros(n, dtype=bool)
    for name in PARTING_COLUMNS:
        differs |= a[name].to_numpy()[:n] != b[name].to_numpy()[:n]
    found = np.flatnonzero(differs)
    return int(found[0]) if len(found) else None if len(a) == len(b) else n


def decision_data(logs: dict[str, pd.DataFrame], most: int = MOST_DECISIONS) -> dict[str, Any]:
    """The first decisions of each arm, at most `most` together: rows of (arm, time, kind, replica, request, answer), with
    numbers for texts."""
    each = max(1, most // max(1, len(logs)))
    kinds: dict[str, int] = {}
    answers: dict[str, int] = {}
    rows = []
    for k, log in enumerate(logs.values()):
        for time, kind, replica, request, answer in log[list(PARTING_COLUMNS)].head(each).itertuples(index=False, name=None):
            rows.append([k, round(float(time), 9), kinds.setdefault(kind, len(kinds)), int(replica), int(request),
                         answers.setdefault(answer, len(answers))])
    return {"arms": list(logs), "kinds": list(kinds), "answers": list(answers), "rows": rows}


@dataclass(frozen=True)
class Point:
    """An arm on the throughput-latency plane. `rate`: its value of the rate axis (NaN without one); `series`: the values of
    its other axes; `metrics`: field of the summary -> (mean, low, high), NaN where there is none."""

    label: str
    series: str
    rate: float
    metrics: dict[str, tuple[float, float, float]]


def rate_axis(study: Study) -> str | None:
    """The axis of the study that sets how much arrives and has the most values, if there is one."""
    found = [axis for axis in RATE_AXES if len(study.compare.vary.get(axis, ())) > 1
             and all(type(v) in (int, float) for v in study.compare.vary[axis])]
    return max(found, key=lambda axis: len(study.compare.vary[axis])) if found else None


def arm_axes(study: Study, arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Each arm's value of each axis, in the order in which a study makes arms of its axes."""
    axes = study.compare.vary
    return [dict(zip(axes, values, strict=True)) for _, values in zip(arms, itertools.product(*axes.values()), strict=True)]


def points_of_runs(study: Study, arms: Sequence[Arm], summaries: Sequence[Sequence[dict[str, Any]]]) -> list[Point]:
    """An arm's mean over its seeds; a number that some seed lacks is left out."""
    axis = rate_axis(study)
    out = []
    for arm, axes, of_arm in zip(arms, arm_axes(study, arms), summaries, strict=True):
        metrics = {}
        for name in of_arm[0]:
            values = [summary.get(name) for summary in of_arm]
            if all(type(v) in (int, float) for v in values):
                metrics[name] = (float(np.mean([float(v or 0) for v in values])), float("nan"), float("nan"))
        out.append(_point(arm.label, axes, axis, metrics))
    return out


def points_of_sweep(study: Study, arms: Sequence[dict[str, Any]]) -> list[Point]:
    """From `Sweep.arms()`."""
    axis = rate_axis(study)
    nan = float("nan")
    return [_point(arm["arm"], arm["axes"], axis, {
        name: (m["mean"], m["low"] if m["low"] is not None else nan, m["high"] if m["high"] is not None else nan)
        for name, m in arm["metrics"].items() if m["mean"] is not None}) for arm in arms]


def _point(name: str, axes: dict[str, Any], axis: str | None, metrics: dict[str, tuple[float, float, float]]) -> Point:
    others = ", ".join(f"{key.split('.')[-1]}={label(key, value)}" for key, value in axes.items() if key != axis)
    return Point(name, others if axis else name, float(axes[axis]) if axis else float("nan"), metrics)


def knee(rate: np.ndarray, latency: np.ndarray) -> tuple[int | None, str]:
    """The place of the knee of a latency curve over ascending rates, and why there is none (see KNEE_RULE)."""
    if len(rate) < FEWEST_FOR_KNEE:
        return None, f"{len(rate)} points; a knee needs {FEWEST_FOR_KNEE}"
    if not latency[-1] > KNEE_RISE * latency[0]:
        return None, f"latency rises {latency[-1] / latency[0]:.2f} times over these rates; no knee within them"
    x = (rate - rate[0]) / (rate[-1] - rate[0])
    y = (latency - latency.min()) / (latency.max() - latency.min())
    chord = y[0] + (y[-1] - y[0]) * x
    below = chord - y
    place = int(np.argmax(below))
    if below[place] <= 0.05:
        return None, "latency rises in nearly a straight line; no knee"
    return place, ""
