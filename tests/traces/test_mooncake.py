import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.mooncake import read_mooncake

GOOD = {"timestamp": 1000, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}


def write(path: Path, *rows: dict | str) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def changed(**values: object) -> dict:
    return {key: value for key, value in {**GOOD, **values}.items() if value is not ...}


def test_columns(tmp_path: Path) -> None:
    longer = changed(timestamp=1500.5, input_length=1025, hash_ids=[0, 5, 6])
    workload = read_mooncake(write(tmp_path / "m.jsonl", GOOD, longer))
    assert workload.arrival.tolist() == [1.0, 1.5005]
    assert workload.input_tokens.tolist() == [600, 1025]
    assert workload.output_tokens.tolist() == [3, 3]
    assert workload.known_tokens.tolist() == [600, 1025]
    assert workload.block_tokens == 512
    assert [workload.ids(i).tolist() for i in range(2)] == [[0, 1], [0, 2, 3]]
    assert "outputs are not identified" in " ".join(workload.source.notes)


BAD = [
    (json.dumps(GOOD)[:-5], "not a whole JSON object"),
    (changed(input_length=0), "input_length: found 0: allowed: a whole number, 1 to 16777215"),
    (changed(input_length=-600), "input_length: found -600: allowed: a whole number, 1 to"),
    (changed(input_length=600.0), "input_length: found 600.0: allowed: a whole number, 1 to"),
    (changed(input_length=True), "input_length: found True: allowed: a whole number, 1 to"),
    (changed(output_length=0), "output_length: found 0: allowed: a whole number, 1 to"),
    (changed(output_length=...), "output_length: missing: allowed: input_length, output_length, hash_ids"),
    (changed(hash_ids=...), "hash_ids: missing: allowed: input_length, output_length, hash_ids"),
    (changed(model="x"), "model: unknown key: allowed: input_length, output_length, hash_ids, timestamp, delay"),
    (changed(hash_ids=[0]), "hash_ids: found '1 ids': allowed: 2 ids: input_length 600 in blocks of 512 tokens"),
    (changed(hash_ids=[0, "1"]), "hash_ids: found [0, '1']: allowed: a list of whole numbers"),
    (changed(hash_ids=[0, 1.0]), "hash_ids: found [0, 1.0]: allowed: a list of whole numbers"),
    (changed(hash_ids=[0, True]), "hash_ids: found [0, True]: allowed: a list of whole numbers"),
    (changed(hash_ids="01"), "hash_ids: found '01': allowed: a list of whole numbers"),
    (changed(timestamp=999), "timestamp: time goes backwards: found 999: allowed: at least 1000"),
    (changed(timestamp=-1), "timestamp: found -1: allowed: a finite number, at least 0"),
    (changed(timestamp="0"), "timestamp: found '0': allowed: a finite number, at least 0"),
    (changed(timestamp=10**400), "timestamp: found 1000"),
    (changed(timestamp=...), "timestamp: found 'neither': allowed: either timestamp or delay"),
    (changed(delay=5), "timestamp: found 'both': allowed: either timestamp or delay"),
    (changed(timestamp=..., delay=5), "delay: found 5: allowed: only after an earlier row of its session_id"),
    (changed(timestamp=..., delay=-5, session_id="a"), "delay: found -5: allowed: a finite number"),
    (changed(timestamp=..., delay=5, session_id="new"), "delay: found 5: allowed: only after an earlier row"),
    (changed(session_id=None), "session_id: allowed: a string or a whole number"),
    (changed(session_id=1.5), "session_id: found 1.5: allowed: a string or a whole number"),
    (changed(priority=1.5), "priority: found 1.5: allowed: a whole number"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_row_is_refused_or_skipped_and_listed(tmp_path: Path, row: dict | str, message: str) -> None:
    path = write(tmp_path / "m.jsonl", GOOD, row, changed(timestamp=2000, hash_ids=[0, 9]))
    with pytest.raises(TraceError) as refused:
        read_mooncake(path)
    assert str(refused.value).startswith(f"{path}:2: ")
    assert message in str(refused.value)
    workload = read_mooncake(path, skip_bad=True)
    assert workload.skipped == (str(refused.value),)
    assert len(workload) == 2
    assert workload.ids(1).tolist() == [0, 2]  # a refused row leaves no trace in the numbering


def test_sessions_with_delays(tmp_path: Path) -> None:
    turn = {"input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
    path = write(
        tmp_path / "m.jsonl", changed(session_id="a", priority=2), changed(session_id="b"), changed(),
        {**turn, "session_id": "a", "delay": 250}, {**turn, "session_id": "a", "delay": 0, "priority": -1},
    )
    workload = read_mooncake(path)
    assert workload.program.tolist() == [0, 1, 2, 0, 0]
    assert workload.turn.tolist() == [0, 0, 0, 1, 2]
    assert [workload.waits(i).tolist() for i in range(5)] == [[], [], [], [0], [3]]
    assert workload.gap.tolist() == [0, 0, 0, 0.25, 0]
    assert np.isnan(workload.arrival[3:]).all()
    assert workload.priority.tolist() == [2, 0, 0, 0, -1]


def test_turns_that_wait_for_a_skipped_turn_are_skipped_too(tmp_path: Path) -> None:
    later = {"input_length": 600, "output_length": 3, "hash_ids": [0, 1], "session_id": "a", "delay": 1}
    path = write(
        tmp_path / "m.jsonl", changed(session_id="a"), {**later, "output_length": 0}, later, later,
        changed(session_id="a", timestamp=4000), later,
    )
    workload = read_mooncake(path, skip_bad=True)
    assert len(workload) == 3
    assert workload.waits(2).tolist() == [1]
    assert [row.split(": ")[0] for row in workload.skipped] == [f"{path}:{k}" for k in (2, 3, 4)]
    assert "the row of its session that it waits for was left out" in workload.skipped[1]


def test_wide_ids_stay_distinct(tmp_path: Path) -> None:
    wide = [2**64, 2**64 + 1, 2**200, -1, 0]
    rows = [changed(input_length=5, hash_ids=[number]) for number in (*wide, 2**200)]
    workload = read_mooncake(write(tmp_path / "m.jsonl", *rows))
    assert [workload.ids(i).tolist() for i in range(6)] == [[0], [1], [2], [3], [4], [2]]


def test_content_ids_are_chained_and_noted(tmp_path: Path) -> None:
    rows = [changed(hash_ids=ids) for ids in ([0, 1], [2, 1], [0, 1], [0, 0])]
    workload = read_mooncake(write(tmp_path / "m.jsonl", *rows))
    assert [workload.ids(i).tolist() for i in range(4)] == [[0, 1], [2, 3], [0, 1], [0, 4]]
    assert any("content ids" in note for note in workload.source.notes)


def test_another_block_size(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", changed(input_length=33, hash_ids=[0, 1, 2]))
    assert read_mooncake(path, block_tokens=16).block_tokens == 16
    with pytest.raises(TraceError, match="allowed: 1 ids"):
        read_mooncake(path)
    with pytest.raises(TraceError, match="block_tokens: found 0: allowed: a whole number, at least 1"):
        read_mooncake(path, block_tokens=0)


def test_gzip_is_told_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(gzip.compress((json.dumps(GOOD) + "\n").encode()))
    assert len(read_mooncake(path)) == 1


def test_ticks_are_noted_only_when_there_are_some(tmp_path: Path) -> None:
    ticking = [changed(timestamp=3000 * k) for k in range(4) for _ in range(3)]
    notes = read_mooncake(write(tmp_path / "m.jsonl", *ticking)).source.notes
    assert "arrivals sit on ticks of about 3.0 s (4 distinct times)" in notes
    smooth = [changed(timestamp=k * k) for k in range(32, 44)]
    assert not any("ticks" in note for note in read_mooncake(write(tmp_path / "m.jsonl", *smooth)).source.notes)


def test_no_rows_at_all(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="found 'no requests': allowed: at least one row"):
        read_mooncake(write(tmp_path / "m.jsonl", "not json"), skip_bad=True)


AGENTIC = {"request_id": "r", "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}


def test_agentic_rows(tmp_path: Path) -> None:
    event = {"tool_call_id": "c", "started_at_unix_ms": 1, "ended_at_unix_ms": 2, "status": "ok"}
    rows = [
        {**AGENTIC, "request_id": "a", "session_id": "main", "timestamp": 1000, "branches": ["b"], "prefix_reset": True},
        {**AGENTIC, "request_id": "x", "session_id": "other", "timestamp": 2000},
        {**AGENTIC, "request_id": "b", "session_id": "child", "wait_for": ["a"], "delay": 500, "hash_ids": [5, 6]},
        {**AGENTIC, "request_id": "c", "session_id": "main", "wait_for": ["b", "a"], "delay": 100, "tool_wait_ms": 2000,
         "timestamp": 9, "tool_events": [{**event, "tool_class": "bash", "duration_ms": 1500},
                                         {**event, "tool_class": "grep", "duration_ms": 5000}]},
        {**AGENTIC, "request_id": "d", "session_id": "main", "wait_for": ["c"], "delay": 250, "tool_wait_ms": 750.0},
        {**AGENTIC, "request_id": "e", "session_id": "main", "wait_for": ["d"]},
    ]
    w = read_mooncake(write(tmp_path / "m.jsonl", *rows))
    assert w.program.tolist() == [0, 1, 0, 0, 0, 0]  # the child's session is part of its caller's program
    assert w.turn.tolist() == [0, 0, 1, 2, 3, 4]
    assert [w.waits(i).tolist() for i in range(6)] == [[], [], [0], [0, 2], [3], [4]]
    assert w.tools == ("bash", "grep", "tool")
    assert w.calls(3) == [(0, 1.5), (1, 2.1)]  # a call may begin before its caller has ended: cut to the wait
    assert w.gap.tolist() == [0, 0, 0.5, 0, 1.0, 0]
    assert w.pause.tolist() == [0, 0, 0.5, 2.1, 1.0, 0]
    assert w.tool.tolist() == [-1, -1, -1, 0, 2, -1]
    assert w.arrival[:2].tolist() == [1, 2]


BAD_AGENTIC = [
    ({"wait_for": ["z"]}, "wait_for: found 'z': allowed: request_ids of rows before this one"),
    ({"wait_for": ["r"]}, "wait_for: found 'r': allowed: request_ids of rows before this one"),
    ({"wait_for": "a"}, "wait_for: found 'a': allowed: a list of request_ids"),
    ({"wait_for": [1]}, "wait_for: found [1]: allowed: a list of request_ids"),
    ({"wait_for": ["a"], "delay": -1}, "delay: found -1: allowed: a finite number, at least 0"),
    ({"wait_for": ["a"], "tool_wait_ms": -1}, "tool_wait_ms: found -1"),
    ({"wait_for": ["a"], "tool_events": [{"tool_class": "x"}]}, "tool_events: found {'tool_class': 'x'}"),
    ({"wait_for": ["a"], "tool_events": [{"tool_class": "", "duration_ms": 1}]}, "tool_events: found"),
    ({"wait_for": ["a"], "tool_events": [{"tool_class": "x", "duration_ms": -1}]}, "duration_ms: found -1"),
    ({"wait_for": ["a"], "tool_events": 3}, "tool_events: found 3: allowed: a list of objects"),
    ({"wait_for": ["a"], "request_id": "a"}, "request_id: found 'a': allowed: a name that no row before has"),
    ({"wait_for": ["a"], "request_id": 3}, "request_id: found 3"),
    ({"wait_for": ["a"], "request_id": None}, "request_id: missing: allowed: a name"),
    ({"timestamp": 2000, "tool_wait_ms": 5}, "tool_wait_ms: found 5: allowed: only in a row that waits for others"),
    ({"delay": 5}, "delay: found 5: allowed: only after an earlier row of its session_id"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_AGENTIC)
def test_a_bad_agentic_row_is_refused_with_those_that_wait_for_it(tmp_path: Path, changes: dict, message: str) -> None:
    first, last = {**AGENTIC, "request_id": "a", "timestamp": 0}, {**AGENTIC, "request_id": "q", "wait_for": ["a"]}
    waits_for_it = {**AGENTIC, "request_id": "s", "wait_for": ["r"]}
    row = {key: value for key, value in {**AGENTIC, **changes}.items() if value is not None}
    path = write(tmp_path / "m.jsonl", first, row, *([waits_for_it] if row.get("request_id") == "r" else []), last)
    with pytest.raises(TraceError) as refused:
        read_mooncake(path)
    assert str(refused.value).startswith(f"{path}:2: ")
    assert message in str(refused.value)
    workload = read_mooncake(path, skip_bad=True)
    assert workload.skipped[0] == str(refused.value)
    assert all("a row that it waits for was left out" in row for row in workload.skipped[1:])
    assert len(workload) == 2
