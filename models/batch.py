"""What a scheduler hands to an executor, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

from simcore.models.request import Request


@dataclass(frozen=True, slots=True)
class WakeAt:
    """An effect: call `schedule` again at this time even if nothing else happens (a pin expires)."""

    time: float


@dataclass(slots=True)
class Batch:
    """One step's work, in the scheduler's order. Parallel lists: request i computes `counts[i]` tokens after `before[i]`
    computed ones; `samples[i]` says whether it yields a token. `tokens` is the sum of the counts."""

    step: int
    requests: list[Request] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    tokens: int = 0
    preempted: list[Request] = field(default_factory=list)
    decision_seconds: float = 0.0
    effects: tuple[WakeAt, ...] = ()


@dataclass(slots=True)
class Outcomes:
    """What a completed batch brought: how many tokens, and the requests that ended."""

    tokens: int
    finished: list[Request]
