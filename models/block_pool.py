"""The paged KV pool of one replica: free list, references and prefix hashes, as vLLM V1 keeps them.

The reference: plain Python, one method per thing that can happen to a block. Source of the rules: data set
vllm_scheduler_golden ("Rules the traces pin down" 5-10).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice


class BlockPool:
    """Blocks 1 .. num_blocks-1 (block 0 is vLLM's null block and never handed out).

    A block is *held* (references > 0) or *free*; free blocks stand in the free list, from whose head they are handed
    out. A block with a key holds the KV of a known prefix and can be found by `match`, held or free.
    """

    def __init__(self, num_blocks: int, *, unhashed_first: bool = True) -> None:
        self.num_blocks = num_blocks
        self.unhashed_first = unhashed_first
        self.references = [0] * num_blocks
        self.key: list[int | None] = [None] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.evictions = 0  # blocks that lost their key because they were handed out
        self._found: dict[int, int] = {}  # key -> the oldest block that has it
        self._twins: dict[int, list[int]] = {}  # key -> younger blocks with the same content, oldest first

    @property
    def usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self.free)

    def match(self, keys: Sequence[int], limit: int) -> list[int]:
        """The blocks that hold the longest cached prefix of `keys[:limit]`."""
        found = self._found
        blocks = []
        for key in islice(keys, limit):
            block = found.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def look(self, keys: Sequence[int], limit: int) -> tuple[int, int]:
        """How many blocks `match` finds, and how many of them stand on the free list."""
        blocks = self.match(keys, limit)
        return len(blocks), self.count_free(blocks)

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these blocks stand on the free list (a hit takes them from it)."""
        references = self.references
        return sum(1 for block in blocks if references[block] == 0)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, taking free ones off the free list."""
        references, free = self.references, self.free
        for block in blocks:
            if references[block] == 0:
                del free[block]
            references[block] += 1

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks from the head of the free list; the caller has checked `num_free`."""
        free, references, key = self.free, self.references, self.key
        blocks = []
        for _ in range(count):
            block, _none = free.popitem(last=False)
            if key[block] is not None:
                self.forget(block)
                self.evictions += 1
            references[block] = 1
            blocks.append(block)
        return blocks

    def give_back(self, blocks: Sequence[int], reuse: str = "lru") -> None:
        """Drop one reference from each block of a sequence (given head first), tail first; see `Release` for `reuse`."""
        references, free, key = self.references, self.free, self.key
        to_front: list[int] = []
        for block in reversed(blocks):
            references[block] -= 1
            if references[block]:
                continue
            if reuse == "never" and key[block] is not None:
                self.forget(block)
            if (key[block] is None and self.unhashed_first) or (reuse == "first" and key[block] is not None):
                to_front.append(block)
            else:
                free[block] = None
        for block in reversed(to_front):
            free[block] = None
            free.move_to_end(block, last=False)

    def register(self, block: int, key: int) -> None:
        """Make a full block findable under `key`; an older block with the same key stays the one that is found."""
        self.key[block] = key
        if key in self._found:
            self._twins.setdefault(key, []).append(block)
        else:
            self._found[key] = block

    def register_all(self, blocks: Iterable[int], keys: Iterable[int]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            self.register(block, key)

    def forget(self, block: int) -> None:
        """Take the block's key away; a younger twin takes its place."""
        key = self.key[block]
        assert key is not None
        self.key[block] = None
        twins = self._twins.get(key)
        if self._found[key] != block:
            assert twins is not None
            twins.remove(block)
        elif twins:
            self._found[key] = twins.pop(0)
        else:
            del self._found[key]
        if twins is not None and not twins:
            del self._twins[key]

    def keys(self) -> frozenset[int]:
        """Of all blocks that can be found now."""
        return frozenset(self._found)

    def check(self) -> None:
        """Raise AssertionError if a block is lost, free and held at once, or found under a key that it has not."""
        for block in range(1, self.num_blocks):
            assert (self.references[block] == 0) == (block in self.free), f"block {block} is both held and free, or neither"
        findable = set(self._found.values()) | {b for twins in self._twins.values() for b in twins}
        assert findable == {b for b, key in enumerate(self.key) if key is not None}
        assert all(self.key[block] == key for key, block in self._found.items())
