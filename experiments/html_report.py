"""One self-contained HTML file about a run, a comparison or a sweep: it opens from a disk and loads nothing.

Equal results give equal bytes, but for what stands between the marks of sim_speed (html_report_page.SPEED_BEGINS and
SPEED_ENDS). What is drawn over time is of each arm's first seed; latency distributions pool all seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simcore.experiments import html_report_data as from_tables
from simcore.experiments.html_report_charts import Series, area_chart, bar_rows, forest, line_chart
from simcore.experiments.html_report_page import (
    SPEED_BEGINS,
    SPEED_ENDS,
    bullets,
    data,
    figures,
    folded,
    keys,
    legend,
    page,
    paragraphs,
    table,
    terminal_table,
)
from simcore.experiments.report import differences_table, metrics_table, number, window_lines
from simcore.experiments.study import Arm, Study
from simcore.files import write_whole
from simcore.models.steady import window_line

if TYPE_CHECKING:
    import pandas as pd

    from simcore.experiments.compare import Comparison
    from simcore.models.serving import RunResult

MOST_REPLICAS = 64
MOST_ARMS = 8  # drawn one by one (KV occupancy, programs); all of them are in what is drawn together
MOST_LINES = 16  # replicas in one chart
MOST_FOREST = 8  # metrics of the chart of differences; all of them are in the table
STATES = [("held", "held by requests"), ("pinned", "pinned"), ("cached", "free, still findable (cached-free)"),
          ("free", "free")]
PARTS = [("queueing", "queueing"), ("reload", "reload from host memory"), ("prefill", "prefill"), ("decode", "decode"),
         ("tool", "between turns: tools, people")]
_SPEED = [
    ("wall_seconds", "Wall (s)"), ("cpu_seconds", "CPU (s)"), ("requests_per_cpu_second", "Requests per CPU s"),
    ("output_tokens_per_cpu_second", "Output tokens per CPU s"), ("real_time_factor", "Simulated s per wall s"),
    ("cpu_us_per_step", "CPU us per step"), ("steps_per_request", "Steps per request"), ("planned_share", "Share planned"),
]

Section = tuple[str, str, str]


@dataclass(frozen=True)
class _Of:
    """An arm with its runs, its facts (`output.study_facts`), and the first request that counts (None: no mean is shown)."""

    arm: Arm
    results: Sequence[RunResult]
    facts: dict[str, Any]
    cut: int | None = 0

    @property
    def first(self) -> RunResult:
        return self.results[0]

    @property
    def name(self) -> str:
        return self.arm.label


def write_report(
    path: Path, comparison: Comparison, facts: Sequence[dict[str, Any]], assumed: Sequence[str] = (), *, partial: str = "",
) -> None:
    """The report of a comparison. `facts`: `output.study_facts` of each arm; `assumed`: the lines that the terminal shows;
    `partial`: what is missing, if the comparison was interrupted."""
    study = comparison.file.study
    cut = from_windows(comparison)
    arms = [_Of(arm, results, of, cut if comparison.windows[arm.label].shown else None)
            for arm, results, of in zip(comparison.arms, comparison.results, facts, strict=True)]
    sections = [
        ("headline", "Headline", _comparison_headline(comparison, partial)),
        ("assumed", "Assumed", _assumed(assumed)),
        ("differences", "Differences", _differences(comparison)),
        *_common(study, arms, comparison.parting),
    ]
    seeds = study.seeds
    under = (f"simcore comparison: {len(arms)} arms, {_count(len(seeds), 'seed')}; what is drawn over time is of seed "
             f"{seeds[0]}; engine vLLM {study.engine.version}")
    write_whole(path, page(study.name, under, sections))


def write_run_report(
    path: Path, study: Study, result: RunResult, facts: dict[str, Any], assumed: Sequence[str] = (), *, label: str = "",
    seed: int | None = None, oracles: Sequence[str] = (), partial: str = "",
) -> None:
    """The report of one run; see `write_report`. `label`: the arm's."""
    seed = study.seeds[0] if seed is None else seed
    of = _Of(Arm(label or study.name, study), [result], facts, result.summary["window"]["cut"])
    sections = [
        ("headline", "Headline", _run_headline(of, oracles, partial)),
        ("assumed", "Assumed", _assumed(assumed)),
        *_common(study, [of], {}),
    ]
    under = f"simcore run: {of.name}, seed {seed}; engine vLLM {study.engine.version}"
    write_whole(path, page(study.name, under, sections))


