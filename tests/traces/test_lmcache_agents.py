from pathlib import Path

import numpy as np
import pytest
from shared_data import shared_file

from simcore.errors import TraceError
from simcore.traces.identity import first_conflict, numbered_ids
from simcore.traces.lmcache_agents import COLUMNS, read_lmcache_agents

ROWS = ["miniswe,m0,0,0.0,400,40,0", "miniswe,m0,1,2.5,600,80,400", "miniswe,m0,2,4.0,300,4,200", "magagent,g0,0,1.0,0,0,0"]


def write(path: Path, *rows: str, header: str = ",".join(COLUMNS)) -> Path:
    path.write_text("\n".join((header, *rows)) + "\n")
    return path


def test_recorded_calls(tmp_path: Path) -> None:
    w = read_lmcache_agents(write(tmp_path / "c.csv", *ROWS))
    assert w.arrival.tolist() == [0, 1, 2.5, 4]
    assert w.program.tolist() == [0, 1, 0, 0]
    assert w.turn.tolist() == [0, 0, 1, 2]
    assert w.input_tokens.tolist() == [100, 1, 150, 75]
    assert w.output_tokens.tolist() == [10, 1, 20, 1]
    assert np.array_equal(w.known_tokens, w.input_tokens)
    assert [w.ids(i).tolist() for i in (0, 2, 3)] == [[*range(7)], [*range(10)], [0, 1, 2, 10, 11]]
    assert "1 calls with an empty prompt or output count as 1 token each there" in w.source.notes


def test_the_closed_loop_needs_a_gap_that_the_trace_does_not_have(tmp_path: Path) -> None:
    path = write(tmp_path / "c.csv", *ROWS)
    w = read_lmcache_agents(path, clock="closed-loop", gap=1.5, agent="miniswe")
    assert np.isnan(w.arrival).tolist() == [False, True, True]
    assert w.gap.tolist() == [0, 1.5, 1.5]
    for options in ({"clock": "closed-loop"}, {"gap": 1.0}, {"clock": "closed-loop", "gap": -1.0}):
        with pytest.raises(TraceError, match="gap: "):
            read_lmcache_agents(path, **options)
    with pytest.raises(TraceError, match="found 'no calls': allowed: at least one row of agent x"):
        read_lmcache_agents(path, agent="x")
    with pytest.raises(TraceError, match="clock: found 'x'"):
        read_lmcache_agents(path, clock="x")
    with pytest.raises(TraceError, match="chars_per_token: found 0"):
        read_lmcache_agents(path, chars_per_token=0)


@pytest.mark.parametrize(("row", "message"), [
    ("miniswe,m0,1,2.5,600,80", "cells: found 6: allowed: 7"),
    ("miniswe,m0,1,-2.5,600,80,400", "t_s: found -2.5"),
    ("miniswe,m0,1,x,600,80,400", "t_s: found 'x'"),
    ("miniswe,m0,1,2.5,-600,80,400", "input_chars: found -600"),
    ("miniswe,m0,1,2.5,600,8.5,400", "output_chars: found 8.5"),
    ("miniswe,m0,1,2.5,600,80,601", "max_common_prefix_chars_with_earlier_call: found 601: allowed: at most"),
])
def test_a_bad_row_is_refused_or_skipped_and_listed(tmp_path: Path, row: str, message: str) -> None:
    path = write(tmp_path / "c.csv", ROWS[0], row, *ROWS[2:])
    with pytest.raises(TraceError) as refused:
        read_lmcache_agents(path)
    assert str(refused.value).startswith(f"{path}:3: {message}")
    workload = read_lmcache_agents(path, skip_bad=True)
    assert workload.skipped == (str(refused.value),)
    assert len(workload) == 3


def test_time_and_header(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"c.csv:3: t_s: time goes backwards: found 1.0: allowed: at least 2.0"):
        read_lmcache_agents(write(tmp_path / "c.csv", "a,s,0,2.0,4,4,0", "a,s,1,1.0,4,4,0"))
    with pytest.raises(TraceError, match=r"c.csv:1: header: found \['workload'"):
        read_lmcache_agents(write(tmp_path / "c.csv", *ROWS, header="workload,session"))


def test_the_published_calls() -> None:
    w = read_lmcache_agents(shared_file("lmcache_agent_trace/calls.csv.gz"))
    assert len(w) == 1619
    assert w.n_programs == 20 + 25 + 24
    assert first_conflict(*numbered_ids(w)) is None
