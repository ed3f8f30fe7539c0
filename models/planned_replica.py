"""A replica that plans: one event a decision instead of one a step, equal to `Replica` to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np

from simcore.models import plan_kernels as kernels
from simcore.models.batch import Batch
from simcore.models.executor import SimulatedExecutor
from simcore.models.facts import Listeners
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
        self, sim: Simulation, id: int, scheduler: PlannedScheduler, executor: SimulatedExecutor,
        on_end: Callable[[Request], None], *, boundaries: Boundaries, listeners: Listeners | None = None,
        steps: Table | None = None, sample_every: float = inf,
    ) -> None:
        super().__init__(
            sim, id, scheduler, executor, on_end, listeners=listeners, steps=steps, sample_every=sample_every)
        self._boundaries = boundaries
        self._planned = self._done = 0
        self._plan_ends = np.zeros(PLAN_STEPS)
        self._plan_device = np.zeros(PLAN_STEPS)
        self._floats = np.zeros(kernels.FLOATS)
        self._floats[kernels.STEP_OVERHEAD] = executor.step_overhead
        self._floats[kernels.SEQUENCE_OVERHEAD] = executor.sequence_overhead
        self._floats[kernels.NEXT_SAMPLE] = 0.0 if steps is not None else inf
        self._floats[kernels.SAMPLE_EVERY] = sample_every
        self._tables = executor.tables
        scheduler.kernel_settings[kernels.WINDOW] = executor.window
        self._features = np.zeros(FIXED + 2 * len(scheduler.order), dtype=np.int64)
        self._samples = np.zeros((PLAN_STEPS, 4), dtype=np.int64)
        self._sample_times = np.zeros((PLAN_STEPS, 2))
        self._preempted = 0
        self.planned_steps = 0  # steps that had no decision of their own
        scheduler.catch_up = self.catch_up

    # --- planning -----------------------------------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        return self._planned > 0

    def _may_start(self) -> bool:
        return not self._planned

    def _start(self, batch: Batch, now: float) -> None:
        scheduler = self.scheduler
        pool = scheduler._pool
        self._planned = kernels.plan(
            scheduler.rows, scheduler.order, len(scheduler._running), scheduler.kernel_settings, self._floats, self._tables,
            self._features, pool.blocks, pool.counters, len(scheduler.queue), scheduler.blocked, now, batch.decision_seconds,
            self._plan_ends, self._plan_device,
        )
        self._done = 0
        self._preempted = len(batch.preempted)  # after a preemption a plan has one step
        self.planned_steps += self._planned - 1

    def _await_boundary(self) -> None:
        if self._planned:
            end = float(self._plan_ends[self._planned - 1])
            self._boundary_call = self.sim.at(end, self._boundary, BOUNDARY, id=self.id)

    def _poke(self) -> None:
        """Cut the plan: the next step end that is not before now becomes a decision."""
        if not self._planned:
            super()._poke()
            return
        self.catch_up()
        if self._planned > self._done + 1:
            self.planned_steps -= self._planned - self._done - 1
            self._planned = self._done + 1
            assert self._boundary_call is not None
            self._boundary_call.cancel()
            self._await_boundary()

    # --- committing ---------------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Commit the planned steps that have ended by now, so that an onlooker sees what he would see step by step."""
        if self._planned - self._done < 1:
            return
        now = self.sim.now
        ends = self._plan_ends
        due = int(ends[self._done : self._planned].searchsorted(now))
        if due:
            self._commit(due, final=False)
        at = self._boundaries
        if ends[self._done] == now and at.time == now and at.id >= self.id and self._planned > self._done + 1:
            # This step ends at this very instant and its turn has come: it is complete, and what follows is decided after
            # what else happens now, as the step-by-step path does.
            self.planned_steps -= self._planned - self._done - 1
            self._planned = self._done + 1
            assert self._boundary_call is not None
            self._boundary_call.cancel()
            self._boundary_call = self.sim.at(now, self._decide, BOUNDARY, id=DECIDES + self.id)
            self._complete(now)

    def _commit(self, steps: int, *, final: bool) -> None:
        scheduler = self.scheduler
        pool = scheduler._pool
        done = self._done
        delivered = kernels.commit(
            scheduler.rows, scheduler.order, len(scheduler._running), scheduler.kernel_settings, self._floats, pool.blocks,
            pool.table, pool.counters, scheduler.row_blocks, scheduler.row_keys, scheduler.counters, len(scheduler.queue),
            steps, final, done, self._plan_ends, self._plan_device, scheduler.closed, self._samples, self._sample_times,
        )
        self._done = done + steps
        self.step_ends += self._plan_ends[done : self._done].tolist()
        if scheduler.counters[kernels.CLOSED]:
            scheduler.note_interruptions()
        if scheduler.counters[kernels.SAMPLES]:
            self._note_samples()
        if delivered:
            self._fruitless_steps = self._fruitless_tokens = 0

    def _complete(self, now: float) -> None:
        """The last planned step ends: commit up to it and let the requests that have their last token go."""
        scheduler = self.scheduler
        boundaries = self._boundaries
        boundaries.time, boundaries.id = now, self.id
        self._commit(self._planned - self._done, final=True)
        device = float(self._plan_device[self._planned - 1])
        self._planned = self._done = 0
        finished = scheduler.finish(now)
        counters = scheduler.counters.tolist()
        if now >= self._floats[kernels.NEXT_SAMPLE] and self._steps is not None:
            self._steps.append((
                now, self.id, counters[kernels.STEP] - 1, device, counters[kernels.LAST_TOKENS],
                counters[kernels.LAST_SEQUENCES], len(scheduler._running), len(scheduler.queue), scheduler._pool.num_free,
                self._preempted,
            ))
            self._floats[kernels.NEXT_SAMPLE] = now + self._sample_every
        self._let_go(finished, now)

    def _decide(self) -> None:
        self._boundaries.time, self._boundaries.id = self.sim.now, DECIDES + self.id
        super()._decide()

    def _note_samples(self) -> None:
        """Rows of the steps table for sampled steps inside a plan: nobody came, went or was preempted in them."""
        assert self._steps is not None
        scheduler = self.scheduler
        for k in range(int(scheduler.counters[kernels.SAMPLES])):
            step, tokens, sequences, free = self._samples[k].tolist()
            end, device = self._sample_times[k].tolist()
            self._steps.append((
                end, self.id, step, device, tokens, sequences, len(scheduler._running), len(scheduler.queue), free, 0))

    @property
    def computed_tokens(self) -> int:  # type: ignore[override]
        return int(self.scheduler.counters[kernels.TOKENS_COMPUTED])

    @computed_tokens.setter
    def computed_tokens(self, value: int) -> None:
        pass

    @property
    def busy_seconds(self) -> Any:  # type: ignore[override]
        return float(self._floats[kernels.BUSY]) if hasattr(self, "_floats") else 0.0

    @busy_seconds.setter
    def busy_seconds(self, value: float) -> None:
        pass
