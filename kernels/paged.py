"""Where the keys and values of a tile of tokens lie in the paged cache: what the two attention kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def look_up(table, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks of the tokens start .. start + BLOCK_N - 1: int32[BLOCK_N], or one int32. table: the sequence's block table.

    Tokens from `end` on are not looked up. `start` is a multiple of BLOCK_N, or the range up to `end` lies within one such
    tile; so where BLOCK_N divides a block, one look-up serves the whole tile. Callers look up a tile while they work on the
    one before: the compiler then need not split its prefetches between the look-up and the loads that depend on it.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        token = start + tl.arange(0, BLOCK_N)
        block = tl.load(table + token // BLOCK_SIZE, mask=token < end, other=0)
    return block


@triton.jit
def token_offsets(block, start, stride_block, stride_token, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets int64[BLOCK_N] in the cache of the tokens start .. start + BLOCK_N - 1, given their blocks."""
    return block.to(tl.int64) * stride_block + (start + tl.arange(0, BLOCK_N)) % BLOCK_SIZE * stride_token
