"""One run: a workload played on a cluster of equal replicas under one set of policies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from simcore.errors import ConfigError
from simcore.interrupt import stops_on_interrupt
from simcore.link import Network
from simcore.models.batch import Batch
from simcore.models.cluster import Cluster
from simcore.models.decision_points import Admission, Policy, ReplicaRouting, Retention
from simcore.models.engine import EngineSettings
from simcore.models.executor import Executor, SimulatedExecutor
from simcore.models.facts import Listeners, StepEnded
from simcore.models.failing_cluster import Attempt, FailingCluster
from simcore.models.failures import Clients, Event, Failures
from simcore.models.host_links import HOST_LATENCY, TRANSFER_COLUMNS, HostLinks
from simcore.models.host_tier import HostTier, host_tier
from simcore.models.metrics import Slo, gaps_and_rates, host_hit_rate, run_seconds, summarise, token_times, with_metrics
from simcore.models.offload import Role
from simcore.models.planned_replica import PlannedReplica, Shared
from simcore.models.planned_scheduler import PlannedRequest, PlannedScheduler
from simcore.models.programs import program_summary, programs_table
from simcore.models.replica import STEP_COLUMNS, Replica
from simcore.models.request import Request
from simcore.models.scheduler import Scheduler
from simcore.models.split_cluster import KV_LATENCY, NOT_PLANNED, PushLinks, SplitCluster, SplitRequest, check_split
from simcore.models.step_time import StepTables
from simcore.models.tools import Tools
from simcore.models.views import Site
from simcore.randomness import generator
from simcore.recorder import Recorder
from simcore.simulation import Simulation
from simcore.traces.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

DECISION_COLUMNS = {"time": "float64", "kind": "string", "replica": "int64", "request": "int64", "answer": "string"}


@dataclass(frozen=True)
class Deployment:
    """What serves: `replicas` engines of the same settings and cost model. `max_model_len` and `num_blocks` (vLLM's
    num_gpu_blocks, block 0 included) are those in force, read from the model and the GPU where the settings leave them
    open. The overheads are the host's (see SimulatedExecutor). `host_bandwidth` (bytes/s each way, all ranks together) and
    `host_latency` (s a copy) are those of the link to the host's memory, which only a host tier uses. `prefill_replicas`:
    the first so many replicas only compute prompts, whose KV goes to the others over links of `kv_link_bandwidth` (bytes/s a
    replica each way, all ranks together) and `kv_link_latency` (s a push); 0 = every replica does both."""

    settings: EngineSettings
    replicas: int
    num_blocks: int
    max_model_len: int
    tables: StepTables
    window: int = 0
    step_overhead: float = 0.0
    sequence_overhead: float = 0.0
    gpus_per_replica: int = 1
    kv_bytes_per_token: float = 0.0
    num_layers: int = 0
    host_bandwidth: float = 0.0
    host_latency: float = HOST_LATENCY
    prefill_replicas: int = 0
    kv_link_bandwidth: float = 0.0
    kv_link_latency: float = KV_LATENCY

    def role(self, replica: int) -> Role:
        if not self.prefill_replicas:
            return "both"
        return "prefill" if replica < self.prefill_replicas else "decode"

    def host_tier(self) -> HostTier | None:
        """A replica's empty host tier; None without one. Raises ConfigError if nothing fits or the link is not known."""
        if self.settings.kv_offloading_size is not None and not self.host_bandwidth > 0:
            raise ConfigError("kv_offloading_size", found=self.settings.kv_offloading_size,
                              why="the GPU's file gives no host_bandwidth", allowed="a GPU whose link to the host is known")
        return host_tier(self.settings, self.kv_bytes_per_token)

    def reload_seconds(self, tokens: int) -> float | None:
        """Seconds to load `tokens` tokens from the host tier, alone on the link; None without one."""
        if self.settings.kv_offloading_size is None:
            return None
        return tokens * self.kv_bytes_per_token / self.host_bandwidth + self.host_latency

    def executor(self) -> SimulatedExecutor:
        return SimulatedExecutor(
            self.tables, window=self.window, step_overhead=self.step_overhead, sequence_overhead=self.sequence_overhead,
            asynchronous=self.settings.async_scheduling,
        )

    def prefill_seconds(self, tokens: int, prefix: int = 0) -> float:
        """Seconds to compute `tokens` prompt tokens after `prefix` cached ones, alone on a replica."""
        executor, now, done = self.executor(), 0.0, 0
        while done < tokens:
            count = min(tokens - done, self.settings.step_budget)
            batch = Batch(0, counts=[count], before=[prefix + done], samples=[done + count == tokens])
            now = executor.start(batch, now).ends
            done += count
        return now


