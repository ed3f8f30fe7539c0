"""Exports: a run of what was written is a run of the original in all that a format says; the rest is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import serving_runs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simcore.errors import TraceError
from simcore.traces.exporting import export_trace
from simcore.traces.identity import chained
from simcore.traces.read import read
from simcore.traces.sessions import counted
from simcore.traces.workload import Source, Workload, build


@st.composite
def workloads(draw: st.DrawFn, *, waits: bool = True, joins: bool = False, outputs: bool = False) -> Workload:
    """Programs whose turns wait for the turn before (or, with `joins`, for several), times in quarters of a second. Prompts
    share beginnings; `outputs`: outputs are identified too."""
    n, block = draw(st.integers(1, 8)), 4
    program = np.array([draw(st.integers(0, max(0, i))) for i in range(n)])
    _, first = np.unique(program, return_index=True)
    rank = {int(program[k]): r for r, k in enumerate(sorted(first.tolist()))}
    program = np.array([rank[int(p)] for p in program])  # numbered by first appearance
    arrival, gap, waited, calls, contents, known, inputs, out = [], [], [], [], [], [], [], []
    now = 0.0
    for i in range(n):
        before = [k for k in range(i) if program[k] == program[i]]
        w: list[int] = []
        if waits and before and draw(st.booleans()):
            w = [before[-1]]
            if joins:
                w = sorted({*w, *draw(st.lists(st.sampled_from(before), max_size=2))})
        now += 0 if w else draw(st.integers(0, 8)) / 4
        arrival.append(np.nan if w else now)
        gap.append(draw(st.integers(0, 8)) / 4 if w else 0.0)
        calls.append([(draw(st.integers(0, 1)), draw(st.integers(0, 8)) / 4)] if w and joins and draw(st.booleans()) else [])
        waited.append(w)
        base = contents[draw(st.integers(0, i - 1))] if i else []
        row = base[: draw(st.integers(0, len(base)))] + draw(st.lists(st.integers(0, 2), max_size=3))
        own = draw(st.integers(1, 6))
        produced = draw(st.integers(1, 6))
        inputs.append(len(row) * block + (own if not row or draw(st.booleans()) else 0))
        out.append(produced)
        covered = len(row) * block
        if outputs and covered == inputs[-1]:
            row = [*row, *[5] * -(-produced // block)]
            covered += produced
        contents.append(row)
        known.append(covered)
    return build(
        arrival=np.array(arrival), input_tokens=np.array(inputs), output_tokens=np.array(out), source=Source("made"),
        block_tokens=block, known_tokens=np.array(known), block_ids=chained(np.array(c, dtype=int) for c in contents),
        priority=np.array(draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))), program=program, turn=counted(program),
        gap=np.array(gap), waits=waited, calls=calls, tools=("search", "shell"),
        tool=np.array([c[0][0] if c else -1 for c in calls]),
    )


def table(work: Workload) -> pd.DataFrame:
    """The request table of a run in which blocks are scarce and two replicas share the work."""
    settings_ = {"enable_prefix_caching": True, "max_num_seqs": 3, "max_num_batched_tokens": 16}
    return serving_runs.run(work, blocks=16, replicas=2, settings=settings_, cost=serving_runs.tables(0.5, 0.01)).requests


def assert_same_run(a: Workload, b: Workload) -> None:
    pd.testing.assert_frame_equal(table(a), table(b), check_exact=True)


EXPORTS = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@EXPORTS
@given(work=workloads())
def test_a_run_of_a_mooncake_export_is_a_run_of_the_original(work: Workload, tmp_path: Path) -> None:
    done = export_trace(work, tmp_path / "out.jsonl", "mooncake")
    assert done.lost == () and done.read_with == {"format": "mooncake", "block_tokens": 4}
    assert_same_run(work, read(tmp_path / "out.jsonl", **done.read_with))


@EXPORTS
@given(work=workloads(joins=True))
def test_a_run_of_an_agentic_export_is_a_run_of_the_original(work: Workload, tmp_path: Path) -> None:
    done = export_trace(work, tmp_path / "out.jsonl.gz", "agentic-mooncake")
    back = read(tmp_path / "out.jsonl.gz", **done.read_with)
    if np.array_equal(back.program, work.program):  # rows of a session are one program there; so are those that wait
        assert done.lost == ()
    assert_same_run(work, replace(back, program=work.program, turn=work.turn))
    for row in range(len(work)):
        assert [(back.tools[t], s) for t, s in back.calls(row)] == [(work.tools[t], s) for t, s in work.calls(row)]


@EXPORTS
@given(work=workloads(joins=True))
def test_a_run_of_a_csv_export_is_that_of_the_original_without_identity(work: Workload, tmp_path: Path) -> None:
    done = export_trace(work, tmp_path / "out.csv", "csv")
    assert all("token identity" in what for what in done.lost) == bool(work.known_tokens.any() or not done.lost)
    none = np.zeros(len(work), dtype=np.int64)
    bare = replace(work, known_tokens=none, run_offsets=np.append(none, 0), run_first=none[:0], run_last=none[:0])
    assert_same_run(bare, read(tmp_path / "out.csv", **done.read_with))


@EXPORTS
@given(work=workloads(waits=False))
def test_a_vidur_export_holds_arrivals_and_lengths(work: Workload, tmp_path: Path) -> None:
    done = export_trace(work, tmp_path / "out.csv", "vidur")
    back = read(tmp_path / "out.csv", **done.read_with)
    assert np.array_equal(back.arrival, work.arrival)
    assert any("token identity" in what for what in done.lost) == bool(work.known_tokens.any())
    none = np.zeros(len(work), dtype=np.int64)
    bare = replace(work, known_tokens=none, run_offsets=np.append(none, 0), run_first=none[:0], run_last=none[:0],
                   priority=none, program=np.arange(len(work)), turn=none)
    assert_same_run(bare, back)


@EXPORTS
@given(work=workloads(outputs=True), finer=st.sampled_from([1, 2, 4]))
def test_finer_blocks_carry_what_the_blocks_of_the_trace_do(work: Workload, finer: int, tmp_path: Path) -> None:
    """With outputs known beyond the prompt, what an export loses is said; prompts keep all that they share."""
    done = export_trace(work, tmp_path / "out.jsonl", "mooncake", block_tokens=finer)
    back = read(tmp_path / "out.jsonl", **done.read_with)
    beyond = (work.known_tokens > work.input_tokens).any()
    assert any("outputs were identified" in what for what in done.lost) == bool(beyond)
    for i in range(len(work)):
        full = int(min(work.known_tokens[i], work.input_tokens[i])) // finer
        for j in range(i):
            other = int(min(work.known_tokens[j], work.input_tokens[j])) // finer
            here, there = (set(w.block_keys(i, finer)[:full].tolist()) & set(w.block_keys(j, finer)[:other].tolist())
                           for w in (work, back))
            assert len(here) == len(there)


def test_the_runs_that_are_compared_reuse_prefixes_and_preempt(tmp_path: Path) -> None:
    n = 12
    work = build(arrival=np.arange(n) / 4, input_tokens=np.full(n, 24), output_tokens=np.full(n, 16), source=Source("s"),
                 block_tokens=4, known_tokens=np.full(n, 20), block_ids=[np.array([0, 1, 2, 3, 4 + k]) for k in range(n)])
    export_trace(work, tmp_path / "out", "mooncake")
    ran = table(read(tmp_path / "out", block_tokens=4))
    assert (ran.cached_tokens > 0).sum() > 6 and ran.preemptions.sum() > 0
    pd.testing.assert_frame_equal(ran.drop(columns=["program", "turn"]), table(work).drop(columns=["program", "turn"]))


def simple(**change: object) -> Workload:
    columns: dict = {"arrival": np.array([0.0, 1.0]), "input_tokens": np.array([8, 8]), "output_tokens": np.array([1, 1]),
                     "source": Source("s"), "block_tokens": 4} | change
    return build(**columns)


WAITING = {"arrival": np.array([0.0, np.nan]), "waits": [[], [0]]}


@pytest.mark.parametrize(("work", "to", "message"), [
    (simple(arrival=np.array([0.0, np.nan]), workers=1), "mooncake", "workers: mooncake does not say who starts a program"),
    (replace(simple(), time_limit=5.0), "csv", "time_limit: csv does not say when clients give up"),
    (simple(**WAITING, program=np.array([0, 0])), "vidur", "vidur cannot say that a request waits: found '1 that do'"),
    (simple(**WAITING), "agentic-mooncake", "row 1: wait_for: waits for another program"),
    (simple(arrival=np.array([0, np.nan, np.nan]), waits=[[], [0], [0, 1]], program=np.zeros(3), input_tokens=np.ones(3),
            output_tokens=np.ones(3)), "mooncake", "row 2: wait_for: mooncake can only say a delay after the row before it"),
    (simple(), "xml", "to: found 'xml': allowed: mooncake, agentic-mooncake, vidur, csv"),
])
def test_what_a_format_cannot_say_is_refused(tmp_path: Path, work: Workload, to: str, message: str) -> None:
    with pytest.raises(TraceError) as error:
        export_trace(work, tmp_path / "out", to)
    assert message in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [0, 3, 8, 2.0])
def test_block_sizes_that_are_refused(tmp_path: Path, size: object) -> None:
    with pytest.raises(TraceError, match=r"block_tokens: found .*: allowed: a divisor of the trace's 4"):
        export_trace(simple(), tmp_path / "out", "mooncake", block_tokens=size)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="block_tokens: found 4: allowed: none: csv has no blocks"):
        export_trace(simple(), tmp_path / "out", "csv", block_tokens=4)


def test_losses_are_counted(tmp_path: Path) -> None:
    work = simple(**WAITING, program=np.array([0, 0]), calls=[[], [(0, 1.5)]], tools=("a b",), gap=np.array([0, 0.1]),
                  known_tokens=np.array([8, 6]), block_ids=[np.array([0, 1]), np.array([0, 2])], ends_known=True,
                  tool=np.array([-1, 0]), skipped=("f:1: bad",), turn=np.array([0, 1]))
    lost = export_trace(work, tmp_path / "a", "mooncake").lost
    assert lost == (
        "1 rows have other tool names, or their tools' time in other parts (the pause stays)",
        "1 programs whose last turn clients tell: not said", "1 entries of rows left out on reading: not said",
        "2 tokens of 1 prompts are known up to within a block: there shared with nobody; smaller block_tokens keep more",
    )
    assert not any("within a block" in what for what in export_trace(work, tmp_path / "b", "mooncake", block_tokens=2).lost)
    assert "token identity of 2 requests: a run of the export shares no prefixes" in export_trace(
        replace(work, ends_known=False, tools=("ab",)), tmp_path / "c", "csv").lost


def test_times_that_milliseconds_cannot_say_are_counted(tmp_path: Path) -> None:
    times = np.sort(np.random.default_rng(1).random(500)) * 1000
    work = simple(arrival=times, input_tokens=np.full(500, 8), output_tokens=np.ones(500))
    done = export_trace(work, tmp_path / "out", "mooncake")
    back = read(tmp_path / "out", **done.read_with)
    different = int((back.arrival != times).sum())
    assert different < 25 and np.abs(back.arrival - times).max() < 1e-12
    assert any("arrivals differ in the last bits" in what for what in done.lost) == (different > 0)


def test_real_sessions_survive(tmp_path: Path) -> None:
    work = read("coding-agents", context=16_384)
    done = export_trace(work, tmp_path / "out.jsonl.gz", "agentic-mooncake")
    back = read(tmp_path / "out.jsonl.gz", **done.read_with)
    assert np.array_equal(back.input_tokens, work.input_tokens) and np.allclose(back.pause, work.pause, rtol=0, atol=1e-9)
    named = [w.tools[k] if k >= 0 else None for w in (work, back) for k in w.tool.tolist()]
    instant = (work.gap == 0).tolist()  # a tool that took no time has no wait to be named in
    assert all(a == b or zero for a, b, zero in zip(named[: len(work)], named[len(work) :], instant, strict=True))
    from simcore.traces.info import best_cached_tokens
    assert np.array_equal(best_cached_tokens(back, 16), best_cached_tokens(work, 16))
