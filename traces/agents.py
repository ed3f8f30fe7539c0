"""When programs start: drawn at a rate, or taken by workers. For every source whose programs have no start of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simcore.errors import TraceError
from simcore.randomness import generator
from simcore.traces.transform import demand, noted
from simcore.traces.workload import Workload


def start_programs(workload: Workload, rate: float, seed: int, *, shuffle: bool = False) -> Workload:
    """The workload with its programs started by a Poisson process of `rate` programs a second (all at t=0 where 0).

    A program is moved as a whole: recorded arrivals keep their distances, gaps and calls stay. Programs start in the order
    of the trace, or in one drawn from the seed; rows are sorted by time. The same seed at another rate gives the same
    order and the same spacing, scaled. Raises TraceError when the rate is negative, or a program waits for another.
    """
    demand(workload, 0 <= rate < np.inf, "rate", rate, "a finite number, at least 0")
    w, n = workload, workload.n_programs
    _alone(w)
    place = generator(seed, "programs/order").permutation(n) if shuffle else np.arange(n)
    start = np.zeros(n)
    if rate:
        start = (np.cumsum(generator(seed, "programs/start").exponential(size=n)) / rate)[place]
    opens = np.diff(w.wait_offsets) == 0
    first = np.full(n, np.inf)
    own = np.isfinite(w.arrival)
    np.minimum.at(first, w.program[own], w.arrival[own])
    first[np.isinf(first)] = 0.0
    at = np.where(own, w.arrival, 0.0) - np.where(own, first[w.program], 0.0)
    arrival = np.where(opens, start[w.program] + at, np.nan)
    order = np.lexsort((np.arange(len(w)), place[w.program], _time(w, arrival)))
    how = f"Poisson, {rate:g} programs/s" if rate else "all at t=0"
    return noted(
        replace(w, arrival=arrival, workers=0).take(order),
        f"program starts drawn: {how}, {n} programs, seed {seed}" + (", in shuffled order" if shuffle else ""),
    )


def with_workers(workload: Workload, workers: int, *, seed: int | None = None) -> Workload:
    """The workload with its programs started by `workers` clients: each takes the next when the one it has is finished.

    Programs are taken in the order of the trace, or, with a seed, in one drawn from it. Raises TraceError when workers is
    no whole number of at least 1, when a program waits for another, or when a program has several recorded arrivals.
    """
    demand(workload, type(workers) is int and workers >= 1, "workers", workers, "a whole number, at least 1")
    w, n = workload, workload.n_programs
    _alone(w)
    opens = np.diff(w.wait_offsets) == 0
    if (np.bincount(w.program[opens], minlength=n) > 1).any():
        raise TraceError(
            w.source.name, "workers", found="programs with several recorded arrivals",
            allowed="programs whose turns wait for one another (clock: closed-loop)",
        )
    place = np.arange(n) if seed is None else generator(seed, "programs/order").permutation(n)
    order = np.lexsort((np.arange(len(w)), place[w.program]))
    arrival = np.where(opens, np.nan, w.arrival)
    return noted(
        replace(w, arrival=arrival, workers=workers).take(order),
        f"programs started by {workers} workers, in " + ("trace order" if seed is None else f"shuffled order, seed {seed}"),
    )


def first_programs(workload: Workload, count: int) -> Workload:
    """The first `count` programs, whole. Raises TraceError when one of them waits for another that is left out."""
    demand(workload, type(count) is int and count >= 1, "programs", count, "a whole number, at least 1")
    if count >= workload.n_programs:
        return workload
    kept = workload.take(np.flatnonzero(workload.program < count))
    return noted(kept, f"first {count} of {workload.n_programs} programs")


def _alone(w: Workload) -> None:
    """TraceError when a request waits for one of another program: such programs have no start of their own."""
    waiter = np.repeat(np.arange(len(w)), np.diff(w.wait_offsets))
    across = w.program[waiter] != w.program[w.wait_for]
    if across.any():
        row = int(waiter[np.argmax(across)])
        raise TraceError(
            f"{w.source.name}: row {row}", "wait_for", why="waits for another program, so starts cannot be drawn")


def _time(w: Workload, arrival: np.ndarray) -> np.ndarray:
    """float64[n], s: a row's own arrival, else the latest arrival before it in its program."""
    order = np.argsort(w.program, kind="stable")
    time = arrival[order].copy()
    begins = np.concatenate(([True], w.program[order][1:] != w.program[order][:-1])) if len(w) else np.zeros(0, dtype=bool)
    last = np.where(np.isfinite(time), np.arange(len(time)), 0)
    last = np.maximum.accumulate(np.where(begins, np.arange(len(time)), last))
    out = np.empty(len(time))
    out[order] = time[last]
    return out
