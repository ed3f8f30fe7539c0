"""How well max((D + W |G|) / bandwidth, FLOPs / rate) + t0 tells the time of a layer's experts on this GPU.

The model of Sieve (arXiv 2605.11277): |G| activated experts of W bytes each; D: bytes of the rows, read and written.
Bandwidth and rate are measured beside it; only t0 is fitted, on the even splits. The uneven ones, drawn from the two-group
mixture that was fitted to the shares which the paper gives, are not fitted on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from simcore.experiments.gpu_validation.checks import EXPERTS, normal
from simcore.experiments.gpu_validation.processes import Emit
from simcore.experiments.gpu_validation.timing import Ceilings, device, free, measure_ceilings, rounds_for, timed
from simcore.kernels.experts import grouped_matmul, grouped_swiglu
from simcore.kernels.install import require

torch = require()

GROUPS = (128, 64, 16, 4, 1)  # experts; the largest first: tiles are tuned on what comes first
TOKENS = (256, 64, 16, 8, 4, 2, 1)  # of each expert
FLAT = 8  # up to so many tokens an expert, weights bind and time should be flat
BATCHES = (16, 64, 256, 1024)  # tokens of the uneven splits
DRAWS = 5  # of each
WIDTH = 2  # bytes of a bf16 value
TARGETS = {"median_error": 0.15, "p95_error": 0.30, "flatness": 0.15, "slope_off": 0.10, "crossover_off": 2.0}


@dataclass(frozen=True)
class Mixture:
    """Popularity of experts: log p = delta + hot * z for a share of them, cold * z for the rest, z normal quantiles; each
    token takes `top_k` different ones by Gumbel noise. The first `here` experts are on this GPU."""

    experts: int
    top_k: int
    here: int
    share: float
    delta: float
    hot: float
    cold: float

    def counts(self, tokens: int, random: np.random.Generator) -> np.ndarray:
        """Tokens of each expert on this GPU: int64[here]."""
        from scipy.special import ndtri

        many = round(self.share * self.experts)

        def quantiles(n: int) -> np.ndarray:
            return ndtri((np.arange(n) + 0.5) / n)

        log_p = np.concatenate((self.delta + self.hot * quantiles(many), self.cold * quantiles(self.experts - many)))
        log_p = random.permutation(log_p)
        keys = log_p + random.gumbel(size=(tokens, self.experts))
        chosen = np.argpartition(-keys, self.top_k - 1, axis=1)[:, : self.top_k]
        return np.bincount(chosen.ravel(), minlength=self.experts)[: self.here]


MIXTURES = {
    "qwen3-30b-a3b": Mixture(128, 8, 128, 0.439, 6.0, 1.41, 2.72),
    "gpt-oss-120b": Mixture(128, 4, 32, 0.351, 2.56, 0.12, 0.29),
    "qwen3.5-397b": Mixture(512, 10, 64, 0.551, 2.07, 0.61, 0.0),
}
TINY = Mixture(4, 2, 4, 0.5, 2.0, 0.5, 0.1)


def experts_sweep(emit: Emit, tiny: bool) -> None:
    """The section `experts`."""
    ceilings, _, _ = measure_ceilings(tiny)
    shapes = EXPERTS if not tiny else {"tiny": (48, 24)}
    found: dict[str, Any] = {"targets": TARGETS, "ceilings": vars(ceilings), "shapes": {}}
    for model, shape in shapes.items():
        layer = _Layer(shape, GROUPS[0] if not tiny else 4)
        even: list[dict[str, Any]] = []
        uneven: list[dict[str, Any]] = []
        for group in GROUPS if not tiny else (4, 1):
            for tokens in TOKENS if not tiny else (8, 1):
                even.append(layer.time([tokens] * group, even=tokens))
                found["shapes"][model] = judge(shape, even, uneven, ceilings)
                emit(found)
        random = np.random.default_rng(1)
        for batch in BATCHES if not tiny else (3,):
            for _ in range(DRAWS if not tiny else 2):
                uneven.append(layer.time(MIXTURES.get(model, TINY).counts(batch, random).tolist()))
        found["shapes"][model] = judge(shape, even, uneven, ceilings)
        found |= together(found["shapes"], tiny)
        emit(found)
        del layer
        free()


class _Layer:
    """Weights of `most` experts. A split over fewer is timed on several sets of experts in turn, so that no weights stay in
    the L2 cache from one call to the next."""

    def __init__(self, shape: tuple[int, int], most: int) -> None:
        self.hidden, self.inner = shape
        self.gate_up = normal(most, 2 * self.inner, self.hidden, dtype=torch.bfloat16, scale=self.hidden**-0.5)
        self.down = normal(most, self.hidden, self.inner, dtype=torch.bfloat16, scale=self.inner**-0.5)

    def time(self, counts: Sequence[int], even: int | None = None) -> dict[str, Any]:
        """Both products for these rows of each expert."""
        group, rows = len(counts), sum(counts)
        offsets = torch.tensor([0, *counts], device=device()).cumsum(0).to(torch.int32)
        x = normal(rows, self.hidden, dtype=torch.bfloat16)
        weights = 3 * self.hidden * self.inner * WIDTH * sum(count > 0 for count in counts)
        sets = min(len(self.gate_up) // group, rounds_for(weights))
        took = timed([partial(self._run, x, offsets, slice(i * group, (i + 1) * group)) for i in range(sets)])
        what = {"tokens": even} if even is not None else {"counts": list(counts)}
        return {"experts": sum(count > 0 for count in counts), "rows": rows, **what, "seconds": took.seconds,
                "low": took.low, "high": took.high, "by": took.by}

    def _run(self, x: Any, offsets: Any, which: slice) -> Any:
        return grouped_matmul(grouped_swiglu(x, self.gate_up[which], offsets), self.down[which], offsets)


def roofline(shape: tuple[int, int], experts: int, rows: int, ceilings: Ceilings) -> float:
    """The model's seconds without t0."""
    hidden, inner = shape
    weights = 3 * hidden * inner * WIDTH * experts
    moved = 2 * (hidden + inner) * rows * WIDTH  # x read, h written and read, y written
    return max((moved + weights) / ceilings.copy, 6 * hidden * inner * rows / ceilings.matmul)


