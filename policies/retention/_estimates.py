"""What Continuum learns while it serves: tool durations, the queueing delay of evicted turns, memoryfulness."""

from __future__ import annotations

from collections import deque
from math import sqrt

import numpy as np


class Durations:
    """The empirical distribution of recorded durations (s). Adding and asking take one numpy pass over the distinct ones."""

    def __init__(self) -> None:
        self.count = 0
        self._size = 0
        self._values = np.zeros(64)  # distinct, ascending
        self._at_most = np.zeros(64, dtype=np.int64)  # how many recorded durations are <= that value

    def add(self, seconds: float) -> None:
        n = self._size
        i = int(self._values[:n].searchsorted(seconds))
        if i == n or self._values[i] != seconds:
            self._insert(i, seconds)
        self._at_most[i : self._size] += 1
        self.count += 1

    def _insert(self, i: int, seconds: float) -> None:
        n = self._size
        if n == len(self._values):
            self._values = np.concatenate((self._values, np.zeros(n)))
            self._at_most = np.concatenate((self._at_most, np.zeros(n, dtype=np.int64)))
        values, at_most = self._values, self._at_most
        values[i + 1 : n + 1] = values[i:n].copy()
        at_most[i + 1 : n + 1] = at_most[i:n].copy()
        values[i] = seconds
        at_most[i] = at_most[i - 1] if i else 0
        self._size = n + 1

    def best_ttl(self, benefit: float) -> float:
        """The time tau (s), 0 or a recorded duration, at which P(duration <= tau) * benefit - tau is largest; the smallest
        of equals. Exact, since between two recorded durations the objective only falls (arXiv 2511.02230, eq. 2)."""
        k = int(self._values[: self._size].searchsorted(benefit))  # a longer pin than the benefit never pays
        if not k:
            return 0.0
        values = self._values[:k]
        gains = self._at_most[:k] / self.count * benefit - values
        best = int(gains.argmax())
        return values.item(best) if gains[best] > 0 else 0.0


class SlidingMean:
    """Mean of the last `window` values; 0 before the first."""

    def __init__(self, window: int) -> None:
        self._values: deque[float] = deque(maxlen=window)

    def add(self, value: float) -> None:
        self._values.append(value)

    @property
    def value(self) -> float:
        return sum(self._values) / len(self._values) if self._values else 0.0


class Memoryfulness:
    """eta = -Corr(k, N - k) over all turns of the finished programs: k = turns served so far, N = turns of the program
    (arXiv 2511.02230, section 4.1). 1 for programs of equal length, 0 for geometric ones, below 0 for heavy tails; `start`
    until two distinct k have been seen. Sums are integers, so nothing drifts."""

    def __init__(self, start: float = 1.0) -> None:
        self._start = start
        self._n = self._k = self._m = self._kk = self._mm = self._km = 0

    def add(self, turns: int) -> None:
        """A program of so many turns has finished."""
        n = turns
        k, kk = n * (n + 1) // 2, n * (n + 1) * (2 * n + 1) // 6  # sums of k and k^2, k = 1 .. n
        self._n += n
        self._k += k
        self._m += n * n - k
        self._kk += kk
        self._mm += n * n * n - 2 * n * k + kk
        self._km += n * k - kk

    @property
    def value(self) -> float:
        n = self._n
        spread = (n * self._kk - self._k**2) * (n * self._mm - self._m**2)
        return -(n * self._km - self._k * self._m) / sqrt(spread) if spread else self._start
