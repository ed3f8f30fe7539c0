"""Imports: every format by name or by its head, into our JSONL; ids of any width; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.importing import import_trace
from simcore.traces.read import FORMATS, TEXTS, options_of, read

ROW = {"startTime": 1_730_000_000.5, "prompt_tokens": 5, "completion_tokens": 2}


def test_what_is_written_reads_as_what_was_read(tmp_path: Path) -> None:
    source, target = tmp_path / "trace.jsonl", tmp_path / "out.jsonl.gz"
    rows = [{"timestamp": 250 * k, "input_length": 700 + k, "output_length": 5, "hash_ids": [0, 2**90 + k]}
            for k in range(5)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    w = import_trace(source, target, block_tokens=512)
    again = read(target)
    assert again.source == w.source and again.block_tokens == 512
    for column in ("arrival", "input_tokens", "known_tokens", "run_first", "run_last", "program"):
        assert np.array_equal(getattr(w, column), getattr(again, column))
    assert len({int(w.ids(k)[1]) for k in range(5)}) == 5


@pytest.mark.parametrize("ids", [
    [2**64, 2**64 + 1, 2**63, -1], [2**200 + k for k in range(4)], [f"{k:064x}" for k in range(4)], ["", "a", "A", " a"],
    [1, "1", 2, "2"],  # a row holds one kind, but rows may differ
])
def test_hash_ids_of_any_width_stay_distinct(tmp_path: Path, ids: list) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"timestamp": k, "input_length": 10, "output_length": 1, "hash_ids": [h]}) + "\n"
                            for k, h in enumerate([*ids, *ids])))
    w = read(path, "mooncake")
    assert [int(w.ids(k)[0]) for k in range(8)] == [0, 1, 2, 3] * 2


def test_hash_ids_that_do_not_fit_the_length_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"hash_ids": [1, 2, 3]}) + "\n")
    with pytest.raises(TraceError, match=r"trace.jsonl:2: hash_ids: found '3 ids': allowed: 2 ids: input_length"):
        import_trace(path, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    assert len(import_trace(path, tmp_path / "out.jsonl", skip_bad=True).skipped) == 1


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    for target in ("out.csv", "out", "out.jsonl.zip"):
        with pytest.raises(TraceError, match=r"target: found .*: allowed: a file ending in \.jsonl or \.jsonl\.gz"):
            import_trace(path, tmp_path / target)
    with pytest.raises(TraceError, match="target: is the source"):
        import_trace(path, path)
    with pytest.raises(TraceError, match=r"format: not given for a folder: found .*: allowed: weka, servegen"):
        import_trace(tmp_path, tmp_path / "out.jsonl")
    with pytest.raises(TraceError, match="option: found 'clok': allowed: for gateway: clock, block_tokens, model, salt"):
        import_trace(path, tmp_path / "out.jsonl", clok="recorded")
    with pytest.raises(TraceError, match="salt: vidur holds no text: found 'one': allowed: for gateway, otel, sharegpt"):
        import_trace(path, tmp_path / "out.jsonl", "vidur", salt="pepper")


def test_every_format_has_a_reader_and_texts_have_a_salt() -> None:
    assert {"gateway", "otel", "dynamo", "weka", "burstgpt", "vidur", "sharegpt", "servegen"} <= set(FORMATS)
    assert [format for format in FORMATS if "salt" in options_of(format)] == list(TEXTS)


def test_shipped_traces_can_be_written_out(tmp_path: Path) -> None:
    w = import_trace("coding-agents", tmp_path / "out.jsonl.gz", context=16_384)
    assert read(tmp_path / "out.jsonl.gz").n_programs == w.n_programs
