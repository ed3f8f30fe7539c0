"""Builds what a study names and plays it: one job is one arm under one seed, on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from simcore.errors import ConfigError, TraceError
from simcore.experiments.study import (
    AgentsWorkload,
    Arm,
    DiurnalWorkload,
    FittedWorkload,
    GammaWorkload,
    GeneratedWorkload,
    PolicyConfig,
    ProgramStarts,
    Study,
    StudyFile,
    WorkloadConfig,
)
from simcore.lookup import construct, find_class
from simcore.models.calibrated import CalibratedConfig, read_calibrated
from simcore.models.decision_points import KINDS, Policy, Retention
from simcore.models.gpu import GpuSpec, load_gpu
from simcore.models.hf_config import load_llm
from simcore.models.kv_capacity import KvCapacity, kv_capacity
from simcore.models.llm import LlmSpec
from simcore.models.roofline import roofline_tables
from simcore.models.serving import Deployment, Policies, RunResult, serve
from simcore.models.split_cluster import KV_LATENCY
from simcore.models.steady import Window, apply_window, find_window
from simcore.models.step_time import StepTables
from simcore.parallel import fan_out
from simcore.traces.agent_generator import generate_agents
from simcore.traces.agents import first_programs, start_programs, with_workers
from simcore.traces.clone import clone_sessions, resample_sessions
from simcore.traces.generate import poisson
from simcore.traces.generate_arrivals import diurnal, gamma
from simcore.traces.generate_fitted import fit, generate_fitted
from simcore.traces.read import SHIPPED, read
from simcore.traces.transform import dequantise, head, shrink, slice_time, thin
from simcore.traces.workload import Workload

DEFAULTS = {"admission": "fcfs", "retention": "lru", "replica_routing": "round-robin"}


@dataclass(frozen=True)
class Job:
    """What a worker process gets: names and numbers only, so that it builds everything itself."""

    study: Study
    folder: Path
    seed: int


def build_workload(config: WorkloadConfig, folder: Path, seed: int) -> Workload:
    """Read or generate, then change it as the study says, in the order of WorkloadConfig. Raises ConfigError naming the
    key, or TraceError naming the trace's file and line."""
    if config.generate is not None:
        with _of_key("workload.generate"):
            workload = _generate(config.generate, folder, seed)
    else:
        assert config.trace is not None
        path = Path(config.trace) if config.trace in SHIPPED else folder / config.trace
        if config.trace not in SHIPPED and not path.is_file():
            raise ConfigError("workload.trace", found=config.trace, why=f"no such file in {folder}",
                              allowed=f"a shipped trace ({', '.join(SHIPPED)}) or the path of a file")
        with _of_key("workload", keep={"format": "workload.format", "option": "workload.options"}):
            workload = read(str(path), config.format, skip_bad=config.skip_bad, **config.options)
    if config.dequantise is not None:
        with _of_key("workload.dequantise"):
            workload = dequantise(workload, config.dequantise, seed)
    if config.slice is not None:
        with _of_key("workload.slice"):
            workload = slice_time(workload, config.slice.start, config.slice.end)
    if config.thin is not None:
        with _of_key("workload.thin"):
            workload = thin(workload, config.thin, seed)
    if config.resample:
        with _of_key("workload.resample"):
            workload = resample_sessions(workload, seed)
    if config.clone is not None:
        with _of_key("workload.clone"):
            workload = clone_sessions(workload, config.clone, seed)
    if config.head is not None and config.head < len(workload):
        with _of_key("workload.head"):
            workload = head(workload, config.head)
    if config.programs is not None:
        with _of_key("workload.programs"):
            workload = first_programs(workload, config.programs)
    if config.shrink is not None:
        with _of_key("workload.shrink"):
            workload = shrink(workload, config.shrink)
    if config.start is not None:
        with _of_key("workload.start"):
            workload = _start(workload, config.start, seed)
    if not len(workload):
        raise ConfigError("workload", why="no request is left")
    return workload


def _generate(g: GeneratedWorkload, folder: Path, seed: int) -> Workload:
    if isinstance(g, AgentsWorkload):
        return generate_agents(g.name, g.programs, rate=0.0, seed=seed, turn_multiplier=g.turn_multiplier)
    if isinstance(g, FittedWorkload):
        return _fitted(g, folder, seed)
    if isinstance(g, DiurnalWorkload):
        return diurnal(
            g.requests, g.rates, _lengths(g.input_tokens), _lengths(g.output_tokens), seed, period=g.period, start=g.begin,
            cv=g.cv, prefix_groups=g.prefix_groups, prefix_tokens=g.prefix_tokens,
        )
    if isinstance(g, GammaWorkload):
        return gamma(
            g.requests, g.rate, g.cv, _lengths(g.input_tokens), _lengths(g.output_tokens), seed,
            prefix_groups=g.prefix_groups, prefix_tokens=g.prefix_tokens,
        )
    return poisson(
        g.requests, g.rate, _lengths(g.input_tokens), _lengths(g.output_tokens), seed,
        prefix_groups=g.prefix_groups, prefix_tokens=g.prefix_tokens,
    )


