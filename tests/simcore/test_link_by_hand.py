"""Flows whose rates and ends are worked out by hand; all numbers are binary fractions, so equality is exact."""

import math

import pytest

from simcore.link import Flow, Link, Network, max_min_rates
from simcore.recorder import Recorder
from simcore.simulation import Simulation


def ends(links, flows, at=None):
    """Start each (bytes, path) at its time (default 0) and run; the end of each."""
    sim = Simulation()
    network = Network(sim)
    started = [Flow(size, [links[name] for name in path.split()]) for size, path in flows]
    for number, (flow, time) in enumerate(zip(started, at or [0.0] * len(flows), strict=True)):
        sim.at(time, network.start, id=number, args=(flow,))
    sim.run_until()
    assert all(not link.flows for link in links.values())
    return [flow.ended for flow in started]


def links(latency=0.0, **bandwidths):
    return {name: Link(name, bandwidth, latency) for name, bandwidth in bandwidths.items()}


def test_classic_two_links():
    # A over L1 (10 B/s) and L2 (4), B over L1, C over L2. L2 fills first: A = C = 4/2 = 2; L1 leaves B 10 - 2 = 8.
    # t=5: B (40 B at 8) and C (10 B at 2) end. A has 30 - 5*2 = 20 left and takes min(10, 4) = 4: it ends at 5 + 5.
    assert ends(links(L1=10.0, L2=4.0), [(30.0, "L1 L2"), (40.0, "L1"), (10.0, "L2")]) == [10.0, 5.0, 5.0]


def test_chain_of_three_links():
    # A over L1 (6), L2 (4), L3 (10); B, C, D over one each. Shares: L1 3, L2 2, L3 5. L2 fills first: A = C = 2.
    # Then B = 6 - 2 = 4 and D = 10 - 2 = 8.
    # t=2: B (8 B) ends; L2 still holds A at 2. t=4: C (8 B) ends, D has had 32. A has 16 - 8 = 8 left at min(6, 4) = 4,
    # D goes at 10 - 4 = 6. t=6: A ends, D has had 32 + 12 = 44 of 64; the last 20 at 10 take 2 s.
    flows = [(16.0, "L1 L2 L3"), (8.0, "L1"), (8.0, "L2"), (64.0, "L3")]
    assert ends(links(L1=6.0, L2=4.0, L3=10.0), flows) == [6.0, 2.0, 4.0, 8.0]


def test_rates_of_a_second_bottleneck():
    # A over L1 (2), B over L1 and L2, C and D over L2 (9), E over L2 and L3 (1.5).
    # L1 share 1: A = B = 1. L3: E = 1.5. L2 leaves C and D (9 - 1 - 1.5) / 2 = 3.25 each.
    world = links(L1=2.0, L2=9.0, L3=1.5)
    sim = Simulation()
    network = Network(sim)
    paths = ("L1", "L1 L2", "L2", "L2", "L2 L3")
    flows = [network.start(Flow(100.0, [world[name] for name in path.split()])) for path in paths]
    assert [flow.rate for flow in flows] == [1.0, 1.0, 3.25, 3.25, 1.5]
    assert max_min_rates(flows) == {flow.id: flow.rate for flow in flows}
    assert world["L2"].backlog == 400.0


def test_a_late_arrival_slows_an_earlier_flow():
    # A: 50 of 100 B by t=5, then 5 B/s beside B. B (20 B) ends at 5 + 4 = 9. A's last 30 B at 10 take 3 s.
    assert ends(links(L=10.0), [(100.0, "L"), (20.0, "L")], at=[0.0, 5.0]) == [12.0, 9.0]


def test_a_late_arrival_elsewhere_can_speed_a_flow_up():
    # A over L1 (4), B over L1 and L2 (8): 2 each. At t=1 seven flows join L2: B falls to 8/8 = 1 and A rises to 3.
    # A: 2 by t=1, then 3 B/s: 8 B end at 3. B: 2 by t=1, then 1 B/s.
    others = [(100.0, "L2")] * 7
    assert ends(links(L1=4.0, L2=8.0), [(8.0, "L1"), (4.0, "L1 L2"), *others], at=[0.0, 0.0] + [1.0] * 7)[:2] == [3.0, 3.0]


def test_a_rate_that_stays_keeps_the_end_to_the_last_bit():
    # B comes and goes on A's second link and is held back by a third; A's rate is L1's 3 B/s all along.
    world = links(L1=3.0, L2=1000.0, L3=7.0)
    assert ends(world, [(1.0, "L1 L2"), (0.3, "L2 L3"), (0.1, "L3")], at=[0.0, 0.1, 0.123])[0] == 1 / 3


def test_equal_flows_end_together():
    assert ends(links(L=8.0), [(6.0, "L")] * 4) == [3.0] * 4


def test_latency_is_added_and_frees_the_link_before():
    # A: 10 B at 10, off its links at 1, arrives after 0.5 + 0.25. B starts at 1 and has the whole link.
    world = {"near": Link("near", 10.0, 0.5), "far": Link("far", 10.0, 0.25)}
    assert ends(world, [(10.0, "near far"), (10.0, "near")], at=[0.0, 1.0]) == [1.75, 2.5]


