"""Clones and bootstrap replicates: sessions stay what they were, and share with others what they shared before."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.errors import TraceError
from simcore.traces.clone import clone_sessions, resample_sessions
from simcore.traces.identity import first_conflict, numbered_ids
from simcore.traces.info import best_cached_tokens
from simcore.traces.read import read
from simcore.traces.workload import Source, Workload, build


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Sessions of a few turns: a root of two blocks that all share, a third block that some sessions share, then blocks of
    the session's own, which each turn continues. Turns arrive by themselves or wait for earlier turns of their session."""
    n = draw(st.integers(1, 14))
    sessions = draw(st.integers(1, 5))
    arrival = np.sort(np.array(draw(st.lists(st.integers(0, 30), min_size=n, max_size=n)), dtype=float))
    program, turn, waits, ids = [], [], [], []
    seen: dict[int, list[int]] = {}
    for row in range(n):
        p = draw(st.integers(0, sessions - 1))
        earlier = seen.setdefault(p, [])
        waits.append(draw(st.lists(st.sampled_from(earlier), min_size=1, max_size=2, unique=True).map(sorted))
                     if earlier and draw(st.booleans()) else [])
        program.append(p)
        turn.append(len(earlier))
        own = 1000 * (p + 1)
        ids.append(np.array([7, 8, 500 + p // 2, *range(own, own + 1 + len(earlier))]))
        earlier.append(row)
    depends = np.array([bool(w) for w in waits])
    known = np.array([4 * len(row) for row in ids])
    return build(
        arrival=np.where(depends, np.nan, arrival), gap=np.where(depends, 0.5, 0.0), input_tokens=known + np.arange(n) + 1,
        output_tokens=np.arange(n) + 1, program=np.unique(program, return_inverse=True)[1], turn=np.array(turn), waits=waits,
        block_ids=ids, known_tokens=known, block_tokens=4, source=Source("small"), priority=np.arange(n), tools=("cd", "ls"),
        calls=[[(row % 2, row / 8)] * (row % 3) if waits[row] else [] for row in range(n)],
    )


def sessions_of(w: Workload) -> list[list[int]]:
    return [np.flatnonzero(w.program == p).tolist() for p in range(w.n_programs)]


def shape(w: Workload, rows: list[int]) -> tuple:
    """What a copy of a session keeps: lengths, turns, waits, distances and what its turns share with one another."""
    place = {row: k for k, row in enumerate(rows)}
    start = np.nanmin(w.arrival[rows])
    ids: dict[int, int] = {}
    return (
        tuple(w.priority[rows].tolist()), tuple(w.input_tokens[rows].tolist()), tuple(w.turn[rows].tolist()),
        tuple(w.gap[rows].tolist()), tuple(tuple(w.calls(row)) for row in rows),
        tuple(tuple(place[k] for k in w.waits(row).tolist()) for row in rows),
        tuple(None if np.isnan(a) else round(a - start, 6) for a in w.arrival[rows].tolist()),
        tuple(tuple(ids.setdefault(i, len(ids)) for i in w.ids(row).tolist()) for row in rows),
    )


def check_copies(source: Workload, out: Workload) -> None:
    """Each session of `out` is a copy of one of the source; ids are shared by copies of one session only if several sessions
    of the source share them; all stay prefix identities and within the source's span."""
    out.check()
    assert first_conflict(*numbered_ids(out)) is None
    shapes = {shape(source, rows): p for p, rows in enumerate(sessions_of(source))}
    users = {}
    for p, rows in enumerate(sessions_of(source)):
        for row in rows:
            for i in source.ids(row).tolist():
                users.setdefault(i, set()).add(p)
    copies, owner = Counter(), {}
    for number, rows in enumerate(sessions_of(out)):
        of = shapes[shape(out, rows)]
        copies[of] += 1
        used = {i for row in rows for i in out.ids(row).tolist()}
        common = {i for row in sessions_of(source)[of] for i in source.ids(row).tolist() if len(users[i]) > 1}
        assert common <= used
        for i in used - common:
            assert owner.setdefault(i, number) == number
    own = out.arrival[np.isfinite(out.arrival)]
    assert own.min() >= np.nanmin(source.arrival) - 1e-9 and own.max() <= np.nanmax(source.arrival) + 1e-9


@given(workloads(), st.sampled_from([1.0, 1.5, 2.0, 3.0, 3.25]), st.integers(0, 3))
def test_clones_are_whole_sessions_of_fresh_identity(w: Workload, factor: float, seed: int) -> None:
    out = clone_sessions(w, factor, seed)
    check_copies(w, out)
    counts = Counter(tuple(out.priority[rows].tolist()) for rows in sessions_of(out))
    assert all(int(factor) <= count <= np.ceil(factor) for count in counts.values()) and len(counts) == w.n_programs
    for p, rows in enumerate(sessions_of(w)):  # the originals are there as they were
        kept = sessions_of(out)[p]
        assert np.array_equal(out.arrival[kept], w.arrival[rows], equal_nan=True)
        assert [out.ids(k).tolist() for k in kept] == [w.ids(k).tolist() for k in rows]
    again = clone_sessions(w, factor, seed)
    assert np.array_equal(out.run_first, again.run_first) and np.array_equal(out.arrival, again.arrival, equal_nan=True)


@given(workloads(), st.integers(0, 5))
def test_a_bootstrap_replicate_has_as_many_sessions_all_from_the_source(w: Workload, seed: int) -> None:
    out = resample_sessions(w, seed)
    assert out.n_programs == w.n_programs
    check_copies(w, out)


def test_factor_one_changes_nothing() -> None:
    w = read("mooncake-conversation")
    out = clone_sessions(w, 1, 3)
    for column in ("arrival", "program", "turn", "input_tokens", "run_offsets", "run_first", "run_last"):
        assert np.array_equal(getattr(out, column), getattr(w, column))


def test_a_real_trace_at_twice_its_rate() -> None:
    """The clones hit as well within their sessions as the originals: with an infinite cache, as many tokens each."""
    w = read("mooncake-conversation")
    out = clone_sessions(w, 2, 1)
    assert len(out) == 2 * len(w) and out.n_programs == 2 * w.n_programs
    assert out.source.notes[-1] == ("rate raised 2 times by cloning whole sessions at random offsets (seed 1): 4931 -> 9862 "
                                    "sessions, 7851 -> 15702 requests")
    cached, before = best_cached_tokens(out, 16), best_cached_tokens(w, 16)
    later = np.flatnonzero(w.turn > 0)  # a first turn finds the root if another session was there before
    originals, clones = np.flatnonzero(out.program < w.n_programs), np.flatnonzero(out.program >= w.n_programs)
    by_session = clones[np.lexsort((out.turn[clones], out.program[clones]))]
    source = np.lexsort((w.turn, w.program))
    assert np.array_equal(cached[originals][later], before[later])
    turns = w.turn[source] > 0
    assert np.array_equal(cached[by_session][turns], before[source][turns])
    halves = np.histogram(out.arrival[clones], bins=4)[0] / len(clones)
    assert halves == pytest.approx([0.25] * 4, abs=0.03)


def test_smaller_factors_are_subsets() -> None:
    w = read("mooncake-conversation")

    def clones(factor: float) -> set[tuple[float, int]]:
        out = clone_sessions(w, factor, 5)
        rows = out.program >= w.n_programs
        return set(zip(out.arrival[rows].tolist(), out.input_tokens[rows].tolist(), strict=True))

    a, b, c = clones(1.2), clones(1.7), clones(2.3)
    assert a < b < c
    assert len(b) / len(w) == pytest.approx(0.7, abs=0.05)


def test_seeds_bring_other_replicates() -> None:
    w = read("mooncake-conversation")
    one, other = resample_sessions(w, 1), resample_sessions(w, 2)
    assert one.n_programs == other.n_programs == w.n_programs
    assert not np.array_equal(one.input_tokens[:100], other.input_tokens[:100])
    distinct = len({tuple(row) for row in zip(one.input_tokens.tolist(), one.output_tokens.tolist(), strict=True)})
    assert distinct < 0.8 * len(w)
    assert "resampled by whole sessions with replacement (seed 1): 3108 of 4931 sessions" in one.source.notes[-1]


def test_what_cannot_be_cloned_is_refused() -> None:
    w = build(arrival=np.array([0, np.nan]), input_tokens=np.ones(2), output_tokens=np.ones(2), waits=[[], [0]],
              gap=np.array([0, 0.5]), source=Source("small"))
    for transform in (lambda: clone_sessions(w, 2, 1), lambda: resample_sessions(w, 1)):
        with pytest.raises(TraceError, match="small: row 1: wait_for: waits for another session"):
            transform()
    with pytest.raises(TraceError, match=r"factor: found 0.5: allowed: a finite number of at least 1 \(thin lowers"):
        clone_sessions(w, 0.5, 1)
    most = ((1 << 63) - 1) // 16 - 1
    large = build(arrival=np.zeros(1), input_tokens=np.full(1, 16), output_tokens=np.ones(1), known_tokens=np.full(1, 16),
                  block_ids=[np.array([most])], source=Source("large"))
    with pytest.raises(TraceError, match="ids: too large for fresh ones after them"):
        clone_sessions(large, 2, 1)
