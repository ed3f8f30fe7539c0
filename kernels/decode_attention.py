"""Attention of one new token a sequence over paged KV memory, the context split over programs (Flash-Decoding).

Bytes bind, not arithmetic: each block of keys and values is read once for the whole group of query heads that share it
(GQA, arXiv 2305.13245), and every sequence is cut into chunks, so that few long sequences also fill the GPU. The softmax is
the online one of FlashAttention (arXiv 2205.14135); chunks are merged by their maxima and sums.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from simcore.kernels.checks import check, check_paged, check_paged_kernel
from simcore.kernels.paged import look_up, token_offsets
from simcore.kernels.tiles import decode_attention_configs, dot, prune_attention

LOG2_E = 1.4426950408889634
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SHORTEST_CHUNK = 512  # tokens; of shorter ones, writing and merging the partial results would take a share that shows
_PROGRAMS_PER_SM = 8  # about four waves of the two that fit: sequences differ in length, and a last wave is seldom full


def decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, context_lens: torch.Tensor,
    *, scale: float, max_context: int, out: torch.Tensor | None = None, splits: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """softmax(scale q K^T) V of one query a sequence: [batch, heads, head_dim], into `out` where it is given.

    q [batch, heads, head_dim] fp16, bf16 or fp32; k_cache, v_cache [num_blocks, block_size, kv_heads, head_dim] of equal
    strides, block_size 16 .. 256, head_dim a power of two in 16 .. 256; query head h reads kv head h // (heads // kv_heads).
    block_table int32[batch, max_blocks]: entries beyond those that the context needs are not read. context_lens
    int32[batch]: tokens in the cache, the new one included; 0 gives zeros. max_context: no context is longer (on a GPU
    nobody checks). splits: at most so many chunks a sequence, of a power of two of tokens; None = enough to fill the GPU.
    Sums in fp32. Raises ValueError. Source: Flash-Decoding (Dao et al., 2023); PagedAttention (arXiv 2309.06180).
    """
    check_paged(q, k_cache, v_cache, block_table, context_lens, out, scale, len(q))
    check_paged_kernel(q, k_cache, v_cache, block_table, context_lens, out, DTYPES)
    batch, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    capacity = block_table.shape[1] * block_size
    check(0 <= max_context <= capacity, "max_context", max_context, f"0 .. {capacity}, what a row of block_table holds")
    check(splits is None or splits > 0, "splits", splits, "> 0")
    if batch and not context_lens.is_cuda:
        longest = int(context_lens.max())
        check(longest <= max_context, "context_lens", longest, f"<= max_context {max_context}")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.numel():
        return out
    chunk = _chunk(batch * kv_heads, max_context, splits, q.device)
    splits = max(1, triton.cdiv(max_context, chunk))
    partial, peaks, sums = out, out, out  # one chunk is the whole: the kernel finishes it
    if splits > 1:
        partial = torch.empty((batch, heads, splits, head_dim), dtype=torch.float32, device=q.device)
        peaks, sums = torch.empty((2, batch, heads, splits), dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    _attend_chunk[(kv_heads, splits, batch)](
        q, k_cache, v_cache, block_table, context_lens, out, partial, peaks, sums, scale * LOG2_E, chunk,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), *k_cache.stride()[:3], block_table.stride(0),
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        WHOLE=splits == 1,
    )  # fmt: skip
    if splits > 1:
        _merge_chunks[(heads, batch)](
            partial, peaks, sums, context_lens, out, chunk, splits, out.stride(0), out.stride(1), HEAD_DIM=head_dim,
            CHUNKS=min(16, triton.next_power_of_2(splits)), num_warps=4,
        )
    return out


def _chunk(sequences: int, max_context: int, splits: int | None, device: torch.device) -> int:
    """Tokens of a chunk, a power of two; `sequences` counts each kv head of each sequence."""
    if splits is not None:
        return max(16, triton.next_power_of_2(triton.cdiv(max_context, splits)))
    fill = triton.cdiv(_PROGRAMS_PER_SM * _multiprocessors(device), sequences)
    if fill == 1:
        return max(_SHORTEST_CHUNK, triton.next_power_of_2(max_context))
    return max(_SHORTEST_CHUNK, triton.next_power_of_2(max_context // fill + 1) // 2)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.autotune(
    configs=decode_attention_configs(), key=["GROUP", "HEAD_DIM", "BLOCK_SIZE", "WHOLE"],
    prune_configs_by={"early_config_prune": prune_attention},
)
@triton.jit(do_not_specialize=["stride_table"])  # the width of the table changes at every step
def _attend_chunk(
    q, k_cache, v_cache, block_table, context_lens, out, partial, peaks, sums, scale_log2, chunk,
    stride_q, stride_q_head, stride_out, stride_out_head, stride_block, stride_token, stride_kv_head, stride_table,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One chunk of one sequence, for the query heads of one kv head: GROUP rows, padded to what a matrix product takes."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    context = tl.load(context_lens + sequence)
    first = split * chunk
    end = tl.minimum(first + chunk, context)
    if WHOLE == 0 and first >= context:
        return
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, HEAD_DIM)
    real = (row < GROUP)[:, None]
    head = kv_head * GROUP + row
    at_q = q + sequence.to(tl.int64) * stride_q + head[:, None] * stride_q_head + channel[None, :]
    query = tl.load(at_q, mask=real, other=0.0)
    table = block_table + sequence.to(tl.int64) * stride_table
    k_head = k_cache + kv_head.to(tl.int64) * stride_kv_head + channel[None, :]
    v_head = v_cache + kv_head.to(tl.int64) * stride_kv_head + channel[None, :]

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    block = look_up(table, first, end, BLOCK_SIZE, BLOCK_N)
    for start in range(first, end, BLOCK_N):
        at = token_offsets(block, start, stride_block, stride_token, BLOCK_SIZE, BLOCK_N)
        block = look_up(table, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        inside = start + tl.arange(0, BLOCK_N) < end
        keys = tl.load(k_head + at[:, None], mask=inside[:, None], other=0.0)
        values = tl.load(v_head + at[:, None], mask=inside[:, None], other=0.0)
        scores = dot(query, tl.trans(keys), tl.zeros([ROWS, BLOCK_N], tl.float32)) * scale_log2
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        mixed = dot(weights.to(values.dtype), values, mixed * shrink[:, None])
        peak = higher

    if WHOLE:
        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]  # an empty sequence: 0 / 1
        at_out = out + sequence.to(tl.int64) * stride_out + head[:, None] * stride_out_head + channel[None, :]
        tl.store(at_out, mixed.to(out.dtype.element_ty), mask=real)
    else:
        heads = tl.num_programs(0) * GROUP
        at = (sequence.to(tl.int64) * heads + head) * tl.num_programs(1) + split
        tl.store(partial + at[:, None] * HEAD_DIM + channel[None, :], mixed, mask=real)
        tl.store(peaks + at, peak, mask=row < GROUP)
        tl.store(sums + at, total, mask=row < GROUP)


@triton.jit(do_not_specialize=["splits"])
def _merge_chunks(
    partial, peaks, sums, context_lens, out, chunk, splits, stride_out, stride_out_head,
    HEAD_DIM: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One head of one sequence; only the chunks that its context reaches were written."""
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    written = tl.cdiv(tl.load(context_lens + sequence), chunk)
    channel = tl.arange(0, HEAD_DIM)
    base = (sequence * tl.num_programs(0) + head) * splits
    peak = float("-inf")
    total = 0.0
    mixed = tl.zeros([HEAD_DIM], tl.float32)
    for first in range(0, written, CHUNKS):
        split = first + tl.arange(0, CHUNKS)
        inside = split < written
        each = tl.load(peaks + base + split, mask=inside, other=float("-inf"))
        of_each = tl.load(sums + base + split, mask=inside, other=0.0)
        at = partial + (base + split)[:, None] * HEAD_DIM + channel[None, :]
        parts = tl.load(at, mask=inside[:, None], other=0.0)
        higher = tl.maximum(peak, tl.max(each, 0))
        weights = tl.exp2(each - higher)
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(of_each * weights, 0)
        mixed = mixed * shrink + tl.sum(parts * weights[:, None], 0)
        peak = higher
    mixed = mixed / tl.where(total > 0, total, 1.0)
    tl.store(out + sequence * stride_out + head * stride_out_head + channel, mixed.to(out.dtype.element_ty))
