from pathlib import Path

import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.info import describe, render
from simcore.traces.lmcache_agents import COLUMNS as LMCACHE_COLUMNS
from simcore.traces.read import detect, options_of, read
from simcore.traces.tau_bench import COLUMNS as TAU_BENCH_COLUMNS

NAME = "mooncake-conversation"


@pytest.fixture(scope="module")
def shipped():
    return read(NAME)


def test_the_shipped_trace(shipped) -> None:
    assert len(shipped) == 7851
    assert shipped.input_tokens.sum() == 97_571_920
    assert shipped.output_tokens.sum() == 2_724_903
    assert (np.diff(shipped.arrival) >= 0).all()
    assert shipped.source.licence == "Apache-2.0"
    assert "arrivals sit on ticks of about 3.0 s (800 distinct times)" in shipped.source.notes
    assert "sessions are prefix chains after a common root of 1 blocks" in shipped.source.notes
    assert not shipped.skipped


def test_its_best_possible_hit_rate(shipped) -> None:
    info = describe(shipped, block_size=16)
    assert round(info["best_hit_rate"], 4) == 0.3576
    assert info["requests"] == 7851
    assert "best possible hit rate 0.3576" in render(info)


def test_reading_twice_gives_the_same(shipped) -> None:
    again = read(NAME)
    assert again.source == shipped.source
    assert np.array_equal(again.run_first, shipped.run_first)
    assert np.array_equal(again.program, shipped.program)


FIRST_LINES = [
    ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}', "mooncake"),
    ('{"timestamp": 0, "input_length": 1, "output_le', "mooncake"),
    ('{"arrival": 0, "input_tokens": 1, "output_tokens": 1}', "jsonl"),
    ('{"simcore_trace": 1}\n{"arrival": 0, "input_tokens": 1, "output_tokens": 1}', "jsonl"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1", "azure"),
    ('\n"arrival","input_tokens","output_tokens"\n0,1,1', "csv"),
    ('{"id": "", "block_size": 9, "requests": [{"t": 0, "type": "n", "in": 1, "out": 1, "hash_ids": []}]}', "coding-agents"),
    ('{"session_id": "a", "arrival_time_ns": 0, "sub_requests": [{"input_toks": 1, "output_toks": 1}]}', "llmservingsim"),
    ('{"arrival_time_ns": 0, "input_toks": 1, "output_toks": 1}', "llmservingsim"),
    (f"{','.join(LMCACHE_COLUMNS)}\na,a,0,0,4,4,0", "lmcache-agents"),
    (f"{','.join(TAU_BENCH_COLUMNS)}\n0,0,0,0,user,4,0,,0\n0,0,0,1,assistant,4,0,,0", "tau-bench"),
    ('{"session_id": "a", "round_index": 0, "input_tokens_total": 1, "prefix_tokens": 0, "output_tokens": 1, "tools": [], '
     '"timing_events": [{"event_type": "text", "timestamp": "2026-06-01T05:40:20.151Z"}]}', "tracelab"),
    ('{"request_id": "a", "timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}', "mooncake"),
    ('{"startTime": 1, "prompt_tokens": 1, "completion_tokens": 1}', "gateway"),
]


@pytest.mark.parametrize(("text", "format"), FIRST_LINES)
def test_the_format_is_told_by_the_first_line(tmp_path: Path, text: str, format: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text + "\n")
    assert detect(path) == format
    if "output_le" not in text[-12:]:
        assert len(read(path)) == len(read(str(path), format)) == 1


@pytest.mark.parametrize("text", ["", "hello\n", '{"a": 1}\n', "[1]\n", "{"])
def test_a_format_that_cannot_be_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"trace:1: the first line fits no known format.*mooncake.*azure.*csv.*jsonl"):
        read(path)


def test_unknown_names_and_formats(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=rf"found 'moon': allowed: a shipped trace \({NAME}, coding-agents\) or the path"):
        read("moon")
    with pytest.raises(TraceError, match="allowed: a shipped trace"):
        read(tmp_path)
    with pytest.raises(TraceError, match="format: found 'xml': allowed: mooncake, azure, csv, jsonl, coding-agents"):
        read(NAME, "xml")


def test_options_of_a_format_are_passed_on_and_others_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 17, "output_length": 1, "hash_ids": [0, 1]}\n')
    assert read(path, block_tokens=16).block_tokens == 16
    assert options_of("mooncake") == ("block_tokens",)
    assert options_of("coding-agents") == ("clock", "long", "context", "max_gap")
    with pytest.raises(TraceError, match="option: found 'long': allowed: for mooncake: block_tokens"):
        read(path, long="drop")
    with pytest.raises(TraceError, match="option: found 'clock': allowed: for mooncake"):
        read(NAME, clock="recorded")
    with pytest.raises(TraceError, match="option: found 'source': allowed: for csv: none"):
        read(path, "csv", source="mine")


def test_the_later_form_of_agentic_rows_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64, "hash_id_scope": "local"}\n')
    with pytest.raises(TraceError, match=r"trace.jsonl:1: schema: found 'dynamo.agentic_mooncake': allowed: rows without a"):
        read(path)


def test_skip_bad_is_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,input_tokens,output_tokens\n0,1,1\n0,0,1\n")
    assert len(read(path, skip_bad=True).skipped) == 1
