"""Plays every arm of a study and says which is better, by how much, how sure, and why."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import nan
from typing import TYPE_CHECKING, Any, cast

from simcore.errors import ConfigError
from simcore.experiments.run import build_deployment, build_policies, build_workload, count_window, oracles, play_arms
from simcore.experiments.statistics import METRICS, PROGRAM_METRICS, Difference, compare_metric, programs_of
from simcore.experiments.study import Arm, StudyFile
from simcore.models.serving import RunResult
from simcore.models.steady import Window, find_window
from simcore.traces.workload import Workload

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Comparison:
    """`results[arm][seed]`; `differences[k]`: every metric of arm k against the first arm (k = 1, 2, ...)."""

    file: StudyFile
    arms: list[Arm]
    results: list[list[RunResult]]
    differences: dict[str, list[Difference]]
    best: list[Difference]  # the best arm by the headline metric against every other, in arm order without itself
    best_label: str
    headline: list[str]
    parting: dict[str, str]
    carriers: dict[str, pd.DataFrame]
    oracles: dict[str, list[str]]
    windows: dict[str, Window]  # each arm's own; what counts in all of them is the latest
    partial: str = ""  # what Ctrl-C left, where it ended the runs

    @property
    def table(self) -> pd.DataFrame:
        """Differences as a table: one row an arm and metric."""
        import pandas as pd

        rows = [{"arm": arm, **vars(d), "known": d.known} for arm, ds in self.differences.items() for d in ds]
        return pd.DataFrame(rows)

    def summary(self) -> dict[str, Any]:
        """The comparison as JSON-able data: summaries of the arms' first seeds, differences, headline."""
        return {
            "arms": {arm.label: [r.summary for r in results] for arm, results in zip(self.arms, self.results, strict=True)},
            "differences": {arm: [{**vars(d), "known": d.known} for d in ds] for arm, ds in self.differences.items()},
            "headline": self.headline,
            **({"partial": self.partial} if self.partial else {}),
            "first_parting_decision": self.parting,
            "oracles": self.oracles,
            "carriers": {arm: frame.to_dict("records") for arm, frame in self.carriers.items()},
            "window": {"kind": self.file.study.window, "cut": common_cut(self.windows.values()),
                       "of_arms": {arm: vars(window) for arm, window in self.windows.items()}},
        }


def common_cut(windows: Iterable[Window]) -> int:
    """The latest truncation of the arms that show a steady state: all of them count the same requests."""
    return max((window.cut for window in windows if window.shown), default=0)


def require_arms(file: StudyFile) -> None:
    """Raises ConfigError unless there is something to compare, by a metric that there is."""
    if len(file.arms) < 2:
        raise ConfigError(file.document.where(("compare", "vary")), "compare.vary", found=file.study.compare.vary,
                          allowed="a key with at least two values, here or as --vary key=a,b")
    require_headline(file)


def require_headline(file: StudyFile) -> None:
    """Raises ConfigError unless the study's headline is a metric that there is."""
    known = [metric.name for metric in (*METRICS, *PROGRAM_METRICS)]
    if file.study.compare.headline not in known:
        raise ConfigError(file.document.where(("compare", "headline")), "compare.headline",
                          found=file.study.compare.headline, allowed=", ".join(known))


def check(file: StudyFile, arms: list[Arm], seed: int | None = None, *, paired: bool = True) -> list[Workload]:
    """Build what every arm names, so that errors come before any simulated time. Raises ConfigError with file and line;
    also, if they are to be `paired`, when arms have other seeds or numbers of requests than the first.
    Returns the arms' workloads under `seed` (None = their first)."""
    workloads: list[Workload] = []
    for k, arm in enumerate(arms):
        config = arm.study.workload
        alike = next((j for j in range(k) if arms[j].study.workload == config), None)
        try:
            build_deployment(arm.study, file.folder)
            build_policies(arm.study, file.folder)
            workloads.append(
                build_workload(config, file.folder, arm.study.seeds[0] if seed is None else seed) if alike is None
                else workloads[alike])
        except ConfigError as error:
            raise file.located(error, arm) from None
        if paired and (arm.study.seeds != arms[0].study.seeds or len(workloads[k]) != len(workloads[0])):
            raise ConfigError(file.document.where(("compare", "vary")), "compare.vary", found=arm.label,
                              why="arms are paired by seed and request",
                              allowed="keys that change neither the seeds nor the number of requests")
    return workloads


