"""Trials of a search for capacity: one set-up under all seeds, kept as a sweep keeps its runs, judged against an SLO.

An overloaded run ends early, and no verdict changes by it. Where requests arrive on a clock of their own and the SLO bounds
how long a good request may take (E2E; or TTFT and TPOT: ttft + tpot x (output tokens - 1)), a run is cut when even the last
request has had that long: what has not finished by then is late whatever follows, and the rest is not touched. So a trial at
k times the load that can be served costs about 1/k of one that is served.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, isfinite, nan, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simcore.errors import ConfigError, SimcoreError
from simcore.experiments.compare import check
from simcore.experiments.run import build_cost, build_deployment, build_workload, study_llm
from simcore.experiments.statistics import METRICS, Level, level_of
from simcore.experiments.study import Arm, Study, StudyFile
from simcore.experiments.sweep import Sweep, begin_folder, failures, plan_sweep
from simcore.models.metrics import Slo
from simcore.traces.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

FEW = 10_000  # requests of a trial below which other processes take longer to start than to play
SAMPLES = 200  # looks at a replica in the time in which requests arrive
Z = 1.959963984540054  # 97.5% quantile of the normal distribution
GOODPUT_SHARE = next(metric for metric in METRICS if metric.name == "goodput_share")
# What a study may ask that a set-up cannot give: listed where several are tried.
UNFIT = ("kv_capacity", "tensor_parallel_size", "engine.max_model_len", "cost_model.file", "weight_dtype")


@dataclass(frozen=True)
class Pressure:
    """How hard a trial's resources were used; means over replicas and seeds. Shares of steps are of the sampled ones."""

    device_busy: float  # share of the run in which a replica's device works
    host_between_steps: float  # share in which it waits for the host's fixed overhead of a step
    kv_occupancy_p95: float  # share of the KV pool that requests hold
    kv_blocked: float  # share of steps in which requests wait, slots are free, and the median prompt does not fit
    slots_full: float  # share of steps in which requests wait and max_num_seqs run
    preemptions: float  # a request
    host_link: float  # bytes copied / what the link could have copied, of the busier direction; 0 without a host tier
    waiting: float  # mean number of requests that wait, a replica

    def saturated(self, beyond: dict[str, float]) -> tuple[str, str]:
        """The resource that gives out, and the numbers that say so. `beyond`: the share of requests past each limit; where
        most are past TPOT, steps are too long, whoever waits."""
        slow_steps = beyond.get("tpot", 0.0) > max(beyond.get("ttft", 0.0), beyond.get("e2el", 0.0))
        if self.slots_full >= max(0.02, self.kv_blocked) and not slow_steps:
            return "max_num_seqs", f"requests wait for one of the max_num_seqs places in {self.slots_full:.0%} of the steps"
        if self.preemptions >= 0.05 or (self.kv_blocked >= 0.02 and not slow_steps):
            return "KV pool", (f"{self.kv_occupancy_p95:.0%} of the pool in use (p95); a prompt waits for blocks in "
                               f"{self.kv_blocked:.0%} of the steps; {self.preemptions:.2g} preemptions a request")
        if self.host_link >= 0.8:
            return "host link", f"copies fill {self.host_link:.0%} of the link to the host's memory"
        busy = self.device_busy + self.host_between_steps
        numbers = (f"busy {self.device_busy:.0%} of the time, and {self.host_between_steps:.0%} waiting for the host; "
                   f"KV pool {self.kv_occupancy_p95:.0%} in use (p95), places full in {self.slots_full:.0%} of the steps")
        return ("device", numbers) if busy >= 0.6 or self.waiting >= 1 or slow_steps else ("none", f"device {numbers}")


