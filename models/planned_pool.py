"""The KV pool as arrays that compiled code may touch: same rules as block_pool.py, written independently.

`blocks` is int64[POOL_FIELDS, num_blocks]; block 0 is never handed out and is the sentinel of the free list, which is
doubly linked through PREV and NEXT. `table` is an open-addressing hash table (linear probing, a power of two at least
twice the number of blocks) that holds, for each known key, the oldest block with it; younger ones hang on TWIN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numba
import numpy as np

PREV, NEXT, REFERENCES, HASHED, KEY, TWIN = range(6)
POOL_FIELDS = 6

# Counters of the pool, int64[POOL_COUNTERS].
FREE, EVICTIONS = range(2)
POOL_COUNTERS = 2


@numba.njit(cache=True, inline="always")
def _place(key, mask):
    x = np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64((x ^ (x >> np.uint64(31))) & np.uint64(mask))


@numba.njit(cache=True)
def find(blocks, table, key):
    """The oldest block with this key, 0 = none."""
    mask = len(table) - 1
    place = _place(key, mask)
    while table[place] != 0:
        if blocks[KEY, table[place]] == key:
            return table[place]
        place = (place + 1) & mask
    return 0


@numba.njit(cache=True)
def register(blocks, table, block, key):
    blocks[HASHED, block] = 1
    blocks[KEY, block] = key
    blocks[TWIN, block] = 0
    mask = len(table) - 1
    place = _place(key, mask)
    while table[place] != 0:
        other = table[place]
        if blocks[KEY, other] == key:
            while blocks[TWIN, other] != 0:
                other = blocks[TWIN, other]
            blocks[TWIN, other] = block
            return
        place = (place + 1) & mask
    table[place] = block


@numba.njit(cache=True)
def forget(blocks, table, block):
    key = blocks[KEY, block]
    blocks[HASHED, block] = 0
    mask = len(table) - 1
    place = _place(key, mask)
    while blocks[KEY, table[place]] != key:
        place = (place + 1) & mask
    other = table[place]
    if other != block:  # a younger twin: take it out of the chain
        while blocks[TWIN, other] != block:
            other = blocks[TWIN, other]
        blocks[TWIN, other] = blocks[TWIN, block]
    elif blocks[TWIN, block] != 0:
        table[place] = blocks[TWIN, block]
    else:  # close the gap: move back every entry that probing would no longer reach
        table[place] = 0
        gap = place
        place = (place + 1) & mask
        while table[place] != 0:
            home = _place(blocks[KEY, table[place]], mask)
            if ((place - home) & mask) >= ((place - gap) & mask):
                table[gap] = table[place]
                table[place] = 0
                gap = place
            place = (place + 1) & mask
    blocks[TWIN, block] = 0


@numba.njit(cache=True)
def take(blocks, table, counters):
    """The block at the head of the free list; the caller knows that there is one."""
    block = blocks[NEXT, 0]
    after = blocks[NEXT, block]
    blocks[NEXT, 0] = after
    blocks[PREV, after] = 0
    counters[FREE] -= 1
    if blocks[HASHED, block]:
        forget(blocks, table, block)
        counters[EVICTIONS] += 1
    blocks[REFERENCES, block] = 1
    return block


@numba.njit(cache=True)
def hold(blocks, counters, block):
    if blocks[REFERENCES, block] == 0:
        before, after = blocks[PREV, block], blocks[NEXT, block]
        blocks[NEXT, before] = after
        blocks[PREV, after] = before
        counters[FREE] -= 1
    blocks[REFERENCES, block] += 1


LRU, FIRST, NEVER_AGAIN = range(3)
REUSE = {"lru": LRU, "first": FIRST, "never": NEVER_AGAIN}


@numba.njit(cache=True)
def give_back(blocks, table, counters, held, count, reuse, unhashed_first):
    """Drop a reference from each of `held[:count]` (given head first), tail first."""
    head = 0  # where the next block that goes to the front is put: after those that went there before it
    front_last = 0
    for k in range(count - 1, -1, -1):
        block = held[k]
        blocks[REFERENCES, block] -= 1
        if blocks[REFERENCES, block] != 0:
            continue
        counters[FREE] += 1
        if reuse == NEVER_AGAIN and blocks[HASHED, block]:
            forget(blocks, table, block)
        hashed = blocks[HASHED, block]
        if (not hashed and unhashed_first) or (reuse == FIRST and hashed):
            before = front_last
            front_last = block
        else:
            before = blocks[PREV, head]
        after = blocks[NEXT, before]
        blocks[NEXT, before] = block
        blocks[PREV, block] = before
        blocks[NEXT, block] = after
        blocks[PREV, after] = block


@numba.njit(cache=True)
def match(blocks, table, keys, limit):
    """How many leading keys are found, at most `limit`; and how many of the blocks found stand on the free list."""
    free = 0
    for k in range(limit):
        block = find(blocks, table, keys[k])
        if block == 0:
            return k, free
        if blocks[REFERENCES, block] == 0:
            free += 1
    return limit, free


@numba.njit(cache=True)
def match_all(blocks, table, keys, out):
    """The blocks with these keys, all of which are found."""
    for k in range(len(keys)):
        out[k] = find(blocks, table, keys[k])


@numba.njit(cache=True)
def hold_all(blocks, counters, held):
    for block in held:
        hold(blocks, counters, block)


@numba.njit(cache=True)
def take_all(blocks, table, counters, out):
    for k in range(len(out)):
        out[k] = take(blocks, table, counters)


@numba.njit(cache=True)
def register_all(blocks, table, full, keys):
    for k in range(len(full)):
        register(blocks, table, full[k], keys[k])


def table_size(num_blocks: int) -> int:
    """Places of the hash table."""
    return 1 << (2 * num_blocks - 1).bit_length()


class PlannedPool:
    """`BlockPool`'s interface over arrays, for the code that both paths share."""

    def __init__(self, num_blocks: int, *, unhashed_first: bool = True) -> None:
        self.num_blocks = num_blocks
        self.unhashed_first = unhashed_first
        self.blocks = np.zeros((POOL_FIELDS, num_blocks), dtype=np.int64)
        ring = np.arange(num_blocks)
        self.blocks[NEXT] = (ring + 1) % num_blocks
        self.blocks[PREV] = (ring - 1) % num_blocks
        self.table = np.zeros(table_size(num_blocks), dtype=np.int64)
        self.counters = np.zeros(POOL_COUNTERS, dtype=np.int64)
        self.counters[FREE] = num_blocks - 1

    def move(self, blocks: np.ndarray, table: np.ndarray, counters: np.ndarray) -> None:
        """From now on live in these arrays (of the same shapes)."""
        blocks[:], table[:], counters[:] = self.blocks, self.table, self.counters
        self.blocks, self.table, self.counters = blocks, table, counters

    @property
    def usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return int(self.counters[FREE])

    @property
    def evictions(self) -> int:
        return int(self.counters[EVICTIONS])

    @property
    def references(self) -> list[int]:
        return self.blocks[REFERENCES].tolist()

    @property
    def free(self) -> list[int]:
        """The free list, head first."""
        order, block = [], int(self.blocks[NEXT, 0])
        while block:
            order.append(block)
            block = int(self.blocks[NEXT, block])
        return order

    def match(self, keys: np.ndarray, limit: int) -> list[int]:
        found = np.empty(self.count_matched(keys, limit), dtype=np.int64)
        match_all(self.blocks, self.table, keys[: len(found)], found)
        return found.tolist()

    def look(self, keys: np.ndarray, limit: int) -> tuple[int, int]:
        return match(self.blocks, self.table, keys, min(limit, len(keys)))

    def count_matched(self, keys: np.ndarray, limit: int) -> int:
        return match(self.blocks, self.table, keys, min(limit, len(keys)))[0]

    def count_free(self, blocks: Iterable[int]) -> int:
        return sum(1 for block in blocks if self.blocks[REFERENCES, block] == 0)

    def hold(self, blocks: Sequence[int]) -> None:
        hold_all(self.blocks, self.counters, np.asarray(blocks, dtype=np.int64))

    def take(self, count: int) -> list[int]:
        taken = np.empty(count, dtype=np.int64)
        take_all(self.blocks, self.table, self.counters, taken)
        return taken.tolist()

    def give_back(self, blocks: Sequence[int] | np.ndarray, reuse: str = "lru") -> None:
        held = np.asarray(blocks, dtype=np.int64)
        give_back(self.blocks, self.table, self.counters, held, len(held), REUSE[reuse], self.unhashed_first)

    def register(self, block: int, key: int) -> None:
        register(self.blocks, self.table, block, key)

    def register_all(self, blocks: Sequence[int], keys: np.ndarray) -> None:
        register_all(self.blocks, self.table, np.asarray(blocks, dtype=np.int64), keys)

    def forget(self, block: int) -> None:
        forget(self.blocks, self.table, block)

    def check(self) -> None:
        """Raise AssertionError if the free list, the references or the hash table contradict each other."""
        order = self.free
        assert len(order) == len(set(order)) == self.num_free
        free = set(order)
        for block in range(1, self.num_blocks):
            assert (self.blocks[REFERENCES, block] == 0) == (block in free), f"block {block} is lost, or held and free"
        found = set()
        for head in self.table[self.table != 0].tolist():
            assert find(self.blocks, self.table, self.blocks[KEY, head]) == head
            while head:
                assert self.blocks[HASHED, head] and head not in found
                found.add(head)
                head = int(self.blocks[TWIN, head])
        assert found == set(np.flatnonzero(self.blocks[HASHED]).tolist())