def _fitted(g: FittedWorkload, folder: Path, seed: int) -> Workload:
    path = Path(g.trace) if g.trace in SHIPPED else folder / g.trace
    if g.trace not in SHIPPED and not path.is_file():
        raise ConfigError("workload.generate.trace", found=g.trace, why=f"no such file in {folder}",
                          allowed=f"a shipped trace ({', '.join(SHIPPED)}) or the path of a file")
    try:
        workload = read(str(path), g.format, **g.options)
    except TraceError as error:
        raise ConfigError("workload.generate.trace", why=str(error)) from None
    return generate_fitted(fit(workload, g.window), g.programs, seed, rate=g.rate_factor, context=g.context)


def _start(workload: Workload, start: ProgramStarts, seed: int) -> Workload:
    if start.workers is not None:
        started = with_workers(workload, start.workers, seed=seed if start.shuffle else None)
    else:
        assert start.rate is not None
        started = start_programs(workload, start.rate, seed, shuffle=start.shuffle)
    return replace(started, time_limit=start.time_limit)


@contextmanager
def _of_key(key: str, keep: dict[str, str] | None = None) -> Iterator[None]:
    """What a generator or a transform refuses, under the study's key that asked for it. `keep`: only errors about these
    things, each with its own key."""
    try:
        yield
    except TraceError as error:
        if keep is not None and error.where not in keep:
            raise
        key = keep[error.where] if keep else key
        why = ": ".join(filter(None, (error.key, error.why)))
        raise ConfigError(key, found=error.found, allowed=error.allowed, why=why) from None


@dataclass(frozen=True)
class StepCost:
    """What a step costs: tables for the executor, the host's seconds, and every number behind them that is neither a
    specification nor read from a table; `says`: what these are, in words."""

    tables: StepTables
    step_overhead: float
    sequence_overhead: float
    listed: dict[str, float]
    says: str


def study_llm(study: Study) -> LlmSpec:
    return load_llm(study.llm.name, study.llm.weight_dtype, study.llm.kv_cache_dtype)


def build_cost(study: Study, folder: Path, llm: LlmSpec) -> StepCost:
    """The study's cost model, compiled. Raises ConfigError naming key or file."""
    config, tp, budget = study.cost_model, study.cluster.tensor_parallel_size, study.engine.max_num_batched_tokens
    if isinstance(config, CalibratedConfig):
        model = read_calibrated(folder / config.file)
        tables = model.tables(llm, tensor_parallel_size=tp, max_num_batched_tokens=budget)
        fitted = ", ".join(f"{name} {value:.3g}" for name, value in model.fitted_on.items())
        says = f"step times: calibrated on {model.device} ({model.software}, {model.dtype}); {fitted}"
        return StepCost(tables, model.step_overhead, model.sequence_overhead, model.listed(), says)
    tables = roofline_tables(llm, load_gpu(study.cluster.gpu), tensor_parallel_size=tp, max_num_batched_tokens=budget,
                             assumptions=config)
    listed = config.listed()
    each = ", ".join(f"{key.split('.')[-1]} {value:g}" for key, value in listed.items())
    says = f"step times: roofline, assumed and fitted to nothing: {each}"
    return StepCost(tables, config.step_overhead, config.sequence_overhead, listed, says)


def kv_link_bandwidth(study: Study, gpu: GpuSpec) -> float:
    """Bytes/s at which a replica pushes or is pushed KV: as the study says, or what its GPUs' links to others bring."""
    gbps = study.cluster.kv_link_gbps
    return gpu.link_bandwidth * study.cluster.tensor_parallel_size if gbps is None else gbps * 1e9 / 8


