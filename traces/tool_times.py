"""How long tools take: latency sources, drawn when a workload is built, so that all policies meet the same times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from typing import Protocol

import numpy as np

from simcore.errors import TraceError


class ToolTime(Protocol):
    """A latency source. Times in s."""

    @property
    def mean(self) -> float: ...

    @property
    def sd(self) -> float: ...

    def draw(self, random: np.random.Generator, n: int) -> np.ndarray:
        """float64[n], s."""
        ...


@dataclass(frozen=True)
class Constant:
    seconds: float

    @property
    def mean(self) -> float:
        return self.seconds

    @property
    def sd(self) -> float:
        return 0.0

    def draw(self, random: np.random.Generator, n: int) -> np.ndarray:
        return np.full(n, self.seconds)


@dataclass(frozen=True)
class Empirical:
    """Recorded durations, drawn with replacement."""

    seconds: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.seconds))

    @property
    def sd(self) -> float:
        return float(np.std(self.seconds))

    def draw(self, random: np.random.Generator, n: int) -> np.ndarray:
        return np.array(self.seconds)[random.integers(len(self.seconds), size=n)]


@dataclass(frozen=True)
class Lognormal:
    """A lognormal body; a share of the calls takes `spike_seconds` instead (a time-out, a test suite)."""

    median: float
    sigma: float
    spike_share: float = 0.0
    spike_seconds: float = 0.0

    @property
    def mean(self) -> float:
        return (1 - self.spike_share) * self.median * exp(self.sigma**2 / 2) + self.spike_share * self.spike_seconds

    @property
    def sd(self) -> float:
        square = (1 - self.spike_share) * self.median**2 * exp(2 * self.sigma**2) + self.spike_share * self.spike_seconds**2
        return sqrt(max(0.0, square - self.mean**2))

    def draw(self, random: np.random.Generator, n: int) -> np.ndarray:
        body = self.median * np.exp(self.sigma * random.standard_normal(n))
        return np.where(random.random(n) < self.spike_share, self.spike_seconds, body)


@dataclass(frozen=True)
class ToolMix:
    """Which tool a call uses, and how long it takes: tool -> (share of the calls, latency source)."""

    tools: Mapping[str, tuple[float, ToolTime]]

    @property
    def mean(self) -> float:
        return sum(share * time.mean for share, time in self.tools.values()) / self._total

    @property
    def sd(self) -> float:
        square = sum(share * (time.sd**2 + time.mean**2) for share, time in self.tools.values()) / self._total
        return sqrt(max(0.0, square - self.mean**2))

    @property
    def _total(self) -> float:
        return sum(share for share, _ in self.tools.values())

    def draw(self, random: np.random.Generator, n: int) -> list[tuple[str, float]]:
        """n calls: (tool, s)."""
        names = list(self.tools)
        shares = np.array([share for share, _ in self.tools.values()]) / self._total
        chosen = random.choice(len(names), size=n, p=shares)
        drawn = np.stack([time.draw(random, n) for _, time in self.tools.values()], axis=1)
        return [(names[k], float(drawn[i, k])) for i, k in enumerate(chosen.tolist())]


_KINDS = {
    "constant": ("seconds",),
    "empirical": ("seconds",),
    "histogram": ("start", "width", "counts", "single"),
    "lognormal": ("median", "sigma", "spike_share", "spike_seconds"),
}


def tool_time(where: str, given: object) -> ToolTime:
    """A latency source from what a file says: a number of seconds, or a mapping with `kind`.

    Kinds: constant (seconds), empirical (seconds: a list), lognormal (median, sigma, spike_share, spike_seconds) and
    histogram (start, width, counts, single: bins, each spread evenly, and single values). Raises TraceError.
    """
    if isinstance(given, int | float) and not isinstance(given, bool):
        return Constant(_number(where, "seconds", given))
    if not isinstance(given, Mapping) or given.get("kind") not in _KINDS:
        raise TraceError(where, "kind", found=given, allowed=f"a number of seconds, or a kind: {', '.join(_KINDS)}")
    kind = str(given["kind"])
    for key in given:
        if key != "kind" and key not in _KINDS[kind]:
            raise TraceError(where, str(key), why="unknown key", allowed=", ".join(_KINDS[kind]))
    if kind == "constant":
        return Constant(_number(where, "seconds", given.get("seconds")))
    if kind == "empirical":
        return Empirical(_numbers(where, "seconds", given.get("seconds")))
    if kind == "histogram":
        return Empirical(_spread_bins(where, given))
    median = _number(where, "median", given.get("median"))
    if not median:
        raise TraceError(where, "median", found=median, allowed="above 0")
    return Lognormal(
        median, _number(where, "sigma", given.get("sigma")),
        _number(where, "spike_share", given.get("spike_share", 0.0), most=1.0),
        _number(where, "spike_seconds", given.get("spike_seconds", 0.0)),
    )


def _spread_bins(where: str, given: Mapping) -> tuple[float, ...]:
    start, width = (_number(where, key, given.get(key)) for key in ("start", "width"))
    counts = _numbers(where, "counts", given.get("counts"))
    values = [start + width * (k + (j + 0.5) / count) for k, count in enumerate(counts) for j in range(int(count))]
    return (*values, *(_numbers(where, "single", given["single"]) if "single" in given else ()))


def _numbers(where: str, key: str, found: object) -> tuple[float, ...]:
    if not isinstance(found, list) or not found:
        raise TraceError(where, key, found=found, allowed="a list of numbers")
    return tuple(_number(where, key, value) for value in found)


def _number(where: str, key: str, found: object, most: float = inf) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= most or found == inf:
        raise TraceError(where, key, found=found, allowed=f"a number, 0 to {most:g}")
    return float(found)


def lognormal(mean: float, sd: float) -> Lognormal:
    """The lognormal of this mean (above 0) and sd, without a spike."""
    spread = log(1 + (sd / mean) ** 2)
    return Lognormal(mean * exp(-spread / 2), sqrt(spread))
