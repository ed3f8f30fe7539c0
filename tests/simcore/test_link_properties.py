"""What holds of every world of links and flows: fairness, conservation, and independence of what is unrelated."""

from itertools import pairwise
from math import isnan

from fluid import Given, World, exact_ends, play, worlds
from hypothesis import assume, given
from hypothesis import strategies as st
from pytest import approx

from simcore.link import Flow, Link, Network
from simcore.simulation import Simulation


def settled(network):
    """The history without solutions that held for no time."""
    return [(time, rates, later) for (time, rates), (later, _) in pairwise(network.history) if later > time]


@given(worlds())
def test_ends_are_those_of_the_exact_fluid_model(world):
    flows, _ = play(world)
    assert [flow.ended for flow in flows] == approx([float(end) for end in exact_ends(world)], rel=1e-9, abs=1e-9)


@given(worlds(), st.sampled_from([0.25, 1.0]))
def test_latency_shifts_the_ends_and_changes_nothing_else(world, latency):
    prompt, _ = play(world)
    late, _ = play(world, latency)
    assert [flow.ended for flow in late] == [flow.ended + latency * len(flow.path) for flow in prompt]


@given(worlds())
def test_every_flow_is_held_back_by_a_full_link_on_which_none_is_faster(world):
    """This is what max-min fair means, and it implies work conservation. No link is ever over its capacity."""
    _, network = play(world)
    for _, rates, _ in settled(network):
        load = {link.name: sum(rate for flow, rate in rates.items() if link in flow.path) for link in network.links}
        fastest = {link.name: max((r for f, r in rates.items() if link in f.path), default=0.0) for link in network.links}
        assert all(load[link.name] <= link.bandwidth * (1 + 1e-9) for link in network.links)
        for flow, rate in rates.items():
            assert any(
                load[link.name] >= link.bandwidth * (1 - 1e-9) and rate >= fastest[link.name] * (1 - 1e-9)
                for link in flow.path
            )


@given(worlds())
def test_bytes_are_conserved(world):
    flows, network = play(world)
    moved = dict.fromkeys(flows, 0.0)
    for time, rates, later in settled(network):
        for flow, rate in rates.items():
            moved[flow] += rate * (later - time)
    assert list(moved.values()) == approx([float(given.bytes) for given in world.flows], rel=1e-9, abs=1e-9)
    assert all(not link.flows and link.backlog == 0 for link in network.links)
    table = network._table.frame()
    assert sorted(table["label"]) == sorted(flow.label for flow in flows)
    assert table["ended"].is_monotonic_increasing


@given(worlds(), worlds())
def test_unrelated_flows_do_not_touch_the_last_bit(mine, other):
    links = len(mine.bandwidths)
    shifted = tuple(Given(flow.start, flow.bytes, tuple(link + links for link in flow.path)) for flow in other.flows)
    both = World(mine.bandwidths + other.bandwidths, mine.flows + shifted)
    alone = play(mine)[0] + play(other)[0]
    assert [flow.ended for flow in play(both)[0]] == [flow.ended for flow in alone]


positive = st.floats(1e-3, 1e12)


@given(st.integers(2, 16), positive, positive, st.floats(0, 1e5), st.integers(0, 5))
def test_equal_flows_end_at_the_very_same_time(count, size, bandwidth, start, followers):
    """Not a rounding error apart: what happens at one instant is ordered by rank and id, so a last bit would reorder it.
    It holds even when the callback of the first starts other flows, which would stretch what rounding left of the rest."""
    assume(size / bandwidth > 1e-9 * max(start, 1.0))  # a shorter one ends at the very float at which it starts
    sim, link = Simulation(), Link("L", bandwidth)
    network = Network(sim)
    flows = [Flow(size, [link]) for _ in range(count)]

    def follow(_):
        for _ in range(followers):
            network.start(Flow(size, [link]))

    for flow in flows:
        sim.at(start, network.start, args=(flow, follow))
    sim.run_until()
    assert len({flow.ended for flow in flows}) == 1
    assert flows[0].ended >= start


@given(worlds(), st.randoms(use_true_random=False))
def test_the_order_of_starting_within_an_instant_does_not_matter(world, random):
    """To rounding: the same flows are then added up in another order."""
    order = random.sample(range(len(world.flows)), len(world.flows))
    shuffled = play(World(world.bandwidths, tuple(world.flows[n] for n in order)))[0]
    assert [flow.ended for flow in shuffled] == approx([play(world)[0][n].ended for n in order], rel=1e-9, abs=1e-9)


@given(worlds(), st.integers(0, 6), st.integers(0, 12))
def test_cancelling_is_as_if_the_bytes_had_run_out_there(world, victim, second):
    victim, time = victim % len(world.flows), second + 0.5
    whole, history = play(world)
    moved = sum(rates.get(whole[victim], 0.0) * max(0.0, min(till, time) - since) for since, rates, till in settled(history))
    on_its_way = whole[victim].started < time < whole[victim].ended
    shorter = list(world.flows)
    if on_its_way:
        shorter[victim] = shorter[victim]._replace(bytes=moved)
    expected, _ = play(World(world.bandwidths, tuple(shorter)))

    cut, network = play(world, cancel={victim: time})
    assert isnan(cut[victim].ended) == on_its_way
    assert all(not link.flows for link in network.links)
    ends = [(flow.ended, other.ended) for n, (flow, other) in enumerate(zip(cut, expected, strict=True)) if n != victim]
    assert [end for end, _ in ends] == approx([end for _, end in ends], rel=1e-9, abs=1e-9)
