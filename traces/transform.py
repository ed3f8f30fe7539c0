"""Workloads from workloads: spread ticks, cut, thin, compress. Each transform says in the notes what it did."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simcore.errors import TraceError
from simcore.randomness import generator, uniform
from simcore.traces.workload import Workload


def dequantise(workload: Workload, tick_seconds: float, seed: int) -> Workload:
    """Spread requests that arrive on one tick uniformly over [t, min(t + tick, next tick in use)); rows keep their order.

    Requests that wait for others are left as they are. Raises TraceError when tick_seconds is not above 0.
    """
    demand(workload, 0 < tick_seconds < np.inf, "tick_seconds", tick_seconds, "a finite time above 0")
    own = np.flatnonzero(np.isfinite(workload.arrival))
    at = workload.arrival[own]
    ticks, tick_of = np.unique(at, return_inverse=True)
    end = np.minimum(ticks + tick_seconds, np.append(ticks[1:], np.inf))
    draw = generator(seed, "dequantise").random(len(own))
    draw = draw[np.lexsort((draw, tick_of))]  # ascending within each tick
    spread = at + draw * (end[tick_of] - at)
    arrival = workload.arrival.copy()
    last = np.maximum(np.nextafter(end[tick_of], -np.inf), at)  # rounding must not reach the next tick
    arrival[own] = np.minimum(spread, last)
    return noted(
        replace(workload, arrival=arrival), f"arrivals spread over their {tick_seconds:g} s ticks (uniform, seed {seed})"
    )


def slice_time(workload: Workload, start: float, end: float) -> Workload:
    """Requests that arrive in [start, end) seconds, with time from 0 again.

    A request that waits for others stays when all of them stay. Raises TraceError when nothing stays, or when workers
    start programs: when they do is not known before the run.
    """
    no_workers(workload, "cut by time")
    demand(workload, 0 <= start < end, "start, end", (start, end), "0 <= start < end")
    stays = (workload.arrival >= start) & (workload.arrival < end)
    depends = np.diff(workload.wait_offsets) > 0
    for row in np.flatnonzero(depends).tolist():  # they wait for earlier rows only, so one pass settles all
        stays[row] = stays[workload.waits(row)].all()
    demand(workload, stays.any(), "start, end", (start, end), "a time in which requests arrive")
    begun = np.intersect1d(workload.program[workload.arrival < start], workload.program[stays])
    cut = workload.take(np.flatnonzero(stays))
    return noted(
        replace(cut, arrival=cut.arrival - start),
        f"cut to {start:g} .. {end:g} s, time from 0: {len(cut)} of {len(workload)} requests; "
        f"{int((depends & ~stays).sum())} left out because they wait for one that was cut away; "
        f"{len(begun)} sessions had begun before",
    )


def head(workload: Workload, n: int) -> Workload:
    """The first n requests (all, if there are fewer); what a request waits for stands before it and stays too."""
    demand(workload, n >= 1, "n", n, "at least 1")
    kept = min(n, len(workload))
    return noted(workload.take(np.arange(kept)), f"first {kept} of {len(workload)} requests")


def thin(workload: Workload, fraction: float, seed: int) -> Workload:
    """Keep each program (session) whole with probability `fraction`; a smaller fraction keeps a subset of a larger one's.
    Where workers start the programs there are fewer of them, at the same load.

    Raises TraceError when nothing stays, or when a request that stays waits for one of a program that does not.
    """
    demand(workload, 0 < fraction <= 1, "fraction", fraction, "above 0, at most 1")
    keep = np.array([uniform(seed, "thin", p) < fraction for p in range(workload.n_programs)], dtype=bool)
    rows = np.flatnonzero(keep[workload.program])
    demand(workload, len(rows) > 0, "fraction", fraction, "one that leaves at least one session")
    return noted(
        workload.take(rows),
        f"thinned to {fraction:g} by whole sessions (seed {seed}): {int(keep.sum())} of {len(keep)} sessions, "
        f"{len(rows)} of {len(workload)} requests",
    )


def scale_rate(workload: Workload, factor: float, seed: int) -> Workload:
    """The workload at `factor` times its rate, by thinning or cloning; pauses inside sessions stay as they were.

    Raises TraceError as both do, and when workers start programs: their number sets the load.
    """
    from simcore.traces.clone import clone_sessions

    no_workers(workload, "scale the rate")
    demand(workload, 0 < factor < np.inf, "factor", factor, "a finite number above 0")
    return thin(workload, factor, seed) if factor <= 1 else clone_sessions(workload, factor, seed)


def compress(workload: Workload, factor: float) -> Workload:
    """Divide arrival times by `factor` (gaps of requests that wait for others are tool and think time, and stay).

    Raises TraceError when factor is not above 0, or when workers start programs.
    """
    no_workers(workload, "compress arrivals")
    demand(workload, 0 < factor < np.inf, "factor", factor, "a finite number above 0")
    return noted(
        replace(workload, arrival=workload.arrival / factor),
        f"warning: time compressed by {factor:g}: pauses between the turns of a session shrink with it, so caches and "
        "queues see other sessions than were recorded",
    )


def shrink(workload: Workload, factor: int) -> Workload:
    """Every block of the trace stands for 1 / `factor` of its tokens; lengths follow, rounded up; what is shared stays.

    For models too small, or runs too short, for the trace's own lengths. Raises TraceError where blocks do not divide.
    """
    block = workload.block_tokens
    demand(workload, factor >= 1 and block % factor == 0, "factor", factor, f"a divisor of the {block} tokens of a block")

    def less(tokens: np.ndarray) -> np.ndarray:
        return -(-tokens // factor)

    return noted(
        replace(workload, input_tokens=less(workload.input_tokens), output_tokens=less(workload.output_tokens),
                known_tokens=less(workload.known_tokens), block_tokens=block // factor),
        f"warning: lengths divided by {factor}: blocks of {block} tokens stand for {block // factor}",
    )


def noted(workload: Workload, note: str) -> Workload:
    """The workload, checked, with one more note."""
    return replace(workload, source=workload.source.noted(note)).check()


def no_workers(workload: Workload, what: str) -> None:
    """TraceError when workers start programs, for transforms of arrival times."""
    started = int(workload.by_worker.sum())
    if started:
        raise TraceError(
            workload.source.name, "workers", why=f"cannot {what}", found=f"{started} programs without an arrival",
            allowed="programs that have arrivals (start_programs gives them some); the number of workers sets the load",
        )


def demand(workload: Workload, ok: bool | np.bool_, key: str, found: object, allowed: str) -> None:
    """TraceError naming the argument `key`, unless `ok`."""
    if not ok:
        raise TraceError(workload.source.name, key, found=found, allowed=allowed)
