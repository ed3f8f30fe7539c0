"""The host tier of one replica: which chunks of KV lie in host memory, which are on their way, and which make place.

Plain bookkeeping, without clock or bytes in motion; both paths of a replica use it. A chunk is a fixed number of KV blocks
and is named by the key of its last block, which stands for the whole prefix up to there. The rules are those of vLLM's
native offloading (a chunk is a block) and of LMCache (a chunk is 256 tokens); docs/scheduler.md lists them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

from simcore.errors import ConfigError
from simcore.models.engine import LMCACHE_CHUNK, EngineSettings


class HostTier:
    """`capacity` chunks of `chunk_blocks` blocks each. A chunk is *readable*, or *being written*: then its place is taken
    and it cannot be found yet. One that is being loaded cannot be evicted. The readable chunks stand in the order of their
    last use; within one prefix the head counts as used last, so that tails go first."""

    def __init__(self, capacity: int, chunk_blocks: int, block_size: int, chunk_bytes: float, *, outputs: bool) -> None:
        self.capacity = capacity
        self.chunk_blocks = chunk_blocks
        self.block_size = block_size
        self.chunk_bytes = chunk_bytes  # all ranks together
        self.outputs = outputs  # an ended turn's output is stored too, not only its prompt
        self.evictions = 0  # chunks
        self.not_stored = 0  # chunks for which there was no place
        self._readable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._writing: dict[int, None] = {}
        self._held: dict[int, int] = {}  # loads under way, by chunk
        self._loads = 0  # chunks of all loads under way

    @property
    def used(self) -> int:
        """Readable chunks."""
        return len(self._readable)

    @property
    def reserved(self) -> int:
        """Chunks being written."""
        return len(self._writing)

    @property
    def to_host_bytes(self) -> float:
        """Bytes of the copies to the host under way, each counted whole until it ends."""
        return len(self._writing) * self.chunk_bytes

    @property
    def from_host_bytes(self) -> float:
        """Bytes of the copies from the host under way, each counted whole until it ends."""
        return self._loads * self.chunk_bytes

    # --- reading ------------------------------------------------------------------------------------------------------

    def find(self, keys: Any, blocks: int, known: int, *, writing: bool = False) -> tuple[list[int], int]:
        """(chunks, blocks) that continue a request's first `blocks` blocks without a gap: the chunks' names, and how many
        blocks beyond those they hold; of all but one of the `known` tokens. `keys`: of the request's blocks, a list or
        int64[n]. `writing`: chunks being written count as well."""
        size = self.chunk_blocks
        most = (known - 1) // self.block_size
        first = blocks // size
        stop = min(known // self.block_size // size, -(-most // size))
        found = []
        for name in self._names(keys, first, stop):
            if name not in self._readable and not (writing and name in self._writing):
                break
            found.append(name)
        more = min((first + len(found)) * size, most) - blocks
        return (found, more) if found and more > 0 else ([], 0)

    def load(self, chunks: Sequence[int]) -> None:
        """A load of these readable chunks begins."""
        for name in chunks:
            self._held[name] = self._held.get(name, 0) + 1
        self._loads += len(chunks)
        self._touch(chunks)

    def loaded(self, chunks: Sequence[int]) -> None:
        """That load has ended."""
        for name in chunks:
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]
        self._loads -= len(chunks)

    # --- writing ------------------------------------------------------------------------------------------------------

    def reserve(self, keys: Any, tokens: int) -> list[int]:
        """Take place for the full chunks of a sequence's first `tokens` tokens that are neither here nor on their way, head
        first, and return their names: they are to be written. What is here counts as used now, and does not make place."""
        names = self._names(keys, 0, tokens // (self.chunk_blocks * self.block_size))
        missing = [name for name in names if name not in self._readable and name not in self._writing]
        self._touch(names)
        if not missing:
            return missing
        fits = self._make_place(len(missing), names)
        self.not_stored += len(missing) - fits
        del missing[fits:]
        self._writing.update(dict.fromkeys(missing))
        return missing

    def stored(self, chunks: Sequence[int]) -> None:
        """These chunks are written: from now on they can be read."""
        for name in reversed(chunks):
            del self._writing[name]
            self._readable[name] = None

    def _make_place(self, count: int, keep: Collection[int]) -> int:
        """Evict until `count` chunks more fit; returns how many do."""
        free = self.capacity - self.used - self.reserved
        lacking = count - free
        if lacking <= 0:
            return count
        keep = set(keep)
        victims: list[int] = []
        for name in self._readable:
            if len(victims) == lacking:
                break
            if name not in self._held and name not in keep:
                victims.append(name)
        for name in victims:
            del self._readable[name]
        self.evictions += len(victims)
        return free + len(victims)

    def _touch(self, names: Sequence[int]) -> None:
        readable = self._readable
        for name in reversed(names):
            if name in readable:
                readable.move_to_end(name)

    def _names(self, keys: Any, first: int, stop: int) -> list[int]:
        """Names of the chunks first .. stop - 1 of a sequence."""
        size = self.chunk_blocks
        part = keys[(first + 1) * size - 1 : stop * size : size]
        return part if isinstance(part, list) else part.tolist()

    def check(self) -> None:
        """Raise AssertionError if more is kept than fits, or a chunk is in two states (tests, --check)."""
        assert 0 <= self.used + self.reserved <= self.capacity
        assert not self._writing.keys() & self._readable.keys() and self._held.keys() <= self._readable.keys()
        assert self._loads == sum(self._held.values()) and all(count > 0 for count in self._held.values())


def host_tier(settings: EngineSettings, kv_bytes_per_token: float) -> HostTier | None:
    """The tier that the settings ask for, None if they ask for none. `kv_bytes_per_token`: all ranks together.

    Raises ConfigError if not one chunk fits.
    """
    size = settings.kv_offloading_size
    if size is None:
        return None
    native = settings.kv_offloading_backend == "native"
    blocks = 1 if native else LMCACHE_CHUNK // settings.block_size
    chunk_bytes = blocks * settings.block_size * kv_bytes_per_token
    capacity = int(size * 2**30 / chunk_bytes) if chunk_bytes else 0
    if not capacity:
        raise ConfigError("kv_offloading_size", found=size, why=f"not one chunk of {chunk_bytes:,.0f} bytes fits",
                          allowed=f"at least {chunk_bytes / 2**30:.4g} GiB")
    return HostTier(capacity, blocks, settings.block_size, chunk_bytes, outputs=not native)
