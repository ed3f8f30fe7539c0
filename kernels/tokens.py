"""Token ids of a request, by a fixed rule from the identity of its blocks.

Traces tell which blocks are equal, not what they say. Equal keys give equal tokens, so that a reused block holds just what
computing it again would give; what a request writes is given in the same way, whatever a model of random weights says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_OWN = np.uint64(1) << np.uint64(63)  # set in the seeds of content that no block of the trace names


def token_ids(keys: Sequence[int], request: int, start: int, stop: int, block_size: int, vocab: int) -> np.ndarray:
    """Ids of the request's tokens start .. stop - 1: int64[stop - start], below `vocab`.

    `keys`: identities of its full blocks of `block_size` tokens; what stands after them is the request's own.
    """
    at = np.arange(start, stop)
    block, offset = at // block_size, (at % block_size).astype(np.uint64)
    known = np.asarray(keys[start // block_size : (stop - 1) // block_size + 1], dtype=np.int64).view(np.uint64)
    first = start // block_size
    seeds = _OWN + np.uint64(request)
    of_block = np.full(int(block[-1]) - first + 1 if len(at) else 0, seeds, dtype=np.uint64)
    of_block[len(known):] += (np.arange(first + len(known), first + len(of_block)).astype(np.uint64) << np.uint64(32))
    of_block[: len(known)] = known
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(of_block[block - first]) + offset)
    return (mixed % np.uint64(vocab)).astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
