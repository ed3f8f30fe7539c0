"""Token ids from block identities."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from simcore.kernels.tokens import token_ids


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(1 << 40), 1 << 40), max_size=5), st.integers(0, 40), st.integers(0, 20), st.integers(0, 20),
       st.integers(1, 7), st.integers(1, 1000))
def test_a_range_is_its_parts(keys, start, first, second, block_size, vocab):
    def ids(a, b):
        return token_ids(keys, 3, a, b, block_size, vocab)

    whole = ids(start, start + first + second)
    assert np.array_equal(whole, np.concatenate([ids(start, start + first), ids(start + first, start + first + second)]))
    assert len(whole) == first + second and (not len(whole) or (whole.min() >= 0 and whole.max() < vocab))


def test_equal_blocks_have_equal_tokens_and_others_have_not():
    a, b = (token_ids(keys, request, 0, 64, 16, 10_000) for keys, request in (([7, 8, 9], 1), ([7, 8, 5], 2)))
    assert np.array_equal(a[:32], b[:32])
    assert not (a[32:] == b[32:]).any()  # of 10,000 words; the last block is each request's own


def test_the_same_block_has_the_same_tokens_wherever_it_is_asked_for():
    assert np.array_equal(token_ids([4, 6], 0, 16, 32, 16, 999), token_ids([1, 6], 5, 16, 32, 16, 999))
