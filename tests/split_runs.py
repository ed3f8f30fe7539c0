"""Watched serving runs of a split cluster: `serving_runs.run` with prefill and decode replicas, its books kept by stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import serving_runs
from serving_runs import BLOCK_BYTES, Witness

from simcore.models.request import Request
from simcore.models.scheduler import Scheduler
from simcore.models.serving import Deployment, RunResult
from simcore.traces.workload import Workload

INFINITE = 1e30  # blocks/s


def run(
    work: Workload, *, prefill: int = 1, decode: int = 1, push: float = 1.0, push_latency: float = 0.0,
    decode_blocks: int | None = None, witness: Witness | None = None, **options: Any,
) -> RunResult:
    """`push`: blocks/s of a replica's link each way; `decode_blocks`: usable blocks of the decode replicas' pools, where
    they are not as many as those of the others."""
    plain = serving_runs._watched_scheduler

    def deployment(*args: Any, **more: Any) -> Deployment:
        return Deployment(*args, prefill_replicas=prefill, kv_link_bandwidth=push * BLOCK_BYTES,
                          kv_link_latency=push_latency, **more)

    def watched(seen: Witness) -> type[Scheduler]:
        class Split(plain(seen)):  # type: ignore[misc]
            """Takes each stay of a request for a request of its own."""

            def __init__(self, settings: Any, num_blocks: int, *args: Any, **more: Any) -> None:
                if decode_blocks is not None and more["role"] == "decode":
                    num_blocks = decode_blocks + 1
                super().__init__(settings, num_blocks, *args, **more)

            def add(self, request: Request, now: float, gap: float = float("nan")) -> None:
                seen.computed.pop(request.id, 0)
                seen.lost.pop(request.id, None)
                super().add(request, now, gap)
                self.check()

            def pushed(self, request: Request, now: float) -> None:
                assert now >= self.now, "the clock went back"
                seen.counts["pushed"] += 1
                super().pushed(request, now)
                self.check()

        return Split

    new: Callable[..., Any] = deployment
    with patch.object(serving_runs, "_watched_scheduler", watched), patch.object(serving_runs, "Deployment", new):
        result = serving_runs.run(work, replicas=prefill + decode, witness=witness, **options)
    assert result.speed["path"] == "step-by-step"
    return result
