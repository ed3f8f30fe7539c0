import json
from pathlib import Path

import numpy as np
import pytest
from shared_data import shared_file

from simcore.errors import TraceError
from simcore.traces.tracelab import read_tracelab, read_tracelab_aggregates


def event(kind: str, seconds: float) -> dict:
    return {"event_type": kind, "timestamp": f"2026-06-01T05:40:{seconds:06.3f}Z", "source": "x"}


def round_(index: int, total: int, output: int, events: list[dict], **changes: object) -> dict:
    row = {"session_id": "s", "round_index": index, "input_tokens_total": total, "prefix_tokens": 32,
           "output_tokens": output, "reasoning_output_tokens": None, "timing_events": events, "tools": [], "provider": "x"}
    return {key: value for key, value in {**row, **changes}.items() if value is not ...}


TOOLS = [{"tool_name": "Bash", "tool_wall_latency_ms": 500}, {"tool_name": "Read", "tool_wall_latency_ms": 9000},
         {"tool_name": "Ask", "tool_wall_latency_ms": None}]
ROUNDS = [
    round_(0, 64, 32, [event("user_message", 1), event("text", 4), event("tool_call", 5)], tools=TOOLS),
    round_(1, 112, 16, [event("tool_result", 6), event("tool_result", 7.5), event("text", 9), event("usage_report", 30)],
           reasoning_output_tokens=8),
    round_(2, 128, 16, [event("user_message", 15), event("text", 18)]),
    round_(3, 100, 16, [event("user_message", 20), event("text", 22)]),
]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_rounds(tmp_path: Path) -> None:
    w = read_tracelab(write(tmp_path / "t.jsonl", *ROUNDS))
    assert w.input_tokens.tolist() == [64, 112, 128, 100]
    assert w.calls(1) == [(0, 0.5), (1, 2.5), (2, 0.0)]  # the second began while the model still wrote: cut to the pause
    assert w.gap.tolist() == [0, 0, 6, 2]
    assert w.pause.tolist() == [0, 2.5, 6, 2]
    assert [w.tools[t] if t >= 0 else None for t in w.tool] == [None, "Bash", "human", "human"]
    ids = [w.ids(i).tolist() for i in range(4)]
    assert ids[1][:6] == ids[0]  # prompt and output
    assert ids[2][:7] == ids[1][:7]  # the output was partly reasoning: the prompt alone
    assert ids[2][7] != ids[1][7]
    assert ids[3][:2] == ids[2][:2]  # a shorter prompt: what the provider's cache had
    assert ids[3][2] != ids[2][2]


def test_the_recorded_clock(tmp_path: Path) -> None:
    w = read_tracelab(write(tmp_path / "t.jsonl", *ROUNDS), clock="recorded")
    assert w.arrival.tolist() == [0, 6.5, 14, 19]
    assert not len(w.wait_for)


BAD = [
    ("{", "not a whole JSON object"),
    (round_(1, 112, 16, [event("text", 9)], prefix_tokens=...), "prefix_tokens: missing"),
    (round_(2, 112, 16, [event("text", 9)]), "round_index: found 2: allowed: 1, as rounds leave no hole"),
    (round_(1, 0, 16, [event("text", 9)]), "input_tokens_total: found 0"),
    (round_(1, 112, -1, [event("text", 9)]), "output_tokens: found -1"),
    (round_(1, 112, 16, [event("text", 9)], prefix_tokens=-1), "prefix_tokens: found -1"),
    (round_(1, 112, 16, [event("text", 9)], reasoning_output_tokens=17), "reasoning_output_tokens: found 17"),
    (round_(1, 112, 16, []), "timing_events: found []"),
    (round_(1, 112, 16, [{"event_type": "text"}]), "timing_events: found {'event_type': 'text'}"),
    (round_(1, 112, 16, [event("usage_report", 9)]), "timing_events: found"),
    (round_(1, 112, 16, [event("tool_result", 0.5)]), "timing_events: time goes backwards"),
    (round_(1, 112, 16, [event("text", 9)], session_id=3), "session_id: found 3"),
    (round_(1, 112, 16, [event("text", 9)], tools=3), "tools: found 3: allowed: a list"),
    (round_(1, 112, 16, [event("text", 9)], tools=[{"tool_name": ""}]), "tools: found {'tool_name': ''}"),
    (round_(1, 112, 16, [event("text", 9)], tools=[{"tool_name": "a", "tool_wall_latency_ms": -1}]), "latency_ms: found -1"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_round_ends_its_session(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path / "t.jsonl", ROUNDS[0], row, round_(0, 5, 5, [event("text", 3)], session_id="z"))
    with pytest.raises(TraceError) as refused:
        read_tracelab(path)
    assert str(refused.value).startswith(f"{path}:2: ")
    assert message in str(refused.value)
    workload = read_tracelab(path, skip_bad=True)
    assert workload.skipped == (str(refused.value),)
    assert len(workload) == 2


def test_rounds_after_a_bad_one_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", ROUNDS[0], {**ROUNDS[1], "output_tokens": 0}, ROUNDS[1])
    workload = read_tracelab(path, skip_bad=True)
    assert len(workload) == 1
    assert workload.skipped[1] == f"{path}:3: a round before it in its session was left out"


def test_aggregates(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    header = "metric,scope,value,unit,upstream_artifact\n"
    path.write_text(header + "tool_latency_p50,claude:Read,36,ms,x\n")
    assert read_tracelab_aggregates(path) == {("tool_latency_p50", "claude:Read"): (36.0, "ms")}
    for row, message in (("a,b,x,ms,x", "value: found 'x'"), ("a,b,-1,ms,x", "value: found -1"), ("a,b,1,ms", "cells: ")):
        path.write_text(f"{header}{row}\n")
        with pytest.raises(TraceError, match=f"csv:2: {message}"):
            read_tracelab_aggregates(path)
    path.write_text(header + "a,b,1,ms,x\n" * 2)
    with pytest.raises(TraceError, match="csv:3: metric, scope: found"):
        read_tracelab_aggregates(path)


def test_the_published_sample() -> None:
    w = read_tracelab(shared_file("tracelab_sample/round_trace.jsonl.gz"))
    assert len(w) == 19
    assert np.bincount(w.program).tolist() == [10, 9]
    quoted = read_tracelab_aggregates(shared_file("tracelab_sample/published_aggregates.csv"))
    assert len(quoted) == 56
    assert quoted["tool_latency_p50", "claude:Bash"] == (409.0, "ms")
