"""Fan-out over processes: results in the order of the jobs, progress while they run, the first error as it was raised."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")
Report = Callable[[int, float], Any]  # (job number, share done in 0..1)

_shares: Any = None  # in a worker: the shared array of shares done


def fan_out(
    work: Callable[[Job, Callable[[float], Any]], Result], jobs: Sequence[Job], *, processes: int,
    report: Report | None = None, keep: bool = False,
) -> list[Any]:
    """`[work(job, progress) for job in jobs]` on up to `processes` processes.

    `work` is a module-level function; it calls `progress(share)` as it goes. With one process, or one job, nothing is
    spawned. Results do not depend on `processes`. Ctrl-C ends all; with `keep` the results so far come back, None where
    there is none.
    """
    report = report or (lambda number, share: None)
    if processes <= 1 or len(jobs) <= 1:
        results: list[Any] = []
        try:
            for number, job in enumerate(jobs):
                results.append(work(job, lambda share, number=number: report(number, share)))  # type: ignore[misc]
                report(number, 1.0)
        except KeyboardInterrupt:
            if not keep:
                raise
        return results + [None] * (len(jobs) - len(results))
    context = multiprocessing.get_context("spawn")
    shares = context.Array("d", len(jobs), lock=False)
    with ProcessPoolExecutor(min(processes, len(jobs)), context, _start_worker, (shares,)) as pool:
        with _main_stays_home():
            futures = [pool.submit(_run, work, number, job) for number, job in enumerate(jobs)]
        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, timeout=0.2)
                for number, share in enumerate(shares):
                    report(number, share)
                for future in sorted(done, key=futures.index):
                    future.result()  # raise the first failure at once
        except BaseException as error:
            kept = [future.result() if future.done() and not future.exception() else None for future in futures]
            # Without its workers the pool gives up what is left; futures that we cancel ourselves make its thread fail.
            for process in list((pool._processes or {}).values()):
                process.terminate()
            if keep and isinstance(error, KeyboardInterrupt):
                return kept
            raise
        return [future.result() for future in futures]


@contextmanager
def _main_stays_home() -> Iterator[None]:
    """Workers need no part of the caller's script: without this, spawn would run it again in each of them, and a script
    or notebook cell without an `if __name__ == "__main__"` guard would fail."""
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    try:
        main.__spec__ = None
        if "__file__" in hidden:
            del main.__file__
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)


def _start_worker(shares: Any) -> None:
    global _shares
    _shares = shares
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal's processes: the caller decides


def _run(work: Callable[[Any, Callable[[float], Any]], Any], number: int, job: Any) -> Any:
    def progress(share: float) -> None:
        _shares[number] = share

    result = work(job, progress)
    progress(1.0)
    return result
