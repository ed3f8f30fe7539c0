"""Causal attention of chunks of prompts over paged KV memory: FlashAttention-2 (arXiv 2307.08691) through a block table.

A row of a tile is one query of one head; the heads of a group stand beside one another, so that a tile reads each key for
all of them and a chunk of few queries still fills it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from simcore.kernels.checks import check, check_paged, check_paged_kernel, check_queries
from simcore.kernels.decode_attention import DTYPES, LOG2_E
from simcore.kernels.paged import look_up, token_offsets
from simcore.kernels.tiles import dot, prefill_attention_configs, prune_attention

_ROWS_BUCKETS = (16, 64, 512, 4096)  # rows of the longest chunk, rounded up to one of these: tiles are tuned for each


def prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, query_starts: torch.Tensor,
    context_lens: torch.Tensor, *, scale: float, max_query: int, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """softmax(scale q K^T) V, causal: [tokens, heads, head_dim], into `out` where it is given.

    q [tokens, heads, head_dim] fp16, bf16 or fp32: sequence s owns rows query_starts[s] .. query_starts[s + 1] - 1, n of
    them, perhaps none; rows that no sequence owns are not written. Its query i sees the keys 0 .. context_lens[s] - n + i,
    which are all in the cache. k_cache, v_cache [num_blocks, block_size, kv_heads, head_dim] of equal strides, block_size
    16 .. 256, head_dim a power of two in 16 .. 256; query head h reads kv head h // (heads // kv_heads). block_table
    int32[batch, max_blocks]: entries beyond those that the context needs are not read. query_starts int32[batch + 1],
    context_lens int32[batch]. max_query: no sequence owns more rows (on a GPU nobody checks).
    Sums in fp32. Raises ValueError.
    """
    check_paged(q, k_cache, v_cache, block_table, context_lens, out, scale, len(query_starts) - 1)
    check_paged_kernel(q, k_cache, v_cache, block_table, context_lens, out, DTYPES)
    check(query_starts.dtype == torch.int32 and query_starts.is_contiguous() and query_starts.device == q.device,
          "query_starts", f"{query_starts.dtype} on {query_starts.device}", f"contiguous torch.int32 on {q.device}")
    if not query_starts.is_cuda:
        check_queries(query_starts, context_lens, len(q), max_query)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    batch, kv_heads, group = len(context_lens), k_cache.shape[2], q.shape[1] // k_cache.shape[2]
    rows = max_query * group
    if not batch * rows * q.numel():
        return out
    _attend[lambda tile: (triton.cdiv(rows, tile["BLOCK_M"]), kv_heads, batch)](
        q, k_cache, v_cache, block_table, query_starts, context_lens, out, scale * LOG2_E, q.stride(0), q.stride(1),
        out.stride(0), out.stride(1), *k_cache.stride()[:3], block_table.stride(0),
        GROUP=group, HEAD_DIM=q.shape[2], BLOCK_SIZE=k_cache.shape[1],
        ROWS=next((bucket for bucket in _ROWS_BUCKETS if rows <= bucket), _ROWS_BUCKETS[-1]),
    )  # fmt: skip
    return out


@triton.autotune(
    configs=prefill_attention_configs(), key=["GROUP", "HEAD_DIM", "BLOCK_SIZE", "ROWS"],
    prune_configs_by={"early_config_prune": prune_attention},
)
# The width of the table, and where these start in the batch's, change at every step.
@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["block_table", "context_lens"])
def _attend(
    q, k_cache, v_cache, block_table, query_starts, context_lens, out, scale_log2, stride_q, stride_q_head,
    stride_out, stride_out_head, stride_block, stride_token, stride_kv_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of one kv head of one sequence; row r is query r // GROUP by head r % GROUP of the group."""
    sequence = tl.program_id(2)
    kv_head = tl.program_id(1)
    query_start = tl.load(query_starts + sequence)
    queries = tl.load(query_starts + sequence + 1) - query_start
    # The last tiles see the most keys: they start first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if first >= queries * GROUP:
        return
    before = tl.load(context_lens + sequence) - queries
    row = first + tl.arange(0, BLOCK_M)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    token = (query_start + query).to(tl.int64)
    channel = tl.arange(0, HEAD_DIM)
    real = (row < queries * GROUP)[:, None]
    at_q = q + (token * stride_q + head * stride_q_head)[:, None] + channel[None, :]
    rows = tl.load(at_q, mask=real, other=0.0)
    table = block_table + sequence.to(tl.int64) * stride_table
    k_head = k_cache + kv_head.to(tl.int64) * stride_kv_head + channel[None, :]
    v_head = v_cache + kv_head.to(tl.int64) * stride_kv_head + channel[None, :]

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    last_key = before + query
    edge = (before + first // GROUP + 1) // BLOCK_N * BLOCK_N  # up to here every row sees every key
    end = before + tl.minimum((first + BLOCK_M - 1) // GROUP + 1, queries)
    peak, total, mixed = _over_keys(
        peak, total, mixed, rows, k_head, v_head, table, last_key, 0, edge, scale_log2, stride_block, stride_token, False,
        BLOCK_SIZE, BLOCK_N)
    peak, total, mixed = _over_keys(
        peak, total, mixed, rows, k_head, v_head, table, last_key, edge, end, scale_log2, stride_block, stride_token, True,
        BLOCK_SIZE, BLOCK_N)
    mixed = mixed / total[:, None]  # each row has seen key 0
    at_out = out + (token * stride_out + head * stride_out_head)[:, None] + channel[None, :]
    tl.store(at_out, mixed.to(out.dtype.element_ty), mask=real)


@triton.jit
def _over_keys(
    peak, total, mixed, rows, k_head, v_head, table, last_key, first, end, scale_log2, stride_block, stride_token,
    DIAGONAL: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds keys first .. end - 1 to the rows' running maximum, sum and mixture; DIAGONAL: some rows see only some."""
    block = look_up(table, first, end, BLOCK_SIZE, BLOCK_N)
    for start in range(first, end, BLOCK_N):
        at = token_offsets(block, start, stride_block, stride_token, BLOCK_SIZE, BLOCK_N)
        block = look_up(table, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        key = start + tl.arange(0, BLOCK_N)
        if DIAGONAL:
            keys = tl.load(k_head + at[:, None], mask=(key < end)[:, None], other=0.0)
            values = tl.load(v_head + at[:, None], mask=(key < end)[:, None], other=0.0)
        else:
            keys = tl.load(k_head + at[:, None])
            values = tl.load(v_head + at[:, None])
        scores = dot(rows, tl.trans(keys), tl.zeros([rows.shape[0], BLOCK_N], tl.float32))
        if DIAGONAL:
            scores = tl.where(key[None, :] <= last_key[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        mixed = dot(weights.to(values.dtype), values, mixed * shrink[:, None])
        peak = higher
    return peak, total, mixed
