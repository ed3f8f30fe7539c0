import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simcore.traces.identity import chained
from simcore.traces.sessions import by_prefix, common_root


def ids(*rows: list[int]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int64) for row in rows]


def test_a_session_is_a_chain_after_the_common_root() -> None:
    rows = ids([0, 1, 2], [0, 1, 3], [0, 1, 2, 4], [0, 1], [0, 1, 3, 5], [0, 1], [0, 1, 2, 6])
    assert common_root(rows) == 2
    program, turn = by_prefix(rows)
    assert program.tolist() == [0, 1, 0, 2, 1, 3, 0]  # rows that are nothing but the root stand alone
    assert turn.tolist() == [0, 0, 1, 0, 1, 0, 2]


def test_without_a_common_root_the_first_block_names_the_session() -> None:
    rows = ids([0, 1], [2], [0, 3], [], [2, 4])
    assert common_root(rows) == 0
    assert by_prefix(rows)[0].tolist() == [0, 1, 0, 2, 1]


def test_few_requests() -> None:
    assert common_root([]) == 0
    assert by_prefix([])[0].tolist() == []
    assert by_prefix(ids([0, 1]))[0].tolist() == [0]


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=8))
def test_against_brute_force(contents: list[list[int]]) -> None:
    rows = chained(np.array(row, dtype=np.int64) for row in contents)
    root = max(k for k in range(5) if all(row[:k] == contents[0][:k] and len(row) >= k for row in contents))
    assert common_root(rows) == root
    program, turn = by_prefix(rows)
    for i, a in enumerate(contents):
        for j, b in enumerate(contents):
            together = i == j or (len(a) > root and a[: root + 1] == b[: root + 1])
            assert (program[i] == program[j]) == together
        assert turn[i] == (program[:i] == program[i]).sum()
