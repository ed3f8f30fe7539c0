"""When programs start: at a rate, or when a worker is free."""

from __future__ import annotations

import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.agent_programs import AgentTurn, Program, build_programs
from simcore.traces.agents import start_programs, with_workers
from simcore.traces.clone import clone_sessions, resample_sessions
from simcore.traces.identity import first_conflict, numbered_ids
from simcore.traces.info import describe, render
from simcore.traces.transform import compress, dequantise, head, scale_rate, slice_time, thin
from simcore.traces.workload import Source, Workload, build


def workload(n: int = 50) -> Workload:
    """Program p has 1 + p % 3 turns, and new tokens that tell it from others."""
    return build_programs(
        [Program((AgentTurn(100 + p, 5), *(AgentTurn(1, 1, calls=(("cd", 1.0),)) for _ in range(p % 3)))) for p in range(n)],
        Source("agents"),
    )


def identity(w: Workload) -> list[int]:
    """Number in `workload` of each program, in order of its start."""
    opens = np.diff(w.wait_offsets) == 0
    return (w.input_tokens[opens] - 100).tolist()


def test_starts_are_a_poisson_process_and_programs_stay_whole() -> None:
    w = start_programs(workload(2000), 4.0, seed=1)
    starts = w.arrival[np.isfinite(w.arrival)]
    assert np.diff(starts).mean() == pytest.approx(0.25, rel=0.05)
    assert np.diff(starts).std() == pytest.approx(0.25, rel=0.1)
    assert identity(w) == list(range(2000))
    assert w.call_seconds.sum() == workload(2000).call_seconds.sum()
    assert "program starts drawn: Poisson, 4 programs/s, 2000 programs, seed 1" in w.source.notes
    faster = start_programs(workload(2000), 8.0, seed=1)
    assert np.allclose(faster.arrival * 2, w.arrival, equal_nan=True)


def test_a_shuffled_order_depends_on_the_seed_alone() -> None:
    orders = [identity(start_programs(workload(), rate, seed, shuffle=True)) for rate, seed in ((1, 1), (9, 1), (1, 2))]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(50)) != orders[0]
    assert identity(start_programs(workload(), 0, 1, shuffle=True)) == orders[0]
    assert identity(with_workers(workload(), 3, seed=1)) == orders[0]


def test_recorded_distances_are_kept() -> None:
    w = build(
        arrival=np.array([5.0, 6.0, 7.5]), input_tokens=np.ones(3), output_tokens=np.ones(3), source=Source("here"),
        program=np.array([0, 1, 0]), turn=np.array([0, 0, 1]),
    )
    moved = start_programs(w, 0.5, seed=3)
    first = [moved.arrival[moved.program == p] for p in range(2)]
    assert sorted(np.round(np.diff(a), 9).tolist() for a in first) == [[], [2.5]]
    with pytest.raises(TraceError, match="workers: found 'programs with several recorded arrivals'"):
        with_workers(w, 2)


def test_workers_start_programs_and_can_be_undone() -> None:
    w = with_workers(workload(), 4)
    assert w.workers == 4
    assert w.by_worker.sum() == 50
    assert np.isnan(w.arrival).all()
    assert identity(w) == list(range(50))
    back = start_programs(w, 1.0, seed=1)
    assert back.workers == 0
    assert np.array_equal(back.arrival, start_programs(workload(), 1.0, seed=1).arrival, equal_nan=True)
    info = describe(w)
    assert (info["workers"], info["started_by_workers"], info["closed_loop_requests"]) == (4, 50, 49)
    assert "workers   4 start 50 programs" in render(info)
    assert info["pauses"]["cd"]["mean"] == 1.0


def test_transforms_of_time_refuse_programs_that_workers_start() -> None:
    w = with_workers(workload(), 4)
    for act in (
        lambda: slice_time(w, 0, 1), lambda: compress(w, 2), lambda: clone_sessions(w, 2, 1), lambda: scale_rate(w, 0.5, 1),
    ):
        with pytest.raises(TraceError, match=r"agents: workers: cannot .*: found '50 programs without an arrival'"):
            act()
    assert dequantise(w, 1.0, 1).by_worker.sum() == 50
    assert head(w, 7).by_worker.sum() == len(set(head(w, 7).program.tolist()))
    kept = thin(w, 0.5, 1)
    assert 0 < kept.n_programs < 50
    assert kept.workers == 4


def test_a_bootstrap_replicate_of_programs_that_workers_start() -> None:
    w = with_workers(workload(), 4)
    out = resample_sessions(w, 1).check()
    assert out.by_worker.sum() == out.n_programs == 50
    assert first_conflict(*numbered_ids(out)) is None
    turns = np.bincount(w.program)
    sources = dict(zip(out.program[out.by_worker].tolist(), identity(out), strict=True))
    assert np.bincount(out.program).tolist() == [turns[sources[p]] for p in range(50)]
    assert len(out.call_seconds) == sum(turns[p] - 1 for p in sources.values())


def test_refusals() -> None:
    for rate in (-1, float("nan"), float("inf")):
        with pytest.raises(TraceError, match="agents: rate: found"):
            start_programs(workload(), rate, 1)
    for workers in (0, -1, 1.5, True):
        with pytest.raises(TraceError, match="agents: workers: found"):
            with_workers(workload(), workers)
    across = build(
        arrival=np.array([0, np.nan]), input_tokens=np.ones(2), output_tokens=np.ones(2), source=Source("here"),
        waits=[[], [0]],
    )
    for act in (lambda: start_programs(across, 1, 1), lambda: with_workers(across, 1)):
        with pytest.raises(TraceError, match="here: row 1: wait_for: waits for another program"):
            act()
