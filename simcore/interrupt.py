"""Ctrl-C ends a simulation between two events, so that what has come to pass can still be written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from simcore.simulation import Simulation


@contextmanager
def stops_on_interrupt(sim: Simulation) -> Iterator[None]:
    """The first Ctrl-C halts `sim` (its `halted` says so); the second is the usual one. Only the main thread hears signals:
    elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def halt(number: int, frame: Any) -> None:
        sim.halted = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, halt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