def write_sweep_report(
    path: Path, study: Study, arms: Sequence[dict[str, Any]], assumed: Sequence[str] = (), *, partial: str = "",
    speed: dict[str, Any] | None = None,
) -> None:
    """The report of a sweep. `arms`: `Sweep.arms()`; `speed`: facts about this start of it, marked as such."""
    from simcore.experiments.sweep_report import summary_field, sweep_table, unsteady

    field = summary_field(study.compare.headline)
    less = field not in ("slo_attainment", "prefix_cache_hit_rate")
    judged = [(arm["metrics"][field], arm["arm"]) for arm in arms if arm["metrics"].get(field, {}).get("mean") is not None]
    lines = []
    if judged:
        best = (min if less else max)(judged, key=lambda of: of[0]["mean"])
        interval = "" if best[0]["low"] is None else f", 95% interval {best[0]['low']:,.4g} to {best[0]['high']:,.4g}"
        lines.append(f"Lowest {field} of {len(judged)} arms: {best[1]} with {best[0]['mean']:,.4g}{interval}" if less else
                     f"Highest {field} of {len(judged)} arms: {best[1]} with {best[0]['mean']:,.4g}{interval}")
        lines.append("Arms of a sweep are not paired: simcore compare says whether a difference is shown.")
    else:
        lines.append(f"No arm has a {field}.")
    shown = terminal_table(sweep_table(study.name, list(arms), with_slo=True), words=1)
    not_steady = [f"{arm['arm']}: {text}" for arm in arms if (text := unsteady(arm["windows"]))]
    sections = [
        ("headline", "Headline", _partial(partial) + paragraphs(lines[:1], "verdict") + paragraphs(lines[1:])),
        ("assumed", "Assumed", _assumed(assumed)),
        ("metrics", "Metrics", shown + (bullets(not_steady) if not_steady else "")),
        ("throughput", "Throughput and latency", _throughput(study, from_tables.points_of_sweep(study, arms))),
        *([("speed", "Speed of the simulator", _marked(paragraphs(f"{k}: {v}" for k, v in sorted(speed.items()))))]
          if speed else []),
    ]
    under = f"simcore sweep: {_count(len(arms), 'arm')}; engine vLLM {study.engine.version}"
    write_whole(path, page(study.name, under, sections))


def from_windows(comparison: Comparison) -> int:
    """The first request that counts in every arm."""
    from simcore.experiments.compare import common_cut

    return common_cut(comparison.windows.values())


def _common(study: Study, arms: Sequence[_Of], parting: dict[str, str]) -> list[Section]:
    return [
        ("metrics", "Metrics", _metrics(arms)),
        ("latency", "Latency distributions", _latency(arms)),
        ("throughput", "Throughput and latency", _throughput(study, from_tables.points_of_runs(
            study, [of.arm for of in arms], [[run.summary for run in of.results] for of in arms])
            if len(arms) > 1 else _alone(arms[0]))),
        ("kv", "KV occupancy over time", _occupancy(arms)),
        ("replicas", "Replicas: hit rate and preemptions", _replicas(arms)),
        ("programs", "Programs, turn by turn", _programs(arms)),
        ("parting", "Where policies part", _parting(arms, parting)),
        ("decisions", "Decision log", _decisions(arms)),
        ("speed", "Speed of the simulator", _speed(arms)),
    ]


def _alone(of: _Of) -> list[from_tables.Point]:
    nan = float("nan")
    return [from_tables.Point(of.name, of.name, nan, {
        k: (v, nan, nan) for k, v in of.first.summary.items() if type(v) in (int, float)})]


# --- sections ---------------------------------------------------------------------------------------------------------


def _partial(said: str) -> str:
    return f'<p class="warn">PARTIAL RESULT: {escape(said)}</p>' if said else ""


