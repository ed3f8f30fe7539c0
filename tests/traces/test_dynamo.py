"""Dynamo request traces: sessions, tools, hashes of 64 bits and more, and records that are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.read import detect, read

T0 = 1_777_312_800_000
BIG = 14_879_255_164_371_896_291  # beyond 63 bits


def request(name: str, start: int, end: int, hashes: list, length: int = 128, output: int = 16, **more: object) -> dict:
    return {
        "schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": T0 + end,
        "request": {
            "request_id": name, "request_received_ms": T0 + start, "output_tokens": output,
            "replay": {"trace_block_size": 64, "input_length": length, "input_sequence_hashes": hashes},
        },
    } | more


def agent(session: str, parent: str | None = None) -> dict:
    return {"agent_context": {"session_id": session} | ({"parent_session_id": parent} if parent else {})}


def tool(session: str, name: str, start: int, end: int) -> dict:
    return {
        "schema": "dynamo.request.trace.v1", "event_type": "tool_end", "event_time_unix_ms": T0 + end, **agent(session),
        "tool": {"tool_call_id": f"c{start}", "tool_class": name, "started_at_unix_ms": T0 + start,
                 "ended_at_unix_ms": T0 + end},
    }


def log(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_without_context_are_independent(tmp_path: Path) -> None:
    rows = [request("b", 500, 900, [BIG, BIG + 1]), request("a", 0, 1000, [BIG, 7], 100)]
    path = log(tmp_path / "trace.jsonl", [{"event_type": "request_payload", "request_id": "a", "secret": "text"}, *rows])
    assert detect(log(tmp_path / "plain.jsonl", rows)) == "dynamo"
    w = read(path, "dynamo")
    assert w.arrival.tolist() == [0, 0.5] and w.input_tokens.tolist() == [100, 128] and w.block_tokens == 64
    assert w.ids(0)[0] == w.ids(1)[0] and w.ids(0)[1] != w.ids(1)[1]
    assert w.program.tolist() == [0, 1] and w.known_tokens.tolist() == [100, 128]
    assert any("1 request_payload records" in note for note in w.source.notes)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_hashes_of_any_width_stay_distinct(tmp_path: Path, width: int) -> None:
    ids = [2**width - 1, 2**width - 2, (2**width - 1) >> 1, 1, 0]
    rows = [request(f"r{k}", k, k + 1, [h], 64) for k, h in enumerate([*ids, *ids])]
    w = read(log(tmp_path / "trace.jsonl", rows))
    assert [int(w.ids(k)[0]) for k in range(10)] == [0, 1, 2, 3, 4] * 2
    texts = [request(f"r{k}", k, k + 1, [h], 64) for k, h in enumerate(["ff" * 32, "fe" * 32, "ff" * 32])]
    w = read(log(tmp_path / "trace.jsonl", texts))
    assert [int(w.ids(k)[0]) for k in range(3)] == [0, 1, 0]


def test_sessions_tools_and_sub_agents(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1, "event": request("p1", 0, 1000, [1, 2], **agent("main"))},
        {"timestamp": 2, "event": tool("main", "web_search", 1100, 1500)},
        {"timestamp": 3, "event": request("c1", 1200, 2000, [9, 8], **agent("sub", "main"))},
        {"timestamp": 4, "event": request("p2", 2500, 3000, [1, 2, 3], 192, **agent("main"))},
    ]
    path = log(tmp_path / "trace.jsonl", rows)
    assert detect(path) == "dynamo"
    w = read(path)
    assert [w.waits(k).tolist() for k in range(3)] == [[], [0], [0, 1]]
    assert w.program.tolist() == [0, 0, 0]
    assert w.gap.tolist() == [0, pytest.approx(0.2), 0.5] and w.calls(2) == []  # the tool ended before the sub-agent did
    alone = read(log(path, [rows[0], rows[1], rows[3]]))
    assert alone.tools == ("web_search",) and alone.calls(1) == [(0, 0.4)] and alone.gap[1] == pytest.approx(1.1)
    assert alone.pause[1] == pytest.approx(1.5)


def test_outputs_are_identified_where_their_hashes_are_given(tmp_path: Path) -> None:
    first = request("a", 0, 100, [1, 2], 100, 40)
    first["request"]["replay"]["completion_sequence_hashes"] = [1, 5, 6]
    w = read(log(tmp_path / "trace.jsonl", [first, request("b", 200, 300, [1, 5, 7], 150)]))
    assert w.known_tokens.tolist() == [140, 150]
    assert w.ids(0)[:2].tolist() == w.ids(1)[:2].tolist()
    assert "outputs of 1 requests are identified" in w.source.notes


def change(path: str, value: object) -> dict:
    row = copy.deepcopy(request("x", 0, 10, [1, 2]))
    at = row
    *outer, last = path.split(".")
    for key in outer:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return row


@pytest.mark.parametrize(("row", "message"), [
    (change("schema", "dynamo.request.trace.v2"), "schema: another one: allowed: dynamo.request.trace.v1"),
    (change("event_type", "request_start"), "event_type: another one: allowed: request_end"),
    (change("request.replay", None), "replay: missing: allowed: an object"),
    (change("request.request_id", "a"), "request.request_id: missing, or not the first of its name"),
    (change("request.replay.input_sequence_hashes", [1]), "1 hashes: allowed: 2: 128 tokens in blocks of 64"),
    (change("request.replay.input_sequence_hashes", [1, 2, 3]), "3 hashes: allowed: 2: 128 tokens in blocks of 64"),
    (change("request.replay.input_sequence_hashes", [1, 2.0]), "no hashes: allowed: a list of whole numbers or strings"),
    (change("request.replay.input_length", 0), "input_length: found 0"),
    (change("request.replay.input_length", None), "input_length: missing"),
    (change("request.replay.trace_block_size", 32), "trace_block_size: found 32: allowed: 64, as in the rows before"),
    (change("request.output_tokens", None), "output_tokens: missing"),
    (change("request.output_tokens", -1), "output_tokens: found -1"),
    (change("request.request_received_ms", None), "request_received_ms: missing"),
    (change("request.replay.completion_sequence_hashes", [3, 2, 9]), "do not begin with the prompt's"),
    (change("agent_context", {"session_id": 3}), "agent_context.session_id: no text: allowed: a string"),
    ({**tool("s", "t", 0, 5), "tool": {}}, "tool.tool_class: missing"),
    (tool("s", "t", 9, 5), "tool.started_at_unix_ms: after its end"),
])
def test_records_that_are_refused(tmp_path: Path, row: dict, message: str) -> None:
    path = log(tmp_path / "trace.jsonl", [request("a", 0, 1, [1, 2]), row])
    with pytest.raises(TraceError) as error:
        read(path, "dynamo")
    assert str(error.value).startswith(f"{path}:2") and message in str(error.value)
    w = read(path, "dynamo", skip_bad=True)
    assert len(w) == 1 and len(w.skipped) == 1


def test_a_trace_without_requests(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="found 'no request_end records'"):
        read(log(tmp_path / "trace.jsonl", [tool("s", "t", 0, 5)]), "dynamo")


def test_requests_that_gave_nothing(tmp_path: Path) -> None:
    w = read(log(tmp_path / "trace.jsonl", [request("a", 0, 1, [1, 2], output=0)]))
    assert w.output_tokens.tolist() == [1] and np.array_equal(w.ids(0), [0, 1])
    assert any("1 requests without output, counted as 1 token" in note for note in w.source.notes)
