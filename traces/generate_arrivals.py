"""Requests that arrive in bursts (Gamma gaps) or by the time of day, with the lengths and prefixes of `poisson`.

Gaps of a Gamma law whose coefficient of variation is `cv`: 1 is a Poisson process, above 1 requests come in bursts, below 1
they come more evenly. Time of day stretches them: the gaps are those of a process of rate 1 in the time that the integral of
the rate tells.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simcore.errors import TraceError
from simcore.randomness import generator
from simcore.traces.generate import Lengths, requests
from simcore.traces.workload import Workload

DAY = 86_400.0  # s


def gamma(
    n: int, rate: float, cv: float, input_tokens: Lengths, output_tokens: Lengths, seed: int, *, prefix_groups: int = 0,
    prefix_tokens: int = 0, prefix_share: float = 1.0, block_tokens: int = 16, name: str = "gamma",
) -> Workload:
    """n requests at `rate` a second, gaps with coefficient of variation `cv`; the rest as in `poisson`.

    The same seed at another rate gives the same bursts, scaled. Raises TraceError naming the argument.
    """
    _demand(name, n >= 1, "n", n, "at least 1")
    _demand(name, 0 < rate < np.inf, "rate", rate, "a finite number above 0")
    arrival = np.cumsum(gaps(name, n, cv, seed)) / rate
    return requests(
        name, arrival, input_tokens, output_tokens, seed, prefix_groups=prefix_groups, prefix_tokens=prefix_tokens,
        prefix_share=prefix_share, block_tokens=block_tokens,
        note=f"generated: Gamma gaps of CV {cv:g}, {n} requests at {rate:g}/s, seed {seed}",
    )


def diurnal(
    n: int, rates: Sequence[float], input_tokens: Lengths, output_tokens: Lengths, seed: int, *, period: float = DAY,
    start: float = 0.0, cv: float = 1.0, prefix_groups: int = 0, prefix_tokens: int = 0, prefix_share: float = 1.0,
    block_tokens: int = 16, name: str = "diurnal",
) -> Workload:
    """n requests whose rate follows the time of day: `rates` (requests/s) hold for equal parts of `period`, one after the
    other, over and over; time 0 is `start` seconds into it. `cv` as in `gamma`, the rest as in `poisson`.

    Raises TraceError naming the argument.
    """
    _demand(name, n >= 1, "n", n, "at least 1")
    _demand(name, 0 < period < np.inf, "period", period, "a finite time above 0 s")
    _demand(name, 0 <= start < period, "start", start, f"0 to below the period, {period:g} s")
    levels = np.asarray(rates, dtype=np.float64)
    good = levels.ndim == 1 and len(levels) > 0 and np.isfinite(levels).all() and (levels >= 0).all() and levels.any()
    _demand(name, bool(good), "rates", list(rates), "finite numbers of at least 0, not all 0")
    part = period / len(levels)
    begin = np.arange(len(levels) + 1) * part
    mass = np.concatenate(([0.0], np.cumsum(levels * part)))  # expected requests from the period's start
    passed = float(np.interp(start, begin, mass))
    due = np.cumsum(gaps(name, n, cv, seed)) + passed
    arrival = np.floor(due / mass[-1]) * period + at_mass(due % mass[-1], begin, mass) - start
    return requests(
        name, np.maximum.accumulate(np.maximum(arrival, 0.0)), input_tokens, output_tokens, seed,
        prefix_groups=prefix_groups, prefix_tokens=prefix_tokens, prefix_share=prefix_share, block_tokens=block_tokens,
        note=f"generated: {n} requests, rate by time of day ({len(levels)} parts of {period:g} s, {levels.min():g} to "
             f"{levels.max():g}/s, mean {mass[-1] / period:g}/s), gaps of CV {cv:g}, seed {seed}",
    )


def gaps(name: str, n: int, cv: float, seed: int) -> np.ndarray:
    """float64[n] of mean 1 and coefficient of variation `cv`."""
    _demand(name, 0 <= cv <= 100, "cv", cv, "0 to 100")
    random = generator(seed, f"{name}/arrival")
    return random.gamma(1 / cv**2, cv**2, n) if cv else np.ones(n)


def at_mass(due: np.ndarray, begin: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """When the integral `mass` of a rate, constant between the times `begin`, reaches `due`. No time lies where it is 0."""
    k = np.clip(np.searchsorted(mass, due, side="right") - 1, 0, len(mass) - 2)
    rise = mass[k + 1] - mass[k]
    share = np.divide(due - mass[k], rise, out=np.zeros(len(due)), where=rise > 0)
    return begin[k] + share * (begin[k + 1] - begin[k])


def _demand(name: str, ok: bool, key: str, found: object, allowed: str) -> None:
    if not ok:
        raise TraceError(f"generate.{name}", key, found=found, allowed=allowed)
