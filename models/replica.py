"""One serving instance: a scheduler and an executor on the simulation's clock. Replica alone touches time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from simcore.errors import NoProgress, PolicyError
from simcore.models.batch import Batch, Copy, Effect, StartStore, WakeAt
from simcore.models.decision_points import Policy
from simcore.models.executor import Completion, Executor
from simcore.models.facts import Fact, Listeners, StepEnded
from simcore.models.host_links import HostLinks, Links
from simcore.models.request import Request
from simcore.models.scheduler import Scheduler
from simcore.recorder import Table
from simcore.simulation import BOUNDARY, TIMER, Call, Simulation

STEP_COLUMNS = {
    "time": "float64", "replica": "int64", "step": "int64", "seconds": "float64", "tokens": "int64", "sequences": "int64",
    "running": "int64", "waiting": "int64", "free_blocks": "int64", "preempted": "int64",
}
DECIDES = 1 << 16  # added to the id of a decision: at one instant all replicas complete before any decides
_PATIENCE = 1000  # steps or wake-ups without a token before the watchdog looks at the tokens they computed


@dataclass(slots=True)
class _InFlight:
    batch: Batch
    completion: Completion


class Replica:
    """Runs batch after batch: complete the oldest, decide the next, start it; idle until something arrives.

    Requests leave through `on_end(request)`, which the cluster sets. `sample_every` (s) is the least time between two rows
    of the steps table (taken at step ends, never by a timer); inf = none.
    """

    def __init__(
        self, sim: Simulation, id: int, scheduler: Scheduler, executor: Executor, *,
        listeners: Listeners | None = None, steps: Table | None = None, sample_every: float = inf,
        host: Links | None = None,
    ) -> None:
        self.sim = sim
        self.id = id
        self._step_ends: list[float] = []
        self._busy_seconds = 0.0
        self.outstanding = 0  # requests routed here that have not ended
        self._computed_tokens = 0
        self.on_end: Callable[[Request], None] = _nobody_listens
        self._in_flight: deque[_InFlight] = deque()
        self._boundary_call: Call | None = None
        self._timers: dict[Policy | None, Call] = {}  # the next wake-up of each policy; None = of the pins
        self._steps = steps
        self._sample_every = sample_every
        self._next_sample = 0.0
        self._run_engine(scheduler, executor, listeners, host)

    def _run_engine(
        self, scheduler: Scheduler, executor: Executor, listeners: Listeners | None, host: Links | None
    ) -> None:
        """What runs here from now on, with nothing on it."""
        self.scheduler = scheduler
        self.executor = executor
        self.host = host
        settings = scheduler.settings
        chunked = settings.enable_chunked_prefill
        self._limits = (scheduler.max_model_len, settings.block_size, scheduler.pool.usable,
                        inf if chunked else settings.step_budget)
        self._depth = 2 if settings.async_scheduling else 1
        self._listeners = listeners or Listeners()
        self._tell_steps = self._listeners.wants(StepEnded)
        policies: list[Policy] = [scheduler.admission, scheduler.retention]
        self._waking = [p for k, p in enumerate(policies)
                        if type(p).next_wakeup is not Policy.next_wakeup and p not in policies[:k]]
        self._news = True  # something arrived, ended or woke since the policies were asked when to be woken
        self._fruitless_steps = 0  # since the last delivered token
        self._fruitless_tokens = 0

    def settle(self) -> None:
        """The run is cut here: what has come to pass by now is on record."""

    # --- the record ---------------------------------------------------------------------------------------------------

    @property
    def step_ends(self) -> Sequence[float]:
        """End time of each step (s); token times of requests point here."""
        return self._step_ends

    def step_end(self, step: int) -> float:
        return self._step_ends[step]

    @property
    def busy_seconds(self) -> float:
        """Device time of the completed steps."""
        return self._busy_seconds

    @property
    def computed_tokens(self) -> int:
        """Tokens computed, recomputation included."""
        return self._computed_tokens

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, gap: float) -> None:
        """A request arrives here. What can never fit, or what admission refuses, ends at once with its reason."""
        now = self.sim._now
        scheduler = self.scheduler
        request.replica = self.id
        reason = self.never_fits(request) or scheduler.refusal(request, now)
        if reason:
            request.state, request.reason, request.ended = "refused", reason, now
            scheduler.now = now
            scheduler._note("refuse", request.id, reason)
            self.on_end(request)
            return
        self._poke()  # before the queue grows: what ends at this very instant has not seen the newcomer
        self._news = True
        scheduler.add(request, now, gap)

    def abort(self, request: Request) -> None:
        """The client of a request that is here has given up. What it leaves may let others in. (Step by step only.)"""
        self._poke()
        self._news = True
        self._fruitless_steps = self._fruitless_tokens = 0  # tokens computed for it brought none, and need not
        self.scheduler.abort(request, self.sim._now)

    def restart(
        self, scheduler: Scheduler, executor: Executor, listeners: Listeners | None, host: HostLinks | None
    ) -> list[Request]:
        """The engine dies and this fresh one takes its place: nothing is left of requests, KV, pins, copies, policies. What
        it computed last is not delivered. Returns the requests that were here, by id. (Step by step only.)"""
        lost = self.scheduler.everyone()
        for call in (self._boundary_call, *self._timers.values()):
            if call is not None:
                call.cancel()
        self._boundary_call = None
        self._timers.clear()
        self._in_flight.clear()
        old = self.scheduler.tier
        if isinstance(self.host, HostLinks) and host is not None:
            self.host.cut()
            host.bytes = self.host.bytes
        if old is not None and scheduler.tier is not None:
            scheduler.tier.evictions, scheduler.tier.not_stored = old.evictions, old.not_stored
        scheduler.steps = len(self._step_ends)
        self._run_engine(scheduler, executor, listeners, host)
        return lost

    def pushed(self, request: Request) -> None:
        """The KV of a prompt that was computed here has been pushed, or is wanted nowhere: its blocks may let others in."""
        self._poke()
        self._news = True
        self.scheduler.pushed(request, self.sim._now)

    def hear(self, fact: Fact) -> None:
        """A fact from outside, for this replica's own policies; it may move waiters in the queue."""
        self.scheduler.hear(fact)

    def end_program(self, program: int) -> None:
        """The client says that the program is over; blocks that were pinned for it may let a waiting request in."""
        if self.scheduler.end_program(program, self.sim.now):
            self._poke()

    def never_fits(self, request: Request) -> str:
        """Why the request can never run to its end here; "" = it can."""
        longest, block, usable, budget = self._limits
        if request.input_tokens >= longest:
            return f"prompt of {request.input_tokens} tokens; max_model_len is {longest}"
        total = min(request.total, longest)
        need = -(-(total - 1) // block)  # the last token is sampled, its KV is never written
        if need > usable:
            return f"needs {need} KV blocks; the replica has {usable}"
        if total - 1 > budget:  # it may be recomputed whole
            return f"{total - 1} tokens to compute at once without chunked prefill; a step computes at most {budget:.0f}"
        return ""

    # --- time ---------------------------------------------------------------------------------------------------------

    def _poke(self) -> None:
        """Something changed. A busy replica sees it at its next boundary; an idle one gets a boundary now, after
        everything else that happens at this instant."""
        if not self._busy and self._boundary_call is None:
            self._boundary_call = self.sim.at(self.sim.now, self._decide, BOUNDARY, id=DECIDES + self.id)

    def _boundary(self) -> None:
        """The oldest batch ends, and the next is decided: at once, or after what else happens at this instant (the next
        turn of a program whose turn has just ended may be there without delay)."""
        now = self.sim._now
        self._boundary_call = None
        self._complete(now)
        self._proceed(now)

    def _proceed(self, now: float) -> None:
        """After what has ended now, decide."""
        if self._boundary_call is not None:
            return  # a program that ended here has poked this replica
        if self.sim.peek() > now:
            self._decide()
        else:
            self._boundary_call = self.sim.at(now, self._decide, BOUNDARY, id=DECIDES + self.id)

    def _decide(self) -> None:
        now = self.sim.now
        self._boundary_call = None
        scheduler = self.scheduler
        while self._may_start() and not (scheduler.idle and not scheduler.pins):
            batch = scheduler.schedule(now)
            if batch.effects:
                self._carry_out(batch.effects)
            if not batch.tokens:
                self._watch(batch.tokens)
                if batch.preempted and not self._busy:
                    continue  # only blocks were given back: as vLLM's loop does, decide again with what is free now
                break
            self._start(batch, now)
            self._watch(batch.tokens)
        self._await_boundary()
        if self._waking and self._news and not scheduler.idle:
            self._news = False
            self._ask_wakeups(now)

    @property
    def _busy(self) -> bool:
        return bool(self._in_flight)

    def _may_start(self) -> bool:
        return len(self._in_flight) < self._depth

    def _start(self, batch: Batch, now: float) -> None:
        self._in_flight.append(_InFlight(batch, self.executor.start(batch, now)))

    def _await_boundary(self) -> None:
        if self._in_flight:
            self._boundary_call = self.sim.at(self._in_flight[0].completion.ends, self._boundary, BOUNDARY, id=self.id)

    def _complete(self, now: float) -> None:
        done = self._in_flight.popleft()
        batch = done.batch
        self._step_ends.append(now)
        self._busy_seconds += done.completion.device_seconds
        outcomes = self.scheduler.complete(batch, now)
        if outcomes.tokens:
            self._fruitless_steps = self._fruitless_tokens = 0
        if now >= self._next_sample and self._steps is not None:
            self._sample(batch, done.completion, now)
        if self._tell_steps:
            scheduler = self.scheduler
            seconds = done.completion.device_seconds
            fact = StepEnded(now, self.id, seconds, batch.tokens, len(scheduler.running), scheduler.num_waiting)
            self._listeners.tell(fact)
        if outcomes.effects:
            self._carry_out(outcomes.effects)
        self._let_go(outcomes.finished, now)

    def _let_go(self, finished: list[Request], now: float) -> None:
        for request in finished:
            request.ended = now
            self._news = True
            self.on_end(request)

    def _sample(self, batch: Batch, completion: Completion, now: float) -> None:
        assert self._steps is not None
        scheduler = self.scheduler
        self._steps.append((
            now, self.id, batch.step, completion.device_seconds, batch.tokens, len(batch.counts), len(scheduler.running),
            scheduler.num_waiting, scheduler.pool.num_free, len(batch.preempted),
        ))
        self._next_sample = now + self._sample_every

    # --- effects ------------------------------------------------------------------------------------------------------

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        """Do what the scheduler cannot: wake it up, and move bytes."""
        for effect in effects:
            if isinstance(effect, WakeAt):
                self._wake_at(effect.time)
            else:
                assert self.host is not None
                self.host.start(effect, self._copied)

    def _copied(self, copy: Copy, seconds: float) -> None:
        """A copy to or from the host, or a push to here, has arrived. A chunk that can now be read matters to who waits, and
        to nobody else."""
        scheduler = self.scheduler
        if not isinstance(copy, StartStore) or scheduler.num_waiting:
            self._poke()
        scheduler.copied(copy, seconds, self.sim._now)

    # --- wake-ups -----------------------------------------------------------------------------------------------------

    def _wake_at(self, time: float, policy: Policy | None = None) -> None:
        """One timer each for the earliest pin and for every policy that wakes; what was asked for last stands."""
        timer = self._timers.get(policy)
        if timer is not None:
            if timer.time == time:
                return
            timer.cancel()
        self._timers[policy] = self.sim.at(time, self._woken, TIMER, id=self.id, args=(policy,))

    def _ask_wakeups(self, now: float) -> None:
        for policy in self._waking:
            time = policy.next_wakeup(now)
            if not time > now:
                raise PolicyError(policy, now, f"next_wakeup answered {time!r}; allowed: a time after now, or inf")
            if time < inf:
                self._wake_at(time, policy)
            elif policy in self._timers:
                self._timers.pop(policy).cancel()

    def _woken(self, policy: Policy | None) -> None:
        del self._timers[policy]
        self._news = True
        if policy is not None and not self.scheduler.idle:
            self.scheduler.wake(policy, self.sim.now)
        self._poke()

    # --- watchdog -----------------------------------------------------------------------------------------------------

    def _watch(self, tokens: int) -> None:
        """End a run whose decisions bring no token: preemption for ever, or wake-ups that change nothing."""
        scheduler = self.scheduler
        if not tokens and (scheduler.loading or scheduler.handed):
            return  # it waits for a link, which will deliver
        self._fruitless_steps += 1
        self._computed_tokens += tokens
        self._fruitless_tokens += tokens
        if self._fruitless_steps < _PATIENCE:
            return
        known = scheduler.engine.running_tokens + scheduler.engine.waiting_tokens
        known += sum(request.known for request in scheduler.loading.values())
        if self._fruitless_tokens > 4 * known or self._fruitless_steps > _PATIENCE * 100:
            waiting = [r.id for r in scheduler.queue.in_order()[:5]]
            running = [r.id for r in scheduler.running[:5]]
            raise NoProgress(
                f"replica {self.id} at t={self.sim.now:.6f} s: {self._fruitless_steps} steps and {self._fruitless_tokens} "
                f"computed tokens brought no output token; running requests {running}, waiting requests {waiting}"
            )


def _nobody_listens(request: Request) -> None:
    pass
