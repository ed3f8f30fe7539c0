"""How long it takes to have an ended turn's context on the GPU again: "Prefill-Reload" in Continuum."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from simcore.models.views import Site, Turn


class RebuildTime:
    """Prefill time by context length, profiled once and fitted with a quadratic, and reload time where the engine has a
    CPU tier (arXiv 2511.02230, section 5.2, "Offline Profile")."""

    def __init__(self, site: Site) -> None:
        self._site = site
        points = profile_points(min(site.num_blocks * site.settings.block_size, site.settings.max_model_len or 1 << 62))
        self._scale = float(points[-1])
        self._fit = least_squares([x / self._scale for x in points], [site.prefill_seconds(x) for x in points])

    def prefill(self, tokens: float) -> float:
        """Seconds to compute `tokens` tokens from nothing. That some blocks survive is left out, as in the paper."""
        x = tokens / self._scale
        value = 0.0
        for coefficient in reversed(self._fit):
            value = value * x + coefficient
        return max(0.0, value)

    def seconds(self, turn: Turn) -> float:
        """PR(r) of the turn's whole context (s): what a lower tier holds is loaded, the rest is computed."""
        tokens = turn.context_tokens
        stored = min(tokens, turn.lower_tier_tokens)  # of an ended turn: from its first token on
        load = self._site.reload_seconds(stored) if stored else None
        if load is None:
            return self.prefill(tokens)
        return load + max(0.0, self.prefill(tokens) - self.prefill(stored))


def profile_points(longest: int) -> list[int]:
    """Context lengths at which prefill is timed: 1000, 2000, 4000 ... and the longest; halves of it if it is short."""
    points = {longest}
    tokens = 1000
    while tokens < longest:
        points.add(tokens)
        tokens *= 2
    if len(points) < 3:
        points = {max(1, longest // 4), max(1, longest // 2), longest}
    return sorted(points)


def least_squares(x: Sequence[float], y: Sequence[float], degree: int = 2) -> list[float]:
    """Coefficients, constant first, of the polynomial that fits best. x in [0, 1]. Plain Python: a linear algebra library
    may round differently on another processor, and with it a policy's decisions."""
    size = min(degree + 1, len(x))
    rows = [[fsum(v ** (i + j) for v in x) for j in range(size)] + [fsum(v**i * w for v, w in zip(x, y, strict=True))]
            for i in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(size):
            if r != i:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]
