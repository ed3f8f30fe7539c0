"""Recorded coding-agent sessions: the shipped set, block identity, sub-agents, clocks, and rows that are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.agents import start_programs, with_workers
from simcore.traces.coding_agents import read_coding_agents
from simcore.traces.identity import first_conflict, numbered_ids
from simcore.traces.read import read
from simcore.traces.workload import Workload


@pytest.fixture(scope="module")
def every() -> Workload:
    return read("coding-agents", long="bigger-context")


def test_the_shipped_sessions(every: Workload) -> None:
    assert every.n_programs == 467
    assert len(every) == 29_948 + 315  # 29,978 entries at the top level, of which 30 are sub-agents with 315 requests
    assert "coding agents: 467 of 467 sessions, 30 sub-agents; all start at t=0" in every.source.notes
    assert "299 sessions have a turn of more than 131072 tokens: kept" in every.source.notes
    assert any("3115 turns follow one whose end is not recorded" in note for note in every.source.notes)
    assert "19 turns with 0 output tokens count as 1" in every.source.notes
    assert every.source.licence == "Apache-2.0"
    assert every.block_tokens == 64
    assert every.tools == ("tool", "human")
    assert np.array_equal(every.known_tokens, every.input_tokens // 64 * 64)
    assert not every.ends_known
    assert float(np.median(every.gap[every.tool == 0])) == 9.0


def test_the_sessions_that_fit_a_context(every: Workload) -> None:
    w = read("coding-agents")
    assert w.n_programs == 168
    assert w.total_tokens.max() <= 131_072
    assert "299 sessions have a turn of more than 131072 tokens: dropped" in w.source.notes
    cut = read("coding-agents", long="truncate")
    assert cut.n_programs == 376  # 91 sessions begin with a turn that does not fit
    assert cut.total_tokens.max() <= 131_072
    assert any("10836 turns cut" in note for note in cut.source.notes)
    fits = every.total_tokens <= 131_072
    begins = np.array([fits[every.program == p][0] for p in range(467)])
    assert begins.sum() == 376
    assert with_workers(w, 8).by_worker.sum() == 168
    assert np.isfinite(start_programs(w, 0.01, 1).arrival).sum() == 168


def test_ids_are_prefix_identities_and_local_to_a_session(every: Workload) -> None:
    assert first_conflict(*numbered_ids(every.take(np.flatnonzero(every.program % 5 == 0)))) is None
    owner = np.repeat(every.program, np.diff(every.run_offsets))
    lowest = np.array([every.run_first[owner == p].min() for p in range(467)])
    highest = np.array([every.run_last[owner == p].max() for p in range(467)])
    assert (lowest[1:] > highest[:-1]).all()


REQUEST = {"t": 0.0, "type": "n", "in": 130, "out": 10, "hash_id_ranges": [[1, 2]], "input_types": ["text"], "api_time": 2.0,
           "think_time": 0.0}


def request(t: float, tokens: int, runs: list[list[int]], **changes: object) -> dict:
    row = {**copy.deepcopy(REQUEST), "t": t, "in": tokens, "hash_id_ranges": runs, "input_types": ["tool_result"], **changes}
    return {key: value for key, value in row.items() if value is not ...}


SUB = {"type": "subagent", "t": 30.0, "duration_ms": 17_000, "requests": [
    request(0.0, 70, [[9, 9]], api_time=5.0), request(8.0, 130, [[9, 10]], think_time=3.0, api_time=6.0),
]}
SESSION = {"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": [
    REQUEST,
    request(12.0, 200, [[1, 3]], think_time=10.0, api_time=0.5),
    SUB,
    request(32.0, 260, [[1, 2], [5, 6]], think_time=19.0),
    request(50.0, 140, [[1, 1], [7, 7]], think_time=16.0, input_types=["text"]),
]}


def write(path: Path, *sessions: object) -> Path:
    path.write_text("".join((s if isinstance(s, str) else json.dumps(s)) + "\n" for s in sessions))
    return path


def session(**changes: object) -> dict:
    row = {**copy.deepcopy(SESSION), **changes}
    return {key: value for key, value in row.items() if value is not ...}


def changed(k: int, **changes: object) -> dict:
    """The session with its request k changed (... takes a key away)."""
    row = session()
    row["requests"][k] = {key: value for key, value in {**row["requests"][k], **changes}.items() if value is not ...}
    return row


def test_turns_sub_agents_and_pauses(tmp_path: Path) -> None:
    w = read_coding_agents(write(tmp_path / "a.jsonl", SESSION, session(id="b")))
    assert w.program.tolist() == [0] * 6 + [1] * 6
    assert w.turn.tolist() == [*range(6)] * 2
    assert [w.waits(i).tolist() for i in range(6)] == [[], [0], [1], [2], [1, 3], [4]]
    # The sub-agent ran from 13 to 30 s, its last call until 27 s; the delay of 19 s that the trace gives its caller's next
    # turn counts from 12.5 s, so that it holds the sub-agent's service.
    assert w.gap[:6].tolist() == [0, 10, 0.5, 3, 5, 16]
    assert w.tool[:6].tolist() == [-1, 0, 0, 0, 0, 1]
    assert np.isnan(w.arrival).tolist() == [False, *[True] * 5] * 2
    ids = [w.ids(i).tolist() for i in range(6)]
    assert ids == [[1, 2], [1, 2, 3], [9], [9, 10], [1, 2, 5, 6], [1, 7]]
    assert [w.ids(6 + i).tolist() for i in range(6)] == [[11 + k for k in row] for row in ids]


def test_the_recorded_clock(tmp_path: Path) -> None:
    w = read_coding_agents(write(tmp_path / "a.jsonl", SESSION, session(id="b")), clock="recorded")
    assert w.arrival.tolist() == [t for t in (0, 12, 13, 21, 32, 50) for _ in range(2)]
    assert not len(w.wait_for)
    assert w.turn.tolist() == [k for k in range(6) for _ in range(2)]
    assert (w.gap == 0).all()
    assert w.tool.tolist() == [k for k in (-1, 0, 0, 0, 0, 1) for _ in range(2)]
    assert start_programs(w, 0.1, seed=1).n_programs == 2


def test_a_sub_agent_in_the_background_is_waited_for_by_the_first_turn_after_its_end(tmp_path: Path) -> None:
    w = read_coding_agents(write(tmp_path / "a.jsonl", changed(2, t=42.0, duration_ms=29_000)))
    assert [w.waits(i).tolist() for i in range(6)] == [[], [0], [1], [2], [1, 3], [4]]
    late = changed(2, t=48.0, duration_ms=17_000)
    w = read_coding_agents(write(tmp_path / "a.jsonl", late))
    assert [w.waits(i).tolist() for i in range(6)] == [[], [0], [1], [2], [1], [3, 4]]
    assert w.gap.tolist()[4:] == [19, 5]


def test_a_turn_whose_end_is_not_recorded(tmp_path: Path) -> None:
    row = changed(1, api_time=...)
    del row["requests"][2]
    row["requests"][1]["out"] = 40
    w = read_coding_agents(write(tmp_path / "a.jsonl", row))
    assert w.gap.tolist() == [0, 10, 32 - 12 - 2 - 0.7, 16]
    assert any(note.startswith("1 turns follow one whose end is not recorded") for note in w.source.notes)
    w = read_coding_agents(write(tmp_path / "a.jsonl", changed(1, think_time=...)))
    assert w.gap[1] == 10


def test_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", changed(0, out=0), session(id="b"))
    assert read_coding_agents(path).output_tokens[0] == 1
    assert read_coding_agents(path, context=270).n_programs == 2
    with pytest.raises(TraceError, match="found 'no sessions': allowed: at least one that fits the context"):
        read_coding_agents(path, context=269)
    cut = read_coding_agents(path, context=269, long="truncate")
    assert len(cut) == 8
    assert any("truncated before it (4 turns cut)" in note for note in cut.source.notes)
    capped = read_coding_agents(path, max_gap=4.0)
    assert capped.gap[:6].tolist() == [0, 4, 0.5, 3, 4, 4]
    assert "6 pauses cut to 4 s" in capped.source.notes
    part = read_coding_agents(write(path, changed(0, hash_id_ranges=[[1, 2], [20, 20]])))
    assert part.known_tokens[0] == 130
    plain = read_coding_agents(write(path, changed(3, hash_ids=[1, 2, 5, 6], hash_id_ranges=...)))
    assert plain.ids(4).tolist() == [1, 2, 5, 6]


BAD = [
    ("{", "not a whole JSON object"),
    ("[]", "found []: allowed: a JSON object"),
    (session(colour=1), "colour: unknown key"),
    (session(requests=...), "requests: missing"),
    (session(block_size=0), "block_size: found 0"),
    (session(block_size=32), "block_size: found 32: allowed: 64, as in the sessions before"),
    (session(hash_id_scope="global"), "hash_id_scope: found 'global': allowed: local"),
    (session(requests=[]), "requests: found []: allowed: a list of at least one request"),
    (session(requests=[SUB]), "requests[0]: a sub-agent before any request of its agent"),
    (session(requests=[3]), "requests[0]: found 3: allowed: an object"),
    (changed(1, colour=1), "requests[1].colour: unknown key"),
    (changed(1, t=...), "requests[1].t: missing"),
    (changed(4, t=31.0), "requests[4].t: time goes backwards: found 31.0"),
    (changed(1, t=-1.0), "requests[1].t: found -1.0"),
    (changed(1, type="x"), "requests[1].type: found 'x': allowed: n, s or subagent"),
    (changed(1, think_time=-0.5), "requests[1].think_time: found -0.5: allowed: a finite number, at least 0"),
    (changed(1, api_time="2"), "requests[1].api_time: found '2'"),
    (changed(1, out=-1), "requests[1].out: found -1"),
    (changed(1, out=1.5), "requests[1].out: found 1.5"),
    ({**changed(1), "requests": [{**REQUEST, "in": 0}]}, "requests[0].in: found 0"),
    (changed(1, input_types="text"), "requests[1].input_types: found 'text'"),
    (changed(1, hash_id_ranges=[[1, 2]]), "requests[1].hash_id_ranges: found '2 ids': allowed: 3 ids: in 200"),
    (changed(1, hash_id_ranges=[[3, 1]]), "requests[1].hash_id_ranges: found [[3, 1]]"),
    (changed(1, hash_id_ranges=[[1.0, 3.0]]), "requests[1].hash_id_ranges: found [[1.0, 3.0]]"),
    (changed(1, hash_id_ranges=[[1, 2], [3]]), "requests[1].hash_id_ranges: found"),
    (changed(1, hash_id_ranges="1"), "requests[1].hash_id_ranges: found '1'"),
    (changed(1, hash_ids=[1, 2, 3]), "requests[1]: either hash_ids or hash_id_ranges"),
    (changed(1, hash_id_ranges=[[2, 4]]), "block ids: an id stands behind another prefix than before: found 2"),
    (changed(3, hash_id_ranges=[[1, 1], [3, 5]]), "block ids: an id stands behind another prefix than before: found 3"),
    (changed(3, hash_id_ranges=[[1, 3], [7, 7]]), "block ids: an id stands behind another prefix than before: found 7"),
    (changed(2, duration_ms=-1), "requests[2].duration_ms: found -1"),
    (changed(2, requests=[{**REQUEST, "think_time": -1.0}, {**REQUEST, "out": -1}]), "requests[2].requests[1].out: found"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_session_is_refused_or_skipped_and_listed(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path / "a.jsonl", SESSION, row, session(id="c"))
    with pytest.raises(TraceError) as refused:
        read_coding_agents(path)
    assert str(refused.value).startswith(f"{path}:2: ")
    assert message in str(refused.value)
    workload = read_coding_agents(path, skip_bad=True)
    assert workload.skipped == (str(refused.value),)
    assert workload.n_programs == 2


def test_options_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", SESSION)
    for option, allowed in (
        ({"clock": "open"}, "clock: found 'open': allowed: closed-loop, recorded"),
        ({"long": "cut"}, "long: found 'cut': allowed: drop, truncate, bigger-context"),
        ({"max_gap": -1.0}, "max_gap: found -1.0: allowed: a finite time, at least 0 s"),
        ({"context": 0}, "context: found 0: allowed: a whole number of tokens, at least 1"),
    ):
        with pytest.raises(TraceError, match=allowed):
            read_coding_agents(path, **option)