@dataclass(frozen=True)
class Policies:
    """How to make each kind of policy: admission and retention once a replica, routing once a cluster.

    `retention` may return the very object that `admission` returned for the same replica (one class serving both).
    """

    admission: Callable[[int], Admission]
    retention: Callable[[int, Admission], Retention]
    replica_routing: Callable[[], ReplicaRouting]


@dataclass
class RunResult:
    """Tables of one run (pandas): requests, programs, tools, steps (sampled), decisions; and its summary.

    `step_ends[r]`: end times of replica r's steps; `token_steps[i]`: runs of steps that brought request i's tokens.
    `speed` is about the simulator, not the simulated: it differs from run to run and goes to run.json only.
    """

    tables: dict[str, pd.DataFrame]
    summary: dict[str, Any]
    speed: dict[str, Any]
    oracles: tuple[str, ...] = ()
    step_ends: list[np.ndarray] = field(default_factory=list, repr=False)
    token_steps: dict[int, list[int]] = field(default_factory=dict, repr=False)

    @property
    def requests(self) -> pd.DataFrame:
        return self.tables["requests"]

    @property
    def programs(self) -> pd.DataFrame:
        return self.tables["programs"]

    @property
    def tools(self) -> pd.DataFrame:
        return self.tables["tools"]

    @property
    def steps(self) -> pd.DataFrame:
        return self.tables["steps"]

    @property
    def decisions(self) -> pd.DataFrame:
        return self.tables["decisions"]

    def token_times(self, request: int) -> np.ndarray:
        """When each output token of the request was delivered, float64[generated tokens], s."""
        runs = self.token_steps.get(request, [])
        replica = int(self.requests["replica"].to_numpy()[request])
        return token_times(runs, self.step_ends[replica]) if runs else np.zeros(0)

    def itls(self, request: int) -> np.ndarray:
        """Gaps between the request's tokens, float64[generated tokens - 1], s."""
        return np.diff(self.token_times(request))


