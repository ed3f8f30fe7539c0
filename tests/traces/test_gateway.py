"""Gateway logs: LiteLLM's and Envoy's shapes, what is missing, what is left out, and that no text stays anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.importing import import_trace
from simcore.traces.read import detect, read

SECRET = "marmalade zeppelin Xanthippe 4711"
SYSTEM = {"role": "system", "content": "You help with all that one may ask. " * 12}


def litellm(k: int, said: object, answer: str | None = "Certainly. " * 10, **change: object) -> dict:
    row = {
        "id": f"chatcmpl-{k}", "trace_id": f"trace-{k}", "call_type": "acompletion", "status": "success", "model": "qwen",
        "startTime": 1_730_000_000.25 + 10 * k, "endTime": 1_730_000_003.25 + 10 * k,
        "completionStartTime": 1_730_000_000.75 + 10 * k, "prompt_tokens": 200 + 100 * k, "completion_tokens": 40,
        "total_tokens": 240 + 100 * k, "messages": said, "metadata": {"user_api_key_alias": SECRET}, "stream": True,
        "response": {"choices": [{"index": 0, "finish_reason": "stop",
                                  "message": {"role": "assistant", "content": answer}}]},
    }
    return {k: v for k, v in (row | change).items() if v != "absent"}


def chat(turns: int) -> list[dict]:
    rows, history = [], [SYSTEM]
    for k in range(turns):
        history = [*history, {"role": "user", "content": f"{SECRET} question {k} " * 5}]
        rows.append(litellm(k, history))
        history = [*history, {"role": "assistant", "content": "Certainly. " * 10}]
    return rows


def log(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def noted(workload, words: str) -> bool:
    return any(words in note for note in workload.source.notes)


def test_litellm_payloads(tmp_path: Path) -> None:
    path = log(tmp_path / "log.jsonl", chat(3))
    assert detect(path) == "gateway"
    w = read(path)
    assert w.input_tokens.tolist() == [200, 300, 400] and w.output_tokens.tolist() == [40] * 3
    assert (w.program.tolist(), w.turn.tolist()) == ([0, 0, 0], [0, 1, 2])  # found by their prompts: each has its trace id
    assert w.gap.tolist() == [0, 7, 7] and w.arrival[0] == 0
    assert w.known_tokens.tolist() == [240, 340, 440]
    for before, after in ((0, 1), (1, 2)):
        assert np.array_equal(w.ids(after)[: len(w.ids(before))], w.ids(before))
    assert noted(w, "2 calls without a session begin with the whole context of another")
    assert noted(w, "recorded latency of 3 calls: mean 3.000 s")
    assert noted(w, "recorded time to first token of 3 calls: mean 0.500 s")
    apart = read(path, clock="recorded")
    assert apart.arrival.tolist() == [0, 10, 20] and len(apart.wait_for) == 0


def test_spend_logs_and_envelopes_and_sessions(tmp_path: Path) -> None:
    spend = {
        "request_id": "r", "call_type": "acompletion", "prompt_tokens": 30, "completion_tokens": 5, "session_id": "s",
        "startTime": "2025-03-01T10:00:00.500Z", "endTime": "2025-03-01T10:00:02.500Z", "model": "m", "messages": {},
        "response": {}, "cache_hit": "False",
    }
    later = spend | {"startTime": "2025-03-01 10:00:05", "endTime": "2025-03-01 10:00:06", "request_id": "q"}
    w = read(log(tmp_path / "log.jsonl", [{"level": "INFO", "standard_logging_object": later}, spend]))
    assert w.arrival[0] == 0 and w.gap.tolist() == [0, 2.5] and w.program.tolist() == [0, 0]
    assert noted(w, "2 prompts without text, which share nothing") and not w.known_tokens.any()
    assert noted(w, "no texts: nothing is shared")


ENVOY = {
    "start_time": "2025-06-01T12:00:00.100Z", "method": "POST", "x-envoy-origin-path": "/v1/chat/completions",
    "response_code": "200", "duration": "2500", "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": "120",
    "gen_ai.usage.output_tokens": "-", "session.id": "-",
}


def test_envoys_access_log(tmp_path: Path) -> None:
    rows = [
        ENVOY | {"gen_ai.usage.output_tokens": "30", "session.id": "a"},
        ENVOY | {"gen_ai.usage.output_tokens": "8", "session.id": "a", "start_time": "2025-06-01T12:00:04.100Z"},
        ENVOY | {"gen_ai.usage.output_tokens": 0, "start_time": "2025-06-01T12:00:05.100Z"},
        ENVOY | {"response_code": 503, "gen_ai.usage.output_tokens": "-"},
        ENVOY | {"x-envoy-origin-path": "/v1/embeddings?x=1"},
        {"start_time": "2025-06-01T12:00:06.100Z", "response_code": 200, "duration": 10,
         "gen_ai": {"usage": {"input_tokens": 7, "output_tokens": 2}}},
    ]
    path = log(tmp_path / "log.jsonl", rows)
    assert detect(path) == "gateway"
    w = read(path)
    assert w.input_tokens.tolist() == [120, 120, 120, 7] and w.output_tokens.tolist() == [30, 8, 1, 2]
    assert w.gap[1] == 1.5 and w.program.tolist() == [0, 0, 1, 2]
    assert noted(w, "1 outputs of 0 tokens, counted as 1") and noted(w, "1 failed calls")
    assert noted(w, "1 calls that generate no text") and noted(w, "2 calls have no session")


def test_request_bodies_and_other_apis(tmp_path: Path) -> None:
    body = {"model": "m", "system": "Be brief. " * 20, "messages": [{"role": "user", "content": "Hi " * 20}],
            "tools": [{"name": "t"}]}
    anthropic = {
        "timestamp": 1_730_000_000_000, "latency_ms": 1500, "request_body": json.dumps(body),
        "response": {"role": "assistant", "content": [{"type": "text", "text": "Hello"}],
                     "usage": {"input_tokens": 10, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 5,
                               "output_tokens": 3}},
    }
    responses = {
        "timestamp": 1_730_000_004_000, "latency_ms": 500, "input": [{"role": "user", "content": "Hi"}],
        "response": {"output": [{"type": "message", "role": "assistant",
                                 "content": [{"type": "output_text", "text": "Yo"}]}],
                     "usage": {"input_tokens": 9, "output_tokens": 2}},
    }
    completion = {"time": 1_730_000_005, "prompt": "Once upon a time", "choices": [{"text": "there was"}]}
    w = read(log(tmp_path / "log.jsonl", [anthropic, responses, completion]))
    assert w.input_tokens.tolist() == [75, 9, 7] and w.output_tokens.tolist() == [3, 2, 6]
    assert noted(w, "1 prompts counted by the rule; 1 outputs counted by the rule")
    assert w.known_tokens.tolist() == [78, 11, 13]


def test_redacted_and_truncated_texts_and_answers_from_a_cache(tmp_path: Path) -> None:
    hidden = [{"role": "user", "content": "redacted-by-litellm"}]
    cut = [{"role": "user", "content": "begins ... (litellm_truncated skipped 9000 chars) ... ends"}]
    rows = [litellm(0, hidden, "redacted-by-litellm"), litellm(1, hidden, "redacted-by-litellm"), litellm(2, cut),
            litellm(3, cut, cache_hit=True), litellm(4, [SYSTEM], model="other")]
    w = read(log(tmp_path / "log.jsonl", rows), model="qwen")
    assert len(w) == 3 and w.known_tokens.tolist() == [0, 0, 440]
    assert noted(w, "1 texts cut by the gateway") and noted(w, "1 answers from the gateway's cache")
    assert noted(w, "1 calls of other models")
    with pytest.raises(TraceError, match="found '5 calls of other models': allowed: at least one row of other, qwen"):
        read(tmp_path / "log.jsonl", model="none")


def test_output_text_that_is_missing_is_not_identified(tmp_path: Path) -> None:
    rows = chat(2)
    for row in rows:
        row["response"] = None
    w = read(log(tmp_path / "log.jsonl", rows))
    assert w.known_tokens.tolist() == [200, 300]
    assert w.program.tolist() == [0, 0]  # the second prompt begins with the whole first one
    assert np.array_equal(w.ids(1)[:12], w.ids(0)[:12])
    assert noted(w, "2 outputs without text, which no later prompt shares")


BAD = [
    (litellm(0, [SYSTEM], startTime="soon"), "startTime: no time: allowed: a date or an epoch"),
    (litellm(0, [SYSTEM], prompt_tokens="absent", messages="absent"), "usage: neither a count of the prompt's tokens nor"),
    (litellm(0, [SYSTEM], completion_tokens="absent", response="absent"), "usage: neither a count of the output's tokens"),
    (litellm(0, [SYSTEM], prompt_tokens=0), "usage: no prompt: found 0"),
    (litellm(0, [SYSTEM], prompt_tokens=-5), "prompt_tokens: found -5: allowed: a whole number"),
    (litellm(0, [SYSTEM], prompt_tokens=2.5), "prompt_tokens: found 2.5"),
    (litellm(0, [SYSTEM], completion_tokens=1 << 40), "completion_tokens: found"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_rows_that_are_refused(tmp_path: Path, row: dict, message: str) -> None:
    path = log(tmp_path / "log.jsonl", [litellm(1, [SYSTEM]), row])
    with pytest.raises(TraceError) as error:
        read(path, "gateway")
    assert str(error.value).startswith(f"{path}:2: ") and message in str(error.value)
    w = read(path, "gateway", skip_bad=True)
    assert len(w) == 1 and len(w.skipped) == 1


def test_no_text_stays(tmp_path: Path) -> None:
    """Neither in what is written, nor in what an error says, of good rows, bad ones and torn ones."""
    rows = chat(3)
    asks = [{"role": "user", "content": SECRET}]
    rows += [litellm(5, asks, startTime=SECRET), litellm(6, [{"role": SECRET, "content": SECRET}]),
             litellm(7, asks, prompt_tokens=SECRET), litellm(8, SECRET, SECRET, session_id=SECRET),
             litellm(9, SECRET, SECRET, model=SECRET)]
    path = log(tmp_path / "log.jsonl", rows)
    with path.open("a") as out:
        out.write('{"startTime": 1730000000, "messages": [{"role": "user", "content": "' + SECRET + "\n")
        out.write(f'"{SECRET}"\n')
    out = tmp_path / "trace.jsonl"
    w = import_trace(path, out, skip_bad=True)
    assert len(w.skipped) == 4
    written = out.read_text() + repr(w.source) + repr(w.skipped)
    for word in (*SECRET.split(), "Certainly", "You help", "qwen", "chatcmpl"):
        assert word not in written
    with pytest.raises(TraceError) as error:
        read(path)
    assert "marmalade" not in str(error.value)


def test_a_salt_changes_nothing_that_is_written(tmp_path: Path) -> None:
    path = log(tmp_path / "log.jsonl", chat(4))
    for name, salt in (("a", None), ("b", None), ("c", "pepper")):
        import_trace(path, tmp_path / f"{name}.jsonl", salt=salt)
    a, b, c = ((tmp_path / f"{name}.jsonl").read_bytes() for name in "abc")
    assert a == b == c


def test_options_are_checked(tmp_path: Path) -> None:
    path = log(tmp_path / "log.jsonl", chat(1))
    with pytest.raises(TraceError, match="clock: found 'wall': allowed: closed-loop, recorded"):
        read(path, clock="wall")
    with pytest.raises(TraceError, match="block_tokens: found 0"):
        read(path, block_tokens=0)
    assert read(path, block_tokens=64).block_tokens == 64


@pytest.mark.parametrize(("more", "pause"), [
    ({"response_time": 2.0}, 8.0), ({"response_time": 2.0, "stream": True}, None), ({"latency_ms": "1500"}, 8.5),
    ({"duration": 250}, 9.75), ({"endTime": "2024-10-27T03:33:21Z"}, 9.0), ({}, None),
])
def test_ends_by_time_or_by_latency(tmp_path: Path, more: dict, pause: float | None) -> None:
    row = {"startTime": 1_730_000_000, "prompt_tokens": 5, "completion_tokens": 5, "session_id": "s"} | more
    w = read(log(tmp_path / "log.jsonl", [row, {**row, "startTime": 1_730_000_010}]))
    assert (w.gap[1] if w.waits(1).tolist() else None) == pause
    assert noted(w, "2 calls without an end") == (pause is None)


def test_an_empty_log(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="found '1 failed calls': allowed: at least one row"):
        read(log(tmp_path / "log.jsonl", [litellm(0, [SYSTEM], status="failure")]))
