"""Weka sessions: files, folders and arrays, the two clocks of sub-agents, requests without ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.read import detect, read


def request(t: float, inputs: int, ids: list[int] | None, **more: object) -> dict:
    row: dict[str, object] = {"t": t, "type": "n", "model": "m", "in": inputs, "out": 10, "api_time": 1.0}
    return row | ({"hash_ids": ids} if ids is not None else {}) | more


def session(name: str, *requests: dict) -> dict:
    return {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local", "tool_tokens": 0, "system_tokens": 0,
            "requests": list(requests)}


def with_sub_agent(first: float) -> dict:
    """A sub-agent from 100 s to 110 s, whose requests are at `first` and 3 s later."""
    inner = [request(first, 64, [7]), request(first + 3, 128, [7, 8])]
    marker = {"t": 110.0, "type": "subagent", "duration_ms": 10_000, "requests": inner}
    return session("a", request(90, 64, [1]), marker, request(120, 128, [1, 2]))


@pytest.mark.parametrize("first", [0.0, 100.0])
def test_both_clocks_of_sub_agents_are_told_apart(tmp_path: Path, first: float) -> None:
    path = tmp_path / "trace_0001.json"
    path.write_text(json.dumps(with_sub_agent(first), indent=1))
    assert detect(path) == "coding-agents"
    w = read(path, "weka")
    assert [w.waits(k).tolist() for k in range(4)] == [[], [0], [1], [0, 2]]
    assert w.gap.tolist() == [0, 9, 2, 16]  # joined at 104 s, when its last request has ended


def test_a_clock_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(with_sub_agent(100.0)))
    relative = read(path, "weka", sub_agent_times="relative", clock="recorded")
    assert relative.arrival.max() == 203
    with pytest.raises(TraceError, match="sub_agent_times: found 'x': allowed: auto, relative, absolute"):
        read(path, "weka", sub_agent_times="x")


def test_folders_arrays_and_lines_are_one(tmp_path: Path) -> None:
    sessions = [session(f"s{k}", request(0, 64, [1]), request(5 + k, 128, [1, 2])) for k in range(3)]
    folder = tmp_path / "traces"
    folder.mkdir()
    for k, row in enumerate(sessions):
        (folder / f"trace_{k}.json").write_text(json.dumps(row, indent=2))
    (folder / "README.md").write_text("not a trace")
    (tmp_path / "all.json").write_text(json.dumps(sessions, indent=2))
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sessions))
    read_ = [read(folder, "weka"), read(tmp_path / "all.json", "weka"), read(tmp_path / "all.jsonl", "weka"),
             read(tmp_path / "all.json"), read(tmp_path / "all.jsonl", "coding-agents")]
    for w in read_:
        assert w.n_programs == 3 and w.gap.tolist() == [0, 4, 0, 5, 0, 6]
        assert np.array_equal(w.run_first, read_[0].run_first)


def test_requests_without_ids_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(session("a", request(0, 64, [1]), request(5, 200, None))))
    w = read(path, "weka")
    assert w.known_tokens.tolist() == [64, 0]
    assert "1 turns without ids share nothing" in w.source.notes
    with pytest.raises(TraceError, match="either hash_ids or hash_id_ranges"):
        read(path, "coding-agents")


def test_what_is_refused(tmp_path: Path) -> None:
    bad = session("a", request(0, 64, [1, 2]))
    (tmp_path / "bad.json").write_text(json.dumps([session("b", request(0, 64, [1])), bad], indent=1))
    with pytest.raises(TraceError, match=r"bad.json:\d+: requests\[0\].hash_ids: found '2 ids': allowed: 1 ids: in 64"):
        read(tmp_path / "bad.json", "weka")
    assert len(read(tmp_path / "bad.json", "weka", skip_bad=True).skipped) == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match=r"found 'no files': allowed: \.json or \.jsonl files"):
        read(tmp_path / "empty", "weka")
    with pytest.raises(TraceError, match="allowed: a shipped trace"):
        read(tmp_path / "empty", "mooncake")
