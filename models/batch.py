"""What a scheduler hands to an executor, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from simcore.models.request import Request


@dataclass(frozen=True, slots=True)
class WakeAt:
    """An effect: call `schedule` again at this time even if nothing else happens (a pin expires)."""

    time: float


@dataclass(frozen=True, slots=True)
class StartLoad:
    """An effect: copy these chunks of the host tier to the request's blocks, which then hold `tokens` tokens more. `bytes`:
    of whole chunks, all ranks together."""

    link: ClassVar[Literal["from_host"]] = "from_host"
    request: Request
    chunks: Sequence[int]
    tokens: int
    bytes: float


@dataclass(frozen=True, slots=True)
class StartStore:
    """An effect: copy these chunks of an ended turn to the host tier."""

    link: ClassVar[Literal["to_host"]] = "to_host"
    request: Request
    chunks: Sequence[int]
    bytes: float


@dataclass(frozen=True, slots=True)
class StartPush:
    """An effect: copy a prompt's KV from the replica that computed it to the request's blocks, which then hold `tokens`
    tokens more. `source`: the request's stay on that replica, whose blocks are held until then. `bytes`: of whole blocks,
    all ranks together."""

    link: ClassVar[Literal["push"]] = "push"
    request: Request
    source: Any
    tokens: int
    bytes: float


Copy = StartLoad | StartStore | StartPush
Effect = WakeAt | Copy


class Batch:
    """One step's work, in the scheduler's order. Parallel lists: request i computes `counts[i]` tokens after `before[i]`
    computed ones; `samples[i]` says whether it yields a token. `tokens` is the sum of the counts. What must happen outside
    the scheduler stands in `effects`; `decision_seconds` is what its policies charged."""

    __slots__ = ("before", "counts", "decision_seconds", "effects", "preempted", "requests", "samples", "step", "tokens")

    def __init__(
        self, step: int, counts: Sequence[int] = (), before: Sequence[int] = (), samples: Sequence[bool] = ()
    ) -> None:
        self.step = step
        self.requests: list[Request] = []
        self.counts = list(counts)
        self.before = list(before)
        self.samples = list(samples)
        self.tokens = sum(self.counts)
        self.preempted: list[Request] = []
        self.decision_seconds = 0.0
        self.effects: Sequence[Effect] = ()


@dataclass(slots=True)
class Outcomes:
    """What a completed batch brought: how many tokens, the requests that ended, and what must happen outside."""

    tokens: int
    finished: list[Request]
    effects: Sequence[Effect] = ()
