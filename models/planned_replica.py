"""A replica that plans: one event a decision instead of one a step, equal to `Replica` to the last bit."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np

from simcore.models import commit_kernels, decide_kernels
from simcore.models import plan_memory as layout
from simcore.models.batch import Batch
from simcore.models.executor import SimulatedExecutor
from simcore.models.facts import Fact, Listeners
from simcore.models.host_links import HostLinks
from simcore.models.plan_memory import PLAN_STEPS, FloatMemory
from simcore.models.planned_scheduler import PlannedRequest, PlannedScheduler
from simcore.models.replica import DECIDES, Replica
from simcore.recorder import Table
from simcore.simulation import BOUNDARY, Simulation


class Shared:
    """What the replicas of a run share. The latest step boundary that it has processed (`time`, `id`): at one instant they
    go by id, and a step that ends now has ended for an onlooker exactly if its replica's turn has come. And
    `arrivals_until` (s): by then the next arrivals, as many as there are replicas, will have come; to plan further is
    mostly for nothing."""

    def __init__(self) -> None:
        self.time = -1.0
        self.id = -1
        self.arrivals_until = inf


class PlannedReplica(Replica):
    """The plan is a list of step ends; `_done` of them are committed, and the event stands at the last. Whatever comes
    from outside cuts the plan at the first step end that is not before now."""

    scheduler: PlannedScheduler

    def __init__(
        self, sim: Simulation, id: int, scheduler: PlannedScheduler, executor: SimulatedExecutor, *, shared: Shared,
        listeners: Listeners | None = None, steps: Table | None = None, sample_every: float = inf,
        host: HostLinks | None = None,
    ) -> None:
        super().__init__(
            sim, id, scheduler, executor, listeners=listeners, steps=steps, sample_every=sample_every, host=host)
        self._shared = shared
        self._planned = self._done = 0
        self._committed = 0  # steps
        self._cut_at = -1.0  # when the plan was last cut
        self._waiting = 0  # requests that waited when the plan was made: who comes later cuts it
        memory = FloatMemory(executor.tables)
        clock = memory.clock
        clock[layout.STEP_OVERHEAD] = executor.step_overhead
        clock[layout.SEQUENCE_OVERHEAD] = executor.sequence_overhead
        clock[layout.NEXT_SAMPLE] = 0.0 if steps is not None else inf
        clock[layout.SAMPLE_EVERY] = sample_every
        scheduler.memory.settings[layout.WINDOW] = executor.window
        self._memory = memory
        self._budget = scheduler.settings.step_budget
        self._arrays = (scheduler.memory.all, memory.all)  # what every kernel is handed
        self._plan_ends = memory.plan_ends
        self._ends = np.zeros(4 * PLAN_STEPS)  # by step number; grows
        self._preempted = 0
        self.stops = 0  # decisions: ends of plans
        scheduler.catch_up = self.catch_up

    # --- planning -----------------------------------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        return self._planned > 0

    def _may_start(self) -> bool:
        return not self._planned

    def _start(self, batch: Batch, now: float) -> None:
        scheduler = self.scheduler
        self._preempted = len(batch.preempted)  # after a preemption a plan has one step
        self._waiting = scheduler.num_waiting
        self._planned = decide_kernels.start(
            len(scheduler._running), self._waiting, scheduler.blocked, scheduler.wanted, now,
            batch.decision_seconds, self._shared.arrivals_until, *self._arrays)
        self._planning_is_done()

    def _decide(self) -> None:
        shared = self._shared
        shared.time, shared.id = self.sim._now, DECIDES + self.id
        # Where nobody but the queue is asked, one kernel does it. What needs more (someone must be preempted) goes the
        # long way.
        if not (self._queue_alone() and self._begin()):
            super()._decide()

    def _queue_alone(self) -> bool:
        """Whether the next decision asks nobody but the queue, and need not look into a host tier."""
        scheduler = self.scheduler
        if scheduler.tier is not None and scheduler.num_waiting:
            return False
        return not scheduler.pins and not self._waking and (bool(scheduler._running) or scheduler.queue.size > 0)

    def _begin(self, budget: int = -1) -> bool:
        """Decide and plan; False if the step must be decided request by request (then nothing has changed)."""
        scheduler = self.scheduler
        planned = 0
        while not planned:
            planned, count, cached, budget = decide_kernels.begin(*self._situation(budget))
            if count > 0:
                scheduler.admit_head(cached)
        return planned > 0 and self._begun(planned, budget)

    def _situation(self, budget: int) -> tuple[Any, ...]:
        """What `decide_kernels.begin` is handed: the queue, the clock, the head, the memory."""
        scheduler = self.scheduler
        queue = scheduler.queue
        now = scheduler.now = self.sim._now
        if not queue.size:
            return (
                len(scheduler._running), 0, budget, False, now, scheduler._decision_seconds, self._shared.arrivals_until, 0,
                PlannedRequest.no_keys, 0, 0, 0, 0, *self._arrays)
        head, columns = queue.head(), scheduler._free_columns
        return (
            len(scheduler._running), queue.size, budget, scheduler.hears_of_admissions, now, scheduler._decision_seconds,
            self._shared.arrivals_until, columns[-1] if columns else 0, head.keys, head.known, head.total,
            head.steps_start, head.steps_stop, *self._arrays)

    def _begun(self, planned: int, budget: int) -> bool:
        scheduler = self.scheduler
        scheduler._decision_seconds = 0.0
        self._preempted = 0
        self._waiting = scheduler.queue.size
        self._planned = planned
        self._planning_is_done()
        self._watch(self._budget - budget)
        self._await_boundary()
        return True

    def _planning_is_done(self) -> None:
        self._boundary_call = None
        self._done = 0
        self._cut_at = -1.0
        self.stops += 1

    def _await_boundary(self) -> None:
        if self._planned:
            self._boundary_call = self.sim.at(
                self._plan_ends.item(self._planned - 1), self._boundary, BOUNDARY, id=self.id)

    def hear(self, fact: Fact) -> None:
        if self._planned and any(type(fact) in p.observes for p in (self.scheduler.admission, self.scheduler.retention)):
            self._cut_now()
        super().hear(fact)

    def _poke(self) -> None:
        if self._planned:
            self._cut_now()
        else:
            super()._poke()

    def _cut_now(self) -> None:
        """Cut the plan: the next step end that is not before now becomes a decision."""
        now = self.sim._now
        done, planned = self._done, self._planned
        if planned - done <= 1 or self._cut_at == now:
            return
        self._cut_at = now
        ends = self._plan_ends
        if ends[planned - 2] < now:
            return  # the plan's last step is under way
        k = done + int(ends[done:planned].searchsorted(now))
        if ends[k] == now:
            self.catch_up()  # it may have had its turn
            if self._planned - self._done <= 1:
                return
        self._cut(k + 1)
        self._await_boundary()

    def _cut(self, planned: int) -> None:
        self._planned = planned
        assert self._boundary_call is not None
        self._boundary_call.cancel()

    # --- committing ---------------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Commit the planned steps that have ended by now, so that an onlooker sees what he would see step by step."""
        done = self._done
        if self._planned <= done + 1:
            return  # nothing planned, or only the step whose end has an event of its own
        now = self.sim.now
        ends = self._plan_ends
        if ends[done] < now:
            self._commit(int(ends[done : self._planned].searchsorted(now)), final=False)
            done = self._done
        at = self._shared
        if ends[done] == now and at.time == now and at.id >= self.id and self._planned > done + 1:
            # This step ends at this very instant and its turn has come: it is complete, and what follows is decided after
            # what else happens now, as the step-by-step path does.
            self._cut(done + 1)
            self._boundary_call = self.sim.at(now, self._decide, BOUNDARY, id=DECIDES + self.id)
            self._complete(now)

    def settle(self) -> None:
        due = int(self._plan_ends[self._done : self._planned].searchsorted(self.sim.now, side="right"))
        if due:
            self._commit(due, final=False)
            self._planned = max(self._planned, self._done + 1)  # the step in flight stays in flight

    def _boundary(self) -> None:
        """As in `Replica`; where this instant holds nothing else and nobody but the queue is asked, a plan that brings no
        request to its end is followed by the next one at once, in one kernel call."""
        sim, scheduler, shared = self.sim, self.scheduler, self._shared
        now = sim._now
        if scheduler.pins or self._waking or scheduler._asks_limit or sim.peek() <= now or self._sample_due(now) or (
            scheduler.tier is not None and scheduler.num_waiting
        ):
            super()._boundary()
            return
        shared.time, shared.id = now, self.id
        self._boundary_call = None
        steps = self._planned - self._done
        self._make_place(steps)
        found, planned, count, cached, budget = decide_kernels.turn_over(
            self._waiting, steps, self._done, self._ends, *self._situation(-1))
        self._note_commit(found)
        self._planned = self._done = 0
        if found >= commit_kernels.FLAGS:
            ended = found // commit_kernels.FLAGS
            finished = [scheduler.finish_one(count, cached, budget)] if ended == 1 else scheduler.finish(ended, now)
            if scheduler.effects:
                self._carry_out(scheduler.take_effects())
            self._let_go(finished, now)
            self._proceed(now)
            return
        shared.id = DECIDES + self.id
        if count > 0:
            scheduler.admit_head(cached)
        if planned > 0:
            self._begun(planned, budget)
        elif planned < 0 or not self._begin(budget):
            super()._decide()

    def _commit(self, steps: int, *, final: bool) -> int:
        """Apply planned steps to the arrays; returns how many requests have their last token."""
        self._make_place(steps)
        found = commit_kernels.commit(
            len(self.scheduler._running), self._waiting, steps, final, self._done, *self._arrays, self._ends)
        self._done += steps
        self._note_commit(found)
        return found // commit_kernels.FLAGS

    def _make_place(self, steps: int) -> None:
        """For the ends of the steps to be committed."""
        self._committed += steps
        if self._committed > len(self._ends):
            self._ends = np.concatenate((self._ends, np.zeros(len(self._ends))))

    def _note_commit(self, found: int) -> None:
        if found & commit_kernels.HAS_CLOSED:
            self.scheduler.note_interruptions()
        if found & commit_kernels.HAS_SAMPLES:
            self._note_samples()
        if found & commit_kernels.HAS_DELIVERED:
            self._fruitless_steps = self._fruitless_tokens = 0

    def _complete(self, now: float) -> None:
        """The last planned step ends: commit up to it and let the requests that have their last token go."""
        scheduler = self.scheduler
        shared = self._shared
        shared.time, shared.id = now, self.id
        last = self._planned - 1
        ended = self._commit(self._planned - self._done, final=True)
        self._planned = self._done = 0
        finished = scheduler.finish(ended, now) if ended or scheduler._asks_limit else []
        if self._sample_due(now):
            assert self._steps is not None
            counters = scheduler.memory.engine.tolist()
            self._steps.append((
                now, self.id, counters[layout.STEP] - 1, float(self._memory.plan_device[last]),
                counters[layout.LAST_TOKENS], counters[layout.LAST_SEQUENCES], len(scheduler._running),
                scheduler.num_waiting, scheduler._pool.num_free, self._preempted,
            ))
            self._memory.clock[layout.NEXT_SAMPLE] = now + self._sample_every
        if scheduler.effects:
            self._carry_out(scheduler.take_effects())
        if finished:
            self._let_go(finished, now)

    def _sample_due(self, now: float) -> bool:
        return now >= self._memory.clock.item(layout.NEXT_SAMPLE)

    def _note_samples(self) -> None:
        """Rows of the steps table for sampled steps inside a plan: nobody came, went or was preempted in them."""
        assert self._steps is not None
        scheduler = self.scheduler
        for k in range(int(scheduler.memory.engine[layout.SAMPLES])):
            step, tokens, sequences, free = scheduler.memory.samples[k].tolist()
            end, device = self._memory.sample_times[k].tolist()
            self._steps.append((
                end, self.id, step, device, tokens, sequences, len(scheduler._running), self._waiting, free, 0))

    # --- the record ---------------------------------------------------------------------------------------------------

    @property
    def step_ends(self) -> np.ndarray:  # type: ignore[override]
        return self._ends[: self._committed]

    def step_end(self, step: int) -> float:
        return self._ends.item(step)

    @property
    def computed_tokens(self) -> int:
        return int(self.scheduler.memory.engine[layout.TOKENS_COMPUTED])

    @property
    def busy_seconds(self) -> float:
        return float(self._memory.clock[layout.BUSY])