def _comparison_headline(comparison: Comparison, partial: str) -> str:
    out = [_partial(partial), paragraphs(comparison.headline[:1], "verdict"), paragraphs(comparison.headline[1:])]
    out += [f'<p class="warn">ORACLE: {escape(name)} uses the true future ({escape(", ".join(found))})</p>'
            for name, found in comparison.oracles.items()]
    for name, ds in comparison.differences.items():
        if left_out := max(d.left_out for d in ds):
            out.append(f'<p class="warn">Left out of {escape(name)}\'s pairs: {left_out:,} that did not finish in both '
                       "runs; a policy that refuses the slow ones looks fast.</p>")
    return f'<div class="card">{"".join(out)}{paragraphs(window_lines(comparison), "dim")}</div>'


def _run_headline(of: _Of, oracles: Sequence[str], partial: str) -> str:
    s = of.first.summary
    parts = [f"{s['completed']:,} of {s['completed'] + s['failed']:,} requests finished in {s['duration']:,.4g} s"]
    for words, key in (("TTFT", "ttft"), ("TPOT", "tpot"), ("E2E", "e2el")):
        mean, p99 = s.get(f"mean_{key}_ms"), s.get(f"p99_{key}_ms")
        if mean is not None and mean == mean:
            parts.append(f"{words} mean {number(mean)} ms, p99 {number(p99)} ms")
    if s.get("mean_jct_ms") is not None and s["mean_jct_ms"] == s["mean_jct_ms"]:
        parts.append(f"JCT mean {number(s['mean_jct_ms'], 1e-3)} s")
    lines = ["One run has no interval: simcore compare pairs it with another and says how sure the difference is.",
             window_line(s["window"])]
    oracle = "".join(f'<p class="warn">ORACLE: {escape(name)} uses the true future</p>' for name in oracles)
    return (f'<div class="card">{_partial(partial)}{paragraphs(["; ".join(parts) + "."], "verdict")}{oracle}'
            f'{paragraphs(lines, "dim")}</div>')


def _assumed(lines: Sequence[str]) -> str:
    return bullets(lines) if lines else paragraphs(["Nothing was listed."], "dim")


def _differences(comparison: Comparison) -> str:
    first = comparison.arms[0].label
    names = [arm.label for arm in comparison.arms]
    numbers = {name: k for k, name in enumerate(names)}
    count = len(next(iter(comparison.differences.values())))
    rows = []
    for k in range(count):
        of = []
        for name, ds in comparison.differences.items():
            d = ds[k]
            share = 100 / abs(d.a) if d.a else float("nan")
            low, high = (float("nan"),) * 2 if d.why else (d.low * share, d.high * share)
            middle, *ends = (number(value, sign=True) for value in (d.difference * share, low, high))
            of.append((numbers[name], d.difference * share, low, high, f"{name}: {middle}% ({' .. '.join(ends)})"))
        rows.append((f"{next(iter(comparison.differences.values()))[k].label}", of))
    wanted = [comparison.file.study.compare.headline, "jct_mean", "jct_p99", "ttft_mean", "ttft_p99", "tpot_mean",
              "e2e_mean", "e2e_p99", "hit_rate", "goodput_share"]
    order = {d.metric: k for k, d in enumerate(next(iter(comparison.differences.values())))}
    chosen = [rows[order[name]] for name in dict.fromkeys(wanted) if name in order][:MOST_FOREST]
    chart = forest(chosen, title="Differences", x_label="difference (% of the first's value), 95% intervals")
    reasons = list(dict.fromkeys(f"No interval: {d.why}" for ds in comparison.differences.values() for d in ds if d.why))
    said = terminal_table(differences_table(comparison), words=1, markup=True)
    pairing = f"Paired with {first} by seed and request. Green: better, red: worse, both with 95% confidence."
    beside = f"<figure>{said}</figure></div>" if len(names) <= 4 else f"</div>{said}"
    return (legend(names) + f'<div class="charts"><figure>{chart}</figure>{beside}' + bullets(reasons)
            + paragraphs([pairing], "dim"))


def _metrics(arms: Sequence[_Of]) -> str:
    shown = metrics_table("", {of.name: of.first.summary for of in arms})
    return terminal_table(shown, words=2 if len(arms) > 1 else 1)