def serve(
    workload: Workload, deployment: Deployment, policies: Policies, *, slo: Slo | None = None,
    usd_per_gpu_hour: float | None = None, seed: int = 0, horizon: float = inf, sample_every: float = 1.0,
    progress: Callable[[float], None] | None = None, path: Literal["planned", "step-by-step"] = "planned",
    tool_slots: Mapping[str, int] | None = None, executor: Callable[[int], Executor] | None = None,
    clients: Clients | None = None, events: Sequence[Event] = (), view_delay: float = 0.0, interruptible: bool = False,
) -> RunResult:
    """Play `workload` and return its tables. `horizon`: simulated seconds after which the run is cut. `path`: both give the
    same result to the last bit; where the planned one cannot be taken, `speed["why_not_planned"]` says why. `tool_slots`:
    tool -> calls of it that run at once; no limit where it is left out. `executor`: replica -> what runs its batches, one
    by one, in place of the deployment's cost model. `clients`, `events`, `view_delay` (s): what goes wrong (failures.py).
    `interruptible`: Ctrl-C cuts the run as a horizon would, and its summary has `interrupted_at` (s).

    Raises ConfigError for slots of a tool that the workload does not name and for events that cannot be, PolicyError for an
    illegal decision and NoProgress when decisions bring no token for long.
    """
    wall, cpu = time.perf_counter(), time.process_time()  # for sim_speed alone; no decision sees them
    failures = Failures(clients, tuple(events), view_delay)
    failures.check(deployment.replicas)
    divided = deployment.prefill_replicas
    if divided:
        check_split(divided, deployment.replicas, deployment.kv_link_bandwidth, deployment.kv_link_latency,
                    deployment.settings, failures)
    if executor is not None and divided:
        raise ConfigError("executor", why="KV cannot be pushed between batches that are run",
                          allowed="a run without cluster.prefill_replicas")
    if executor is not None and failures.reasons():
        raise ConfigError("executor", why="batches that are run cannot be taken back",
                          allowed="a run without clients, events and view_delay")
    sim = Simulation(seed)
    tools = Tools(sim, tool_slots, workload.tools)
    recorder = Recorder()
    decisions = recorder.table("decisions", DECISION_COLUMNS)
    steps = recorder.table("steps", STEP_COLUMNS, order=("time", "replica"))  # the planned path notes a step when it looks
    settings = deployment.settings
    site = Site(
        settings, deployment.num_blocks - 1, deployment.kv_bytes_per_token, deployment.num_layers, deployment.replicas,
        deployment.prefill_seconds, deployment.reload_seconds, divided,
    )
    router = policies.replica_routing()
    router.start(site, generator(seed, "policy", "replica_routing"))
    used: list[Policy] = [router]
    replicas: list[Replica] = []

    note = decisions.append
    network = Network(sim)
    offloads = settings.kv_offloading_size is not None
    transfers = recorder.table("transfers", TRANSFER_COLUMNS, order=("time", "replica")) if offloads or divided else None
    pushes = None
    if divided and transfers is not None:
        pushes = PushLinks(network, divided, deployment.replicas, deployment.kv_link_bandwidth, deployment.kv_link_latency,
                           transfers)

    def policies_of(r: int, *life: int) -> tuple[Admission, Retention]:
        """`life`: how many engines the replica has had, if it is not the first."""
        admission = policies.admission(r)
        pair = admission, policies.retention(r, admission)
        for kind, policy in {id(p): (k, p) for k, p in zip(("admission", "retention"), pair, strict=True)}.values():
            policy.start(site, generator(seed, "policy", kind, r, *life))
        return pair

    pairs = [policies_of(r) for r in range(deployment.replicas)]
    used += [policy for pair in pairs for policy in pair]
    obstacles = ["the study asks for it"] if path == "step-by-step" else not_planned(settings, used, failures, divided)
    if executor is not None:
        obstacles.append("batches are run, not priced")
    else:
        executor = _priced(deployment)
    shared = Shared()

    def equipment(r: int, admission: Admission, retention: Retention) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a scheduler and its replica get."""
        listeners = Listeners([admission, retention, router])
        options: dict[str, Any] = {
            "max_model_len": deployment.max_model_len, "listeners": listeners,
            "log": note, "replica": r, "tier": deployment.host_tier(),
        }
        places: dict[str, Any] = {"listeners": listeners, "steps": steps, "sample_every": sample_every}
        if pushes is not None:
            options["role"] = deployment.role(r)
            options["block_bytes"] = deployment.kv_bytes_per_token * settings.block_size
            places["host"] = pushes
        elif transfers is not None:
            places["host"] = HostLinks(network, r, deployment.host_bandwidth, deployment.host_latency, transfers)
        return options, places

    def fresh_engine(r: int, life: int) -> tuple[Scheduler, Executor, Listeners, HostLinks | None]:
        admission, retention = policies_of(r, life)
        options, places = equipment(r, admission, retention)
        scheduler = Scheduler(settings, deployment.num_blocks, admission, retention, **options)
        return scheduler, deployment.executor(), places["listeners"], places.get("host")

    for r, (admission, retention) in enumerate(pairs):
        options, places = equipment(r, admission, retention)
        if obstacles:
            scheduler = Scheduler(settings, deployment.num_blocks, admission, retention, **options)
            replicas.append(Replica(sim, r, scheduler, executor(r), **places))
        else:
            planner = PlannedScheduler(settings, deployment.num_blocks, admission, retention, **options)
            replicas.append(PlannedReplica(
                sim, r, planner, deployment.executor(), shared=shared, **places))
    common: dict[str, Any] = {
        "block_size": settings.block_size if settings.enable_prefix_caching else 0, "tools": tools, "log": note,
        "progress": progress}
    failing = split = None
    if divided:
        split = SplitCluster(sim, workload, replicas, router, recorder, request_type=SplitRequest, prefill=divided, **common)
    elif failures.reasons():
        failing = FailingCluster(sim, workload, replicas, router, recorder, request_type=Attempt, failures=failures,
                                 engines=fresh_engine, **common)
    cluster = split or failing or Cluster(
        sim, workload, replicas, router, recorder, request_type=Request if obstacles else PlannedRequest,
        shared=None if obstacles else shared, **common)
    cluster.start()
    try:
        with stops_on_interrupt(sim) if interruptible else nullcontext():
            sim.run_until(horizon)
    except Exception as error:  # a policy of the user's may fail in any way: say when
        error.add_note(f"at simulated time {sim.now!r} s")
        raise
    if sim.halted:
        horizon = sim.now  # closed as at a horizon
    stuck = sim.peek() == inf
    cut = not stuck and cluster.ended < len(workload)
    for replica in replicas:
        replica.settle()
    cluster.close(stuck=stuck)
    cluster.let_go()
    ended_wall, ended_cpu = time.perf_counter(), time.process_time()

    tables = recorder.frames()
    if failing is not None:
        tables["requests"]["attempts"] = failing.attempts
    if split is not None:
        split.columns(tables["requests"])
    tables["requests"] = with_metrics(tables["requests"])
    tables["tools"] = tools.frame(run_seconds(tables["requests"], horizon if cut else None), horizon if cut else inf)
    step_ends = [np.array(replica.step_ends) for replica in replicas]
    result = RunResult(
        tables, {}, {}, tuple(sorted({type(p).__name__ for p in used if p.oracle})), step_ends, cluster.token_steps)
    gaps, rates = gaps_and_rates(
        cluster.token_steps, tables["requests"]["replica"].tolist(), step_ends, float(tables["requests"]["arrival"].min()))
    result.summary = summarise(
        tables["requests"], gaps, rates, slo=slo or Slo(),
        gpus=deployment.replicas * deployment.gpus_per_replica, usd_per_gpu_hour=usd_per_gpu_hour,
        busy_seconds=[replica.busy_seconds for replica in replicas], cut_at=horizon if cut else None,
    )
    tables["programs"] = programs_table(tables["requests"], workload, result.summary["usd"])
    result.summary |= program_summary(tables["programs"]) | _offload_summary(tables["requests"], replicas)
    if failing is not None:
        result.summary |= failing.summary(tables["requests"], horizon if cut else None)
    if split is not None and pushes is not None:
        result.summary |= split.summary(pushes, result.summary["duration"])
    if sim.halted:
        result.summary["interrupted_at"] = sim.now
    total_steps = sum(len(ends) for ends in step_ends)
    result.summary |= {"steps": total_steps, "computed_tokens": sum(replica.computed_tokens for replica in replicas)}
    seconds = ended_cpu - cpu
    result.speed = {
        "wall_seconds": ended_wall - wall, "cpu_seconds": seconds, "events": sim.events, "steps": total_steps,
        "requests_per_cpu_second": len(workload) / seconds if seconds else None,
        "output_tokens_per_cpu_second": result.summary["total_output_tokens"] / seconds if seconds else None,
        "cpu_us_per_step": 1e6 * seconds / total_steps if total_steps else None,
        "steps_per_request": total_steps / len(workload) if len(workload) else None,
        "decisions_per_request": len(tables["decisions"]) / len(workload) if len(workload) else None,
        "real_time_factor": sim.now / (ended_wall - wall) if ended_wall > wall else None,
        "path": "step-by-step" if obstacles else "planned",
        **_path_speed(replicas, total_steps, len(workload)),
        "why_not_planned": obstacles,
    }
    return result


def _priced(deployment: Deployment) -> Callable[[int], Executor]:
    return lambda replica: deployment.executor()


def not_planned(
    settings: EngineSettings, policies: Sequence[Policy], failures: Failures | None = None, prefill_replicas: int = 0
) -> list[str]:
    """What keeps a run off the planned path; empty = nothing."""
    reasons = failures.reasons() if failures is not None else []
    if prefill_replicas:
        reasons.append(NOT_PLANNED)
    if settings.async_scheduling:
        reasons.append("engine.async_scheduling: two batches are in flight")
    if settings.prefill_schedule_interval and settings.semantics.spaced_prefills:
        reasons.append("engine.prefill_schedule_interval spaces prefills by counting steps")
    for policy in policies:
        if StepEnded in policy.observes:
            reasons.append(f"policy {type(policy).__name__} observes every step")
    return list(dict.fromkeys(reasons))


def _offload_summary(requests: pd.DataFrame, replicas: Sequence[Replica]) -> dict[str, Any]:
    """What a summary says of the host tiers, where there are any; chunks and bytes over all replicas."""
    used = [(r.scheduler.tier, r.host) for r in replicas if r.scheduler.tier is not None and isinstance(r.host, HostLinks)]
    if not used:
        return {}
    return {
        "host_hit_rate": host_hit_rate(requests),
        "bytes_to_host": sum(links.bytes["to_host"] for _, links in used),
        "bytes_from_host": sum(links.bytes["from_host"] for _, links in used),
        "host_evictions": sum(tier.evictions for tier, _ in used),
        "host_chunks_not_stored": sum(tier.not_stored for tier, _ in used),
    }


def _path_speed(replicas: Sequence[Replica], steps: int, requests: int) -> dict[str, Any]:
    """How a run took the planned path: the share of its steps that the kernels decided (the others were decided request by
    request, because someone had to be preempted, or alone, because pins had to be asked about at each), and how often a
    request a plan ended in a decision."""
    planned = [r for r in replicas if isinstance(r, PlannedReplica)]
    long_way = sum(r.scheduler.long_way for r in planned)
    return {
        "planned_share": (steps - long_way) / steps if planned and steps else 0.0,
        "stops_per_request": sum(r.stops for r in planned) / requests if planned and requests else None,
    }
