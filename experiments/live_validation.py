"""`simcore validate live`: the real executor against its calibrated model, on one machine.

Measures operators on batches made up, fits, then plays one workload twice on the real executor and once in simulation under
the same scheduler and policies. None of the batches that are judged was fitted on.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simcore.errors import ConfigError
from simcore.experiments.calibrate import fit, predict
from simcore.experiments.run import build_policies, build_workload, study_llm
from simcore.experiments.study import StudyFile
from simcore.models.calibrated import CalibratedModel
from simcore.models.llm import LlmSpec
from simcore.models.operator_profile import OperatorProfile
from simcore.models.serving import Deployment, RunResult, serve
from simcore.traces.transform import compress
from simcore.traces.workload import Workload

if TYPE_CHECKING:
    from simcore.kernels.decoder import Decoder
    from simcore.kernels.executor import RealStep

LOAD = 0.6  # of what the model predicts the device can serve, unless the user says otherwise
HELD_OUT = 40  # batches drawn to judge the fit
TARGETS = {"step": 0.12, "ttft": 0.15, "tpot": 0.15}  # of a CPU with a model of 20 to 60 million parameters


@dataclass(frozen=True)
class Row:
    """One line of the report. `error`: of the prediction, relative to what was measured (median or of means, as `metric`
    says); `spread`: the same between the two measured runs; `target`: NaN = none."""

    metric: str
    measured: float
    repeated: float
    predicted: float
    error: float
    spread: float
    target: float = float("nan")

    @property
    def ok(self) -> bool | None:
        return None if self.target != self.target else self.error <= self.target


@dataclass(frozen=True)
class LiveValidation:
    """What was found. `steps`: the first real run's; `predicted`: the model's seconds of each."""

    rows: list[Row]
    profile: OperatorProfile
    model: CalibratedModel
    steps: list[RealStep]
    predicted: np.ndarray
    measured: tuple[RunResult, RunResult]
    simulated: RunResult
    paired_steps: int  # of the second run, that had the same batch as one of the first
    drift: float  # seconds of batches of the profile just before the runs over those when it was measured

    def facts(self) -> dict[str, Any]:
        return {
            "device": self.profile.device, "software": self.profile.software, "model": self.profile.model,
            "parameters": self.profile.parameters, "dtype": self.profile.dtype, "steps": len(self.steps),
            "paired_steps": self.paired_steps, "requests": len(self.simulated.requests),
            "profile_rows": len(self.profile.rows), "drift": self.drift,
            **{f"fit_{k}": v for k, v in self.model.fitted_on.items()},
        }

    def as_json(self) -> dict[str, Any]:
        return {"what": "the engine against its model on one machine", **self.facts(),
                "rows": [{**vars(row), "ok": row.ok} for row in self.rows]}


Report = Callable[[str, float], Any]  # (what is being done, share)


def validate_live(file: StudyFile, device: str, profile: Path, *, load: float = LOAD, seed: int = 1,
                  report: Report = lambda what, share: None) -> LiveValidation:
    """Measure (or go on measuring) into the file `profile`, fit, play and compare. Raises ConfigError for what the real
    executor cannot do, and where torch is not installed."""
    from simcore.kernels.executor import RealExecutor
    from simcore.kernels.measure import drawn, drift, grid, measure

    study = file.study
    llm = study_llm(study)
    decoder, limits = build_decoder(file, llm, device, seed)
    measured = measure(
        decoder, grid(**limits), profile, held_out=drawn(HELD_OUT, **limits, seed=seed),
        report=lambda done, all: report("operators", done / all))
    model = fit(measured, llm)
    drifted = drift(decoder, measured)
    deployment = live_deployment(file, llm, model)
    workload = at_load(build_workload(study.workload, file.folder, seed), file, deployment, load)
    runs, steps = [], []
    for number in (1, 2):
        executor = RealExecutor(decoder)
        gc.collect()
        gc.disable()  # a pause would be measured as the engine's
        try:
            runs.append(_play(file, deployment, workload, executor,
                              lambda share, n=number: report(f"real run {n}", share)))  # type: ignore[misc]
        finally:
            gc.enable()
        steps.append(executor.steps)
    simulated = _play(file, deployment, workload)
    predicted = predict(model, [(s.counts, s.before, s.samples) for s in steps[0]], llm)
    rows, paired = compare_runs(steps, predicted, (runs[0], runs[1]), simulated)
    return LiveValidation(rows, measured, model, steps[0], predicted, (runs[0], runs[1]), simulated, paired, drifted)


def build_decoder(file: StudyFile, llm: LlmSpec, device: str, seed: int) -> tuple[Decoder, dict[str, int]]:
    """The decoder of a study, and the limits of its batches. Raises ConfigError naming the key that real execution lacks."""
    from simcore.kernels.install import require

    engine, cluster = file.study.engine, file.study.cluster
    torch = require()
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", found=device, why="torch finds no GPU", allowed="cpu, or cuda where there is one")
    for key, bad in (("engine.async_scheduling", engine.async_scheduling), ("cluster.replicas", cluster.replicas > 1),
                     ("cluster.tensor_parallel_size", cluster.tensor_parallel_size > 1),
                     ("engine.kv_offloading_size", engine.kv_offloading_size is not None)):
        if bad:
            raise ConfigError(key, why="not in real execution, which runs one synchronous engine on one device",
                              allowed="leave it out")
    if engine.num_gpu_blocks is None:
        raise ConfigError("engine.num_gpu_blocks", why="the KV memory of a real run is allocated",
                          allowed="a number of blocks")
    if llm.weight_dtype != "bf16":
        raise ConfigError("model.weight_dtype", found=llm.weight_dtype, allowed="bf16 in real execution")
    from simcore.kernels.decoder import Decoder
    from simcore.kernels.operators import load_operators

    longest = min(engine.max_model_len or llm.max_position_embeddings, llm.max_position_embeddings)
    decoder = Decoder(
        llm, engine.num_gpu_blocks, engine.block_size, max_model_len=longest, device=device, seed=seed,
        operators=load_operators("triton" if device == "cuda" else "torch"),
        dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    limits = {
        "max_num_seqs": engine.max_num_seqs, "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": longest, "pool_tokens": (engine.num_gpu_blocks - 1 - engine.max_num_seqs) * engine.block_size,
    }
    return decoder, limits


def live_deployment(file: StudyFile, llm: LlmSpec, model: CalibratedModel) -> Deployment:
    """One engine of the study, priced by the calibrated model."""
    engine = file.study.engine
    assert engine.num_gpu_blocks is not None
    return Deployment(
        settings=engine, replicas=1, num_blocks=engine.num_gpu_blocks,
        max_model_len=min(engine.max_model_len or llm.max_position_embeddings, llm.max_position_embeddings),
        tables=model.tables(llm, tensor_parallel_size=1, max_num_batched_tokens=engine.max_num_batched_tokens),
        step_overhead=model.step_overhead, sequence_overhead=model.sequence_overhead,
        kv_bytes_per_token=llm.kv_bytes_per_token, num_layers=llm.n_layers)


def at_load(workload: Workload, file: StudyFile, deployment: Deployment, load: float) -> Workload:
    """The workload with its arrivals drawn out or pressed together, so that the device would be busy this share of the time
    (by the model, which batches best when all comes at once)."""
    span = float(np.nanmax(workload.arrival) - np.nanmin(workload.arrival))
    if not span > 0:
        return workload
    at_once = replace(workload, arrival=np.where(np.isnan(workload.arrival), np.nan, 0.0))
    busy = _play(file, deployment, at_once).summary["duration"]
    return compress(workload, span * load / busy)


def _play(file: StudyFile, deployment: Deployment, workload: Workload, executor: Any = None,
          progress: Callable[[float], Any] | None = None) -> RunResult:
    policies = build_policies(file.study, file.folder)
    run = None if executor is None else (lambda replica: executor)
    return serve(workload, deployment, policies, slo=file.study.limits, seed=file.study.seeds[0], executor=run,
                 progress=progress)


def compare_runs(steps: Sequence[Sequence[RealStep]], predicted: np.ndarray, measured: tuple[RunResult, RunResult],
                 simulated: RunResult) -> tuple[list[Row], int]:
    """(the report's rows, steps of the second run that had the same batch as one of the first)."""
    nan = float("nan")
    real = np.array([step.seconds for step in steps[0]])
    off = np.abs(predicted / real - 1)
    again = _paired(steps[0], steps[1])
    spread = np.abs(again[:, 1] / again[:, 0] - 1) if len(again) else np.array([nan])
    rows = [
        Row("step, median error", float(np.median(real)), nan, float(np.median(predicted)), float(np.median(off)),
            float(np.median(spread)), TARGETS["step"]),
        Row("step, p90 error", float(np.quantile(real, 0.9)), nan, float(np.quantile(predicted, 0.9)),
            float(np.quantile(off, 0.9)), float(np.quantile(spread, 0.9))),
        Row("all steps together", float(real.sum()), nan, float(predicted.sum()),
            abs(float(predicted.sum() / real.sum() - 1)),
            abs(float(again[:, 1].sum() / again[:, 0].sum() - 1)) if len(again) else nan),
    ]
    for name, key in (("TTFT mean", "ttft"), ("TPOT mean", "tpot"), ("E2E mean", "e2e"), ("TTFT p90", "ttft"),
                      ("TPOT p90", "tpot")):
        values = [run.requests[key].dropna().to_numpy() for run in (*measured, simulated)]
        a, b, found = (float(np.quantile(x, 0.9) if "p90" in name else x.mean()) for x in values)
        target = TARGETS.get(key, nan) if "mean" in name else nan
        rows.append(Row(name, a, b, found, abs(2 * found / (a + b) - 1), abs(2 * (a - b) / (a + b)), target))
    return rows, len(again)


def _paired(first: Sequence[RealStep], second: Sequence[RealStep]) -> np.ndarray:
    """Seconds of steps of either run that ran the same batch, float64[pairs, 2]; each step once, in order."""
    waiting: dict[Any, list[float]] = defaultdict(list)
    for step in first:
        waiting[step.counts, step.before].append(step.seconds)
    pairs = []
    for step in second:
        same = waiting.get((step.counts, step.before))
        if same:
            pairs.append((same.pop(0), step.seconds))
    return np.array(pairs).reshape(-1, 2)