def compare(
    file: StudyFile, *, processes: int | None = None, report: Callable[[int, float], Any] | None = None
) -> Comparison:
    """Run all arms and compare each with the first. Ctrl-C leaves a comparison of what was finished by then. Raises
    ConfigError when there is nothing to compare."""
    require_arms(file)
    headline = file.study.compare.headline
    workloads = check(file, file.arms)
    has_turns = bool((workloads[0].turn > 0).any())
    metrics = {metric.name: metric for metric in (*(PROGRAM_METRICS if has_turns else ()), *METRICS)}
    if headline not in metrics:
        raise ConfigError(file.document.where(("compare", "headline")), "compare.headline", found=headline,
                          why="no program of this workload has a second turn", allowed=", ".join(metrics))
    whole = [Arm(arm.label, arm.study.model_copy(update={"window": "all"})) for arm in file.arms]
    played = play_arms(file, whole, processes=processes or os.cpu_count() or 1, report=report)
    file, results, partial = _finished(file, played)
    labels = [arm.label for arm in file.arms]
    windows, tables = _windowed(file, results)
    by_unit = {"requests": tables, "programs": [[programs_of(run.programs) for run in runs] for runs in results]}
    slo = file.study.limits
    by_seed = len(file.study.seeds) > 1 and all(arm.study.workload.replicated_by_seed for arm in file.arms)

    def against(metric: str, a: int, b: int) -> Difference:
        unsteady = [f"{labels[k]} is {windows[k].why}" for k in dict.fromkeys((a, b)) if not windows[k].shown]
        if not unsteady:
            of = by_unit[metrics[metric].of]
            return compare_metric(metrics[metric], of[a], of[b], slo, by_seed=by_seed)
        alone = [against(metric, k, k).a if windows[k].shown and a != b else nan for k in (a, b)]
        m = metrics[metric]
        return Difference(m.name, m.label, m.unit, alone[0], alone[1], nan, nan, nan, 0, "", m.less_is_better,
                          "; ".join(unsteady))

    differences = {labels[k]: [against(name, 0, k) for name in metrics] for k in range(1, len(labels))}
    judged = [next(d for d in differences[label] if d.metric == headline) for label in labels[1:]]
    values = [judged[0].a, *(d.b for d in judged)]
    sign = 1 if metrics[headline].less_is_better else -1
    winner = min(range(len(labels)), key=lambda k: (sign * values[k] if values[k] == values[k] else float("inf"), k))
    best = [against(headline, k, winner) for k in range(len(labels)) if k != winner]
    others = [label for k, label in enumerate(labels) if k != winner]
    return Comparison(
        file, file.arms, results, differences, best, labels[winner], _headline(labels, winner, judged, best, others),
        {labels[k]: _parting(results[0][0], results[k][0]) for k in range(1, len(labels))},
        {labels[k]: _carriers(tables[0][0], tables[k][0]) for k in range(1, len(labels))},
        {arm.label: found for arm in file.arms if (found := oracles(arm.study, file.folder))},
        dict(zip(labels, windows, strict=True)), partial,
    )


def _finished(file: StudyFile, played: list[list[RunResult | None]]) -> tuple[StudyFile, list[list[RunResult]], str]:
    """The study narrowed to what was played: to the seeds under which every arm was; where there is none, to the arms that
    were played under all seeds. Raises KeyboardInterrupt where that leaves nothing to compare."""
    seeds = file.study.seeds
    rows = [k for k in range(len(seeds)) if all(runs[k] is not None for runs in played)]
    arms = list(range(len(file.arms)))
    if len(rows) == len(seeds):
        return file, cast("list[list[RunResult]]", played), ""
    if not rows:
        rows = list(range(len(seeds)))
        arms = [a for a in arms if all(run is not None for run in played[a])]
        if len(arms) < 2 or arms[0]:
            raise KeyboardInterrupt
    kept = {"seeds": [seeds[k] for k in rows]}
    narrowed = replace(
        file, study=file.study.model_copy(update=kept),
        arms=[Arm(file.arms[a].label, file.arms[a].study.model_copy(update=kept)) for a in arms])
    said = f"interrupted: {len(arms)} of {len(file.arms)} arms, {len(rows)} of {len(seeds)} seeds"
    return narrowed, [[cast("RunResult", played[a][k]) for k in rows] for a in arms], said


def _windowed(file: StudyFile, results: list[list[RunResult]]) -> tuple[list[Window], list[list[pd.DataFrame]]]:
    """Each arm's window, and the requests that count: under `window: steady` from the latest truncation of all arms on. The
    summaries of the results become those of what counts."""
    if file.study.window == "all":
        return [Window("all") for _ in results], [[run.requests for run in runs] for runs in results]
    windows = [find_window([run.requests for run in runs]) for runs in results]
    cut = common_cut(windows)
    for arm, window, runs in zip(file.arms, windows, results, strict=True):
        for run in runs:
            count_window(arm.study, run, replace(window, cut=cut if window.shown else 0))
    return windows, [[run.requests.iloc[cut:] for run in runs] for runs in results]