def judge(
    shape: tuple[int, int], even: list[dict[str, Any]], uneven: list[dict[str, Any]], ceilings: Ceilings
) -> dict[str, Any]:
    """t0 by least squares of the relative error over the even splits, and what the model is right and wrong about."""
    for cell in (*even, *uneven):
        cell["roofline"] = roofline(shape, cell["experts"], cell["rows"], ceilings)
    took, bare = (np.array([cell[key] for cell in even]) for key in ("seconds", "roofline"))
    t0 = max(0.0, float(((took - bare) / took**2).sum() / (1 / took**2).sum()))
    for cell in (*even, *uneven):
        cell["predicted"] = cell["roofline"] + t0
        cell["error"] = abs(cell["predicted"] / cell["seconds"] - 1)
    errors = [cell["error"] for cell in (*even, *uneven)]
    found: dict[str, Any] = {
        "hidden": shape[0], "inner": shape[1], "t0": t0, "even": even, "uneven": uneven,
        "median_error": float(np.median(errors)), "p95_error": float(np.quantile(errors, 0.95)),
    }
    times = {(cell["experts"], cell["tokens"]): cell["seconds"] for cell in even}
    groups, tokens = (sorted({key[i] for key in times}) for i in (0, 1))
    if len(times) < len(groups) * len(tokens) or len(groups) < 2:
        return found  # not all measured yet
    few = [n for n in tokens if n <= FLAT]
    found["flatness"] = max(max(times[g, n] for n in few) / min(times[g, n] for n in few) - 1 for g in groups)
    slope = float(np.polyfit(groups, [times[g, tokens[0]] for g in groups], 1)[0])
    weights = 3 * shape[0] * shape[1] * WIDTH
    found |= {"seconds_per_expert": slope, "slope_off": abs(slope * ceilings.copy / weights - 1)}
    # Where the straight line of the most tokens, all computation, reaches the flat time of few.
    most = groups[-1]
    crossover = tokens[-1] * (times[most, tokens[0]] - t0) / max(times[most, tokens[-1]] - t0, 1e-12)
    expected = ceilings.matmul * WIDTH / (2 * ceilings.copy)
    ratio = max(crossover / expected, expected / max(crossover, 1e-12))
    return found | {"crossover": crossover, "crossover_expected": expected, "crossover_off": ratio}


def together(shapes: dict[str, dict[str, Any]], tiny: bool) -> dict[str, Any]:
    """Over all shapes: errors of all cells, and of the rest the worst."""
    errors = [cell["error"] for shape in shapes.values() for cell in (*shape["even"], *shape["uneven"])]
    drawn = [cell["error"] for shape in shapes.values() for cell in shape["uneven"]]
    found = {"median_error": float(np.median(errors)), "p95_error": float(np.quantile(errors, 0.95)),
             "uneven_median_error": float(np.median(drawn)), "uneven_p95_error": float(np.quantile(drawn, 0.95))}
    found |= {key: max(shape[key] for shape in shapes.values()) for key in ("flatness", "slope_off", "crossover_off")}
    rows = [{"name": key, "value": found[key], "target": target, "ok": None if tiny else found[key] <= target}
            for key, target in TARGETS.items()]
    return found | {"rows": rows}
