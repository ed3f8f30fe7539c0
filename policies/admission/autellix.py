"""Autellix's PLAS (arXiv 2502.13965): programs that have had the least model time go first, in queues with quanta."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from math import ceil, inf, nan, nextafter

from simcore.models.decision_points import Admission
from simcore.models.facts import Admitted, Fact, Preempted, ProgramEnded, TurnArrived, TurnEnded, Woken
from simcore.models.views import Engine, Running, Turn


@dataclass(slots=True)
class _Call:
    """A turn that has arrived and not ended. Times in s."""

    program: int
    since: float = nan  # start of the present wait or stay in the running list
    service: float = 0.0  # in the running list, up to the last preemption
    forgiven: float = 0.0  # service before the last promotion, which counts no more
    waited: float = 0.0  # since the last promotion
    waited_all: float = 0.0
    promoted: bool = False
    due: float = nan  # when it will have waited too long; NaN while it does not wait


class Autellix(Admission):
    """A turn starts in queue i (of 1 .. `queues`) that holds p, the seconds its program's earlier turns spent in the
    running list: queue i reaches from the sum of the quanta before it to that sum plus its own. Queue i's quantum is
    `quantum` * `growth` ** (i - 1) seconds; having run for that long, a turn goes one queue down. Within a queue, first
    come, first served (section 4.2). At W / T >= `beta` (seconds the program has waited and run, the present turn's
    included) a waiting turn is promoted to queue 1, and its own part of W and T starts at 0 again.

    The paper names neither the number of queues nor quanta nor beta: the defaults are assumptions, to be varied. The engine
    counts a quantum in output tokens: the seconds left are divided by the turn's own pace so far (`token_seconds` before
    its first token), and a turn asked too early is asked again, at least `least_tokens` later. A running turn yields only
    at the end of a quantum; short of memory, the one in the lowest queue is preempted. The process table is one replica's.
    """

    observes: tuple[type[Fact], ...] = (TurnArrived, Admitted, Preempted, TurnEnded, ProgramEnded, Woken)

    def __init__(
        self, queues: int = 8, quantum: float = 2.0, growth: float = 2.0, beta: float = 10.0, token_seconds: float = 0.02,
        least_tokens: int = 16,
    ) -> None:
        if queues < 1 or least_tokens < 1:
            raise ValueError(f"queues = {queues!r}, least_tokens = {least_tokens!r}; allowed: at least 1")
        for name, value in {"quantum": quantum, "growth": growth, "beta": beta, "token_seconds": token_seconds}.items():
            if not value > 0:
                raise ValueError(f"{name} = {value!r}; allowed: above 0")
        self.beta = beta
        self.token_seconds = token_seconds
        self.least_tokens = least_tokens
        self._quanta = [quantum * growth**i for i in range(queues - 1)]  # the last queue has no end
        self._bounds = list(accumulate(self._quanta))
        self._service: dict[int, float] = {}  # program -> seconds its ended turns ran ...
        self._waited: dict[int, float] = {}  # ... and waited
        self._calls: dict[int, _Call] = {}
        self._starving: list[tuple[float, int]] = []  # heap of (due, request); an entry counts if it is the call's `due`
        self._moved: list[int] = []

    # --- the order ------------------------------------------------------------------------------------------------------

    def key(self, turn: Turn, now: float) -> tuple:
        return (self._queue(turn)[0], turn.arrival)

    def victim(self, running: Sequence[Running], blocks: int, engine: Engine) -> Running:
        return max(running, key=lambda request: (self._queue(request)[0], request.arrival, request.id))

    def limit(self, running: Running) -> int | None:
        left = self._queue(running)[1]
        if left == inf:
            return None
        pace = running.service / running.generated if running.generated else self.token_seconds
        return max(self.least_tokens, ceil(left / pace)) if pace > 0 else self.least_tokens

    def _queue(self, turn: Turn) -> tuple[int, float]:
        """(queue from 0, seconds left of its quantum) of a turn."""
        call = self._calls.get(turn.id)
        served = turn.service - (call.forgiven if call else 0.0)
        queue = 0 if call and call.promoted else bisect_right(self._bounds, self._service.get(turn.program, 0.0))
        for quantum in self._quanta[queue:]:
            if served < quantum:
                return queue, quantum - served
            served -= quantum
            queue += 1
        return queue, inf

    # --- waiting too long -----------------------------------------------------------------------------------------------

    def observe(self, fact: Fact) -> None:
        self._moved = []
        match fact:
            case TurnArrived():
                call = self._calls[fact.request] = _Call(fact.program)
                if self._waits(fact.request, call, fact.now):
                    self._moved.append(fact.request)
            case Preempted():
                call = self._calls[fact.request]
                call.service += fact.now - call.since
                self._waits(fact.request, call, fact.now)  # its key is taken after this
            case Admitted():
                call = self._calls[fact.request]
                call.waited += fact.now - call.since
                call.waited_all += fact.wait
                call.since, call.due = fact.now, nan
            case TurnEnded():
                call = self._calls.pop(fact.request)
                self._service[fact.program] = self._service.get(fact.program, 0.0) + fact.service
                self._waited[fact.program] = self._waited.get(fact.program, 0.0) + call.waited_all
            case ProgramEnded():
                self._service.pop(fact.program, None)
                self._waited.pop(fact.program, None)
            case Woken():
                self._promote_starving(fact.now)

    def rekey(self, fact: Fact) -> Iterable[int]:
        return self._moved

    def next_wakeup(self, now: float) -> float:
        starving = self._starving
        while starving and not self._counts(*starving[0]):
            heappop(starving)
        return max(starving[0][0], nextafter(now, inf)) if starving else inf

    def _counts(self, due: float, request: int) -> bool:
        call = self._calls.get(request)
        return call is not None and call.due == due

    def _waits(self, request: int, call: _Call, now: float) -> bool:
        """A call begins to wait; whether it has already waited too long, and is promoted at once."""
        call.since = now
        service = self._service.get(call.program, 0.0) + call.service - call.forgiven
        waited = self._waited.get(call.program, 0.0) + call.waited
        if service <= 0:
            return False  # it is in the first queue
        call.due = now + max(0.0, self.beta * service - waited)
        if call.due <= now:
            self._promote(call, now)
            return True
        if call.due < inf:
            heappush(self._starving, (call.due, request))
        return False

    def _promote(self, call: _Call, now: float) -> None:
        call.promoted, call.due = True, nan
        call.since, call.waited, call.forgiven = now, 0.0, call.service

    def _promote_starving(self, now: float) -> None:
        starving = self._starving
        while starving and starving[0][0] <= now:
            due, request = heappop(starving)
            if self._counts(due, request):
                self._promote(self._calls[request], now)
                self._moved.append(request)
