from pathlib import Path

import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.info import describe, render
from simcore.traces.read import detect, read

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
    with pytest.raises(TraceError, match=rf"found 'moon': allowed: a shipped trace \({NAME}\) or the path of a file"):
        read("moon")
    with pytest.raises(TraceError, match="allowed: a shipped trace"):
        read(tmp_path)
    with pytest.raises(TraceError, match="format: found 'xml': allowed: mooncake, azure, csv, jsonl"):
        read(NAME, "xml")


def test_skip_bad_is_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,input_tokens,output_tokens\n0,1,1\n0,0,1\n")
    assert len(read(path, skip_bad=True).skipped) == 1
