"""Facts: what has happened, told to the policies that name the type in `observes`. Frozen; times in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Fact:
    """Base of all facts. `now` is the simulated time at which the fact became true."""

    now: float


@dataclass(frozen=True, slots=True)
class ProgramStarted(Fact):
    program: int


@dataclass(frozen=True, slots=True)
class ProgramEnded(Fact):
    program: int


@dataclass(frozen=True, slots=True)
class TurnArrived(Fact):
    """`gap`: seconds since the program's previous turn ended (NaN for the first turn, or while that turn still runs);
    `tool`: what ran in between, if the trace says so."""

    request: int
    program: int
    gap: float
    tool: str | None


@dataclass(frozen=True, slots=True)
class Admitted(Fact):
    """First admission or resumption: the request starts to run. `wait`: seconds before, the time of a load from a lower tier
    left out; `had_pin`: whether its program was pinned when it was admitted; `cached_tokens`: reused without computing, the
    loaded ones included."""

    request: int
    program: int
    wait: float
    had_pin: bool
    cached_tokens: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class TurnEnded(Fact):
    """`service`: seconds spent in the running list, preempted stays included. `aborted`: the client gave up, or the
    replica was killed; the turn may come again, under the same id."""

    request: int
    program: int
    service: float
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class Preempted(Fact):
    request: int
    program: int


@dataclass(frozen=True, slots=True)
class PinDropped(Fact):
    """`cause`: "expired", "consumed", "room" or "program_ended"."""

    program: int
    cause: str


@dataclass(frozen=True, slots=True)
class FlowEnded(Fact):
    """A copy between a replica's GPUs and its host's memory has arrived, `seconds` after it began; or ("push") the KV of a
    prompt from a prefill replica to `replica`."""

    replica: int
    link: Literal["to_host", "from_host", "push"]
    bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StepEnded(Fact):
    """Told after every step: a policy that observes it keeps its replica on the step-by-step path."""

    replica: int
    seconds: float
    tokens: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Woken(Fact):
    """The time that the policy named by `next_wakeup` has come."""


class Listeners:
    """Who wants to hear which fact. `wants(kind)` is asked once, so that an unheard fact costs nothing."""

    def __init__(self, policies: Iterable[Any] = ()) -> None:
        self._by_kind: dict[type[Fact], list[Any]] = {}
        seen: list[Any] = []
        for policy in policies:
            if any(policy is other for other in seen):
                continue  # one object that serves several kinds hears a fact once
            seen.append(policy)
            for kind in policy.observes:
                self._by_kind.setdefault(kind, []).append(policy)

    def wants(self, kind: type[Fact]) -> bool:
        return kind in self._by_kind

    def tell(self, fact: Fact) -> None:
        for policy in self._by_kind.get(type(fact), ()):
            policy.observe(fact)