def build_deployment(study: Study, folder: Path = Path(), llm: LlmSpec | None = None) -> tuple[Deployment, KvCapacity]:
    """The engine on its GPUs; raises ConfigError when the model does not fit or a context is longer than the pool."""
    llm = llm or study_llm(study)
    engine, tp = study.engine, study.cluster.tensor_parallel_size
    gpu = load_gpu(study.cluster.gpu)
    capacity = kv_capacity(
        llm, gpu, tensor_parallel_size=tp, gpu_memory_utilization=engine.gpu_memory_utilization,
        block_size=engine.block_size, max_num_seqs=engine.max_num_seqs, max_num_batched_tokens=engine.max_num_batched_tokens,
        num_gpu_blocks=engine.num_gpu_blocks,
    )
    longest = engine.max_model_len or llm.max_position_embeddings
    if longest > llm.max_position_embeddings:
        allowed = f"at most {llm.max_position_embeddings} for {llm.name}"
        raise ConfigError("engine.max_model_len", found=longest, allowed=allowed)
    if -(-longest // engine.block_size) > capacity.blocks - 1 and engine.max_model_len is not None:
        raise ConfigError("engine.max_model_len", found=longest, why="longer than the KV pool",
                          allowed=f"at most {capacity.tokens} tokens, or more memory")
    cost = build_cost(study, folder, llm)
    deployment = Deployment(
        settings=engine, replicas=study.cluster.replicas, num_blocks=capacity.blocks, max_model_len=longest,
        tables=cost.tables, window=llm.window or 0, step_overhead=cost.step_overhead,
        sequence_overhead=cost.sequence_overhead, gpus_per_replica=tp,
        kv_bytes_per_token=llm.kv_bytes_per_token * llm.kv_copies(tp), num_layers=llm.n_layers,
        host_bandwidth=(gpu.host_bandwidth or 0.0) * tp, prefill_replicas=study.cluster.prefill_replicas or 0,
        kv_link_bandwidth=kv_link_bandwidth(study, gpu),
        kv_link_latency=KV_LATENCY if study.cluster.kv_link_latency is None else study.cluster.kv_link_latency,
    )
    deployment.host_tier()  # refused now, if it is
    return deployment, capacity


def build_policies(study: Study, folder: Path) -> Policies:
    """Constructors of the study's policies. Every class is looked up, and built once, here: errors come before the run."""
    chosen = {kind: study.policy(kind) for kind in KINDS}
    classes: dict[str, tuple[type, dict[str, Any]]] = {}
    for kind, config in chosen.items():
        if config is not None:
            classes[kind] = (find_class(kind, config.name, KINDS[kind], folder), config.parameters)
    shared = _one_for_both(classes)
    for kind, name in DEFAULTS.items():
        if kind not in classes and kind != shared:
            config = PolicyConfig(name=name)
            classes[kind] = (find_class(kind, config.name, KINDS[kind], folder), {})
    for kind, (found, parameters) in classes.items():
        construct(found, f"policies.{kind}", parameters)

    def make(kind: str) -> Any:
        found, parameters = classes[kind]
        return construct(found, f"policies.{kind}", parameters)

    return Policies(
        admission=lambda replica: make("retention" if shared == "admission" else "admission"),
        retention=lambda replica, admission: cast(Retention, admission) if shared else make("retention"),
        replica_routing=lambda: make("replica_routing"),
    )


def _one_for_both(classes: dict[str, tuple[type, dict[str, Any]]]) -> str | None:
    """Admission and retention may be one object (queue order and pins over one memory): the kind that was left out, or says
    the same as the other, and is served by the other's policy; else None."""
    if "admission" in classes and classes.get("admission") == classes.get("retention"):
        return "admission"
    for missing, given in (("admission", "retention"), ("retention", "admission")):
        if missing not in classes and given in classes and issubclass(classes[given][0], KINDS[missing]):
            return missing
    return None


def oracles(study: Study, folder: Path) -> list[str]:
    """Names of the study's policies that use the true future."""
    made = build_policies(study, folder)
    admission = made.admission(0)
    policies: list[Policy] = [admission, made.retention(0, admission), made.replica_routing()]
    return sorted({type(policy).__name__ for policy in policies if policy.oracle})


def play(
    job: Job, progress: Callable[[float], Any] | None = None, workload: Workload | None = None, *,
    interruptible: bool = False,
) -> RunResult:
    """Build and run one job, on its workload if that was built before. Its summary is that of the study's window.
    `interruptible`: see serve."""
    study = job.study
    deployment, _ = build_deployment(study, job.folder)
    policies = build_policies(study, job.folder)
    result = serve(
        build_workload(study.workload, job.folder, job.seed) if workload is None else workload, deployment, policies,
        slo=study.limits, usd_per_gpu_hour=study.cost.usd_per_gpu_hour, seed=job.seed, horizon=study.horizon,
        sample_every=study.sample_every, progress=progress,
        tool_slots={name: tool.slots for name, tool in study.tools.items()}, interruptible=interruptible,
        clients=study.clients, events=study.events, view_delay=study.cluster.view_delay,
    )
    count_window(study, result, Window("all") if study.window == "all" else find_window([result.requests]))
    return result


def count_window(study: Study, result: RunResult, window: Window) -> None:
    """Make a run's summary that of a window."""
    apply_window(
        result, window, slo=study.limits, gpus=study.cluster.replicas * study.cluster.tensor_parallel_size,
        usd_per_gpu_hour=study.cost.usd_per_gpu_hour, horizon=study.horizon)


def play_arms(
    file: StudyFile, arms: Sequence[Arm], *, processes: int, report: Callable[[int, float], Any] | None = None
) -> list[list[RunResult | None]]:
    """Every arm under every seed: results[arm][seed], None where Ctrl-C came first. Results do not depend on the number of
    processes."""
    jobs = [Job(arm.study, file.folder, seed) for arm in arms for seed in arm.study.seeds]
    results = iter(fan_out(play, jobs, processes=processes, report=report, keep=True))
    return [[next(results) for _ in arm.study.seeds] for arm in arms]


def _lengths(value: Any) -> Any:
    return (value.mean, value.sd) if hasattr(value, "mean") else value
