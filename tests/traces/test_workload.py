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
