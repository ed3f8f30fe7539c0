"""Links and the flows that share them: max-min fair rates by progressive filling, plus latency.

Rates are solved when a flow starts or ends, only for the flows that are connected to it by shared links; nothing is
polled. Work-conserving: every flow is held back by a link that is full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from simcore.recorder import Recorder
from simcore.simulation import FLOW_END, Call, Simulation


@dataclass(eq=False)
class Link:
    """A shared resource of `bandwidth` bytes/s; crossing it adds `latency` seconds to a flow's end."""

    name: str
    bandwidth: float
    latency: float = 0.0
    flows: dict[int, Flow] = field(default_factory=dict, repr=False)  # active flows by id, in order of starting

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and isfinite(self.bandwidth)):
            raise ValueError(f"link {self.name}: bandwidth {self.bandwidth!r}; allowed: bytes/s > 0")
        if not (self.latency >= 0 and isfinite(self.latency)):
            raise ValueError(f"link {self.name}: latency {self.latency!r}; allowed: seconds >= 0")

    @property
    def backlog(self) -> float:
        """Bytes that active flows still have to bring over this link, as of their last change of rate."""
        return sum(flow.remaining for flow in self.flows.values())


@dataclass(eq=False)
class Flow:
    """`bytes` to move over every link of `path` at once, at one rate. `ended` is the time of arrival, NaN until then."""

    bytes: float
    path: Sequence[Link]
    label: str = ""
    id: int = -1
    started: float = float("nan")
    ended: float = float("nan")
    remaining: float = field(default=0.0, repr=False)
    rate: float = field(default=0.0, repr=False)
    _since: float = field(default=0.0, repr=False)  # when `remaining` was right
    _end: Call | None = field(default=None, repr=False)
    _done: Callable[[Flow], Any] | None = field(default=None, repr=False)


class Network:
    """Starts flows on a simulation's clock and tells when they have arrived."""

    def __init__(self, sim: Simulation, recorder: Recorder | None = None) -> None:
        self.sim = sim
        self._next_id = 0
        self._table = recorder.table("transfers", {
            "flow": "int64", "label": "string", "path": "string", "bytes": "float64", "started": "float64",
            "ended": "float64",
        }) if recorder else None

    def start(self, flow: Flow, done: Callable[[Flow], Any] | None = None) -> Flow:
        """Put a flow on its links now; `done(flow)` is called when its last byte has arrived.

        Raises ValueError for negative or infinite bytes, an empty path, a link that appears twice, or a second start.
        """
        if not (flow.bytes >= 0 and isfinite(flow.bytes)):
            raise ValueError(f"flow {flow.label!r}: {flow.bytes!r} bytes; allowed: a finite number >= 0")
        if not flow.path or len({id(link) for link in flow.path}) != len(flow.path):
            raise ValueError(f"flow {flow.label!r}: its path must name at least one link, and none twice")
        if flow.id >= 0:
            raise ValueError(f"flow {flow.label!r} was started before")
        flow.id, self._next_id = self._next_id, self._next_id + 1
        flow.started = flow._since = self.sim.now
        flow.remaining, flow._done = float(flow.bytes), done
        for link in flow.path:
            link.flows[flow.id] = flow
        self._solve(flow.path)
        return flow

    def cancel(self, flow: Flow) -> None:
        """Take a flow off its links; `done` is not called. Nothing happens if it has left them already."""
        if flow.path and flow.id in flow.path[0].flows:
            if flow._end is not None:
                flow._end.cancel()
            self._leave(flow)

    def _leave(self, flow: Flow) -> None:
        for link in flow.path:
            del link.flows[flow.id]
        self._solve(flow.path)

    def _drained(self, flow: Flow) -> None:
        """The last byte has left the source: free the links now, arrive after the latencies."""
        flow.remaining = 0.0
        self._leave(flow)
        latency = sum(link.latency for link in flow.path)
        if latency > 0:
            self.sim.at(self.sim.now + latency, self._arrived, FLOW_END, id=flow.id, args=(flow,))
        else:
            self._arrived(flow)

    def _arrived(self, flow: Flow) -> None:
        flow.ended = self.sim.now
        if self._table is not None:
            path = " > ".join(link.name for link in flow.path)
            self._table.append((flow.id, flow.label, path, flow.bytes, flow.started, flow.ended))
        if flow._done is not None:
            flow._done(flow)

    def _solve(self, changed: Sequence[Link]) -> None:
        """New rates for every flow connected to the changed links, and new end times where the rate is another."""
        now = self.sim.now
        flows = _connected(changed)
        rates = max_min_rates(flows)
        for flow in flows:
            rate = rates[flow.id]
            if flow._end is not None and (rate == flow.rate or flow._end.time == now):
                continue  # its end time stands, to the last bit; equal flows end together, not a rounding error apart
            flow.remaining = max(0.0, flow.remaining - flow.rate * (now - flow._since))
            flow._since, flow.rate = now, rate
            if flow._end is not None:
                flow._end.cancel()
            flow._end = self.sim.at(now + flow.remaining / rate, self._drained, FLOW_END, id=flow.id, args=(flow,))


def max_min_rates(flows: Sequence[Flow]) -> dict[int, float]:
    """Progressive filling: raise all rates together; a link that fills freezes its flows. Bytes/s by flow id."""
    rates: dict[int, float] = {}
    links: dict[int, tuple[Link, float, int]] = {}  # link, capacity left, flows not yet frozen
    for flow in flows:
        for link in flow.path:
            _, left, count = links.get(id(link), (link, link.bandwidth, 0))
            links[id(link)] = (link, left, count + 1)
    while len(rates) < len(flows):
        share, tightest = inf, None
        for link, left, count in links.values():
            if count and left / count < share:
                share, tightest = left / count, link
        assert tightest is not None
        for flow in tightest.flows.values():
            if flow.id in rates:
                continue
            rates[flow.id] = share
            for link in flow.path:
                _, left, count = links[id(link)]
                links[id(link)] = (link, max(0.0, left - share), count - 1)
    return rates


def _connected(links: Sequence[Link]) -> list[Flow]:
    """All active flows that share a link, directly or through others, with the given links; in order of id."""
    flows: dict[int, Flow] = {}
    seen: set[int] = set()
    pending = list(links)
    while pending:
        link = pending.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        for flow in link.flows.values():
            if flow.id not in flows:
                flows[flow.id] = flow
                pending.extend(flow.path)
    return [flows[k] for k in sorted(flows)]
