import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from token_worlds import World, worlds

from simcore.traces.identity import Numbering, chained, first_conflict


@given(worlds(), st.integers(1, 9))
def test_equal_keys_mean_equal_prefixes_and_the_other_way_round(world: World, block_size: int) -> None:
    blocks = [
        (int(key), tokens[: (k + 1) * block_size])
        for i, tokens in enumerate(world.tokens)
        for k, key in enumerate(world.workload.block_keys(i, block_size))
    ]
    assert len(blocks) == sum(len(t) // block_size for t in world.tokens)
    for (key, prefix), (other_key, other_prefix) in itertools.combinations(blocks, 2):
        assert (key == other_key) == (prefix == other_prefix)


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6))
def test_chained_ids_are_prefix_identities(contents: list[list[int]]) -> None:
    ids = chained(np.array(row, dtype=np.int64) for row in contents)
    size = 1 + max((int(row.max()) for row in ids if len(row)), default=-1)
    assert first_conflict(ids, size) is None
    prefix_of: dict[int, tuple[int, ...]] = {}
    for row, content in zip(ids, contents, strict=True):
        for k, number in enumerate(row.tolist()):
            assert prefix_of.setdefault(number, tuple(content[: k + 1])) == tuple(content[: k + 1])
    assert len(set(prefix_of.values())) == len(prefix_of) == size


@given(st.lists(st.lists(st.integers(0, 3), max_size=4).map(np.array), max_size=5))
def test_a_conflict_is_found_exactly_when_an_id_has_two_parents(rows: list[np.ndarray]) -> None:
    rows = [row.astype(np.int64) for row in rows]
    parent: dict[int, int] = {}
    expected = None
    for k, row in enumerate(rows):
        for before, number in zip([-1, *row.tolist()], row.tolist(), strict=False):
            if parent.setdefault(number, before) != before and expected is None:
                expected = k
    assert first_conflict(rows, 4) == expected


@given(st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 5)), max_size=6))
def test_numbering_is_dense_and_one_to_one(runs: list[tuple[int, int]]) -> None:
    first = np.array([a for a, _ in runs], dtype=np.int64)
    last = first + np.array([k for _, k in runs], dtype=np.int64)
    ids = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in zip(first, last, strict=True)] or [first]))
    number = Numbering(first, last)
    assert number(ids).tolist() == list(range(len(ids)))
    assert number.size == len(ids)
