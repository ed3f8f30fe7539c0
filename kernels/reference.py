"""What the kernels compute, in plain torch: the same signatures, any float type, any device. A CPU runs these."""

from __future__ import annotations

import torch

from simcore.kernels.checks import check, check_paged, check_queries
from simcore.kernels.experts import Routing, sort_by_expert
from simcore.kernels.kv_quant import ROUNDING, Quantized, empty_quantized

_MOST_QUERIES = 512  # queries of a slab: its mask stays small, and keys past its last query are left out


def decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, context_lens: torch.Tensor,
    *, scale: float, max_context: int, out: torch.Tensor | None = None, splits: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """See decode_attention.py; `splits` changes nothing here."""
    check_paged(q, k_cache, v_cache, block_table, context_lens, out, scale, len(q))
    out = torch.empty_like(q) if out is None else out
    kv_heads, head_dim = k_cache.shape[2:]
    for i, context in enumerate(context_lens.tolist()):
        check(context <= max_context, "context_lens", context, f"<= max_context {max_context}")
        if context == 0:
            out[i] = 0
            continue
        keys, values = (_tokens_of(cache, block_table[i], context) for cache in (k_cache, v_cache))
        grouped = q[i].view(kv_heads, -1, head_dim)  # a group's heads are like queries of one head that see the same keys
        out[i] = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, scale=scale).view(-1, head_dim)
    return out


def prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, query_starts: torch.Tensor,
    context_lens: torch.Tensor, *, scale: float, max_query: int, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See prefill_attention.py."""
    check_paged(q, k_cache, v_cache, block_table, context_lens, out, scale, len(query_starts) - 1)
    check_queries(query_starts, context_lens, len(q), max_query)
    out = torch.empty_like(q) if out is None else out
    kv_heads, head_dim = k_cache.shape[2:]
    group = q.shape[1] // kv_heads
    starts = query_starts.tolist()
    for i, context in enumerate(context_lens.tolist()):
        before = context - (starts[i + 1] - starts[i])
        if starts[i] == starts[i + 1]:
            continue
        keys, values = (_tokens_of(cache, block_table[i], context) for cache in (k_cache, v_cache))
        for start in range(starts[i], starts[i + 1], _MOST_QUERIES):
            stop = min(start + _MOST_QUERIES, starts[i + 1])
            seen = before + stop - starts[i]
            mask = torch.ones(stop - start, seen, dtype=torch.bool, device=q.device).tril(seen - (stop - start))
            grouped = q[start:stop].view(stop - start, kv_heads, group, head_dim).permute(1, 2, 0, 3)
            k, v = (x[:, None, :seen].expand(-1, group, -1, -1) for x in (keys, values))
            mixed = torch.nn.functional.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
            out[start:stop] = mixed.permute(2, 0, 1, 3).reshape(stop - start, -1, head_dim)
    return out


def _tokens_of(cache: torch.Tensor, blocks: torch.Tensor, context: int) -> torch.Tensor:
    """The sequence's first `context` tokens in the cache: [kv_heads, context, head_dim]."""
    needed = -(-context // cache.shape[1])
    return cache.index_select(0, blocks[:needed]).flatten(0, 1)[:context].transpose(0, 1)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See rms_norm.py."""
    summed = x if residual is None else x + residual
    wide = _wide(summed)
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * _wide(weight)
    return normed.to(x.dtype) if residual is None else (normed.to(x.dtype), summed)


def grouped_swiglu(
    x: torch.Tensor, gate_up: torch.Tensor, offsets: torch.Tensor, routing: Routing | None = None
) -> torch.Tensor:
    """See experts.py."""
    if routing is not None:
        x = x.index_select(0, routing.order // routing.places.shape[1])
    gate, up = grouped_matmul(x, gate_up, offsets).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def grouped_matmul(x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """See experts.py."""
    out = x.new_empty(len(x), weights.shape[1])
    bounds = offsets.tolist()
    for matrix, start, stop in zip(weights, bounds[:-1], bounds[1:], strict=True):
        if stop > start:
            torch.matmul(x[start:stop], matrix.T, out=out[start:stop])
    return out


def combine(y_sorted: torch.Tensor, routing: Routing, weights: torch.Tensor) -> torch.Tensor:
    """See experts.py."""
    y = _wide(y_sorted[routing.places.flatten()]).unflatten(0, routing.places.shape)
    return (y * weights[..., None].to(y.dtype)).sum(dim=1).to(y_sorted.dtype)


def moe(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, top_experts: torch.Tensor, top_weights: torch.Tensor
) -> torch.Tensor:
    """See experts.py."""
    routing = sort_by_expert(top_experts, len(gate_up))
    h = grouped_swiglu(x, gate_up, routing.offsets, routing)
    return combine(grouped_matmul(h, down, routing.offsets), routing, top_weights)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """See kv_blocks.py."""
    kept = slots >= 0
    block, offset = slots[kept] // k_cache.shape[1], slots[kept] % k_cache.shape[1]
    k_cache[block, offset] = k[kept]
    v_cache[block, offset] = v[kept]


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See kv_blocks.py."""
    return torch.index_select(cache, 0, blocks, out=out)


def scatter_blocks(values: torch.Tensor, cache: torch.Tensor, blocks: torch.Tensor) -> None:
    """See kv_blocks.py."""
    cache.index_copy_(0, blocks, values)


def quantize_keys(k: torch.Tensor, bits: int, group: int) -> Quantized:
    """See kv_quant.py."""
    q = empty_quantized(k, "k", bits, group)
    for i, start in enumerate(range(0, len(k), group)):
        tokens = slice(start, start + group)
        q.codes[tokens], scale, zero = _codes(k[tokens], bits, dim=0)
        q.scale[i], q.zero[i] = scale[0], zero[0]
    return q


def quantize_values(v: torch.Tensor, bits: int) -> Quantized:
    """See kv_quant.py."""
    codes, scale, zero = _codes(v, bits, dim=-1)
    return Quantized(codes, scale[..., 0], zero[..., 0], bits, 0)


def dequantize_keys(q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """See kv_quant.py."""
    scale, zero = (part.repeat_interleave(q.group, dim=0)[: len(q.codes)] for part in (q.scale, q.zero))
    return _decoded(q, scale, zero, dtype)


def dequantize_values(q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """See kv_quant.py."""
    return _decoded(q, q.scale[..., None], q.zero[..., None], dtype)


def _codes(x: torch.Tensor, bits: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed codes, scale, zero) with one scale for all of axis `dim`, which stays as an axis of length 1."""
    low, high = x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True)
    levels = 2**bits - 1
    relative, absolute = ROUNDING.get(x.dtype, (0.0, 0.0))
    scale = ((_wide(high) - _wide(low)) / levels * (1.0 + relative) + absolute).to(x.dtype)
    inverse = 1.0 / torch.where(scale > 0, _wide(scale), 1.0)
    codes = ((_wide(x) - _wide(low)) * inverse + 0.5).floor().clamp(max=levels).to(torch.uint8)
    if bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return codes, scale, low


def _decoded(q: Quantized, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    codes = q.codes
    if q.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return (_wide(codes.to(scale.dtype)) * _wide(scale) + _wide(zero)).to(dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In the type that sums are taken in: fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
