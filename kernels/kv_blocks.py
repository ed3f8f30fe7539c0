"""KV memory in blocks: writing a step's keys and values into their slots, and moving whole blocks to and from a buffer.

All three copy bytes, in words as wide as the addresses allow, whatever the type; addresses are 64 bits wide.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from simcore.kernels.checks import check

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes k, v [tokens, kv_heads, head_dim] into the caches [num_blocks, block_size, kv_heads, head_dim], in place.

    slots int64[tokens]: block * block_size + offset, all different; -1 = skip the token. k and v may be slices of one
    wider product: only the last two axes must be contiguous.
    """
    check(k.dim() == 3, "k", list(k.shape), "[tokens, kv_heads, head_dim]")
    check(v.shape == k.shape, "v", list(v.shape), f"{list(k.shape)}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check(cache.dim() == 4 and cache.shape[2:] == k.shape[1:], name, list(cache.shape),
              f"[num_blocks, block_size, {k.shape[1]}, {k.shape[2]}]")
    check(v_cache.shape == k_cache.shape, "v_cache", list(v_cache.shape), f"{list(k_cache.shape)}")
    check(slots.shape == (len(k),) and slots.is_contiguous(), "slots", list(slots.shape), f"contiguous [{len(k)}]")
    if not k.numel():
        return
    sources = _as_words({"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache})
    ks, vs, k_to, v_to = sources
    block = min(1024, triton.next_power_of_2(ks.shape[1]))
    _write_kv[(len(k), triton.cdiv(ks.shape[1], block))](
        ks, vs, k_to, v_to, slots, k_cache.shape[1], ks.shape[1], *(words.stride(0) for words in sources), BLOCK=block,
        num_warps=_warps(block),
    )


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The blocks int64[n] of cache [num_blocks, ...] as [n, ...], contiguous; into `out` where it is given (swap out)."""
    shape = (_blocks_of(blocks), *cache.shape[1:])
    if out is None:
        out = cache.new_empty(shape)
    check(out.shape == shape and out.is_contiguous(), "out", list(out.shape), f"contiguous {list(shape)}")
    check(out.dtype == cache.dtype, "out", out.dtype, f"cache's {cache.dtype}")
    _copy_blocks(out, cache, blocks, "out", gather=True)
    return out


def scatter_blocks(values: torch.Tensor, cache: torch.Tensor, blocks: torch.Tensor) -> None:
    """Writes values [n, ...] over the blocks int64[n], all different, of cache [num_blocks, ...], in place (swap in)."""
    shape = (_blocks_of(blocks), *cache.shape[1:])
    check(values.shape == shape, "values", list(values.shape), f"{list(shape)}")
    check(values.dtype == cache.dtype, "values", values.dtype, f"cache's {cache.dtype}")
    _copy_blocks(values, cache, blocks, "values", gather=False)


def _copy_blocks(values: torch.Tensor, cache: torch.Tensor, blocks: torch.Tensor, name: str, *, gather: bool) -> None:
    if not values.numel():
        return
    rows, in_cache = _as_words({name: values, "cache": cache})
    block = min(1024, triton.next_power_of_2(rows.shape[1]))
    _move[(len(blocks), triton.cdiv(rows.shape[1], block))](
        rows, in_cache, blocks, rows.shape[1], rows.stride(0), in_cache.stride(0), GATHER=gather, BLOCK=block,
        num_warps=_warps(block),
    )


def _blocks_of(blocks: torch.Tensor) -> int:
    check(blocks.dim() == 1 and blocks.is_contiguous(), "blocks", list(blocks.shape), "contiguous [n]")
    check(blocks.dtype in (torch.int32, torch.int64), "blocks", blocks.dtype, "int64 or int32")
    return len(blocks)


def _as_words(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Each [n, ...] as integers [n, words of a row], of the widest word that all their addresses allow."""
    flat = []
    size = 8
    for name, tensor in tensors.items():
        check(tensor[:1].is_contiguous(), name, f"strides {tensor.stride()}", "contiguous but for the first axis")
        check(tensor.dtype == next(iter(tensors.values())).dtype, name, tensor.dtype, "the type of the others")
        row = math.prod(tensor.shape[1:])
        rows = tensor.as_strided((len(tensor), row), (tensor.stride(0) if len(tensor) > 1 else row, 1))
        width = rows.element_size()
        size = math.gcd(size, row * width, rows.stride(0) * width, rows.data_ptr())
        flat.append(rows)
    return [rows.view(_WORDS[size]) for rows in flat]


def _warps(block: int) -> int:
    """Sixteen bytes or more a thread in each load, and several such loads in flight."""
    return min(4, max(1, block // 128))


@triton.jit
def _write_kv(
    k, v, k_cache, v_cache, slots, block_size, words, k_stride, v_stride, k_cache_stride, v_cache_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK words of the keys and of the values of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    key = tl.load(k + token * k_stride + word, mask=inside)
    value = tl.load(v + token * v_stride + word, mask=inside)
    in_block = slot % block_size * words + word
    tl.store(k_cache + slot // block_size * k_cache_stride + in_block, key, mask=inside)
    tl.store(v_cache + slot // block_size * v_cache_stride + in_block, value, mask=inside)


@triton.jit
def _move(values, cache, blocks, words, stride, cache_stride, GATHER: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK words of one block."""
    i = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    at = values + i * stride + word
    in_cache = cache + tl.load(blocks + i).to(tl.int64) * cache_stride + word
    if GATHER:
        tl.store(at, tl.load(in_cache, mask=inside), mask=inside)
    else:
        tl.store(in_cache, tl.load(at, mask=inside), mask=inside)
