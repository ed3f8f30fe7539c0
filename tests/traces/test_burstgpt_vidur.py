"""BurstGPT's and Vidur's CSV: columns, order, failed requests, sessions, and rows that are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.read import detect, read
from simcore.traces.vidur import write_vidur

HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
THIRD = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"


def file(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_burstgpt(tmp_path: Path) -> None:
    path = file(tmp_path / "b.csv", HEADER, "5,ChatGPT,472,18,490,Conversation log", "45.5,ChatGPT,1087,230,1317,API log",
                "40,GPT-4,417,276,693,Conversation log", "118,GPT-4,300,0,300,API log")
    assert detect(path) == "burstgpt"
    w = read(path)
    assert w.arrival.tolist() == [0, 35, 40.5] and w.input_tokens.tolist() == [472, 417, 1087]
    notes = " ".join(w.source.notes)
    assert "1 failed requests (0 response tokens)" in notes and "1 rows not in order of time, sorted" in notes
    assert len(read(path, model="GPT-4")) == 1 and len(read(path, log_type="Conversation log")) == 2
    with pytest.raises(TraceError, match="found '4 rows of other models or log types'"):
        read(path, model="none")


def test_burstgpt_with_sessions(tmp_path: Path) -> None:
    path = file(tmp_path / "b.csv", THIRD, "0,s,2.5,ChatGPT,10,5,15,Conversation log", "1,,1,ChatGPT,7,5,12,API log",
                "10,s,1,ChatGPT,30,5,35,Conversation log")
    w = read(path)
    assert w.program.tolist() == [0, 1, 0] and w.gap.tolist() == [0, 0, 7.5] and w.waits(2).tolist() == [0]
    assert read(path, clock="recorded").arrival.tolist() == [0, 1, 10]


@pytest.mark.parametrize(("line", "message"), [
    ("x,ChatGPT,1,1,2,API log", "Timestamp: found 'x': allowed: seconds"),
    ("-1,ChatGPT,1,1,2,API log", "Timestamp: found '-1'"),
    ("1,ChatGPT,0,1,1,API log", "Request tokens: found 0"),
    ("1,ChatGPT,1.5,1,2,API log", "Request tokens: found 1.5"),
    ("1,ChatGPT,1,-1,2,API log", "Response tokens: found -1"),
    ("1,ChatGPT,1,1", "cells: found 4: allowed: 6"),
])
def test_burstgpt_rows_that_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = file(tmp_path / "b.csv", HEADER, "0,ChatGPT,1,1,2,API log", line)
    with pytest.raises(TraceError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:3: ") and message in str(error.value)
    assert len(read(path, skip_bad=True).skipped) == 1


def test_vidur(tmp_path: Path) -> None:
    path = file(tmp_path / "v.csv", "arrived_at,num_prefill_tokens,num_decode_tokens", "0.1,374,44",
                "0.30000000000000004,396.0,109")
    assert detect(path) == "vidur"
    w = read(path)
    assert w.arrival.tolist() == [0.1, 0.30000000000000004] and w.output_tokens.tolist() == [44, 109]
    write_vidur(w, tmp_path / "again.csv")
    again = read(tmp_path / "again.csv")
    assert np.array_equal(again.arrival, w.arrival) and np.array_equal(again.input_tokens, w.input_tokens)


def test_vidurs_length_files(tmp_path: Path) -> None:
    path = file(tmp_path / "v.csv", ",num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio", "0,10,5,15,2.0",
                "1,20,5,25,4.0")
    w = read(path)
    assert w.arrival.tolist() == [0, 0] and "Vidur CSV: 2 rows without arrivals, all at t=0" in w.source.notes


@pytest.mark.parametrize(("lines", "message"), [
    (("arrived_at,num_prefill_tokens,num_decode_tokens", "1,5,5", "0,5,5"), "arrived_at: time goes backwards: found 0.0"),
    (("arrived_at,num_prefill_tokens,num_decode_tokens", "0,5,5", "1,5,0"), "num_decode_tokens: found 0"),
    (("arrived_at,num_prefill_tokens,num_decode_tokens", "0,5,5", "x,5,1"), "arrived_at: found 'x'"),
    (("arrived_at,num_prefill_tokens,num_decode_tokens,block_hash_ids", "0,5,5,9", ""), "block_hash_ids: unknown key"),
])
def test_vidur_rows_that_are_refused(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(TraceError) as error:
        read(file(tmp_path / "v.csv", *lines))
    assert message in str(error.value)
