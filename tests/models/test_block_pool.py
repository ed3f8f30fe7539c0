"""The KV pool alone: who is handed out next, which of several equal blocks is found, what a release leaves behind."""

from __future__ import annotations

import pytest

from simcore.models.block_pool import BlockPool


def test_blocks_are_handed_out_from_the_head_and_block_0_never() -> None:
    pool = BlockPool(5)
    assert pool.usable == pool.num_free == 4 and pool.take(4) == [1, 2, 3, 4] and pool.num_free == 0


def test_the_oldest_of_equal_blocks_is_found_until_it_is_gone() -> None:
    pool = BlockPool(9)
    for block in pool.take(4):
        pool.register(block, 7)
    for block in (1, 2, 3, 4):
        assert pool.match([7], 1) == [block]
        pool.forget(block)
        pool.give_back([block])
        pool.check()
    assert pool.match([7], 1) == []


def test_a_younger_twin_may_go_first() -> None:
    pool = BlockPool(9)
    for block in pool.take(3):
        pool.register(block, 7)
    pool.forget(2)
    assert pool.match([7], 1) == [1]
    pool.forget(1)
    assert pool.match([7], 1) == [3]


def test_a_match_ends_at_the_first_gap_and_at_its_limit() -> None:
    pool = BlockPool(9)
    for block, key in zip(pool.take(3), (10, 11, 13), strict=True):
        pool.register(block, key)
    assert pool.match([10, 11, 12, 13], 4) == [1, 2] and pool.match([10, 11], 1) == [1]


@pytest.mark.parametrize(
    ("reuse", "unhashed_first", "order"),
    [("lru", True, [3, 4, 2, 1]), ("lru", False, [4, 3, 2, 1]), ("first", True, [3, 2, 1, 4]),
     ("first", False, [2, 1, 4, 3]), ("never", True, [3, 2, 1, 4]), ("never", False, [4, 3, 2, 1])],
)
def test_where_released_blocks_stand(reuse: str, unhashed_first: bool, order: list[int]) -> None:
    """Blocks 1 and 2 are full and findable, 3 is not; block 4 was never taken."""
    pool = BlockPool(5, unhashed_first=unhashed_first)
    blocks = pool.take(3)
    pool.register(1, 10)
    pool.register(2, 11)
    pool.give_back(blocks, reuse)
    assert list(pool.free) == order
    assert pool.match([10, 11], 2) == ([] if reuse == "never" else [1, 2])
    pool.check()


def test_a_shared_block_stays_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(5)
    pool.take(1)
    pool.register(1, 10)
    pool.hold([1])
    pool.give_back([1], "never")
    assert pool.num_free == 3 and pool.match([10], 1) == [1] and pool.count_free([1]) == 0
    pool.give_back([1])
    assert pool.count_free([1]) == 1
    pool.hold([1])
    assert list(pool.free) == [2, 3, 4]


def test_handing_out_a_findable_block_is_an_eviction() -> None:
    pool = BlockPool(3)
    pool.take(2)
    pool.register(1, 10)
    pool.give_back([1, 2])
    assert pool.take(1) == [2] and pool.evictions == 0
    assert pool.take(1) == [1] and pool.evictions == 1 and pool.match([10], 1) == []
