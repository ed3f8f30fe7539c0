"""Programs written as turns: which prefix each turn keeps, what it waits for, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_native import assert_equal

from simcore.errors import TraceError
from simcore.traces.agent_programs import AgentTurn, Program, build_programs
from simcore.traces.identity import first_conflict, numbered_ids
from simcore.traces.native import read_jsonl, write_jsonl
from simcore.traces.workload import Source, Workload

HERE = Source("here")


def made(*turns: AgentTurn, **options: object) -> Workload:
    return build_programs([Program(turns, prefix_tokens=32)], HERE, **options)


def shared(w: Workload, a: int, b: int) -> int:
    """Tokens of requests a and b in blocks of 16 whose ids are equal (the last one may be covered in part)."""
    one, other = w.ids(a), w.ids(b)
    equal = one[: len(other)] == other[: len(one)]
    return 16 * int(np.argmin(np.append(equal, False)))


def test_a_turn_continues_prompt_and_output_of_the_turn_before() -> None:
    w = made(AgentTurn(16, 16), AgentTurn(32, 48, calls=(("cd", 0.5), ("ls", 2.0)), gap=0.25), AgentTurn(0, 1, gap=3.0))
    assert w.input_tokens.tolist() == [48, 96, 144]
    assert w.known_tokens.tolist() == w.total_tokens.tolist()
    assert [shared(w, 0, 1), shared(w, 1, 2)] == [64, 144]
    assert [w.waits(i).tolist() for i in range(3)] == [[], [0], [1]]
    assert w.calls(1) == [(0, 0.5), (1, 2.0)]
    assert w.pause.tolist() == [0, 2.25, 3.0]
    assert w.tool.tolist() == [-1, 0, -1]
    assert w.tools == ("cd", "ls")


def test_a_compaction_keeps_the_agents_prefix_only() -> None:
    w = made(AgentTurn(100, 60), AgentTurn(10, 10, compact_to=40), AgentTurn(10, 10))
    assert w.input_tokens.tolist() == [132, 82, 102]
    assert [shared(w, 0, 1), shared(w, 0, 2), shared(w, 1, 2)] == [32, 32, 96]


def test_a_cut_keeps_the_head_of_the_context() -> None:
    w = made(AgentTurn(100, 60), AgentTurn(10, 10, keep_tokens=64))
    assert w.input_tokens.tolist() == [132, 74]
    assert shared(w, 0, 1) == 64


def test_dropped_reasoning_breaks_the_prefix_behind_the_last_prompt() -> None:
    w = made(AgentTurn(32, 64, kept_output=16), AgentTurn(16, 16), AgentTurn(16, 16))
    assert w.input_tokens.tolist() == [64, 96, 128]
    assert [shared(w, 0, 1), shared(w, 1, 2)] == [64, 112]
    assert shared(made(AgentTurn(32, 64, kept_output=64), AgentTurn(16, 16)), 0, 1) == 128


def test_a_sub_agent_has_a_chain_of_its_own_and_its_caller_waits_for_it() -> None:
    explore = Program((AgentTurn(16, 16, gap=1.0), AgentTurn(16, 16, calls=(("grep", 0.1),))), "explore", 48)
    w = made(AgentTurn(32, 32), AgentTurn(16, 16, gap=0.5, sub_agents=(explore, explore)), AgentTurn(16, 16))
    assert w.n_programs == 1
    assert w.turn.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert [w.waits(i).tolist() for i in range(7)] == [[], [0], [1], [0], [3], [0, 2, 4], [5]]
    assert w.gap.tolist() == [0, 1, 0, 1, 0, 0.5, 0]
    assert [shared(w, 0, 1), shared(w, 1, 2), shared(w, 1, 3), shared(w, 0, 5)] == [0, 80, 48, 96]


def test_programs_of_one_agent_share_its_prefix_and_nothing_else() -> None:
    one = Program((AgentTurn(100, 10),), "a", 40)
    longer, other = Program((AgentTurn(100, 10),), "a", 80), Program((AgentTurn(100, 10),), "b", 40)
    w = build_programs([one, one, longer, other, one], HERE)
    assert [shared(w, 0, k) for k in (1, 2, 3, 4)] == [32, 32, 0, 32]


def test_rows_stand_in_order_of_arrival_and_workers_programs_last() -> None:
    turns = (AgentTurn(5, 5), AgentTurn(5, 5))
    w = build_programs([Program(turns, start=None), Program(turns, start=9.0), Program(turns, start=2.0)], HERE, workers=2)
    assert w.program.tolist() == [2, 2, 1, 1, 0, 0]
    assert w.by_worker.tolist() == [False] * 4 + [True, False]
    assert [w.waits(i).tolist() for i in range(6)] == [[], [0], [], [2], [], [4]]


def test_recorded_times() -> None:
    sub = Program((AgentTurn(5, 5, at=2.0), AgentTurn(5, 5, at=6.0)), "sub")
    program = Program((AgentTurn(5, 5, at=0.0), AgentTurn(5, 5, at=4.0, tool="cd", gap=1.0, sub_agents=(sub,))), start=10.0)
    w = build_programs([program], HERE)
    assert w.arrival.tolist() == [10, 12, 14, 16]
    assert w.turn.tolist() == [0, 1, 2, 3]
    assert not len(w.wait_for)
    assert w.tool.tolist() == [-1, -1, 0, -1]


BAD = [
    ((AgentTurn(-1, 1),), "program 0, turn 0: new_tokens: found -1: allowed: a whole number, 0 to"),
    ((AgentTurn(1.5, 1),), "new_tokens: found 1.5"),
    ((AgentTurn(1, 0),), "output_tokens: found 0: allowed: a whole number, 1 to"),
    ((AgentTurn(1, 1), AgentTurn(1, 1, gap=-0.5)), "program 0, turn 1: gap: found -0.5: allowed: a finite time"),
    ((AgentTurn(1, 1), AgentTurn(1, 1, gap=float("nan"))), "gap: found nan"),
    ((AgentTurn(1, 1), AgentTurn(1, 1, calls=(("cd", -1.0),))), "turn 1: calls: cd: found -1.0"),
    ((AgentTurn(1, 1), AgentTurn(1, 1, calls=(("rm", 1.0),))), "turn 1: tool: found 'rm': allowed: cd"),
    ((AgentTurn(1, 1), AgentTurn(1, 1, tool="")), "turn 1: tool: found ''"),
    ((AgentTurn(1, 1, gap=1.0),), "turn 0: has nothing to wait for: allowed: no gap, calls or sub_agents"),
    ((AgentTurn(1, 1, sub_agents=(Program((AgentTurn(1, 1),)),)),), "turn 0: has nothing to wait for"),
    ((AgentTurn(1, 1), AgentTurn(1, 1, sub_agents=(Program((), "x"),))), "turn 1, x: turns: found 'none'"),
    ((AgentTurn(1, 1, compact_to=3),), "turn 0: compact_to, keep_tokens: found (3, None)"),
    ((AgentTurn(1, 1), AgentTurn(1, 1, compact_to=3, keep_tokens=3)), "compact_to, keep_tokens: found (3, 3)"),
    ((AgentTurn(1, 1), AgentTurn(1, 1, keep_tokens=99)), "keep_tokens: found 99: allowed: at most the context before"),
    ((AgentTurn(1, 1, kept_output=2), AgentTurn(1, 1)), "kept_output: found 2: allowed: at most its output_tokens, 1"),
    ((AgentTurn(1, 1, at=0.0), AgentTurn(1, 1)), "at: given in some turns only: allowed: in every turn or in none"),
    ((), "program 0: turns: found 'none': allowed: at least one"),
]


@pytest.mark.parametrize(("turns", "message"), BAD)
def test_a_program_that_cannot_be_is_refused(turns: tuple[AgentTurn, ...], message: str) -> None:
    with pytest.raises(TraceError) as refused:
        made(*turns, tools=["cd"])
    assert message in str(refused.value)


def test_other_refusals() -> None:
    with pytest.raises(TraceError, match="here: found 'no programs'"):
        build_programs([], HERE)
    with pytest.raises(TraceError, match="block_tokens: found 0"):
        made(AgentTurn(1, 1), block_tokens=0)
    with pytest.raises(TraceError, match="program 0: start: not given: allowed: a time, or workers that start programs"):
        build_programs([Program((AgentTurn(1, 1),), start=None)], HERE)
    with pytest.raises(TraceError, match="start: not given: allowed: a time, where turns have one"):
        build_programs([Program((AgentTurn(1, 1, at=0.0),), start=None)], HERE, workers=1)
    with pytest.raises(TraceError, match="start: found -1"):
        build_programs([Program((AgentTurn(1, 1),), start=-1)], HERE)
    with pytest.raises(TraceError, match="new_tokens: a prompt of 0 tokens"):
        build_programs([Program((AgentTurn(0, 1),))], HERE)


@st.composite
def programs(draw: st.DrawFn, depth: int = 1) -> Program:
    seconds, counts = st.floats(0, 100), st.integers(0, 40)
    turns = []
    for k in range(draw(st.integers(1, 4))):
        output = draw(st.integers(1, 40))
        turn = {"kept_output": draw(st.none() | st.integers(0, output))}
        if k:
            turn |= {
                "compact_to": draw(st.none() | counts), "gap": draw(seconds), "tool": draw(st.none() | st.just("human")),
                "calls": tuple(draw(st.lists(st.tuples(st.sampled_from(("cd", "ls")), seconds), max_size=2))),
                "sub_agents": tuple(draw(st.lists(programs(depth - 1), max_size=2))) if depth else (),
            }
        turns.append(AgentTurn(1 + draw(counts), output, **turn))
    return Program(tuple(turns), draw(st.sampled_from(("a", "b"))), draw(counts), draw(st.none() | seconds))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.lists(programs(), min_size=1, max_size=4), st.integers(1, 20))
def test_any_programs_are_prefix_identities_and_survive_our_format(
    tmp_path: Path, some: list[Program], block_tokens: int
) -> None:
    w = build_programs(some, HERE, block_tokens=block_tokens, workers=2, ends_known=True)
    assert first_conflict(*numbered_ids(w)) is None
    assert w.n_programs == len(some)
    write_jsonl(w, tmp_path / "w.jsonl")
    assert_equal(read_jsonl(tmp_path / "w.jsonl"), w)
