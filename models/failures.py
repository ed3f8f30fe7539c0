"""What goes wrong in a run, as a study says it: clients that give up, replicas that are killed, drained or restarted,
routers that see old numbers. The rules stand in docs/failures.md; failing_cluster.py carries them out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from simcore.config import Seconds
from simcore.errors import ConfigError

Time = Annotated[Seconds, Field(ge=0, allow_inf_nan=False)]
Span = Annotated[Seconds, Field(gt=0, allow_inf_nan=False)]


class Clients(BaseModel):
    """What clients do. Limits hold for each attempt, from when it reaches the cluster. The k-th retry (from 0) comes
    `backoff * 2^k` s after its attempt failed; by then the client has sent nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout: Span | None = Field(None, description="s to the last token")
    ttft_timeout: Span | None = Field(None, description="s to the first token")
    retries: Annotated[int, Field(ge=0, le=100)] = 0
    backoff: Time = Field(1.0, description="s before the first retry; doubles with each")

def _number(value: Any) -> Any:
    """`replica3` is 3."""
    match = re.fullmatch(r"replica\s*(\d+)", value) if isinstance(value, str) else None
    return int(match.group(1)) if match else value


ReplicaNumber = Annotated[int, BeforeValidator(_number), Field(ge=0, description="a replica: 3, or replica3")]


class RollingRestart(BaseModel):
    """One replica after another: drained, `down` s down, back with nothing in its caches."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    down: Span


if TYPE_CHECKING:
    _Lasting = BaseModel
else:  # `for` is a word of Python's, so that no class body can name it
    _Lasting = create_model("_Lasting", **{"for": (Span | None, Field(None, description="s that the replica is down"))})


class Event(_Lasting):
    """Something that happens to replicas at time `at` (s): just one of kill, drain and rolling_restart. `for`: how long a
    killed replica is down, or a drained one once it is empty; left out = for good."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: Time
    kill: ReplicaNumber | None = None
    drain: ReplicaNumber | None = None
    rolling_restart: RollingRestart | None = None

    @model_validator(mode="after")
    def _one_thing(self) -> Event:
        if sum(thing is not None for thing in (self.kill, self.drain, self.rolling_restart)) != 1:
            raise ValueError("an event is just one of kill, drain and rolling_restart")
        if self.rolling_restart is not None and self.lasts is not None:
            raise ValueError("rolling_restart takes no `for`: its `down` says how long each replica is down")
        return self

    @property
    def lasts(self) -> float | None:
        return getattr(self, "for")

    @property
    def replica(self) -> int | None:
        """The replica that it names; None = all."""
        return self.kill if self.kill is not None else self.drain


@dataclass(frozen=True)
class Failures:
    """All that a run is told of failures. `view_delay`: s, how old at most is what a router sees."""

    clients: Clients | None = None
    events: Sequence[Event] = ()
    view_delay: float = 0.0

    def reasons(self) -> list[str]:
        """Why a run with these cannot be planned ahead; empty: there are none."""
        out = []
        if self.clients is not None:
            out.append("clients: a request may be aborted at any time")
        if self.events:
            out.append("events: a replica may die inside a step")
        if self.view_delay:
            out.append("cluster.view_delay: a router's look at a replica is a copy of its state")
        return out

    def check(self, replicas: int) -> None:
        """Raises ConfigError for a view_delay that is none, and as `check_events` does."""
        if not (self.view_delay >= 0 and isfinite(self.view_delay)):
            raise ConfigError("cluster.view_delay", found=self.view_delay, allowed="a time in s, at least 0")
        check_events(self.events, replicas)


def check_events(events: Sequence[Event], replicas: int) -> None:
    """Refuse what cannot be: a replica that is not there; two events of one replica at one time; an event of a replica that
    the one before has taken, and that is surely not back. (A kill of a drained one can be: it ends the grace period.)

    Raises ConfigError naming the event by its place (`events.2`).
    """
    for k, event in enumerate(events):
        named = event.replica
        if named is not None and named >= replicas:
            kind = "kill" if event.kill is not None else "drain"
            raise ConfigError(f"events.{k}", kind, found=named, allowed=f"0 .. {replicas - 1} (cluster.replicas)")
    for replica in range(replicas):
        own = [(k, event) for k, event in enumerate(events) if event.replica == replica]
        own.sort(key=lambda item: (item[1].at, item[0]))
        for (_, before), (k, event) in pairwise(own):
            back = before.at + (inf if before.lasts is None else before.lasts)  # at the soonest
            ends_drain = before.drain is not None and event.kill is not None
            if event.at == before.at or (event.at < back and not ends_drain):
                what = "killed" if before.kill is not None else "drained"
                until = f"until {back:g} s at least" if back < inf else "for good"
                raise ConfigError(
                    f"events.{k}", found=f"another event of replica {replica} at {event.at:g} s",
                    why=f"it is {what} at {before.at:g} s and away {until}", allowed="a time when it is back")