@dataclass(frozen=True)
class Trial:
    """One set-up under all seeds. `level`: the share of requests within the SLO, and its interval (0..1)."""

    label: str
    settings: dict[str, Any]
    study: Study
    level: Level
    target: float  # 0..1
    requests: int  # counted, over all seeds
    misses: dict[str, float]  # share of the requests beyond each limit, or that did not finish
    pressure: Pressure
    cut: bool  # it was ended when all verdicts were known
    mean_queue: float  # s
    mean_e2e: float  # s
    sessions_per_hour: float
    span: float  # s, first to last arrival
    output_throughput: float  # tokens/s
    total_throughput: float
    unsteady: str = ""  # why `window: steady` shows no share
    keys: tuple[str, ...] = field(default=(), compare=False)

    @property
    def meets(self) -> bool:
        """By the share alone."""
        return self.level.value >= self.target

    @property
    def surely_meets(self) -> bool:
        return self.level.low >= self.target and not self.unsteady

    @property
    def may_meet(self) -> bool:
        return self.level.high >= self.target

    @property
    def gpus(self) -> int:
        return self.study.cluster.replicas * self.study.cluster.tensor_parallel_size

    @property
    def said(self) -> str:
        """The verdict in words."""
        shown = f"{self.level.value:.2%} within the SLO ({self.level.low:.2%} .. {self.level.high:.2%})"
        if self.unsteady:
            return f"{shown}: {self.unsteady}"
        certain = self.surely_meets or not self.may_meet
        return f"{shown}: {'meets' if self.meets else 'misses'} it{'' if certain else ', not certain'}"

    def as_json(self) -> dict[str, Any]:
        return {
            "label": self.label, "settings": self.settings, "gpus": self.gpus, "share": self.level.value,
            "low": self.level.low, "high": self.level.high, "interval": self.level.method, "interval_why": self.level.why,
            "units": self.level.units, "requests": self.requests, "meets": self.meets,
            "certain": self.surely_meets or not self.may_meet, "beyond": self.misses, "pressure": asdict(self.pressure),
            "ended_early": self.cut, "mean_queue_s": self.mean_queue, "mean_e2e_s": self.mean_e2e,
            "sessions_per_hour": self.sessions_per_hour, "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_throughput, "window": self.unsteady or self.study.window,
            "runs": list(self.keys),
        }


def longest_good(slo: Slo, output_tokens: np.ndarray) -> np.ndarray:
    """Seconds after its arrival by which a request within the SLO has finished; inf where the SLO leaves that open."""
    after = np.full(len(output_tokens), inf if slo.e2el_ms is None else slo.e2el_ms / 1e3)
    if slo.ttft_ms is not None:
        rest = np.where(output_tokens > 1, inf, 0.0) if slo.tpot_ms is None else (output_tokens - 1) * slo.tpot_ms / 1e3
        after = np.minimum(after, slo.ttft_ms / 1e3 + rest)
    return after


def decided_by(workload: Workload, slo: Slo) -> float:
    """The time (s) after which no request can become a good one; inf where that is not known before the run."""
    if len(workload.wait_for) or workload.by_worker.any():
        return inf  # when a turn arrives follows from how those before it were served
    last = float((workload.arrival + longest_good(slo, workload.output_tokens)).max())
    return last * (1 + 1e-9) + 1e-6  # rounding of a time must not make a late request of a good one


class Trials:
    """Plays set-ups of one study and keeps them in `folder`; a set-up is played once, also over several searches."""

    def __init__(
        self, file: StudyFile, folder: Path, *, target: float, arm: str | None = None, processes: int = 1,
        watch: Callable[[str, int], Callable[[int, float], Any]] | None = None, tell: Callable[[Trial], Any] | None = None,
    ) -> None:
        """`watch(label, runs)` gives a report of (run, share done); `tell` hears each trial when it is judged."""
        self.file, self.folder, self.target, self.processes = file, folder, target, processes
        self._base = file.document.copy()
        for key, value in _arm_keys(file, arm).items():
            self._base.put(key, value, file.document.where(("compare", "vary", key)))
        self._base.put("compare", {}, "simcore capacity")
        self.study = self._base.validate(Study)
        self.slo = self.study.limits
        if self.slo == Slo():
            raise ConfigError(str(file.path), "slo", why="there is no SLO to size for",
                              allowed="limits here, or --goodput 'ttft:3000 tpot:40'")
        self._watch, self._tell = watch or (lambda label, runs: lambda number, share: None), tell or (lambda trial: None)
        self._known: dict[str, Trial] = {}
        self._workloads: dict[tuple[str, int], tuple[float, float, int]] = {}  # decided by, span, requests; by seed

    @property
    def played(self) -> list[Trial]:
        return list(self._known.values())

    def variant(self, settings: dict[str, Any]) -> Study:
        """The study with keys set. Raises ConfigError."""
        document = self._base.copy()
        for key, value in settings.items():
            document.put(key, value, f"{key}={value}")
        return document.validate(Study)

    def at(self, label: str, settings: dict[str, Any]) -> Trial:
        """The trial of these settings, played or as it is kept. Raises ConfigError where they do not fit, SimcoreError
        where a run fails."""
        name = repr(sorted(settings.items()))
        if name not in self._known:
            self._known[name] = self._play(label, settings)
            self._tell(self._known[name])
        return self._known[name]

    def _play(self, label: str, settings: dict[str, Any]) -> Trial:
        plain = self.variant(settings)
        try:
            times = [self._times(plain, seed) for seed in plain.seeds]
        except ConfigError as error:
            raise self.file.located(error, Arm(label, plain)) from None
        decided = max(time for time, _, _ in times)
        looks = [span / SAMPLES for _, span, _ in times if span > 0]
        changes: dict[str, Any] = {"sample_every": min([plain.sample_every, *looks])}
        # Clients' limits hold for each attempt: a request that was given up may come again.
        cut = plain.window == "all" and plain.clients is None and decided < plain.horizon
        if cut:
            changes["horizon"] = decided
        study = plain.model_copy(update=changes)
        file = StudyFile(self.file.path, study, [Arm(label, study)], self.file.document)
        check(file, file.arms, paired=False)
        sweep = plan_sweep(file, self.folder, tables=True)
        missing = sweep.missing()
        if missing:
            begin_folder(self.folder)
            processes = 1 if sum(n for _, _, n in times) < FEW else self.processes
            failed = sweep.play(missing, processes=processes, report=self._watch(label, len(missing)))
            if failed:
                raise SimcoreError(failures(sweep, failed))
        return judge(label, settings, plain, sweep, self.target, cut=cut)

    def _times(self, study: Study, seed: int) -> tuple[float, float, int]:
        key = (study.workload.model_dump_json(), seed)
        if key not in self._workloads:
            workload = build_workload(study.workload, self.file.folder, seed)
            self._workloads[key] = decided_by(workload, self.slo), span_of(workload), len(workload)
        return self._workloads[key]


