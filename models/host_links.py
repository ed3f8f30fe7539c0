"""The links between one replica's GPUs and its host's memory, and the copies on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from simcore.link import Flow, Link, Network
from simcore.models.batch import StartLoad, StartStore
from simcore.recorder import Table

# Seconds that a copy takes beyond bytes / bandwidth: what fits LMCache's sizes and rates on an H100 (64 KB at 4 GB/s, 256 KB
# at 13 GB/s, 16 MB at 48 GB/s; arXiv 2510.09665).
HOST_LATENCY = 15e-6

TRANSFER_COLUMNS = {
    "time": "float64", "replica": "int64", "direction": "string", "request": "int64", "bytes": "float64",
    "seconds": "float64",
}


class Links(Protocol):
    """What carries a replica's copies."""

    def start(self, copy: Any, done: Callable[[Any, float], None]) -> None:
        """Begin a copy now; `done(copy, seconds)` is called when its last byte has arrived."""
        ...


class HostLinks:
    """One link each way, of `bandwidth` bytes/s (all ranks together). Copies of one direction share it."""

    def __init__(self, network: Network, replica: int, bandwidth: float, latency: float, table: Table) -> None:
        self.links = {
            "to_host": Link(f"replica {replica} to host", bandwidth, latency),
            "from_host": Link(f"replica {replica} from host", bandwidth, latency),
        }
        self.bytes = dict.fromkeys(self.links, 0.0)  # of the copies that have ended
        self._network = network
        self._replica = replica
        self._table = table
        self._is_cut = False

    def start(self, copy: StartLoad | StartStore, done: Callable[[StartLoad | StartStore, float], None]) -> None:
        """Begin a copy now; `done(copy, seconds)` is called when its last byte has arrived."""

        def ended(flow: Flow) -> None:
            if self._is_cut:
                return
            seconds = flow.ended - flow.started
            self.bytes[copy.link] += flow.bytes
            self._table.append((flow.ended, self._replica, copy.link, copy.request.id, flow.bytes, seconds))
            done(copy, seconds)

        self._network.start(Flow(copy.bytes, (self.links[copy.link],)), ended)

    def cut(self) -> None:
        """The process that copied is gone: no copy arrives any more."""
        self._is_cut = True
        for link in self.links.values():
            for flow in list(link.flows.values()):
                self._network.cancel(flow)