def _latency(arms: Sequence[_Of]) -> str:
    programs = all("mean_jct_ms" in of.first.summary for of in arms)
    panels = [*([("programs", "jct", "Job completion time", "JCT (s)", 1.0)] if programs else ()),
              ("requests", "ttft", "Time to first token", "TTFT (s)", 1.0),
              ("requests", "tpot", "Time per output token", "TPOT (ms)", 1e3),
              ("requests", "e2e", "Request latency, end to end", "E2E (s)", 1.0)]
    charts = []
    for name, column, caption, x_label, factor in panels:
        series = []
        for k, of in enumerate(arms):
            if of.cut is None:
                continue
            counted = [run.tables[name].iloc[of.cut if name == "requests" else 0 :] for run in of.results]
            x, y = from_tables.cdf(np.concatenate([frame[column].to_numpy(dtype=float) for frame in counted]) * factor)
            series.append(Series(of.name, x, y, k))
        charts.append((caption, line_chart(series, title=caption, x_label=x_label, y_label=f"share of {name}", x_log=True,
                                           steps=True, y_high=1.0)))
    notes = [f"{of.name} shows no steady state and no distribution" for of in arms if of.cut is None]
    if any(of.cut for of in arms):
        notes.append("Only requests of the window count here; everything over time is of the whole run.")
    notes.append("Values of 0 have no place on a logarithmic axis and are left out; what did not finish has no value.")
    return legend([of.name for of in arms]) + figures(charts) + paragraphs(notes, "dim")


def _throughput(study: Study, points: Sequence[from_tables.Point]) -> str:
    """Latency over throughput; over the values of a rate axis a curve, with its knee."""
    axis = from_tables.rate_axis(study) if len(points) > 1 else None
    names = list(dict.fromkeys(point.series for point in points))
    latencies = [("mean_ttft_ms", "TTFT mean (ms)"), ("mean_e2el_ms", "E2E mean (ms)"), ("p99_ttft_ms", "TTFT p99 (ms)")]
    if all("mean_jct_ms" in point.metrics for point in points):
        latencies[1] = ("mean_jct_ms", "JCT mean (ms)")
    charts, notes, left_out = [], [], []
    for name, words in latencies:
        series = []
        for k, of in enumerate(names):
            own = [p for p in points if p.series == of]
            usable = [p for p in own if _finite(p, name) and _finite(p, "output_throughput")]
            left_out += [p.label for p in own if p not in usable]
            usable.sort(key=lambda p: (p.rate, p.metrics["output_throughput"][0]))
            if not usable:
                continue
            y, low, high = np.array([p.metrics[name] for p in usable]).T
            x = np.array([p.metrics["output_throughput"][0] for p in usable])
            mark = None
            if axis:
                rates = np.array([p.rate for p in usable])
                mark, why = from_tables.knee(rates, y)
                at = f"knee at {axis}={rates[mark]:g}, {x[mark]:,.4g} tokens/s" if mark is not None else why
                notes.append(f"{words}{', ' + of if of else ''}: {at}")
            said = [f"{f'{axis}={p.rate:g}, ' if axis else ''}{a:,.4g} tokens/s, {b:,.4g} ms"
                    for p, a, b in zip(usable, x, y, strict=True)]
            series.append(Series(of or study.name, x, y, k, low, high, said, mark))
        charts.append((words, line_chart(series, title=f"{words} over output throughput", x_label="output tokens/s",
                                         y_label=words, points=True, x_zero=True)))
    if not axis:
        notes.append("One point an arm: a curve and its knee need an axis that sets how much arrives, one of "
                     + ", ".join(from_tables.RATE_AXES) + ".")
    if left_out:
        notes.append(f"Without a point, since there is no such mean: {', '.join(dict.fromkeys(left_out))}")
    rule = paragraphs([from_tables.KNEE_RULE + " A ring marks it."], "dim") if axis else ""
    return legend([name or study.name for name in names]) + figures(charts) + bullets(notes) + rule


def _finite(point: from_tables.Point, name: str) -> bool:
    return name in point.metrics and bool(np.isfinite(point.metrics[name][0]))