def span_of(workload: Workload) -> float:
    """First to last arrival on the clock (s)."""
    at = workload.arrival[np.isfinite(workload.arrival)]
    return float(np.ptp(at)) if len(at) else 0.0


def judge(label: str, settings: dict[str, Any], study: Study, sweep: Sweep, target: float, *, cut: bool) -> Trial:
    """A trial from its kept runs. `study`: as the user gave it; the runs may have been cut when all was decided."""
    import pandas as pd

    slo = study.limits
    tables, summaries, keys, pressures = [], [], [], []
    for run, summary in sweep.results:
        place = sweep.folder / "runs" / run.key
        requests = pd.read_parquet(place / "requests.parquet")
        counted = requests.iloc[summary["window"]["cut"] or 0 :]
        tables.append(_counted(counted, slo, study.horizon))
        summaries.append(summary)
        keys.append(run.key)
        pressures.append(_pressure(study, sweep.file.folder, summary, requests, pd.read_parquet(place / "steps.parquet")))
    together = pd.concat(tables, ignore_index=True)
    unsteady = next((s["window"]["why"] for s in summaries if s["window"]["state"] not in ("all", "steady")), "")
    growing = any(s["window"]["state"] == "unstable" for s in summaries)
    end = sweep.file.study.horizon
    level = share_level([_aged(table, end) for table in tables], slo,
                        by_seed=len(tables) > 1 and study.workload.replicated_by_seed)
    if growing:  # a queue without end meets nothing, however early the run ended
        level = Level(0.0, 0.0, 0.0, level.units, level.method, level.why)
    elif unsteady:
        level = Level(level.value, 0.0, 1.0, level.units, level.method, unsteady)
    programs = [table.groupby("program")["arrival"].min().dropna().to_numpy() for table in tables]
    spans = [float(np.ptp(starts)) if len(starts) else 0.0 for starts in programs]
    rates = [3600 * (len(starts) - 1) / span if span > 0 else nan for starts, span in zip(programs, spans, strict=True)]
    finite = {name: float(np.mean([_number(s[name]) for s in summaries]))
              for name in ("output_throughput", "total_token_throughput")}
    return Trial(
        label, settings, study, level, target, len(together), _beyond(together, slo),
        Pressure(*(float(np.mean(values)) for values in zip(*(asdict(p).values() for p in pressures), strict=True))),
        cut, float(together["queue_time"].mean()), float(together["e2e"].mean()), float(np.mean(rates)),
        float(np.mean([np.ptp(table["arrival"]) if len(table) else 0.0 for table in tables])),
        finite["output_throughput"], finite["total_token_throughput"], unsteady, tuple(keys))


