import json
from pathlib import Path

import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.identity import first_conflict, numbered_ids
from simcore.traces.llmservingsim import read_llmservingsim

SESSION = {"session_id": "task-0-run0", "arrival_time_ns": 4_059_740, "sub_requests": [  # the format's own example
    {"input_toks": 1472, "output_toks": 133, "tool_duration_ns": 127_348_767},
    {"input_toks": 1582, "output_toks": 125, "tool_duration_ns": 0},
]}
FLAT = {"arrival_time_ns": 5_000_000, "input_toks": 3, "output_toks": 2}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_sessions_and_flat_requests_in_one_file(tmp_path: Path) -> None:
    w = read_llmservingsim(write(tmp_path / "a.jsonl", SESSION, FLAT))
    assert w.program.tolist() == [0, 0, 1]
    assert w.turn.tolist() == [0, 1, 0]
    assert np.nan_to_num(w.arrival, nan=-1).tolist() == [0.00405974, -1, 0.005]
    assert [w.waits(i).tolist() for i in range(3)] == [[], [0], []]
    assert w.calls(1) == [(0, 0.127348767)]
    assert w.tools == ("tool",)
    assert w.known_tokens.sum() == 0
    assert "LLMServingSim JSONL: 2 rows, of which 1 are agentic sessions" in w.source.notes
    assert "no token ids: nothing is shared" in w.source.notes


def test_a_tool_after_the_last_call_is_noted(tmp_path: Path) -> None:
    last = {**SESSION, "sub_requests": SESSION["sub_requests"][:1]}
    w = read_llmservingsim(write(tmp_path / "a.jsonl", last))
    assert not len(w.call_tool)
    assert "1 sessions have a tool after their last call; nothing waits for it" in w.source.notes


def test_token_ids_give_prefix_identity(tmp_path: Path) -> None:
    first = {"input_toks": 4, "output_toks": 2, "input_tok_ids": [1, 2, 3, 4], "output_tok_ids": [5, 6]}
    second = {"input_toks": 7, "output_toks": 1, "input_tok_ids": [1, 2, 3, 4, 5, 6, 9]}
    other = {"arrival_time_ns": 9, "input_toks": 4, "output_toks": 1, "input_tok_ids": [3, 4, 1, 2]}
    w = read_llmservingsim(
        write(tmp_path / "a.jsonl", {"arrival_time_ns": 0, "sub_requests": [first, second]}, other), block_tokens=2)
    assert w.known_tokens.tolist() == [6, 7, 4]
    ids = [w.ids(i).tolist() for i in range(3)]
    assert ids[0] == ids[1][:3]
    assert not set(ids[2]) & set(ids[1])  # the same blocks behind other prefixes
    assert first_conflict(*numbered_ids(w)) is None


def test_prompts_that_append(tmp_path: Path) -> None:
    """The example's second prompt, 1,582 tokens, is shorter than the first call, 1,605: it shares what it can."""
    path = write(tmp_path / "a.jsonl", SESSION, {**SESSION, "arrival_time_ns": 5_000_000})
    w = read_llmservingsim(path, prompts="append")
    assert w.known_tokens.tolist() == [1605, 1707, 1605, 1707]
    shared = np.flatnonzero(w.ids(0)[:98] == w.ids(1)[:98])
    assert shared.tolist() == list(range(1582 // 16))
    assert not set(w.ids(0).tolist()) & set(w.ids(2).tolist())
    assert any("taken to begin with prompt and output" in note for note in w.source.notes)


def sub(**changes: object) -> dict:
    return {**SESSION, "arrival_time_ns": 5_000_000, "sub_requests": [{**SESSION["sub_requests"][0], **changes}]}


BAD = [
    ("{", "not a whole JSON object"),
    ({**FLAT, "model": "x"}, "model: unknown key"),
    ({**FLAT, "input_toks": 0}, "input_toks: found 0"),
    ({**FLAT, "arrival_time_ns": 4_000_000}, "arrival_time_ns: time goes backwards: found 4000000: allowed: at least"),
    ({**FLAT, "arrival_time_ns": -1}, "arrival_time_ns: found -1"),
    ({**FLAT, "tool_duration_ns": 1}, "tool_duration_ns: unknown key"),
    ({**FLAT, "input_tok_ids": [1]}, "input_tok_ids: found [1]: allowed: as many whole numbers as input_toks, 3"),
    ({**FLAT, "input_tok_ids": [1, 2, 3], "output_tok_ids": [1]}, "output_tok_ids: found [1]: allowed: as many"),
    ({**FLAT, "input_tok_ids": [1, 2, "3"]}, "input_tok_ids: found [1, 2, '3']"),
    ({**SESSION, "arrival_time_ns": 5_000_000, "sub_requests": []}, "sub_requests: found []"),
    ({**SESSION, "arrival_time_ns": 5_000_000, "sub_requests": [1]}, "sub_requests: found [1]"),
    (sub(tool_duration_ns=-1), "tool_duration_ns: found -1: allowed: a whole number, at least 0"),
    (sub(output_toks=1.5), "output_toks: found 1.5"),
    (sub(tool="x"), "sub_requests[0]: tool: unknown key"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_row_is_refused_or_skipped_and_listed(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path / "a.jsonl", SESSION, row, FLAT)
    with pytest.raises(TraceError) as refused:
        read_llmservingsim(path)
    assert str(refused.value).startswith(f"{path}:2: ")
    assert message in str(refused.value)
    workload = read_llmservingsim(path, skip_bad=True)
    assert workload.skipped == (str(refused.value),)
    assert len(workload) == 3


def test_options_and_empty_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    with pytest.raises(TraceError, match="found 'no requests'"):
        read_llmservingsim(path)
    with pytest.raises(TraceError, match="prompts: found 'grow': allowed: as-given, append"):
        read_llmservingsim(path, prompts="grow")
    with pytest.raises(TraceError, match="block_tokens: found 0"):
        read_llmservingsim(path, block_tokens=0)