def _occupancy(arms: Sequence[_Of]) -> str:
    charts, notes = [], _first_arms(arms)
    drawn = []
    for of in arms[:MOST_ARMS]:
        usable = int(of.facts["kv_pool"]["num_gpu_blocks"]) - 1  # block 0 is the engine's null block
        study = of.arm.study
        drawn.append(from_tables.occupancy(
            of.first.steps, of.first.decisions, of.first.requests, usable=usable, replicas=study.cluster.replicas,
            block_size=study.engine.block_size))
        notes += drawn[-1].notes
    top = _top([100 * (1 - found.states["free"] / max(found.usable, 1)) for found in drawn if found.states])
    top_of_one = _top([100 * share for found in drawn for share in found.of_replica.values()])
    for of, found in zip(arms, drawn, strict=False):
        layers = [(name, 100 * found.states[name] / max(found.usable, 1)) for name, _ in STATES if name in found.states]
        charts.append((f"{of.name}: all replicas, {found.usable:,} blocks", area_chart(
            found.times, layers, title=f"KV occupancy of {of.name}", x_label="simulated time (s)",
            y_label="% of the KV blocks", top=top)))
        if len(found.of_replica) > 1:
            lines = [Series(f"replica {r}", found.times, 100 * share, r)
                     for r, share in list(found.of_replica.items())[:MOST_LINES]]
            first = f", the first {MOST_LINES}" if len(found.of_replica) > MOST_LINES else ""
            charts.append((f"{of.name}: not free, by replica{first}", line_chart(
                lines, title=f"KV blocks not free by replica under {of.name}", x_label="simulated time (s)",
                y_label="% of the replica's blocks", steps=True, y_high=top_of_one, x_high=float(found.times[-1]),
                x_zero=True)))
    if min(top, top_of_one) < 100:
        notes.insert(0, f"The axes end at {top:g}% of all blocks and {top_of_one:g}% of a replica's." if top_of_one < 100
                     else f"The axes of all blocks end at {top:g}%.")
    present = [item for item in STATES
               if item[0] == "free" or any(f.states[item[0]].any() for f in drawn if item[0] in f.states)]
    return keys(present) + figures(charts) + paragraphs(dict.fromkeys(notes), "dim")


def _top(lines: Sequence[np.ndarray]) -> float:
    """Where an axis in percent ends."""
    peak = max((float(line.max()) for line in lines if len(line)), default=100.0)
    return next(t for t in (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0) if t >= min(1.1 * peak, 100.0))


def _first_arms(arms: Sequence[_Of]) -> list[str]:
    return [f"The first {MOST_ARMS} of {len(arms)} arms."] if len(arms) > MOST_ARMS else []


def _replicas(arms: Sequence[_Of]) -> str:
    rows, ends = [], []
    tables = [from_tables.replica_rows(of.first.requests, of.arm.study.cluster.replicas) for of in arms]
    top = max(row["preemptions"] for found in tables for row in found)
    for of, found in zip(arms, tables, strict=True):
        for row in found[:MOST_REPLICAS]:
            rate = row["hit_rate"]
            preempted = _bar(row["preemptions"] / top if top else 0.0, f"{row['preemptions']:,}")
            rows.append([of.name, str(row["replica"]), f"{row['requests']:,}", f"{row['finished']:,}",
                         number(row["ttft"], 1e3), _bar(rate, f"{number(rate, 100)} %"), preempted,
                         f"{row['output_tokens']:,}"])
            ends.append(False)
        ends[-1] = True
    headings = ["Policy", "Replica", "Requests", "Finished", "TTFT mean (ms)", "Prefix hit rate", "Preemptions",
                "Output tokens"]
    more = [f"{of.name}: the first {MOST_REPLICAS} of {of.arm.study.cluster.replicas} replicas"
            for of in arms if of.arm.study.cluster.replicas > MOST_REPLICAS]
    return table(headings, rows, numbers=(2, 3, 4, 7), raw=(5, 6), ends=ends) + paragraphs(more, "dim")


def _bar(share: float, text: str) -> str:
    width = max(0.0, min(1.0, share)) * 80 if share == share else 0.0
    return f'<span class="bar" style="width:{width:.0f}px"></span>{escape(text)}'