def share_level(tables: Sequence[pd.DataFrame], slo: Slo, *, by_seed: bool) -> Level:
    """The share of requests within the SLO (0..1). Its interval is that over seeds or blocks of time, and nowhere narrower
    than Wilson's for independent requests, which is all there is where neither can be had (`why` says so)."""
    n = sum(len(table) for table in tables)
    good = sum(int(slo.met(table).sum()) for table in tables)
    if not n:
        return Level(nan, 0.0, 1.0, 0, "none", "no request counts")
    found = level_of(GOODPUT_SHARE, tables, slo, by_seed=by_seed)
    share = found.value / 100 if by_seed else good / n
    low, high = wilson(share, n)
    if found.why or found.units < 2:
        return Level(share, low, high, 1, "independent requests", found.why)
    half = (found.high - found.low) / 200
    return Level(share, max(0.0, min(low, share - half)), min(1.0, max(high, share + half)), found.units, found.method)


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share of n independent requests."""
    centre = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def _counted(requests: pd.DataFrame, slo: Slo, horizon: float) -> pd.DataFrame:
    """Requests that count, in order, each with a time of arrival to place it by. Of a run that the study's own horizon cuts,
    those count that had ended, or were late already."""
    arrival = requests["arrival"].to_numpy(dtype=float)
    keep = np.ones(len(requests), dtype=bool)
    if isfinite(horizon):
        open_ = (requests["status"] == "unfinished").to_numpy(dtype=bool)
        age = np.where(np.isnan(arrival), -inf, horizon - arrival)
        late = age > longest_good(slo, requests["output_tokens"].to_numpy())
        if slo.ttft_ms is not None:
            first = requests["first_token"].to_numpy(dtype=float)
            late |= np.where(np.isnan(first), age, first - arrival) > slo.ttft_ms / 1e3
        keep = ~open_ | late
    placed = np.fmax.accumulate(arrival) if len(arrival) else arrival
    return requests.assign(arrival=np.nan_to_num(placed, nan=0.0))[keep]


def _aged(requests: pd.DataFrame, end: float) -> pd.DataFrame:
    """An unfinished request's E2E is at least its age at the end of the run: blocks of time must not come out too short."""
    if not isfinite(end):
        return requests
    open_ = (requests["status"] == "unfinished").to_numpy(dtype=bool)
    return requests.assign(e2e=np.where(open_, np.maximum(end - requests["arrival"], 0.0), requests["e2e"]))


def _beyond(requests: pd.DataFrame, slo: Slo) -> dict[str, float]:
    """The share of requests beyond each limit, a request without the time counted where it never finished."""
    done = (requests["status"] == "finished").to_numpy(dtype=bool)
    out = {}
    for name, column, limit in (("ttft", "ttft", slo.ttft_ms), ("tpot", "tpot", slo.tpot_ms), ("e2el", "e2e", slo.e2el_ms)):
        if limit is not None and len(requests):
            value = requests[column].to_numpy(dtype=float) * 1e3
            out[name] = float(((value > limit) | (np.isnan(value) & ~done & (name != "tpot"))).mean())
    return out | {"not finished": float((~done).mean()) if len(requests) else nan}


def _pressure(
    study: Study, folder: Path, summary: dict[str, Any], requests: pd.DataFrame, steps: pd.DataFrame
) -> Pressure:
    deployment, capacity = build_deployment(study, folder)
    engine, replicas = study.engine, study.cluster.replicas
    duration = _number(summary["duration"])
    replica_seconds = replicas * duration if duration > 0 else nan
    limit = min(engine.max_num_seqs, engine.max_num_active_seqs or engine.max_num_seqs)
    usable = capacity.blocks - 1
    waits = (steps["waiting"] > 0).to_numpy()
    full = (steps[["running", "sequences"]].max(axis=1) >= limit).to_numpy()
    prompt = float(requests["input_tokens"].median()) if len(requests) else 0.0
    short = (steps["free_blocks"] * engine.block_size < prompt).to_numpy()
    occupied = 1 - steps["free_blocks"].to_numpy() / usable
    link = max(_number(summary.get("bytes_to_host", 0)), _number(summary.get("bytes_from_host", 0)))
    overhead = 0.0 if engine.async_scheduling else build_cost(study, folder, study_llm(study)).step_overhead
    seen = len(steps) > 0
    return Pressure(
        device_busy=_number(summary["utilization"]),
        host_between_steps=min(1.0, summary["steps"] * overhead / replica_seconds) if replica_seconds > 0 else 0.0,
        kv_occupancy_p95=float(np.percentile(occupied, 95)) if seen else 0.0,
        kv_blocked=float((waits & ~full & short).mean()) if seen else 0.0,
        slots_full=float((waits & full).mean()) if seen else 0.0,
        preemptions=summary["preemptions"] / max(1, len(requests)),
        host_link=link / (deployment.host_bandwidth * replica_seconds) if link and replica_seconds > 0 else 0.0,
        waiting=float(steps["waiting"].mean()) if seen else 0.0,
    )


def _number(value: Any) -> float:
    """A number of a kept summary, in which null stands for what is none."""
    return nan if value is None else float(value)


def _arm_keys(file: StudyFile, arm: str | None) -> dict[str, Any]:
    if arm is None:
        return {}
    axes = file.study.compare.vary
    for known, chosen in zip(file.arms, itertools.product(*axes.values()), strict=True):
        if known.label == arm:
            return dict(zip(axes, chosen, strict=True))
    raise ConfigError(f"--arm {arm}", allowed=", ".join(known.label for known in file.arms))
