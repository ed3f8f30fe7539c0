"""Block ids that are given out, against contexts whose tokens are written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.traces.contexts import BlockIds, Context, columns


def ids_of(context: Context) -> list[int]:
    return [i for first, last in context.runs for i in range(first, last + 1)]


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 7)), max_size=14))
def test_equal_ids_are_equal_prefixes_and_kept_blocks_keep_their_ids(size: int, steps: list[tuple[int, int, int]]) -> None:
    ids, made = BlockIds(size), [(Context(0), ())]
    for number, (which, keep, new) in enumerate(steps):
        base, tokens = made[which % len(made)]
        keep = min(keep, base.tokens)
        grown = ids.grow(base, keep, keep + new)
        made.append((grown, tokens[:keep] + tuple((number, k) for k in range(new))))
        assert ids_of(grown)[: keep // size] == ids_of(base)[: keep // size]
    content: dict[int, tuple] = {}  # id -> the longest prefix that a context with it has, up to the end of its block
    for context, tokens in made:
        assert context.tokens == len(tokens)
        assert len(ids_of(context)) == -(-len(tokens) // size)
        for k, number in enumerate(ids_of(context)):
            prefix, other = tokens[: (k + 1) * size], content.get(number, ())
            assert prefix[: len(other)] == other[: len(prefix)]
            assert -(-len(prefix) // size) == k + 1
            content[number] = max(prefix, other, key=len)


def test_a_part_of_a_block_is_filled_under_its_id_once() -> None:
    ids = BlockIds(16)
    base = ids.grow(None, 0, 20)
    first, second = ids.grow(base, 20, 40), ids.grow(base, 20, 40)
    assert [ids_of(c) for c in (base, first, second)] == [[0, 1], [0, 1, 2], [0, 3, 4]]
    head = ids.grow(first, 20, 20)  # holds what block 1 holds, but block 1 goes on otherwise
    assert ids_of(head) == [0, 1]
    assert ids_of(ids.grow(head, 20, 33)) == [0, 5, 6]


def test_columns_and_impossible_lengths() -> None:
    ids = BlockIds(4)
    a = ids.grow(None, 0, 6)
    b = ids.grow(a, 4, 9)
    known, (offsets, first, last) = columns([a, Context(0), b])
    assert known.tolist() == [6, 0, 9]
    assert offsets.tolist() == [0, 1, 1, 3]
    assert np.stack((first, last), axis=1).tolist() == [[0, 1], [0, 0], [2, 3]]
    for keep, tokens in ((7, 9), (3, 2), (-1, 3)):
        with pytest.raises(ValueError, match="tokens in a context of"):
            ids.grow(a, keep, tokens)