def test_zero_bytes_take_the_latency_alone_and_delay_nobody():
    assert ends(links(L=8.0), [(0.0, "L")], at=[3.0]) == [3.0]
    assert ends(links(latency=0.5, L=8.0), [(16.0, "L"), (0.0, "L")], at=[0.0, 1.0]) == [2.5, 1.5]


def test_cancel_gives_the_rate_to_the_others_and_does_not_call_back():
    # Both at 4 B/s until t=1. Then A's last 12 B at 8 take 1.5 s.
    sim, arrived = Simulation(), []
    network, link = Network(sim), Link("L", 8.0)
    kept = network.start(Flow(16.0, [link]), arrived.append)
    dropped = network.start(Flow(16.0, [link]), arrived.append)
    sim.at(1.0, network.cancel, args=(dropped,))
    sim.at(1.5, network.cancel, args=(dropped,))  # it has left already
    sim.run_until()
    assert arrived == [kept]
    assert kept.ended == 2.5 == sim.now
    assert math.isnan(dropped.ended)


def test_cancel_of_a_flow_that_never_started_or_has_drained_does_nothing():
    sim, arrived = Simulation(), []
    network, link = Network(sim), Link("L", 8.0, latency=1.0)
    network.cancel(Flow(8.0, [link]))
    flow = network.start(Flow(8.0, [link]), arrived.append)
    sim.at(1.5, network.cancel, args=(flow,))  # on its way: its last byte left the link at t=1
    sim.run_until()
    assert arrived == [flow]
    assert flow.ended == 2.0


def test_the_callback_may_start_the_next_flow():
    sim, network, link = Simulation(), None, Link("L", 8.0)
    network = Network(sim)
    times = []

    def again(flow):
        times.append(sim.now)
        if len(times) < 3:
            network.start(Flow(8.0, [link]), again)

    network.start(Flow(8.0, [link]), again)
    sim.run_until()
    assert times == [1.0, 2.0, 3.0]


def test_transfers_table():
    sim, recorder = Simulation(), Recorder()
    network = Network(sim, recorder)
    nvlink, nic = Link("nvlink", 8.0), Link("nic", 4.0, latency=0.5)
    network.start(Flow(8, [nvlink, nic], "kv push"))
    gone = network.start(Flow(8.0, [nvlink], "cancelled"))
    network.start(Flow(2.0, [nvlink], "load"))
    sim.at(0.25, network.cancel, args=(gone,))
    assert [str(dtype) for dtype in recorder.tables["transfers"].frame().dtypes] == [
        "int64", "string", "string", "float64", "float64", "float64"]
    sim.run_until()
    # Thirds of nvlink (8/3 each) until 0.25, then halves of 4: "load" has 2 - 2/3 = 4/3 left and ends at 0.25 + 1/3.
    table = recorder.tables["transfers"].frame()
    assert table["label"].tolist() == ["load", "kv push"]
    assert table["path"].tolist() == ["nvlink", "nvlink > nic"]
    assert table["flow"].tolist() == [2, 0]
    assert table["bytes"].tolist() == [2.0, 8.0]
    assert table["started"].tolist() == [0.0, 0.0]
    # "kv push": 2/3 by 0.25, then 4 B/s (the nic's limit as well as the half): (8 - 2/3) / 4 s more, and 0.5 s latency.
    assert table["ended"].tolist() == pytest.approx([0.25 + 1 / 3, 0.25 + (8 - 2 / 3) / 4 + 0.5], rel=1e-12)


@pytest.mark.parametrize("size", [-1.0, math.inf, math.nan])
def test_bytes_that_are_not_a_size_are_refused(size):
    link = Link("L", 1.0)
    with pytest.raises(ValueError, match=r"flow 'kv': .* bytes; allowed: a finite number >= 0"):
        Network(Simulation()).start(Flow(size, [link], "kv"))
    assert not link.flows


def test_paths_and_second_starts_are_refused():
    network, link = Network(Simulation()), Link("L", 1.0)
    for path in ([], [link, link]):
        with pytest.raises(ValueError, match="at least one link, and none twice"):
            network.start(Flow(1.0, path))
    flow = network.start(Flow(1.0, [link]))
    with pytest.raises(ValueError, match="started before"):
        network.start(flow)


@pytest.mark.parametrize(("bandwidth", "latency", "message"), [
    (0.0, 0.0, "bandwidth 0.0"), (-1.0, 0.0, "bandwidth"), (math.inf, 0.0, "bandwidth"), (math.nan, 0.0, "bandwidth"),
    (1.0, -1.0, "latency -1.0"), (1.0, math.inf, "latency"), (1.0, math.nan, "latency"),
])
def test_links_that_cannot_be_are_refused(bandwidth, latency, message):
    with pytest.raises(ValueError, match=f"link L: {message}"):
        Link("L", bandwidth, latency)