def _headline(
    labels: list[str], winner: int, judged: list[Difference], best: list[Difference], others: list[str]
) -> list[str]:
    """First the verdict, then each arm against the first."""
    first = judged[0]
    beaten = [label for label, d in zip(others, best, strict=True) if d.clear_of_zero(len(best)) and d.better]
    open_ = [label for label in others if label not in beaten]
    why = next((d.why for d in best if d.why), "")
    unit = "%" if first.unit == "points" else first.unit
    leads = judged[winner - 1].b if winner else first.a
    value = f"{first.label} {leads:,.4g} {unit}"
    left_out = max(d.left_out for d in [*judged, *best])
    what = "programs" if first.metric.startswith("jct") else "requests"
    if leads != leads:
        verdict = f"No policy has a {first.label}: {why}."
    elif left_out:
        verdict = (f"No verdict by {first.label}: {left_out:,} {what} did not finish under every policy, and one that "
                   "sheds the slow ones looks fast; --set compare.headline=goodput_share judges all requests.")
    elif not any(d.difference for d in judged):
        verdict = f"No difference at all: {value} under every policy."
    elif not open_:
        verdict = f"{labels[winner]} is best: {value}; better than {_names(beaten)} with 95% confidence."
    elif beaten:
        rest = f"the interval of its difference to {_names(open_)} includes zero"
        if why:
            rest = f"not shown better than {_names(open_)}: an interval is missing ({why})"
        verdict = f"{labels[winner]} leads with {value}: better than {_names(beaten)} with 95% confidence, but {rest}."
    elif why:
        verdict = f"{labels[winner]} leads with {value}, but no policy is shown better: no interval can be given ({why})."
    else:
        verdict = f"The intervals overlap: no policy is shown better by {first.label} ({labels[winner]} leads with {value})."
    return [verdict, *(f"{label} against {labels[0]}: {_sentence(d)}" for label, d in zip(labels[1:], judged, strict=True))]


def _sentence(d: Difference) -> str:
    share = f" ({100 * d.difference / d.a:+.1f}%)" if d.a else ""
    unit = "%" if d.unit == "points" else d.unit
    if d.unit == "points":
        share = " points"
    if d.difference != d.difference:
        return f"{d.label} {_value(d.a)} -> {_value(d.b)} {unit}: {d.why}."
    text = f"{d.label} {d.a:,.4g} -> {d.b:,.4g} {unit}, {d.difference:+,.4g}{share}"
    if d.left_out:
        text += f" (without {d.left_out} requests that did not finish in both runs)"
    if d.why:
        return f"{text}; no interval: {d.why}."
    interval = f"95% interval {d.low:+,.4g} to {d.high:+,.4g} over {d.units} {d.method}"
    return f"{text}, {interval}{'' if d.known else ': no difference shown'}."


def _value(value: float) -> str:
    return "N/A" if value != value else f"{value:,.4g}"


def _names(labels: list[str]) -> str:
    return labels[0] if len(labels) == 1 else ", ".join(labels[:-1]) + " and " + labels[-1]


def _parting(a: RunResult, b: RunResult) -> str:
    """The first decision at which two runs under one seed differ: before it they are the same run."""
    columns = ["time", "kind", "replica", "request", "answer"]
    x, y = (list(r.decisions[columns].itertuples(index=False, name=None)) for r in (a, b))
    for one, other in zip(x, y, strict=False):
        if one != other:
            first, second = sorted((one, other), key=lambda row: row[0])
            which = "" if one is first else "the other run's "
            if first[0] == second[0]:
                return f"t={one[0]:.3f} s: {_decision(one)} against {_decision(other)}"
            return f"t={first[0]:.3f} s: {which}{_decision(first)}; the next decision of the two is at t={second[0]:.3f} s"
    return "none: every decision is the same" if len(x) == len(y) else "one run goes on where the other ends"


def _decision(row: tuple[Any, ...]) -> str:
    return f"{row[1]} of request {row[3]}: {row[4]}"


def _carriers(a: pd.DataFrame, b: pd.DataFrame, count: int = 5) -> pd.DataFrame:
    """The requests that carry the difference in mean E2E: largest changes first, with their share of all changes."""
    import numpy as np

    change = (b["e2e"] - a["e2e"]).to_numpy()
    total = np.nansum(np.abs(change))
    order = np.argsort(-np.nan_to_num(np.abs(change)), kind="stable")[:count]
    out = a.iloc[order][["request", "program", "turn", "input_tokens", "output_tokens"]].copy()
    out["e2e_first"], out["e2e_other"] = a["e2e"].to_numpy()[order], b["e2e"].to_numpy()[order]
    out["cached_first"], out["cached_other"] = a["cached_tokens"].to_numpy()[order], b["cached_tokens"].to_numpy()[order]
    out["change"] = change[order]
    out["share_of_change"] = change[order] / total if total else np.nan
    return out.reset_index(drop=True)
