"""Generated workloads: every draw is fixed here, from (seed, name), before anything is simulated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simcore.errors import TraceError
from simcore.randomness import generator
from simcore.traces.rows import MOST_TOKENS
from simcore.traces.workload import Source, Workload, build

Lengths = int | tuple[float, float] | Sequence[int]


def poisson(
    n: int,
    rate: float,
    input_tokens: Lengths,
    output_tokens: Lengths,
    seed: int,
    *,
    prefix_groups: int = 0,
    prefix_tokens: int = 0,
    prefix_share: float = 1.0,
    block_tokens: int = 16,
    name: str = "poisson",
) -> Workload:
    """n independent requests at `rate` a second (all at t=0 when rate <= 0).

    Lengths in tokens: an int, a tuple (mean, sd) of a lognormal, or a list to draw from. With `prefix_groups`, a request
    belongs to one of the groups with probability `prefix_share`: its prompt is the group's `prefix_tokens`, then
    `input_tokens` of its own. Each column has a stream of its own, so that two rates or two output lengths under one
    seed meet the same prompts. Raises TraceError naming the argument.
    """
    where = f"generate.{name}"
    if n < 1:
        raise TraceError(where, "n", found=n, allowed="at least 1")
    if not np.isfinite(rate):
        raise TraceError(where, "rate", found=rate, allowed="a finite number")
    arrival = np.cumsum(generator(seed, f"{name}/arrival").exponential(size=n)) / rate if rate > 0 else np.zeros(n)
    note = f"generated: Poisson arrivals, {n} requests at {rate:g}/s, seed {seed}"
    return requests(
        name, arrival, input_tokens, output_tokens, seed, prefix_groups=prefix_groups, prefix_tokens=prefix_tokens,
        prefix_share=prefix_share, block_tokens=block_tokens,
        note=note if rate > 0 else f"generated: {n} requests, all at t=0, seed {seed}",
    )


def requests(
    name: str, arrival: np.ndarray, input_tokens: Lengths, output_tokens: Lengths, seed: int, *, prefix_groups: int,
    prefix_tokens: int, prefix_share: float, block_tokens: int, note: str,
) -> Workload:
    """Independent requests at these arrivals, s; lengths and prefixes as in `poisson`. Raises TraceError."""
    where, n = f"generate.{name}", len(arrival)
    if prefix_groups < 0 or prefix_tokens < 0 or (prefix_groups > 0) != (prefix_tokens > 0):
        raise TraceError(
            where, "prefix_groups, prefix_tokens", found=(prefix_groups, prefix_tokens), allowed="both 0 or both above 0"
        )
    if not 0 <= prefix_share <= 1:
        raise TraceError(where, "prefix_share", found=prefix_share, allowed="0 to 1")
    if block_tokens < 1:
        raise TraceError(where, "block_tokens", found=block_tokens, allowed="at least 1")
    inputs = _lengths(where, "input_tokens", input_tokens, n, generator(seed, f"{name}/input"))
    outputs = _lengths(where, "output_tokens", output_tokens, n, generator(seed, f"{name}/output"))
    notes = [note]
    known = np.zeros(n, dtype=np.int64)
    block_ids: list[np.ndarray] | None = None
    if prefix_groups:
        draws = generator(seed, f"{name}/prefix").random((n, 2))
        group = np.where(draws[:, 0] < prefix_share, (draws[:, 1] * prefix_groups).astype(np.int64), -1)
        known[group >= 0] = prefix_tokens
        inputs = inputs + known
        # A group's blocks are numbered one after the other, so each id stands for the prefix that ends with it.
        blocks = np.arange(-(-prefix_tokens // block_tokens), dtype=np.int64)
        block_ids = [blocks + g * len(blocks) if g >= 0 else blocks[:0] for g in group.tolist()]
        notes.append(f"{int((group >= 0).sum())} requests share one of {prefix_groups} prefixes of {prefix_tokens} tokens")
    return build(
        arrival=arrival,
        input_tokens=inputs,
        output_tokens=outputs,
        source=Source(name, notes=tuple(notes)),
        block_tokens=block_tokens,
        known_tokens=known,
        block_ids=block_ids,
    )


def _lengths(where: str, key: str, given: Lengths, n: int, random: np.random.Generator) -> np.ndarray:
    """int64[n], each at least 1."""
    if isinstance(given, tuple):
        mean, sd = given if len(given) == 2 else (0.0, 0.0)
        if not (mean >= 1 and sd >= 0 and np.isfinite(mean) and np.isfinite(sd)):
            raise TraceError(where, key, found=given, allowed="(mean, sd) with mean at least 1 and sd at least 0")
        spread = np.log1p((sd / mean) ** 2)  # variance of the logarithm that gives this mean and sd
        drawn = np.exp(np.log(mean) - spread / 2 + np.sqrt(spread) * random.standard_normal(n))
        return np.clip(np.rint(drawn), 1, MOST_TOKENS).astype(np.int64)
    values = np.atleast_1d(np.asarray(given))
    whole = values.ndim == 1 and len(values) > 0 and values.dtype.kind in "iu"
    if not whole or values.min() < 1 or values.max() > MOST_TOKENS:
        raise TraceError(where, key, found=given, allowed=f"whole numbers from 1 to {MOST_TOKENS}")
    return values.astype(np.int64)[random.integers(len(values), size=n)]
