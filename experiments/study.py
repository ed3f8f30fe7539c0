"""A study file: what is served, by what, under which policies, and what is compared."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from simcore.config import Document, Seconds, parse_value
from simcore.errors import ConfigError
from simcore.models.calibrated import CalibratedConfig
from simcore.models.engine import EngineSettings
from simcore.models.failures import Clients, Event, Failures, check_events
from simcore.models.metrics import Slo
from simcore.models.roofline import RooflineAssumptions
from simcore.models.split_cluster import refuse_beside_split

Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Lognormal(Strict):
    mean: Above0
    sd: Annotated[float, Field(ge=0)]


class PoissonWorkload(Strict):
    """Poisson arrivals; lengths are a constant, a log-normal or a list to draw from."""

    kind: Literal["poisson"] = "poisson"
    requests: Annotated[int, Field(ge=1)]
    rate: Annotated[float, Field(ge=0, description="requests/s; 0 = all at once")]
    input_tokens: Annotated[int, Field(ge=1)] | Lognormal | list[Annotated[int, Field(ge=1)]]
    output_tokens: Annotated[int, Field(ge=1)] | Lognormal | list[Annotated[int, Field(ge=1)]]
    prefix_groups: Annotated[int, Field(ge=0)] = 0
    prefix_tokens: Annotated[int, Field(ge=0)] = 0


class AgentsWorkload(Strict):
    """Agent programs like those of a paper whose traces are not public (traces/agent_workloads.yaml)."""

    kind: Literal["agents"]
    name: Literal["swe-bench", "bfcl", "openhands"]
    programs: Annotated[int, Field(ge=1)] = 100
    turn_multiplier: Annotated[float, Field(gt=0, description="turns of a program; its tokens stay")] = 1.0


class GammaWorkload(PoissonWorkload):
    """Bursts: gaps of a Gamma law with coefficient of variation `cv`; the rest as in PoissonWorkload."""

    kind: Literal["gamma"]  # type: ignore[assignment]
    rate: Above0
    cv: Annotated[float, Field(gt=0, le=100, description="of the gaps; 1 = Poisson, above 1 = bursts")]


class DiurnalWorkload(Strict):
    """The rate follows the time of day: `rates` hold for equal parts of the period, one after the other."""

    kind: Literal["diurnal"]
    requests: Annotated[int, Field(ge=1)]
    rates: Annotated[list[Annotated[float, Field(ge=0, allow_inf_nan=False)]], Field(min_length=1, description="requests/s")]
    period: Seconds = Field(86400.0, gt=0)
    begin: Seconds = Field(0.0, ge=0, description="time of day at which the run starts")
    cv: Annotated[float, Field(gt=0, le=100, description="of the gaps; 1 = Poisson")] = 1.0
    input_tokens: Annotated[int, Field(ge=1)] | Lognormal | list[Annotated[int, Field(ge=1)]]
    output_tokens: Annotated[int, Field(ge=1)] | Lognormal | list[Annotated[int, Field(ge=1)]]
    prefix_groups: Annotated[int, Field(ge=0)] = 0
    prefix_tokens: Annotated[int, Field(ge=0)] = 0


class FittedWorkload(Strict):
    """Programs like those of a trace: rate and CV of their starts by window, turns, lengths and pauses (all empirical)."""

    kind: Literal["fitted"]
    trace: str
    format: str | None = None
    options: dict[str, Any] = {}
    window: Seconds = Field(300.0, gt=0)
    programs: Annotated[int, Field(ge=1)]
    rate_factor: Annotated[float, Field(gt=0, allow_inf_nan=False, description="times the trace's rate")] = 1.0
    context: Annotated[int, Field(ge=1, description="tokens; a program ends before a longer turn")] = 131072


class ProgramStarts(Strict):
    """When programs (sessions) start: by a Poisson process of `rate` programs/s (0 = all at once), or each as soon as one of
    `workers` is free."""

    rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    workers: Annotated[int, Field(ge=1)] | None = None
    shuffle: bool = Field(False, description="in an order drawn from the seed")
    time_limit: Annotated[float, Field(gt=0)] = Field(inf, description="s; an older program starts no further turn")

    @model_validator(mode="after")
    def _one_way(self) -> ProgramStarts:
        if (self.rate is None) == (self.workers is None):
            raise ValueError("give either rate or workers")
        return self


class TraceSlice(Strict):
    start: Seconds = 0.0
    end: Seconds = inf


def _by_kind(default: str) -> Discriminator:
    """Tells the branches of a union by their `kind`, which may be left out."""
    def kind(value: Any) -> str:
        return str(value.get("kind", default) if isinstance(value, dict) else getattr(value, "kind", default))

    return Discriminator(kind)


GeneratedWorkload = PoissonWorkload | AgentsWorkload | GammaWorkload | DiurnalWorkload | FittedWorkload
Generated = Annotated[
    Annotated[PoissonWorkload, Tag("poisson")] | Annotated[AgentsWorkload, Tag("agents")]
    | Annotated[GammaWorkload, Tag("gamma")] | Annotated[DiurnalWorkload, Tag("diurnal")]
    | Annotated[FittedWorkload, Tag("fitted")], _by_kind("poisson")]
StepCosts = Annotated[
    Annotated[RooflineAssumptions, Tag("roofline")] | Annotated[CalibratedConfig, Tag("calibrated")], _by_kind("roofline")]


class WorkloadConfig(Strict):
    """Either `trace` (a shipped trace's name, or a file) or `generate`; then in this order dequantise, slice, thin,
    resample, clone, head, programs, shrink, start."""

    trace: str | None = None
    format: str | None = Field(None, description="one of those of simcore trace info; None = by the first line")
    options: dict[str, Any] = Field({}, description="of the format's reader, e.g. {long: truncate}")
    skip_bad: bool = False
    dequantise: Seconds | None = None
    slice: TraceSlice | None = None
    thin: Share | None = Field(None, description="share of the sessions to keep")
    resample: bool = Field(False, description="draw as many sessions, with replacement; each seed draws others")
    clone: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = Field(None, description="rate, by cloning sessions")
    head: Annotated[int, Field(ge=1)] | None = Field(None, description="first requests only")
    programs: Annotated[int, Field(ge=1)] | None = Field(None, description="first programs (sessions) only")
    shrink: Annotated[int, Field(ge=1)] | None = Field(None, description="tokens divided by this, block by block")
    start: ProgramStarts | None = None
    generate: Generated | None = None

    @model_validator(mode="after")
    def _one_source(self) -> WorkloadConfig:
        if (self.trace is None) == (self.generate is None):
            raise ValueError("give either trace or generate")
        if self.options and self.trace is None:
            raise ValueError("options are those of a trace's reader")
        if isinstance(self.generate, AgentsWorkload) and self.start is None:
            raise ValueError("say when the agents' programs start, e.g. start: {rate: 0.1} or start: {workers: 8}")
        return self

    @property
    def replicated_by_seed(self) -> bool:
        """Whether another seed is another, independent sample of the workload."""
        return self.generate is not None or self.resample or (self.start is not None and self.start.shuffle)


class ModelConfig(Strict):
    name: str
    weight_dtype: Literal["bf16", "fp8", "fp8_block", "int4", "mxfp4", "nvfp4"] | None = None
    kv_cache_dtype: Literal["auto", "bf16", "fp8"] = "auto"


class ClusterConfig(Strict):
    """Either `replicas` that do all, or `prefill_replicas` and `decode_replicas`, whose sum `replicas` then is."""

    replicas: Annotated[int, Field(ge=1)] = 1
    prefill_replicas: Annotated[int, Field(ge=1)] | None = Field(None, description="compute prompts, and push their KV")
    decode_replicas: Annotated[int, Field(ge=1)] | None = Field(None, description="go on with pushed prompts")
    kv_link_gbps: Above0 | None = Field(
        None, description="Gbit/s out of a prefill and into a decode replica; None = the GPUs' links to each other")
    kv_link_latency: Annotated[Seconds, Field(ge=0, allow_inf_nan=False)] | None = Field(
        None, description="s of a push beyond its bytes; None = 10us")
    gpu: str = "h100-sxm"
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    view_delay: Annotated[Seconds, Field(ge=0, allow_inf_nan=False)] = Field(0.0, description="s; most that routers lag")

    @model_validator(mode="before")
    @classmethod
    def _split_or_not(cls, data: Any) -> Any:
        """A split cluster has as many replicas as its two parts; a study written out says both."""
        if not isinstance(data, dict):
            return data
        parts: list[Any] = [data.get("prefill_replicas"), data.get("decode_replicas")]
        if parts == [None, None]:
            for key in ("kv_link_gbps", "kv_link_latency"):
                if data.get(key) is not None:
                    raise ValueError(f"{key} is of a cluster with prefill_replicas and decode_replicas")
            return data
        if None in parts:
            raise ValueError("prefill_replicas and decode_replicas go together")
        if not all(type(part) is int and part > 0 for part in parts):
            return data  # refused for what it is
        total = parts[0] + parts[1]
        if data.get("replicas", total) != total:
            raise ValueError(f"give either replicas or prefill_replicas and decode_replicas (together {total}), not both")
        return data | {"replicas": total}


class ToolConfig(Strict):
    slots: Annotated[int, Field(ge=1, description="calls of this tool that run at once, over all programs")]


class PolicyConfig(BaseModel):
    """A policy's name and, beside it, the parameters of its constructor."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    def __str__(self) -> str:
        inside = ", ".join(f"{k}={v}" for k, v in self.parameters.items())
        return f"{self.name}({inside})" if inside else self.name


class PoliciesConfig(Strict):
    """One policy a decision point. A point left out is served by the policy of another point if that serves it too, else
    by the default (fcfs, lru, round-robin)."""

    admission: PolicyConfig | str | None = None
    retention: PolicyConfig | str | None = None
    replica_routing: PolicyConfig | str | None = None


class SloConfig(Strict):
    ttft_ms: Above0 | None = None
    tpot_ms: Above0 | None = None
    e2el_ms: Above0 | None = None


class CostConfig(Strict):
    usd_per_gpu_hour: Annotated[float, Field(ge=0)] | None = None


class CompareConfig(Strict):
    """`vary`: key -> values; each combination is an arm. The first arm is the one that the others are compared with."""

    vary: dict[str, list[Any]] = Field(default_factory=dict)
    headline: str = "ttft_mean"


class Study(Strict):
    """A study. Keys that are assumptions of the user's (slo, cost) are printed beside every headline."""

    name: str = "study"
    folder: str | None = Field(None, description="what relative paths start from; None = the folder of this file")
    workload: WorkloadConfig
    model: ModelConfig | str
    cluster: ClusterConfig = ClusterConfig()
    engine: EngineSettings = EngineSettings()
    tools: dict[str, ToolConfig] = {}
    clients: Clients | None = Field(None, description="who gives up, and sends again")
    events: list[Event] = Field([], description="replicas that are killed, drained or restarted")
    cost_model: StepCosts = RooflineAssumptions()
    policies: PoliciesConfig = PoliciesConfig()
    slo: SloConfig = SloConfig()
    cost: CostConfig = CostConfig()
    compare: CompareConfig = CompareConfig()
    seeds: Annotated[list[int], Field(min_length=1)] = [1]
    horizon: Seconds = Field(inf, gt=0, description="simulated time after which the run is cut")
    sample_every: Seconds = Field(1.0, ge=0, description="least time between two rows of the steps table")
    window: Literal["all", "steady"] = Field("all", description="requests that count; steady: generated load only")

    @field_validator("seeds")
    @classmethod
    def _each_once(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("each seed once: one that stands twice is no second observation")
        return seeds

    @property
    def llm(self) -> ModelConfig:
        return ModelConfig(name=self.model) if isinstance(self.model, str) else self.model

    def policy(self, kind: str) -> PolicyConfig | None:
        value = getattr(self.policies, kind)
        return PolicyConfig(name=value) if isinstance(value, str) else value

    @property
    def limits(self) -> Slo:
        return Slo(**self.slo.model_dump())


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: a label and the study with its keys set."""

    label: str
    study: Study


@dataclass(frozen=True)
class StudyFile:
    """A study, its arms, and the folder that policies outside the tree are looked up in."""

    path: Path
    study: Study
    arms: list[Arm]
    document: Document

    @property
    def folder(self) -> Path:
        return (self.path.parent / (self.study.folder or "")).resolve()

    def located(self, error: ConfigError, arm: Arm) -> ConfigError:
        """The error of a part that knows only its own key, with the line of the study (or the axis) that set it."""
        key = _KEYS.get(error.where, error.where)
        path = tuple(key.split("."))
        if path[0] not in Study.model_fields:
            return error
        axes = [axis for axis in self.study.compare.vary if f"{key}.".startswith(f"{axis}.") or axis.startswith(f"{key}.")]
        where = self.document.where(("compare", "vary", axes[0]) if axes and arm in self.arms else path)
        rest = f"{key}.{error.key}" if error.key else key
        return ConfigError(where, rest, found=error.found, allowed=error.allowed, why=error.why)


# What parts call a thing, and the key of the study that sets it.
_KEYS = {
    "llm": "model", "gpu": "cluster.gpu", "tensor_parallel_size": "cluster.tensor_parallel_size", "kv_capacity": "cluster",
    "num_gpu_blocks": "engine.num_gpu_blocks", "kv_offloading_size": "engine.kv_offloading_size",
}


def read_study(
    path: str | Path, settings: Sequence[str] = (), vary: Sequence[str] = (), goodput: Sequence[str] = (),
    seeds: str | None = None,
) -> StudyFile:
    """Read and check a study file. `settings`: `key=value`; `vary`: `key=a,b,c` (replaces the file's); `goodput`:
    `ttft:500 tpot:50` in ms (replaces the file's SLO); `seeds`: `1,2,3` (likewise). Raises ConfigError."""
    document = Document(Path(path))
    document.override(settings)
    if goodput:
        document.put("slo", _parse_goodput(goodput), f"--goodput {' '.join(goodput)}")
    if seeds is not None:
        document.put("seeds", parse_value(f"[{seeds}]", f"--seeds {seeds}"), f"--seeds {seeds}")
    if vary:
        axes = dict(_parse_vary(item) for item in vary)
        if len(axes) < len(vary):
            raise ConfigError(f"--vary {' '.join(vary)}", why="a key stands twice", allowed="all values behind one --vary")
        document.put("compare.vary", axes, f"--vary {' '.join(vary)}")
    study = document.validate(Study)
    _check_window(study, document)
    _check_events(study, document)
    _check_split(study, document)
    axes = study.compare.vary
    for key, values in axes.items():
        if key.split(".")[0] in ("slo", "compare", "name", "folder", "window"):
            raise ConfigError(document.where(("compare", "vary", key)), "compare.vary", found=key,
                              allowed="keys of what is simulated; all arms are judged by the same yardstick")
        if not values:
            raise ConfigError(document.where(("compare", "vary", key)), f"compare.vary.{key}", found=values,
                              allowed="a list of at least one value")
    arms = []
    for chosen in itertools.product(*axes.values()):
        variant = document.copy()
        for key, value in zip(axes, chosen, strict=True):
            variant.put(key, value, document.where(("compare", "vary", key)))
        checked = variant.validate(Study)
        _check_window(checked, document)
        _check_events(checked, variant)
        _check_split(checked, variant)
        named = ", ".join(
            label(key, value) if len(axes) == 1 else f"{key.split('.')[-1]}={label(key, value)}"
            for key, value in zip(axes, chosen, strict=True))
        arms.append(Arm(named or study.name, checked))
    labels = [arm.label for arm in arms]
    if len(set(labels)) < len(labels):
        raise ConfigError(document.where(("compare", "vary")), "compare.vary", found=labels, why="a value stands twice")
    return StudyFile(Path(path), study, arms, document)


def _check_window(study: Study, document: Document) -> None:
    """Raises ConfigError where `window: steady` has nothing to be steady."""
    generated = study.workload.generate
    if study.window == "steady" and not (isinstance(generated, PoissonWorkload) and generated.rate):
        why = ("nothing is cut from a finite trace" if not isinstance(generated, PoissonWorkload)
               else "all requests arrive at once, so that there is no steady state")
        raise ConfigError(document.where(("window",)), "window", found="steady", why=why,
                          allowed="all, or steady with workload.generate at a rate above 0")


def _check_events(study: Study, document: Document) -> None:
    """Raises ConfigError for events that cannot be, with their line."""
    try:
        check_events(study.events, study.cluster.replicas)
    except ConfigError as error:
        key = error.where + (f".{error.key}" if error.key else "")
        where = document.where(tuple(key.split(".")))
        raise ConfigError(where, key, found=error.found, allowed=error.allowed, why=error.why) from None


def _check_split(study: Study, document: Document) -> None:
    """Raises ConfigError for what is not simulated where prefill and decode are separate, with its line."""
    if study.cluster.prefill_replicas is None:
        return
    try:
        refuse_beside_split(study.engine, Failures(study.clients, study.events, study.cluster.view_delay))
    except ConfigError as error:
        where = document.where(tuple(error.where.split(".")))
        raise ConfigError(where, error.where, found=error.found, allowed=error.allowed, why=error.why) from None


def label(key: str, value: Any) -> str:
    """How a value of an axis is called: policies by their names and parameters, a split cluster as 2P3D."""
    if key == "policies" and isinstance(value, dict):
        kinds = ("retention", "admission", "replica_routing")
        return " + ".join(label(f"policies.{kind}", value[kind]) for kind in kinds if value.get(kind))
    if key == "cluster" and isinstance(value, dict):
        rest = dict(value)
        parts = [f"{rest.pop(name)}{letter}" for name, letter in (("prefill_replicas", "P"), ("decode_replicas", "D"))
                 if rest.get(name)]
        return " ".join(["".join(parts)] * bool(parts) + [f"{name}={v}" for name, v in rest.items()])
    if key.startswith("policies.") and isinstance(value, dict) and "name" in value:
        value = PolicyConfig(**value)
    return str(value)


def _parse_goodput(items: Sequence[str]) -> dict[str, float]:
    limits: dict[str, float] = {}
    for item in (part for text in items for part in text.split()):
        name, _, value = item.partition(":")
        try:
            if name not in ("ttft", "tpot", "e2el"):
                raise ValueError
            limits[f"{name}_ms"] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput {item}", allowed="ttft:MS, tpot:MS or e2el:MS, e.g. ttft:500 tpot:50") from None
    return limits


def _parse_vary(item: str) -> tuple[str, list[Any]]:
    key, sign, text = item.partition("=")
    if not sign or not text or not key.strip():
        raise ConfigError(f"--vary {item}", allowed="key.path=a,b,c, e.g. policies.replica_routing=round-robin,least-loaded")
    return key.strip(), parse_value(f"[{text}]", f"--vary {item}")
