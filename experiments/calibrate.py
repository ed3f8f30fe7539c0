"""`simcore calibrate`: from a profile of measured batches to a cost model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simcore.errors import ConfigError
from simcore.models.calibrated import UNITS, CalibratedModel, CalibratedOperator, TokenTable, Unit
from simcore.models.llm import LlmSpec
from simcore.models.operator_profile import OperatorProfile, ProfileRow
from simcore.models.roofline import distinct_experts
from simcore.models.step_time import COLUMNS, CONSTANT, EXPERTS, FIXED, TOKENS, features, step_time

# What an operator's time may depend on. Any other works on tokens alone and gets a table.
_DEPENDS: dict[str, Sequence[Unit]] = {
    "attention": ("kv_read", "qk_pairs", "sequences", "chunks", "tokens", "constant"),
    "experts": ("experts", "tokens", "constant"),
    "lm_head": ("sampled", "constant"),
}
_HOST: Sequence[Unit] = ("sequences", "constant")
LEAST_ROWS = 8


def fit(profile: OperatorProfile, llm: LlmSpec) -> CalibratedModel:
    """The cost model of a profile's rows, held-out rows apart.

    Operators of tokens alone: medians at each number of tokens. The others: least absolute errors, relative to the step's
    time, no seconds per unit negative. Raises ConfigError where rows are too few, or of another model.
    """
    if profile.parameters != llm.parameters:
        raise ConfigError("model", found=f"{llm.name} ({llm.parameters:,} parameters)",
                          allowed=f"{profile.model} ({profile.parameters:,} parameters), which the profile is of")
    rows = [row for row in profile.rows if not row.held_out]
    judged = [row for row in profile.rows if row.held_out]
    if len(rows) < LEAST_ROWS:
        raise ConfigError("profile", found=f"{len(rows)} rows that are not held out", allowed=f"at least {LEAST_ROWS}")
    x = columns(rows, llm)
    step = np.array([row.seconds for row in rows])
    names = list(dict.fromkeys(name for row in rows for name in row.operators))
    taken = np.array([[row.operators.get(name, 0.0) for row in rows] for name in names])
    operators, tables = [], []
    for name, y in zip(names, taken, strict=True):
        if name in _DEPENDS:
            solved = _solve(x, y, step, _DEPENDS[name])
            operators.append(CalibratedOperator(name=name, seconds={unit: s for unit, s in solved.items() if s}))
        else:
            tables.append(_table(name, x[:, TOKENS], y))
    host = _solve(x, np.maximum(step - taken.sum(axis=0), 0.0), step, _HOST)
    model = CalibratedModel(
        model=profile.model, parameters=profile.parameters, device=profile.device, software=profile.software,
        dtype=profile.dtype, tables_of_tokens=tables, operators=operators,
        step_overhead=host["constant"], sequence_overhead=host["sequences"],
        fitted_on={"rows": len(rows), "held_out_rows": len(judged)})
    errors = {"median_error": median_error(model, rows, llm)}
    if judged:
        errors["held_out_median_error"] = median_error(model, judged, llm)
    return model.model_copy(update={"fitted_on": model.fitted_on | errors})


def columns(rows: Sequence[ProfileRow], llm: LlmSpec) -> np.ndarray:
    """What the tables' columns are multiplied with: float64[rows, COLUMNS]."""
    experts = distinct_experts(llm.experts, llm.top_k, max(sum(row.counts) for row in rows))
    x = np.zeros((len(rows), COLUMNS))
    for k, row in enumerate(rows):
        x[k, :FIXED] = _features(row)[:FIXED]
        x[k, EXPERTS] = experts[min(int(x[k, TOKENS]), len(experts) - 1)]
        x[k, CONSTANT] = 1.0
    return x


def _features(row: ProfileRow) -> np.ndarray:
    return features(row.counts, row.before, [i < row.samples for i in range(len(row.counts))])


def predict(model: CalibratedModel, batches: Sequence[tuple[Sequence[int], Sequence[int], Sequence[bool]]],
            llm: LlmSpec) -> np.ndarray:
    """Seconds of each batch (counts, before, samples), the host's included: float64[batches]."""
    most = max(sum(counts) for counts, _, _ in batches)
    tables = model.tables(llm, tensor_parallel_size=1, max_num_batched_tokens=most)
    return np.array([
        step_time(tables, features(*batch)) + model.step_overhead + model.sequence_overhead * len(batch[0])
        for batch in batches])


def median_error(model: CalibratedModel, rows: Sequence[ProfileRow], llm: LlmSpec) -> float:
    """Median of |predicted / measured - 1| of a step."""
    batches = [(row.counts, row.before, [i < row.samples for i in range(len(row.counts))]) for row in rows]
    real = np.array([row.seconds for row in rows])
    return float(np.median(np.abs(predict(model, batches, llm) / real - 1)))


def _table(name: str, tokens: np.ndarray, seconds: np.ndarray) -> TokenTable:
    """The median at each number of tokens, made to grow with it (isotonic regression, weighted by rows)."""
    from scipy.optimize import isotonic_regression

    sizes, rows = np.unique(tokens, return_counts=True)
    medians = np.array([np.median(seconds[tokens == size]) for size in sizes])
    grown = isotonic_regression(medians, weights=rows).x
    return TokenTable(name=name, tokens=sizes.astype(int).tolist(), seconds=grown.tolist())


def _solve(x: np.ndarray, y: np.ndarray, step: np.ndarray, units: Sequence[Unit]) -> dict[Unit, float]:
    """Seconds per unit, none negative, with the least sum of |error| / (seconds of the step): one disturbed row moves them
    little. As a linear program: error = over - under."""
    from scipy.optimize import linprog

    used = x[:, [UNITS[unit] for unit in units]] / step[:, None]
    scale = np.maximum(used.max(axis=0), np.finfo(float).tiny)
    rows = len(y)
    errors = np.eye(rows)
    program = linprog(
        np.concatenate((np.zeros(len(units)), np.ones(2 * rows))), A_eq=np.hstack((used / scale, -errors, errors)),
        b_eq=y / step, method="highs")
    assert program.x is not None  # zeros satisfy it
    found = np.where(used.max(axis=0) > 0, program.x[: len(units)] / scale, 0.0)
    return dict(zip(units, found.tolist(), strict=True))
