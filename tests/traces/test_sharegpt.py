"""ShareGPT conversations: turns, shared beginnings, JSON and JSONL, and that no text stays."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.importing import import_trace
from simcore.traces.prompts import tokens_of
from simcore.traces.read import detect, read

SECRET = "gooseberry autogiro Hypatia"
DATA = [
    {"id": "a", "conversations": [
        {"from": "human", "value": f"{SECRET} " * 20}, {"from": "gpt", "value": "Well, then. " * 15},
        {"from": "human", "value": "Go on."}, {"from": "gpt", "value": "That is all."}]},
    {"id": "b", "conversations": [{"from": "human", "value": "Nobody answers"}]},
    {"id": "c", "conversations": [
        {"from": "system", "value": "Be kind."}, {"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hello!"}]},
    {"id": "d", "conversations": [{"from": "gpt", "value": "I begin."}, {"from": "human", "value": "Do"},
                                  {"from": "gpt", "value": "Done."}]},
]


@pytest.mark.parametrize("form", ["array", "indented", "lines"])
def test_conversations(tmp_path: Path, form: str) -> None:
    path = tmp_path / "sharegpt.json"
    text = {"array": json.dumps(DATA), "indented": json.dumps(DATA, indent=2),
            "lines": "\n".join(json.dumps(row) for row in DATA)}[form]
    path.write_text(text)
    assert detect(path) == "sharegpt"
    w = read(path)
    assert w.program.tolist() == [0, 0, 1, 2] and w.turn.tolist() == [0, 1, 0, 0]
    assert w.waits(1).tolist() == [0] and w.arrival[[0, 2, 3]].tolist() == [0, 0, 0] and w.gap.tolist() == [0] * 4
    assert np.array_equal(w.known_tokens, w.total_tokens)
    said = [f"{m['from']}\n{m['value']}\n" for m in DATA[0]["conversations"]]
    assert w.input_tokens[1] == sum(map(tokens_of, said[:3])) and w.output_tokens[1] == tokens_of(said[3])
    shared = w.total_tokens[0] // 16
    assert np.array_equal(w.ids(0)[:shared], w.ids(1)[:shared])
    assert any("3 of 4 conversations, 4 turns" in note and "1 without an answer left out" in note for note in w.source.notes)


def test_messages_and_contexts_that_are_too_long(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    said = [("user", "Hi"), ("assistant", "Ho " * 50), ("user", "x"), ("assistant", "y")]
    path.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}) + "\n")
    assert len(read(path, "sharegpt")) == 2
    cut = read(path, "sharegpt", context=59)
    assert len(cut) == 1 and any("1 end at 59 tokens" in note for note in cut.source.notes)


@pytest.mark.parametrize(("row", "message"), [
    ({"id": "x"}, "messages: missing"),
    ({"conversations": [3]}, "conversations[0]: not an object"),
    ({"conversations": [{"from": "human", "value": 3}]}, "conversations[0]: no text"),
    ([], "allowed: a JSON object"),
])
def test_what_is_refused(tmp_path: Path, row: object, message: str) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([DATA[0], row], indent=1))
    with pytest.raises(TraceError) as error:
        read(path)
    assert message in str(error.value) and SECRET not in str(error.value)
    assert len(read(path, skip_bad=True).skipped) == 1


def test_a_torn_file_and_one_without_answers(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(DATA, indent=1)[:-30])
    with pytest.raises(TraceError, match="not a whole JSON object"):
        read(path)
    assert len(read(path, skip_bad=True)) == 3
    path.write_text(json.dumps(DATA[1:2]))
    with pytest.raises(TraceError, match="found 'no answer of a model'"):
        read(path)


def test_no_text_stays(tmp_path: Path) -> None:
    path, out = tmp_path / "sharegpt.json", tmp_path / "out.jsonl"
    path.write_text(json.dumps([*DATA, {"id": SECRET, "conversations": [{"from": SECRET, "value": {"x": SECRET}}]}]))
    import_trace(path, out, skip_bad=True)
    written = out.read_text()
    assert not any(word in written for word in (*SECRET.split(), "Hello", "Nobody", "human"))
