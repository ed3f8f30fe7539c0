"""OpenTelemetry GenAI spans: one export or one a line, the forms of content, tools, failures, and that no text stays."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.importing import import_trace
from simcore.traces.read import detect, read

S = 10**9
T0 = 1_730_000_000 * S
SECRET = "rhubarb dirigible Aspasia"


def value(v: object) -> dict:
    if isinstance(v, str):
        return {"stringValue": v}
    if isinstance(v, int):
        return {"intValue": str(v)}
    if isinstance(v, float):
        return {"doubleValue": v}
    if isinstance(v, list):
        return {"arrayValue": {"values": [value(x) for x in v]}}
    assert isinstance(v, dict)
    return {"kvlistValue": {"values": attributes(v)}}


def attributes(pairs: dict) -> list[dict]:
    return [{"key": k, "value": value(v)} for k, v in pairs.items()]


def span(start: float, end: float, trace: str = "t1", **more: object) -> dict:
    return {
        "traceId": trace, "spanId": f"{start}", "name": "chat m", "kind": 3, "startTimeUnixNano": str(T0 + int(start * S)),
        "endTimeUnixNano": str(T0 + int(end * S)), "status": {},
    } | more


def chat(start: float, end: float, inputs: int, outputs: int, said: dict | None = None, **more: object) -> dict:
    pairs = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": inputs,
             "gen_ai.usage.output_tokens": outputs} | (said or {})
    return span(start, end, attributes=attributes(pairs), **more)


def export(*spans: dict) -> dict:
    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"scope": {}, "spans": list(spans)}]}]}


def message(role: str, text: str) -> dict:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


ASKED, ANSWERED, MORE = SECRET * 9, "of course " * 20, "and then? " * 9
FIRST = {"gen_ai.input.messages": json.dumps([message("user", ASKED)]),
         "gen_ai.output.messages": json.dumps([message("assistant", ANSWERED) | {"finish_reason": "stop"}])}
HISTORY = [message("user", ASKED), message("assistant", ANSWERED), message("user", MORE)]
SECOND = {"gen_ai.input.messages": json.dumps(HISTORY),
          "gen_ai.output.messages": json.dumps([message("assistant", "bye")])}


def test_an_export_with_its_tools(tmp_path: Path) -> None:
    tool = span(3.5, 5, attributes=attributes({"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search"}))
    agent = span(0, 9, attributes=attributes({"gen_ai.operation.name": "invoke_agent", "gen_ai.usage.input_tokens": 999}))
    http = span(0, 1, attributes=attributes({"http.request.method": "POST"}))
    failed = chat(6, 6.5, 10, 0, status={"code": 2})
    path = tmp_path / "spans.json"
    spans = [chat(6, 8, 160, 5, SECOND), agent, tool, http, failed, chat(1, 3, 100, 40, FIRST)]
    path.write_text(json.dumps(export(*spans), indent=2))
    assert detect(path) == "otel"
    w = read(path)
    assert w.input_tokens.tolist() == [100, 160] and w.output_tokens.tolist() == [40, 5]
    assert w.waits(1).tolist() == [0] and w.tools == ("search",) and w.calls(1) == [(0, 1.5)] and w.gap[1] == 1.5
    assert w.known_tokens.tolist() == [140, 165]
    assert len(set(w.ids(0).tolist()) & set(w.ids(1).tolist())) >= 140 // 16
    notes = " ".join(w.source.notes)
    for said in ("2 spans of model calls, 1 of tools", "1 failed calls", "1 spans of other operations"):
        assert said in notes


def test_one_export_a_line_with_conversations(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    lines = [export(chat(1, 2, 10, 5, {"gen_ai.conversation.id": "c"}, trace="a")), {"resourceMetrics": []},
             export(chat(4, 5, 20, 5, {"gen_ai.conversation.id": "c"}, trace="b"), chat(4, 5, 7, 7, trace="z"))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    w = read(path)
    assert w.program.tolist() == [0, 0, 1] and w.gap.tolist() == [0, 2, 0] and not w.known_tokens.any()


@pytest.mark.parametrize("said", [
    {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": ASKED, "gen_ai.completion.0.role": "assistant",
     "gen_ai.completion.0.content": ANSWERED},
    {"gen_ai.prompt": ASKED, "gen_ai.completion": ANSWERED},
    {"gen_ai.input.messages": [message("user", ASKED)], "gen_ai.output.messages": [message("assistant", ANSWERED)]},
    FIRST,
])
def test_forms_of_content_and_older_counts(tmp_path: Path, said: dict) -> None:
    pairs = {"gen_ai.usage.prompt_tokens": 90, "gen_ai.usage.completion_tokens": 40} | said
    path = tmp_path / "spans.json"
    path.write_text(json.dumps(export(span(1, 2, attributes=attributes(pairs)), chat(3, 4, 150, 5, SECOND))))
    w = read(path)
    assert w.input_tokens.tolist() == [90, 150]
    assert len(set(w.ids(0).tolist()) & set(w.ids(1).tolist())) >= 130 // 16


def test_events_hold_content_too(tmp_path: Path) -> None:
    events = [{"name": "gen_ai.user.message", "attributes": attributes({"content": ASKED})},
              {"name": "gen_ai.choice", "attributes": attributes({"message": {"role": "assistant", "content": ANSWERED}})}]
    details = [{"name": "gen_ai.client.inference.operation.details", "attributes": attributes(SECOND)}]
    path = tmp_path / "spans.json"
    path.write_text(json.dumps(export(chat(1, 2, 90, 40, events=events), chat(3, 4, 150, 5, events=details))))
    w = read(path)
    assert len(set(w.ids(0).tolist()) & set(w.ids(1).tolist())) >= 130 // 16


@pytest.mark.parametrize(("document", "message"), [
    ({"resourceSpans": 3}, "resourceSpans: not a list of objects"),
    (export(chat(1, 2, 5, 5, startTimeUnixNano="soon")), "spans[0]: startTimeUnixNano: no time"),
    (export(chat(1, 2, 5, 5, startTimeUnixNano=None)), "spans[0]: startTimeUnixNano: no time"),
    (export(chat(1, 2, -5, 5)), "spans[0]: gen_ai.usage.input_tokens: found -5: allowed: a whole number"),
    (export(span(1, 2, attributes=attributes({"gen_ai.operation.name": "chat"}))), "usage: neither a count of the prompt's"),
    (export(), "found 'no spans of model calls'"),
])
def test_what_is_refused(tmp_path: Path, document: dict, message: str) -> None:
    path = tmp_path / "spans.json"
    path.write_text(json.dumps(document))
    with pytest.raises(TraceError) as error:
        read(path)
    assert message in str(error.value)


def test_a_torn_export(tmp_path: Path) -> None:
    path = tmp_path / "spans.json"
    path.write_text(json.dumps(export(chat(1, 2, 5, 5, FIRST)), indent=1)[:-40])
    with pytest.raises(TraceError, match=r"spans.json:1: not a whole JSON object") as error:
        read(path)
    assert "rhubarb" not in str(error.value)


def test_no_text_stays(tmp_path: Path) -> None:
    path, out = tmp_path / "spans.json", tmp_path / "out.jsonl.gz"
    bad = chat(9, 10, 5, 5, FIRST, startTimeUnixNano=SECRET)
    path.write_text(json.dumps(export(chat(1, 3, 100, 40, FIRST), chat(6, 8, 160, 5, SECOND), bad)))
    w = import_trace(path, out, skip_bad=True)
    assert len(w) == 2 and len(w.skipped) == 1
    import gzip
    written = gzip.decompress(out.read_bytes()).decode() + repr(w.source)
    assert not any(word in written for word in (*SECRET.split(), "of course", "t1"))
    assert np.array_equal(read(out).input_tokens, w.input_tokens)
