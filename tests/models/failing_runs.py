"""Watched serving runs with failures: `serving_runs.run`, its books kept by attempt and not by request."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import serving_runs
from serving_runs import Witness

from simcore.models.batch import Batch, Outcomes
from simcore.models.failures import Event
from simcore.models.request import Request
from simcore.models.scheduler import Scheduler
from simcore.models.serving import RunResult
from simcore.traces.workload import Workload


def event(**keys: Any) -> Event:
    """`lasts` stands for the key `for`."""
    return Event.model_validate({"for" if key == "lasts" else key: value for key, value in keys.items()})


def run(work: Workload, *, witness: Witness | None = None, wasted: Counter[int] | None = None, **options: Any) -> RunResult:
    """`wasted`: request -> tokens computed for its attempts but the last."""
    spent: Counter[int] = wasted if wasted is not None else Counter()
    plain = serving_runs._watched_scheduler

    def watched(seen: Witness) -> type[Scheduler]:
        class Failing(plain(seen)):  # type: ignore[misc]
            """Looks at itself after every abort, and takes each attempt for a request of its own."""

            def add(self, request: Request, now: float, gap: float = float("nan")) -> None:
                spent[request.id] += seen.computed.pop(request.id, 0)
                seen.lost.pop(request.id, None)
                super().add(request, now, gap)

            def abort(self, request: Request, now: float) -> None:
                seen.counts[f"aborted {request.state}"] += 1
                free, state, blocks = self.pool.num_free, request.state, list(request.blocks)
                alone = [block for block in blocks if self.pool.references[block] == 1]
                keys = {block: self.pool.key[block] for block in blocks}
                super().abort(request, now)
                self.check()
                pins = self.pool.num_free - free - (0 if state == "loading" else len(alone))
                assert pins >= 0, "blocks of an aborted request are not free"
                assert pins or all(self.pool.key[b] == key for b, key in keys.items()), "a hash was lost"

            def complete(self, batch: Batch, now: float) -> Outcomes:
                assert now >= self.now, "the clock went back"
                pairs = list(zip(batch.requests, batch.samples, strict=True))
                gone = {request for request, _ in pairs if request.state == "aborted"}
                seen.counts["thrown away"] += sum(sampled for request, sampled in pairs if request in gone)
                known = {request: request.known for request in gone}
                outcomes = Scheduler.complete(self, batch, now)
                self.check()
                assert outcomes.tokens == sum(sampled for request, sampled in pairs if request not in gone)
                assert all(request.known == before and request.state == "aborted" for request, before in known.items())
                return outcomes

        return Failing

    with patch.object(serving_runs, "_watched_scheduler", watched):
        return serving_runs.run(work, witness=witness, **options)
