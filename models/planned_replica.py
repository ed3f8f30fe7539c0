"""A replica that plans: one event a decision instead of one a step, equal to `Replica` to the last bit."""

from __future__ import annotations

from math import inf

import numpy as np

from simcore.models import plan_kernels as kernels
from simcore.models.batch import Batch
from simcore.models.executor import SimulatedExecutor
from simcore.models.facts import Fact, Listeners
from simcore.models.planned_scheduler import PlannedScheduler
from simcore.models.replica import DECIDES, Replica
from simcore.models.request import Request
from simcore.models.step_time import FIXED
from simcore.recorder import Table
from simcore.simulation import BOUNDARY, Simulation

PLAN_STEPS = 512  # the longest plan; a longer one is planned in pieces


class Boundaries:
    """The latest step boundary that the run has processed, shared by its replicas: at one instant they go by id, and a
    step that ends now has ended for an onlooker exactly if its replica's turn has come."""

    def __init__(self) -> None:
        self.time = -1.0
        self.id = -1


class PlannedReplica(Replica):
    """The plan is a list of step ends; `_done` of them are committed, and the event stands at the last. Whatever comes
    from outside cuts the plan at the first step end that is not before now."""

    scheduler: PlannedScheduler

    def __init__(
        self, sim: Simulation, id: int, scheduler: PlannedScheduler, executor: SimulatedExecutor, *, boundaries: Boundaries,
        listeners: Listeners | None = None, steps: Table | None = None, sample_every: float = inf,
    ) -> None:
        super().__init__(
            sim, id, scheduler, executor, listeners=listeners, steps=steps, sample_every=sample_every)
        self._boundaries = boundaries
        self._planned = self._done = 0
        self._committed = 0  # steps
        self._cut_at = -1.0  # when the plan was last cut
        self._waiting = 0  # requests that waited when the plan was made: who comes later cuts it
        self._plan_ends = np.zeros(PLAN_STEPS)
        self._plan_device = np.zeros(PLAN_STEPS)
        self._ends = np.zeros(4 * PLAN_STEPS)  # by step number; grows
        self._floats = np.zeros(kernels.FLOATS)
        self._floats[kernels.STEP_OVERHEAD] = executor.step_overhead
        self._floats[kernels.SEQUENCE_OVERHEAD] = executor.sequence_overhead
        self._floats[kernels.NEXT_SAMPLE] = 0.0 if steps is not None else inf
        self._floats[kernels.SAMPLE_EVERY] = sample_every
        scheduler.kernel_settings[kernels.WINDOW] = executor.window
        self._samples = np.zeros((PLAN_STEPS, 4), dtype=np.int64)
        self._sample_times = np.zeros((PLAN_STEPS, 2))
        self._preempted = 0
        self.stops = 0  # decisions: ends of plans
        scheduler.catch_up = self.catch_up
        rows, order, settings, *pool = scheduler.arrays
        features = np.zeros(FIXED + 2 * len(order), dtype=np.int64)
        self._start_arrays = (rows, order, settings, self._floats, *pool, scheduler.counters, *executor.tables, features,
                              self._plan_ends, self._plan_device)
        self._bind()

    def _bind(self) -> None:
        scheduler = self.scheduler
        rows, order, settings, *pool = scheduler.arrays
        self._commit_arrays = (rows, order, settings, self._floats, *pool, scheduler.counters, self._plan_ends,
                               self._plan_device, self._ends, scheduler.out, self._samples, self._sample_times)

    # --- planning -----------------------------------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        return self._planned > 0

    def _may_start(self) -> bool:
        return not self._planned

    def _start(self, batch: Batch, now: float) -> None:
        self._preempted = len(batch.preempted)  # after a preemption a plan has one step
        self._plan(now, batch.decision_seconds, decided=True)

    def _plan(self, now: float, decision_seconds: float, *, decided: bool) -> bool:
        """Plan from here; False if blocks run short, so that the step must be decided request by request first."""
        scheduler = self.scheduler
        self._waiting = scheduler.queue.size
        planned = kernels.start(
            len(scheduler._running), self._waiting, scheduler.blocked, now, decision_seconds, self.look_ahead(),
            decided, *self._start_arrays)
        if planned < 0:
            return False
        self._planned = planned
        self._done = 0
        self._cut_at = -1.0
        self.stops += 1
        return True

    def _decide(self) -> None:
        now = self.sim._now
        boundaries = self._boundaries
        boundaries.time, boundaries.id = now, DECIDES + self.id
        scheduler = self.scheduler
        if scheduler.pins or self._waking or not (scheduler._running or scheduler.queue.size):
            super()._decide()
            return
        # Nobody but admission is asked. What needs more than that (someone must be preempted) goes the long way.
        self._boundary_call = None
        decided = scheduler.decide_simply(now) if scheduler.queue.size else False
        if decided is None or not self._plan(now, scheduler._decision_seconds, decided=decided):
            super()._decide()
            return
        scheduler._decision_seconds = 0.0
        self._preempted = 0
        self._watch(scheduler.settings.step_budget - scheduler._left if decided else len(scheduler._running))
        self._await_boundary()

    def _await_boundary(self) -> None:
        if self._planned:
            self._boundary_call = self.sim.at(
                self._plan_ends.item(self._planned - 1), self._boundary, BOUNDARY, id=self.id)

    def submit(self, request: Request, gap: float) -> None:
        if self._planned:
            self._cut_now()  # before the queue grows: what ends at this very instant has not seen the newcomer
        super().submit(request, gap)

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
        at = self._boundaries
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

    def _commit(self, steps: int, *, final: bool) -> int:
        """Apply planned steps to the arrays; returns how many requests have their last token."""
        scheduler = self.scheduler
        self._committed += steps
        if self._committed > len(self._ends):
            self._ends = np.concatenate((self._ends, np.zeros(len(self._ends))))
            self._bind()
        found = kernels.commit(
            len(scheduler._running), self._waiting, steps, final, self._done, *self._commit_arrays)
        self._done += steps
        if found & kernels.HAS_CLOSED:
            scheduler.note_interruptions()
        if found & kernels.HAS_SAMPLES:
            self._note_samples()
        if found & kernels.HAS_DELIVERED:
            self._fruitless_steps = self._fruitless_tokens = 0
        return found // kernels.FLAGS

    def _complete(self, now: float) -> None:
        """The last planned step ends: commit up to it and let the requests that have their last token go."""
        scheduler = self.scheduler
        boundaries = self._boundaries
        boundaries.time, boundaries.id = now, self.id
        last = self._planned - 1
        ended = self._commit(self._planned - self._done, final=True)
        self._planned = self._done = 0
        finished = scheduler.finish(ended, now) if ended or scheduler._asks_limit else []
        if self._steps is not None and now >= self._floats[kernels.NEXT_SAMPLE]:
            counters = scheduler.counters.tolist()
            self._steps.append((
                now, self.id, counters[kernels.STEP] - 1, float(self._plan_device[last]), counters[kernels.LAST_TOKENS],
                counters[kernels.LAST_SEQUENCES], len(scheduler._running), scheduler.queue.size, scheduler._pool.num_free,
                self._preempted,
            ))
            self._floats[kernels.NEXT_SAMPLE] = now + self._sample_every
        if finished:
            self._let_go(finished, now)

    def _note_samples(self) -> None:
        """Rows of the steps table for sampled steps inside a plan: nobody came, went or was preempted in them."""
        assert self._steps is not None
        scheduler = self.scheduler
        for k in range(int(scheduler.counters[kernels.SAMPLES])):
            step, tokens, sequences, free = self._samples[k].tolist()
            end, device = self._sample_times[k].tolist()
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
        return int(self.scheduler.counters[kernels.TOKENS_COMPUTED])

    @property
    def busy_seconds(self) -> float:
        return float(self._floats[kernels.BUSY])
