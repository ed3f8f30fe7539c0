"""What commands print to: the console, progress with an estimate of what is left, JSON."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from simcore.files import to_json, write_whole

PLAIN_EVERY = 10.0  # s between two lines where no bar can be drawn


def console_of(json: Path | None) -> Console:
    """Tables go to stdout, or to stderr when stdout is the JSON's."""
    return Console(stderr=to_stdout(json), width=None if sys.stdout.isatty() else 140)


def to_stdout(json: Path | None) -> bool:
    return json is not None and str(json) == "-"


def write_json(json: Path | None, value: Any) -> None:
    """Write the value where `--json` says; - is stdout."""
    if json is None:
        return
    if to_stdout(json):
        print(to_json(value), end="")
    else:
        write_whole(json, to_json(value))


class _Lines(Progress):
    """Where no bar can be drawn (a log): a line on stderr every PLAIN_EVERY seconds with what is done and what is left."""

    _began = _last = 0.0

    def start(self) -> None:
        self._began = self._last = time.monotonic()

    def stop(self) -> None:
        pass

    def update(self, task_id: Any, **fields: Any) -> None:
        super().update(task_id, **fields)
        now = time.monotonic()
        if now - self._last < PLAIN_EVERY:
            return
        self._last = now
        done = sum(task.completed for task in self.tasks)
        all = sum(task.total or 0.0 for task in self.tasks)
        left = f", some {(now - self._began) * (all - done) / done:,.0f} s left" if done else ""
        share = 100 * done / all if all else 0.0
        print(f"{share:.0f}% done after {now - self._began:,.0f} s{left}", file=sys.stderr, flush=True)


def progress_bar(console: Console) -> Progress:
    """A bar a task, with the time that is left; lines where the console is no terminal."""
    kind = Progress if console.is_terminal else _Lines
    return kind(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
                TimeRemainingColumn(), console=console)