def _programs(arms: Sequence[_Of]) -> str:
    charts, notes = [], _first_arms(arms)
    arms = arms[:MOST_ARMS]
    drawn = [from_tables.waterfall(of.first.requests) for of in arms]
    longest = max((w.longest for w in drawn), default=0.0)
    for of, found in zip(arms, drawn, strict=True):
        parts = [(name, found.parts[name]) for name in ("tool", "queueing", "reload", "prefill", "decode")]
        chart, narrow = bar_rows(found.rows, parts, title=f"Programs under {of.name}",
                                 x_label="s since the program came", longest=longest)
        charts.append((of.name, chart))
        if narrow:
            notes.append(f"{of.name}: {narrow:,} pieces are too short to be seen at this scale and are not drawn.")
    most = from_tables.MOST_PROGRAMS
    if any(w.of > len(w.rows) for w in drawn):
        notes.insert(0, f"The first {most} of {max(w.of for w in drawn):,} programs, the same scale for every policy.")
    notes.append("Turns that overlap are drawn over each other. A wait after a preemption counts as decode here, since the "
                 "requests table does not say when it was. A program of one turn is a request.")
    return keys(PARTS) + figures(charts) + paragraphs(notes, "dim")


def _parting(arms: Sequence[_Of], parting: dict[str, str], around: int = 5) -> str:
    if not parting:
        return paragraphs(["One run: nothing to part from."], "dim")
    out = []
    first = arms[0]
    for of in arms[1:]:
        out.append(f"<h3>{escape(of.name)} against {escape(first.name)}</h3>" + paragraphs([parting[of.name]]))
        a, b = first.first.decisions, of.first.decisions
        place = from_tables.parting_place(a, b)
        if place is None:
            continue
        begin = max(0, place - around)
        end = min(max(len(a), len(b)), place + around + 1)
        rows = [[str(k), *_decision(a, k), *_decision(b, k)] for k in range(begin, end)]
        columns = ("time (s)", "what", "answer")
        headings = ["Decision", *(f"{name}: {what}" for name in (first.name, of.name) for what in columns)]
        out.append(folded(f"Decisions {begin} to {begin + len(rows) - 1} of both runs", table(
            headings, rows, numbers=(0, 1, 4), here=place - begin)))
    return "".join(out)


def _decision(log: pd.DataFrame, k: int) -> list[str]:
    if k >= len(log):
        return ["", "", ""]
    row = log.iloc[k]
    of = "program" if row["kind"] == "unpin" or str(row["answer"]).startswith("extend") else "request"
    return [f"{row['time']:.6f}", f"{row['kind']}, replica {row['replica']}, {of} {row['request']}", str(row["answer"])]


def _decisions(arms: Sequence[_Of]) -> str:
    logs = {of.name: of.first.decisions for of in arms}
    held = from_tables.decision_data(logs)
    total = sum(len(log) for log in logs.values())
    said = (f"The page holds {len(held['rows']):,} of {total:,} decisions: the first of each policy's first seed, at most "
            f"{from_tables.MOST_DECISIONS:,} together; all of them are in the decisions tables beside it.")
    return (
        paragraphs([said], "dim") + '<p><label>Filter <input id="decision-filter" type="search" placeholder="words, all of '
        'which must occur, e.g. victim replica 0"></label> <span id="decision-said" class="dim"></span></p>'
        + table(["Policy", "Time (s)", "Kind", "Replica", "Request (unpin, extend: program)", "Answer"], [],
                numbers=(1, 3, 4), body="decision-rows")
        + "<noscript><p>The rows of the log need the page's script.</p></noscript>" + data("decision-data", held))


def _speed(arms: Sequence[_Of]) -> str:
    rows = []
    for of in arms:
        for seed, run in zip(of.arm.study.seeds, of.results, strict=False):
            rows.append([of.name, str(seed), *(number(run.speed.get(key)) for key, _ in _SPEED),
                         "; ".join(run.speed.get("why_not_planned", ()))])
    headings = ["Policy", "Seed", *(words for _, words in _SPEED), "Why not planned"]
    return _marked(table(headings, rows, numbers=range(1, len(_SPEED) + 2)))


def _marked(inner: str) -> str:
    return (f"{SPEED_BEGINS}{inner}{SPEED_ENDS}" + paragraphs([
        "sim_speed is about this run of the simulator on this machine; it is no result and the only part of this page that "
        "differs when the study is run again."], "dim"))


def _count(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


