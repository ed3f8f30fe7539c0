"""Worlds of links and flows, and an oracle: the same fluid model in exact fractions, with nothing shared with link.py."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from hypothesis import strategies as st

from simcore.link import Flow, Link, Network
from simcore.recorder import Recorder
from simcore.simulation import ARRIVAL, Simulation


class Given(NamedTuple):
    start: int
    bytes: int
    path: tuple[int, ...]


class World(NamedTuple):
    bandwidths: tuple[int, ...]
    flows: tuple[Given, ...]


@st.composite
def worlds(draw, max_flows=7, max_links=4):
    links = draw(st.integers(1, max_links))
    paths = st.lists(st.integers(0, links - 1), min_size=1, max_size=3, unique=True).map(tuple)
    flow = st.builds(Given, st.integers(0, 12), st.integers(0, 40), paths)
    return World(
        tuple(draw(st.lists(st.integers(1, 12), min_size=links, max_size=links))),
        tuple(draw(st.lists(flow, min_size=1, max_size=max_flows))),
    )


class Watched(Network):
    """Keeps the rates after every solution: (time, {flow: rate}) of all flows on the links of this world."""

    def __init__(self, sim: Simulation, links: list[Link], recorder: Recorder) -> None:
        super().__init__(sim, recorder)
        self.links = links
        self.history: list[tuple[float, dict[Flow, float]]] = []

    def _solve(self, changed):
        super()._solve(changed)
        self.history.append((self.sim.now, {flow: flow.rate for link in self.links for flow in link.flows.values()}))


def play(world: World, latency: float = 0.0, cancel: dict[int, float] | None = None) -> tuple[list[Flow], Watched]:
    """Run the world on the code under test. `cancel`: flow number -> time."""
    sim = Simulation()
    links = [Link(f"L{i}", float(bandwidth), latency) for i, bandwidth in enumerate(world.bandwidths)]
    network = Watched(sim, links, Recorder())
    flows = [Flow(float(given.bytes), [links[i] for i in given.path], str(n)) for n, given in enumerate(world.flows)]
    for number, (given, flow) in enumerate(zip(world.flows, flows, strict=True)):
        sim.at(float(given.start), network.start, ARRIVAL, id=number, args=(flow,))
    for number, time in (cancel or {}).items():
        sim.at(time, network.cancel, args=(flows[number],))
    sim.run_until()
    return flows, network


def filled(bandwidths: tuple[int, ...], paths: dict[int, tuple[int, ...]]) -> dict[int, Fraction]:
    """Progressive filling as the textbook tells it: raise all rates by the largest step that no link forbids; flows on
    a full link stop; repeat with the others."""
    rates = {flow: Fraction(0) for flow in paths}
    growing = set(paths)
    while growing:
        room = {
            link: bandwidth - sum(rates[f] for f, path in paths.items() if link in path)
            for link, bandwidth in enumerate(bandwidths)
        }
        growers = {link: sum(link in paths[f] for f in growing) for link in room}
        step = min(Fraction(room[link]) / growers[link] for link in room if growers[link])
        full = {link for link in room if growers[link] and room[link] == step * growers[link]}
        for flow in growing:
            rates[flow] += step
        growing -= {flow for flow in growing if full & set(paths[flow])}
    return rates


def exact_ends(world: World) -> list[Fraction]:
    """When each flow's last byte leaves, in exact arithmetic."""
    left = {n: Fraction(given.bytes) for n, given in enumerate(world.flows)}
    ends: dict[int, Fraction] = {}
    now = Fraction(0)
    while len(ends) < len(world.flows):
        active = {n: world.flows[n].path for n in left if n not in ends and world.flows[n].start <= now}
        for n in [n for n in active if left[n] == 0]:
            ends[n] = now
            del active[n]
        rates = filled(world.bandwidths, active)
        starts = [Fraction(given.start) for given in world.flows if given.start > now]
        times = [*starts, *(now + left[n] / rates[n] for n in active)]
        if not times:
            break
        later = min(times)
        for n in active:
            left[n] -= rates[n] * (later - now)
        now = later
    return [ends[n] for n in range(len(world.flows))]
