"""Shortest job first. By prompt length it needs nothing that an engine does not know; by total length it is an oracle."""

from typing import Literal

from simcore.models.decision_points import Admission
from simcore.models.views import Turn


class ShortestFirst(Admission):
    """`by`: "prompt" orders by known tokens, "uncached" by those the pool does not hold at enqueue, "total" by known
    plus true remaining output tokens (oracle). `patience` (s): arrivals are taken in windows of this length, older
    windows first, so that nobody starves; inf = one window.
    """

    def __init__(self, by: Literal["prompt", "uncached", "total"] = "prompt", patience: float = float("inf")) -> None:
        if by not in ("prompt", "uncached", "total"):
            raise ValueError(f"by = {by!r}; allowed: prompt, uncached, total")
        if not patience > 0:
            raise ValueError(f"patience = {patience!r}; allowed: seconds > 0")
        self.by = by
        self.patience = patience
        self.oracle = by == "total"

    def key(self, turn: Turn, now: float) -> tuple:
        size = turn.context_tokens
        if self.by == "uncached":
            size -= turn.cached_tokens
        elif self.by == "total":
            size += turn.remaining or 0
        # Starvation: the key never changes while a request waits, so patience is counted in whole windows of arrival
        # time. Within a window the shortest goes first; an older window always precedes a newer one.
        window = int(turn.arrival // self.patience) if self.patience != float("inf") else 0
        return (window, size, turn.arrival)
