"""Jobs in processes of their own, some at a time, each with a time limit.

An illegal access ends a process's use of the GPU for good, and a kernel that hangs cannot be interrupted: neither may take
the other jobs along. Processes are forked, so that what is imported is not imported again; hence nothing may have used the
GPU before.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

Emit = Callable[[dict[str, Any]], None]  # replaces what the job has found so far
Job = Callable[[Emit], None]
DIED = "the process died"


@dataclass
class Outcome:
    """What a job emitted last, why it ended early (None: it did not), and how long it took (s)."""

    found: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


@dataclass
class _Running:
    name: str
    process: Any
    began: float
    outcome: Outcome = field(default_factory=Outcome)


def run_jobs(jobs: dict[str, Job], *, workers: int, seconds: float, each: float | None = None) -> dict[str, Outcome]:
    """The outcome of every job, in the order of `jobs`; `seconds` for all together, `each` for one (None: the same)."""
    ends = time.monotonic() + seconds
    waiting = list(jobs)
    running: dict[Connection, _Running] = {}
    outcomes: dict[str, Outcome] = {}

    def deadline(one: _Running) -> float:
        return min(ends, one.began + (seconds if each is None else each))

    def end(pipe: Connection) -> None:
        one = running.pop(pipe)
        one.process.join()
        pipe.close()
        if one.outcome.error == DIED:
            one.outcome.error = f"{DIED}, exit code {one.process.exitcode}"
        one.outcome.seconds = time.monotonic() - one.began
        outcomes[one.name] = one.outcome

    while running or (waiting and time.monotonic() < ends):
        while waiting and len(running) < workers:
            name = waiting.pop(0)
            pipe, process = _start(jobs[name])
            running[pipe] = _Running(name, process, time.monotonic())
        for heard in wait(list(running), timeout=max(0.0, min(map(deadline, running.values())) - time.monotonic())):
            assert isinstance(heard, Connection)
            if _ended(heard, running[heard].outcome):
                end(heard)
        for pipe, one in list(running.items()):
            if time.monotonic() >= deadline(one):
                one.process.kill()
                one.outcome.error = f"not done after {time.monotonic() - one.began:.0f} s"
                end(pipe)
    return {name: outcomes.get(name, Outcome(error="not begun: the time was up")) for name in jobs}


def _ended(pipe: Connection, outcome: Outcome) -> bool:
    """Takes in one message; whether it was the job's last."""
    try:
        kind, value = pipe.recv()
    except (EOFError, OSError):
        kind, value = "end", DIED
    if kind == "found":
        outcome.found = value
    else:
        outcome.error = value
    return kind == "end"


def _start(job: Job) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(job, writer), daemon=True)
    process.start()
    writer.close()  # the child's end is then the only one, and its death is seen
    return reader, process


def _run(job: Job, pipe: Connection) -> None:
    try:
        job(lambda found: pipe.send(("found", found)))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        pipe.send(("end", f"{type(error).__name__}: {str(error)[:1500]} ({where.name}, line {where.lineno})"))
        traceback.print_exc()
    else:
        pipe.send(("end", None))
