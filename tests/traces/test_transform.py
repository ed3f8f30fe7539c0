import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.errors import TraceError
from simcore.traces.read import read
from simcore.traces.transform import compress, dequantise, head, scale_rate, shrink, slice_time, thin
from simcore.traces.workload import Source, Workload, build


def workload(arrival: list[float], program: list[int] | None = None, waits: list[list[int]] | None = None) -> Workload:
    n = len(arrival)
    depends = np.array([bool(w) for w in waits]) if waits else np.zeros(n, dtype=bool)
    return build(
        arrival=np.where(depends, np.nan, np.array(arrival, dtype=float)), input_tokens=np.arange(1, n + 1),
        output_tokens=np.ones(n), source=Source("small"), program=None if program is None else np.array(program),
        waits=waits, gap=np.where(depends, 0.5, 0.0),
    )


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40).map(sorted), st.floats(0.1, 20), st.integers(0, 5))
def test_dequantise_keeps_ticks_and_order(ticks: list[int], tick: float, seed: int) -> None:
    before = workload([3.0 * t for t in ticks])
    after = dequantise(before, tick, seed)
    assert (np.diff(after.arrival) >= 0).all()
    assert (after.arrival >= before.arrival).all()
    assert (after.arrival < before.arrival + tick).all()
    assert np.array_equal(after.arrival // 3, before.arrival // 3) or tick > 3
    distinct = sorted(set(before.arrival.tolist()))
    for here, following in itertools.pairwise(distinct):
        assert (after.arrival[before.arrival == here] < following).all()
    assert np.array_equal(after.input_tokens, before.input_tokens)
    assert np.array_equal(after.arrival, dequantise(before, tick, seed).arrival)


def test_dequantise_spreads_evenly_and_leaves_waiting_rows_alone() -> None:
    after = dequantise(workload([0.0] * 2000 + [3.0] * 2000), 3.0, 1)
    assert np.histogram(after.arrival, bins=6, range=(0, 6))[0] == pytest.approx([667] * 6, abs=90)
    assert "arrivals spread over their 3 s ticks (uniform, seed 1)" in after.source.notes
    closed = dequantise(workload([0, 0, 3], waits=[[], [0], []]), 3.0, 1)
    assert np.isnan(closed.arrival[1])
    with pytest.raises(TraceError, match="small: tick_seconds: found 0: allowed: a finite time above 0"):
        dequantise(closed, 0, 1)


def test_slice_rebases_time_and_drops_those_who_wait_for_what_was_cut() -> None:
    w = workload([1, 0, 5, 0, 0, 9], program=[0, 0, 1, 1, 0, 2], waits=[[], [0], [], [2], [1, 2], []])
    cut = slice_time(w, 5, 9)
    assert cut.input_tokens.tolist() == [3, 4]
    assert cut.arrival[0] == 0
    assert cut.waits(1).tolist() == [0]
    assert "2 of 6 requests; 2 left out because they wait for one that was cut away; 0 sessions" in cut.source.notes[-1]
    assert "1 sessions had begun before" in slice_time(workload([0, 2, 4], [0, 0, 1]), 1, 9).source.notes[-1]
    for start, end in ((5, 5), (-1, 3), (100, 200)):
        with pytest.raises(TraceError, match="small: start, end: found"):
            slice_time(w, start, end)


def test_head() -> None:
    w = workload([1, 0, 5], waits=[[], [0], []])
    assert head(w, 2).input_tokens.tolist() == [1, 2]
    assert head(w, 2).source.notes[-1] == "first 2 of 3 requests"
    assert len(head(w, 99)) == 3
    with pytest.raises(TraceError, match="n: found 0: allowed: at least 1"):
        head(w, 0)


def test_thin_keeps_sessions_whole_and_nests() -> None:
    program = [k % 100 for k in range(400)]
    w = workload([k / 10 for k in range(400)], program)
    kept = {f: thin(w, f, 7) for f in (0.2, 0.5, 1.0)}
    sets = {f: {program[t - 1] for t in k.input_tokens.tolist()} for f, k in kept.items()}
    assert sets[0.2] < sets[0.5] < sets[1.0] == set(range(100))
    for f, k in kept.items():
        assert len(k) == 4 * len(sets[f]) == 4 * k.n_programs
        assert np.array_equal(k.arrival, (k.input_tokens - 1) / 10)
        assert f"{len(sets[f])} of 100 sessions, {len(k)} of 400 requests" in k.source.notes[-1]
    assert 35 < len(sets[0.5]) < 65
    assert np.array_equal(thin(w, 0.5, 7).input_tokens, kept[0.5].input_tokens)
    assert not np.array_equal(thin(w, 0.5, 8).input_tokens, kept[0.5].input_tokens)
    assert np.array_equal(scale_rate(w, 0.5, 7).input_tokens, kept[0.5].input_tokens)
    assert len(scale_rate(w, 3, 7)) == 1200


def test_thin_refuses_what_it_cannot_do() -> None:
    w = workload([0, 1], [0, 1])
    with pytest.raises(TraceError, match="fraction: found 0: allowed: above 0, at most 1"):
        thin(w, 0, 1)
    with pytest.raises(TraceError, match="fraction: found 1e-12: allowed: one that leaves at least one session"):
        thin(w, 1e-12, 1)
    with pytest.raises(TraceError, match="factor: found 0: allowed: a finite number above 0"):
        scale_rate(w, 0, 1)
    across = workload([0.0] * 40, [0, *range(1, 40)], waits=[[], *[[0]] * 39])
    seed = next(s for s in range(99) if _drops_first(s))
    with pytest.raises(TraceError, match="a chosen request waits for one that is left out"):
        thin(across, 0.5, seed)


def _drops_first(seed: int) -> bool:
    return thin(workload([0.0] * 40), 0.5, seed).input_tokens[0] != 1


def test_compress_warns() -> None:
    w = workload([0, 4, 0], waits=[[], [], [1]])
    fast = compress(w, 2)
    assert fast.arrival[:2].tolist() == [0, 2]
    assert fast.gap.tolist() == w.gap.tolist()
    assert fast.source.notes[-1].startswith("warning: time compressed by 2")
    with pytest.raises(TraceError, match="factor: found 0"):
        compress(w, 0)


def test_shrink_keeps_what_is_shared() -> None:
    w = head(read("mooncake-conversation"), 200)
    small = shrink(w, 16)
    assert small.block_tokens == 32 and np.array_equal(small.input_tokens, -(-w.input_tokens // 16))
    assert all(np.array_equal(small.ids(i), w.ids(i)) for i in range(len(w)))
    keys = [[set(x.block_keys(i, b)) & set(x.block_keys(j, b)) for i in range(20) for j in range(i)]
            for x, b in ((w, 512), (small, 32))]
    assert [len(shared) for shared in keys[0]] == [len(shared) for shared in keys[1]] and any(keys[0])
    assert small.source.notes[-1].startswith("warning: lengths divided by 16")
    for factor in (0, 3, 1024):
        with pytest.raises(TraceError, match=f"factor: found {factor}: allowed: a divisor of the 512 tokens of a block"):
            shrink(w, factor)
