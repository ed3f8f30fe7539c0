"""A cluster in which things go wrong: clients that give up and send again, replicas that are killed, drained, restarted.

The rules stand in docs/failures.md. A request has one row and any number of attempts, each a new `Attempt` under the same
id, so that nothing of an aborted one reaches the next. Every attempt ends in one of three ways: its replica ends it
(`request_ended`), its client gives up (`_give_up`), or its replica dies (`_kill`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from simcore.errors import PolicyError
from simcore.models.cluster import Cluster
from simcore.models.executor import Executor
from simcore.models.facts import Fact, Listeners, TurnEnded
from simcore.models.failures import Clients, Event, Failures
from simcore.models.host_links import HostLinks
from simcore.models.policy_desk import view_of
from simcore.models.replica import DECIDES
from simcore.models.request import Request
from simcore.models.scheduler import Scheduler
from simcore.models.stale_views import StaleView
from simcore.models.views import ReplicaView
from simcore.simulation import ARRIVAL, BOUNDARY, TIMER, Call

if TYPE_CHECKING:
    import pandas as pd

# A fresh engine for a replica: (replica, how many it has had before) -> what `Replica.restart` takes.
Engines = Callable[[int, int], tuple[Scheduler, Executor, Listeners | None, HostLinks | None]]


class Attempt(Request):
    """A request as it was sent once. `number` from 1; `first_arrival` (s) of the first attempt; `replica` -1 until routed;
    `lost`: tokens computed that preemptions threw away."""

    __slots__ = ("first_arrival", "lost", "number", "timers")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.number = 1
        self.first_arrival = self.arrival
        self.lost = 0
        self.timers: list[Call] = []

    @property
    def wasted(self) -> int:
        """Tokens computed for it so far, recomputed ones included; of an aborted one, all were for nothing."""
        return self.lost + self.computed - self.cached_all

    def stop_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()


class _Life:
    """Where a replica stands. `away_since`: from when on the router got no more of it (NaN while it does)."""

    def __init__(self) -> None:
        self.state = "up"  # up, draining, down
        self.engines = 1
        self.down_for: float | None = None  # of a drain: s down once empty; None = for good
        self.away_since = nan
        self.away: list[tuple[float, float]] = []  # (from, until), s
        self.back: Call | None = None


class FailingCluster(Cluster):
    """See the module. `failures` have been checked; `engines` makes the engine of a restarted replica."""

    def __init__(self, *args: Any, failures: Failures, engines: Engines, **options: Any) -> None:
        super().__init__(*args, **options)
        self.clients = failures.clients or Clients()
        self.attempts = np.zeros(len(self.workload), dtype=np.int64)  # by request
        self.aborted_tokens = 0  # computed for attempts that came to nothing
        self._events: Sequence[Event] = failures.events
        self._calls_of_events: list[Call] = []
        self._engines = engines
        self._lives = [_Life() for _ in self.replicas]
        self._parked: dict[int, tuple[Attempt, float]] = {}  # no replica was up: (attempt, gap), first come, first served
        self._rolling: list[tuple[float, list[int]]] = []  # rolling restarts: s down, replicas still to do
        self._rolls: int | None = None  # the replica that the first of them waits for
        if failures.view_delay:
            self._views = [StaleView(replica, failures.view_delay) for replica in self.replicas]
        self._offered: list[ReplicaView] = self._views
        for replica in self.replicas:
            replica.scheduler.counts_lost = True

    def start(self) -> None:
        super().start()
        for k, event in enumerate(self._events):  # at one instant events come before clients give up
            self._calls_of_events.append(
                self.sim.at(event.at, self._happens, TIMER, id=k - len(self._events), args=(event,)))

    def close(self, *, stuck: bool) -> None:
        for attempt, _ in list(self._parked.values()):
            attempt.ended = self.sim.now
            del self.live[attempt.id]
            self._record(attempt, "failed", "no replica was up when the run ended")
        super().close(stuck=stuck)

    def let_go(self) -> None:
        super().let_go()
        self._offered = []
        del self._engines

    # --- attempts -----------------------------------------------------------------------------------------------------

    def _send(self, request: Any, gap: float, now: float) -> None:
        self.attempts[request.id] = request.number
        for limit, ran_out in ((self.clients.timeout, self._timed_out), (self.clients.ttft_timeout, self._no_token_yet)):
            if limit is not None:
                request.timers.append(self.sim.at(now + limit, ran_out, TIMER, id=request.id, args=(request,)))
        self._route(request, gap, now)

    def _route(self, request: Attempt, gap: float, now: float) -> None:
        if not self._offered:
            self._parked[request.id] = request, gap
            return
        router = self.router
        answer = router.route(view_of(request, router), self._offered, now)
        if type(answer) is not int or not 0 <= answer < len(self.replicas):
            answer = self._checked(answer, now)
        if self._lives[answer].state != "up":
            up = ", ".join(str(view.id) for view in self._offered)
            raise PolicyError(router, now, f"route answered {answer}, which takes no requests; allowed: {up}")
        request.replica = answer
        self.replicas[answer].outstanding += 1
        self._note("replica_routing", answer, request.id, self._names[answer])
        if router.decision_seconds:
            self.sim.at(now + router.decision_seconds, self._deliver, ARRIVAL, id=request.id, args=(request, gap))
        else:
            self.replicas[answer].submit(request, gap)

    def _deliver(self, request: Attempt, gap: float) -> None:
        """It was routed, and is there now, if client and replica still are."""
        if request.state != "new":
            return
        replica = self.replicas[request.replica]
        if self._lives[replica.id].state == "down":
            self._lose(request, f"replica {replica.id} was down")
            self._over(request, "failed", f"replica {replica.id} was down")
        else:
            replica.submit(request, gap)

    def _again(self, old: Attempt) -> None:
        """A retry. It is not known to be one: it goes through the router like any other."""
        now = self.sim._now
        request: Any = self._request(old.id, now)
        request.number = old.number + 1
        request.first_arrival = old.first_arrival
        request.program_arrival = old.program_arrival
        self.live[old.id] = request
        self._send(request, nan, now)

    def request_ended(self, request: Any) -> None:
        request.stop_timers()
        super().request_ended(request)
        self._look_if_empty(request.replica)

    def _timed_out(self, request: Attempt) -> None:
        self._give_up(request, f"timeout: not ended after {self.clients.timeout:g} s")

    def _no_token_yet(self, request: Attempt) -> None:
        if not request.generated:
            self._give_up(request, f"ttft_timeout: no token after {self.clients.ttft_timeout:g} s")

    def _give_up(self, request: Attempt, why: str) -> None:
        """The client ends the attempt now, wherever it is."""
        if request.state == "new":
            self._parked.pop(request.id, None)
        else:
            self.replicas[request.replica].abort(request)
        self._lose(request, why)
        self._over(request, "timed_out", why)

    def _lose(self, request: Attempt, why: str) -> None:
        """The attempt comes to nothing, and is no longer on its replica."""
        request.state = "aborted"
        request.ended = self.sim._now
        request.stop_timers()
        self.aborted_tokens += request.wasted
        self._note("abort", request.replica, request.id, why)
        if request.replica >= 0:
            self.replicas[request.replica].outstanding -= 1
            self._look_if_empty(request.replica)

    def _over(self, request: Attempt, status: str, why: str) -> None:
        """After a lost attempt the request is sent again, or has ended."""
        clients, now = self.clients, self.sim._now
        if request.number <= clients.retries:
            self.sim.at(
                now + clients.backoff * 2.0 ** (request.number - 1), self._again, ARRIVAL, id=request.id, args=(request,))
            return
        del self.live[request.id]
        if self._tells_arrivals:
            self._program_live[request.program] -= 1
            self._program_last_end[request.program] = now
        self._record(request, status, why)

    def _record(self, request: Any, status: str, reason: str) -> None:
        request.arrival = request.first_arrival
        super()._record(request, status, reason)
        if self.ended == len(self.workload):  # what would happen to replicas now matters to nobody
            for call in [*self._calls_of_events, *(life.back for life in self._lives)]:
                if call is not None:
                    call.cancel()

    # --- replicas -----------------------------------------------------------------------------------------------------

    def _happens(self, event: Event) -> None:
        if event.kill is not None:
            self._kill(event.kill, event.lasts)
        elif event.drain is not None:
            self._drain(event.drain, event.lasts)
        else:
            assert event.rolling_restart is not None
            self._rolling.append((event.rolling_restart.down, list(range(len(self.replicas)))))
            self._roll()

    def _kill(self, r: int, lasts: float | None) -> None:
        """All that is on the replica fails at once. When one that is down already comes back is said anew."""
        life, now = self._lives[r], self.sim._now
        was_down = life.state == "down"
        self._note("event", r, -1, "killed" + self._for(lasts))
        self._leave(r, "down")
        lost = [] if was_down else self._restart(r)
        self._come_back_at(r, inf if lasts is None else now + lasts)
        for request in lost:
            self._died_with(request, r)
        for request in lost:
            self._over(cast("Attempt", request), "failed", f"replica {r} was killed")

    def _died_with(self, request: Any, r: int) -> None:
        now = self.sim._now
        if request.state == "running":
            request.service += now - request.running_since
        else:
            request.computed = 0
        self._lose(request, f"replica {r} was killed")
        if TurnEnded in self.router.observes:  # the replica's own policies are gone
            self.router.observe(TurnEnded(now, request.id, request.program, request.service, aborted=True))

    def _drain(self, r: int, lasts: float | None) -> None:
        life = self._lives[r]
        if life.state != "up":
            self._note("event", r, -1, f"not drained: it is {life.state}")
            return
        self._note("event", r, -1, "drains" + self._for(lasts))
        life.down_for = lasts
        self._leave(r, "draining")
        self._look_if_empty(r)

    def _look_if_empty(self, r: int) -> None:
        """A draining replica goes down when the last of its requests has ended, after all else at that instant."""
        if self._lives[r].state == "draining" and not self.replicas[r].outstanding:
            self.sim.at(self.sim._now, self._empty, BOUNDARY, id=2 * DECIDES + r, args=(r,))

    def _empty(self, r: int) -> None:
        life = self._lives[r]
        if life.state != "draining" or self.ended == len(self.workload):
            return
        life.state = "down"
        self._note("event", r, -1, "down" + self._for(life.down_for))
        self._restart(r)
        self._come_back_at(r, inf if life.down_for is None else self.sim._now + life.down_for)

    def _leave(self, r: int, state: str) -> None:
        """The router gets no more of it."""
        life = self._lives[r]
        if life.state == "up":
            life.away_since = self.sim._now
        life.state = state
        self._offered = [view for view, other in zip(self._views, self._lives, strict=True) if other.state == "up"]

    def _restart(self, r: int) -> list[Request]:
        """Put a fresh engine into the replica; returns the requests that were on the old one."""
        life, replica = self._lives[r], self.replicas[r]
        lost = replica.restart(*self._engines(r, life.engines))
        life.engines += 1
        replica.scheduler.counts_lost = True
        self._views[r]._scheduler = replica.scheduler
        return lost

    def _come_back_at(self, r: int, time: float) -> None:
        """It is down until then; inf = for good, and then a rolling restart does not wait for it."""
        life = self._lives[r]
        if life.back is not None:
            life.back.cancel()
            life.back = None
        if time < inf:
            life.back = self.sim.at(time, self._back, TIMER, id=r, args=(r,))
        elif self._rolls == r:
            self._rolls = None
            self._roll()

    def _back(self, r: int) -> None:
        """It takes requests again, with nothing in its caches; those that wait at the router come first."""
        life, now = self._lives[r], self.sim._now
        life.state, life.back = "up", None
        life.away.append((life.away_since, now))
        life.away_since = nan
        self._offered = [view for view, other in zip(self._views, self._lives, strict=True) if other.state == "up"]
        self._note("event", r, -1, "up")
        parked, self._parked = self._parked, {}
        for request, gap in parked.values():
            self._route(request, gap, now)
        if self._rolls == r:
            self._rolls = None
            self._roll()

    def _roll(self) -> None:
        """Go on with the rolling restarts, one after another."""
        while self._rolls is None and self._rolling:
            down, left = self._rolling[0]
            if not left:
                del self._rolling[0]
                continue
            r = left.pop(0)
            if self._lives[r].state == "up":
                self._rolls = r
            self._drain(r, down)

    # --- the record ---------------------------------------------------------------------------------------------------

    def _tell(self, fact: Fact) -> None:
        """To the router, and to the policies of the replicas that run."""
        if type(fact) in self.router.observes:
            self.router.observe(fact)
        for replica, life in zip(self.replicas, self._lives, strict=True):
            if life.state != "down":
                replica.hear(fact)

    def _note(self, kind: str, replica: int, request: int, answer: str) -> None:
        if self._log is not None:
            self._log((self.sim._now, kind, replica, request, answer))

    @staticmethod
    def _for(seconds: float | None) -> str:
        return "" if seconds is None else f" for {seconds:g} s"

    def summary(self, requests: pd.DataFrame, cut_at: float | None) -> dict[str, Any]:
        """`availability`: of each replica, the share of the time in which it took requests: from the first arrival to the
        last end of any request, or to the horizon `cut_at` that cut the run (s)."""
        start = float(requests["arrival"].min())
        end = cut_at if cut_at is not None else float(requests["ended"].max())
        shares = []
        for life in self._lives:
            away = life.away + ([(life.away_since, inf)] if life.away_since == life.away_since else [])
            gone = sum(max(0.0, min(b, end) - max(a, start)) for a, b in away)
            shares.append(1.0 - gone / (end - start) if end > start else nan)
        return {"availability": shares, "aborted_tokens": self.aborted_tokens}
