"""The decision points: what the system asks a policy, and what a policy may answer.

A policy is a small class derived from one or more of the classes below, with its parameters in the constructor. Every
method has a do-nothing default (which together are vLLM's behaviour). Policies never mutate the system, do no I/O and
read no clock; an illegal answer raises `PolicyError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal

from simcore.models.facts import Fact

if TYPE_CHECKING:
    import numpy as np

    from simcore.models.views import Engine, Pinned, ReplicaView, Running, Site, Turn


class Policy:
    """What all kinds share."""

    observes: tuple[type[Fact], ...] = ()  # facts that `observe` wants to hear
    decision_seconds: float = 0.0  # simulated time charged per decision
    oracle: bool = False  # uses the true future (output lengths, tool times); every comparison prints it

    def start(self, site: Site, rng: np.random.Generator) -> None:
        """Called once, before time runs. `rng` is this policy's own stream."""

    def observe(self, fact: Fact) -> None:
        """Called for each fact of a type named in `observes`."""

    def next_wakeup(self, now: float) -> float:
        """The next time (s) at which the policy wants to be woken (a `Woken` fact, then `review`), inf = never. Asked after
        each arrival, end and wake-up, while there is work; the latest answer stands."""
        return inf


# --- admission ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refuse:
    reason: str


class Admission(Policy):
    """Which requests enter, in which order they are served, and who is preempted. One instance per replica."""

    def accept(self, turn: Turn, engine: Engine) -> Refuse | None:
        """Asked when the request reaches the replica."""
        return None

    def key(self, turn: Turn, now: float) -> tuple:
        """Place in the queue: smallest first, ties by request id. Asked at enqueue, after a preemption and on `rekey`."""
        return (turn.arrival,)

    def rekey(self, fact: Fact) -> Iterable[int]:
        """Ids of waiting requests whose key this observed fact has changed."""
        return ()

    def victim(self, running: Sequence[Running], blocks: int, engine: Engine) -> Running:
        """Who is preempted when `blocks` more blocks are needed than are free. May be the request that asks."""
        return running[-1]

    def limit(self, running: Running) -> int | None:
        """Tokens the request may generate until it is asked again (a quantum); None = never. When it is used up, the
        request's key is taken anew and it yields its place if the head of the queue has a smaller one."""
        return None


# --- retention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Release:
    """Give the blocks back. Hashed blocks stay findable until they are handed out again: "lru" puts them at the end of
    the free list, "first" at its front; "never" takes their hashes away at once."""

    reuse: Literal["lru", "first", "never"] = "lru"


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep the blocks of the ended turn until the absolute time `until` (s), or until the program's next turn is
    admitted ("admission") or ends ("turn_end")."""

    until: float
    consumed: Literal["admission", "turn_end"] = "admission"


@dataclass(frozen=True, slots=True)
class Swap:
    """Move the blocks to a lower tier. Needs an engine with that tier."""

    tier: str


@dataclass(frozen=True, slots=True)
class Unpin:
    program: int


@dataclass(frozen=True, slots=True)
class Extend:
    program: int
    until: float


@dataclass(frozen=True, slots=True)
class Room:
    """A shortage of `blocks` (beyond what is free): of a waiting `head`, or of a running request's next token."""

    blocks: int
    cause: Literal["admission", "decode"]
    head: Turn


class Retention(Policy):
    """What happens to the KV of a turn that has ended. One instance per replica.

    `room_when`: when `make_room` is asked for a waiting head that lacks blocks: "blocked", at every step at which it does;
    or "idle", only where nothing runs (a policy that would answer nothing else says so: the engine need not stop to ask).
    """

    room_when: Literal["blocked", "idle"] = "blocked"

    def at_turn_end(self, turn: Turn, engine: Engine) -> Release | Pin | Swap:
        """Asked when a request has its last token, while it still holds its blocks."""
        return Release()

    def review(self, pins: Sequence[Pinned], engine: Engine) -> Iterable[Unpin | Extend | Swap]:
        """Asked with the expired pins at an expiry (those not extended are dropped), and with all pins at a wake-up."""
        return ()

    def make_room(self, room: Room, pins: Sequence[Pinned], engine: Engine) -> Iterable[int]:
        """Programs whose pins are dropped, in order, until the shortage is met; empty = none."""
        return ()


# --- replica routing ------------------------------------------------------------------------------------------------


class ReplicaRouting(Policy):
    """Which replica serves a request. One instance per cluster."""

    def route(self, turn: Turn, replicas: Sequence[ReplicaView], now: float) -> int | tuple[int, int]:
        """The replica's id; a pair is (prefill, decode), for clusters that separate the two: there a prefill replica's id
        alone means that the decode replica with the least outstanding tokens takes over when the prompt is computed.
        `replicas`: those that take requests, by id, with their `role`; one that is down or drains is not among them, so that
        a place in it is no id."""
        return replicas[0].id


KINDS: dict[str, type[Policy]] = {
    "admission": Admission,
    "retention": Retention,
    "replica_routing": ReplicaRouting,
}
