from pathlib import Path

import numpy as np
import pytest
from shared_data import shared_file

from simcore.errors import TraceError
from simcore.traces.tau_bench import COLUMNS, read_tau_bench

ROWS = [
    "3,0,1.0,0,system,640,0,,0", "3,0,1.0,1,user,72,0,,0", "3,0,1.0,2,assistant,40,0,,0", "3,0,1.0,3,user,40,0,,0",
    "3,0,1.0,4,assistant,0,2,get_user,30", "3,0,1.0,5,tool,80,0,get_user,0", "3,0,1.0,6,tool,40,0,get_user,0",
    "3,0,1.0,7,assistant,8,0,,0", "3,0,1.0,8,user,5,0,,0",
    "3,1,0.0,0,system,640,0,,0", "3,1,0.0,1,user,4,0,,0", "3,1,0.0,2,assistant,4,0,,0",
]


def write(path: Path, *rows: str) -> Path:
    path.write_text("\n".join((",".join(COLUMNS), *rows)) + "\n")
    return path


def test_trajectories(tmp_path: Path) -> None:
    w = read_tau_bench(write(tmp_path / "t.csv", *ROWS), tool_seconds=0.5, human_seconds=8.0)
    assert w.program.tolist() == [0, 0, 0, 1]
    assert w.input_tokens.tolist() == [178, 198, 236, 161]  # 160 + 18; + 10 + 10; + 8 + 30
    assert w.output_tokens.tolist() == [10, 8, 2, 1]
    assert [w.tools[t] if t >= 0 else None for t in w.tool] == [None, "human", "get_user", None]
    assert w.calls(2) == [(1, 0.5), (1, 0.5)]
    assert w.pause.tolist() == [0, 8, 0.5, 0]
    assert w.ids(0)[:10].tolist() == w.ids(3)[:10].tolist()  # the system message
    assert any("no times in the file: assumed 0.5 s a tool call, 8 s" in note for note in w.source.notes)
    assert read_tau_bench(tmp_path / "t.csv", chars_per_token=2.0).input_tokens[3] == 322


@pytest.mark.parametrize(("row", "message"), [
    ("3,0,1.0,2,assistant,40,0,,", "tool_args_chars: found ''"),
    ("3,0,1.0,2,assistant,-40,0,,0", "content_chars: found -40"),
    ("3,0,1.0,2,critic,40,0,,0", "role: found 'critic': allowed: system, user, assistant, tool"),
    ("3,0,1.0,3,assistant,40,0,,0", "message_index: found 3: allowed: 2"),
    ("3,0,1.0,2,assistant,40,1,,0", "tool_name: found '': allowed: a name, where n_tool_calls is above 0"),
    ("3,0,1.0,2,assistant,40,0", "cells: found 7: allowed: 9"),
])
def test_a_bad_row_leaves_its_trajectory_out(tmp_path: Path, row: str, message: str) -> None:
    path = write(tmp_path / "t.csv", *ROWS[:2], row, *ROWS[3:])
    with pytest.raises(TraceError) as refused:
        read_tau_bench(path)
    assert str(refused.value).startswith(f"{path}:4: {message}")
    workload = read_tau_bench(path, skip_bad=True)
    assert workload.skipped == (str(refused.value),)
    assert workload.input_tokens.tolist() == [161]


def test_options_and_empty_files(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", *ROWS)
    for option in ({"tool_seconds": -1.0}, {"human_seconds": float("nan")}, {"chars_per_token": 0.0}):
        with pytest.raises(TraceError, match=f"{next(iter(option))}: found"):
            read_tau_bench(path, **option)
    with pytest.raises(TraceError, match="found 'no trajectories'"):
        read_tau_bench(write(path, *ROWS[:2]))


def test_the_published_trajectories() -> None:
    w = read_tau_bench(shared_file("tau_bench_airline/gpt-4o-airline_messages.csv.gz"))
    assert w.n_programs == 200
    assert len(w) == 1290 + 1164
    assert len(w.tools) == 14  # 13 tools that something follows, and the person
    assert np.isfinite(w.arrival).sum() == 200


def test_an_answer_to_nothing_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "3,0,1.0,0,assistant,40,0,,0")
    with pytest.raises(TraceError, match=r"t.csv:2: role: found 'assistant': allowed: another role with some content first"):
        read_tau_bench(path)
