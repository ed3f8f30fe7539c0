import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.workload import Source, build

GOOD = {
    "arrival": np.array([0.0, np.nan]), "input_tokens": np.array([4, 5]), "output_tokens": np.array([1, 1]),
    "source": Source("here"), "waits": [[], [0]], "block_tokens": 4, "known_tokens": np.array([4, 0]),
    "block_ids": [np.array([0]), np.array([])],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_tokens": np.array([4, 0])}, "here: row 1: input_tokens: found .*0.*: allowed: at least 1"),
        ({"output_tokens": np.array([0, 1])}, "here: row 0: output_tokens"),
        ({"arrival": np.array([-1.0, np.nan])}, "here: row 0: arrival: .*allowed: a finite time >= 0"),
        ({"arrival": np.array([np.nan, np.nan])}, "here: row 0: arrival: .*allowed: a finite time >= 0"),
        ({"arrival": np.array([0.0, 1.0])}, "here: row 1: arrival: .*allowed: NaN in a row that waits for others"),
        ({"arrival": np.array([1.0, 0.0]), "waits": None}, "here: arrival: time goes backwards"),
        ({"arrival": np.array([1.0])}, "here: arrival: found 1: allowed: 2 rows"),
        ({"gap": np.array([1.0, 0.0])}, "here: row 0: gap: .*allowed: 0 in a row that waits for none"),
        ({"gap": np.array([0.0, -1.0])}, "here: row 1: gap: .*allowed: a finite time >= 0"),
        ({"tool": np.array([-1, 0])}, "here: row 1: tool: .*allowed: -1, or an index into tools"),
        ({"turn": np.array([-1, 0])}, "here: row 0: turn"),
        ({"program": np.array([-1, 0])}, "here: row 0: program"),
        ({"known_tokens": np.array([6, 0])}, r"here: row 0: known_tokens: .*allowed: 0 \.\. input \+ output"),
        ({"known_tokens": np.array([5, 0])}, "here: row 0: known_tokens: .*allowed: as many block ids as cover them"),
        ({"known_tokens": np.array([4, 1])}, "here: row 1: known_tokens: .*allowed: as many block ids as cover them"),
        ({"block_ids": [np.array([-1]), np.array([])]}, "run_first, run_last: a run is empty or has a negative id"),
        ({"calls": [[(0, 1.0)], []], "tools": ("cd",)}, "here: row 0: call_offsets: .*allowed: no calls in a row"),
        ({"calls": [[], [(1, 1.0)]], "tools": ("cd",)}, r"here: call_tool: found \[1\]: allowed: 0 \.\. 0"),
        ({"calls": [[], [(0, -1.0)]], "tools": ("cd",)}, "here: call_seconds: found -1.0: allowed: finite times >= 0"),
        ({"workers": -1}, "here: workers: found -1: allowed: at least 0"),
        (
            {"arrival": np.array([np.nan, np.nan]), "waits": None, "workers": 1, "program": np.zeros(2)},
            "here: arrival: two turns of one program would each be started by a worker",
        ),
        ({"waits": [[], [1]]}, "here: row 1: wait_for: found 1: allowed: a request that stands earlier"),
    ],
)
def test_columns_that_contradict_the_schema(change: dict, message: str) -> None:
    build(**GOOD)
    with pytest.raises(TraceError, match=message):
        build(**{**GOOD, **change})


def test_take_renumbers_rows_programs_and_runs() -> None:
    w = build(
        arrival=np.array([0.0, 1.0, np.nan]), input_tokens=np.array([8, 8, 8]), output_tokens=np.array([1, 1, 1]),
        source=Source("here"), waits=[[], [], [1]], block_tokens=4, known_tokens=np.array([8, 8, 4]),
        block_ids=[np.array([0, 1]), np.array([0, 2]), np.array([0])], program=np.array([1, 0, 0]),
    )
    part = w.take(np.array([1, 2])).check()
    assert part.waits(1).tolist() == [0]
    assert part.program.tolist() == [0, 0]
    assert [part.ids(i).tolist() for i in range(2)] == [[0, 2], [0]]
    with pytest.raises(TraceError, match="waits for one that is left out"):
        w.take(np.array([0, 2]))


def test_calls_run_side_by_side_and_the_gap_comes_after_them() -> None:
    w = build(
        arrival=np.array([0.0, np.nan, np.nan]), input_tokens=np.ones(3), output_tokens=np.ones(3), source=Source("here"),
        waits=[[], [0], [1]], calls=[[], [(1, 2.0), (0, 0.5)], []], gap=np.array([0, 0.25, 3.0]), tools=("cd", "ls"),
    )
    assert w.calls(1) == [(1, 2.0), (0, 0.5)]
    assert w.pause.tolist() == [0, 2.25, 3]
    part = w.take(np.array([0, 1]))
    assert [part.calls(i) for i in range(2)] == [[], [(1, 2.0), (0, 0.5)]]


def test_programs_that_workers_start() -> None:
    w = build(
        arrival=np.array([np.nan, np.nan, 1.0]), input_tokens=np.ones(3), output_tokens=np.ones(3), source=Source("here"),
        waits=[[], [0], []], workers=3, program=np.array([0, 0, 1]), turn=np.array([0, 1, 0]),
    )
    assert w.by_worker.tolist() == [True, False, False]
    assert w.take(np.array([0, 1])).workers == 3
