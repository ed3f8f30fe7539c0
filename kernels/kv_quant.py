"""KV in 8 or 4 bits: keys per channel over groups of tokens, values per token (KIVI, arXiv 2402.02750, section 3).

Asymmetric: a code c stands for zero + c * scale, where zero is the least value of its group, kept exactly. The scale is
rounded up to its type, so that the codes reach the greatest value and no value is further than half a scale away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from simcore.kernels.checks import check, check_float

_VALUE_ROWS = 32  # tokens of one program where they do not share a scale
# A scale in these types may be rounded down by this much, relative and (fp16 below its normal range) absolute.
ROUNDING = {torch.float16: (2.0**-10, 2.0**-24), torch.bfloat16: (2.0**-7, 0.0), torch.float32: (0.0, 0.0)}


@dataclass(frozen=True)
class Quantized:
    """Keys or values of some tokens.

    `group`: tokens that share scales, one for each channel (keys); 0: one scale for each token and head (values). With 4
    bits a byte holds the code of channel 2i in its low half and that of 2i + 1 in its high half.
    """

    codes: torch.Tensor  # uint8[tokens, kv_heads, head_dim * bits / 8]
    scale: torch.Tensor  # [ceil(tokens / group), kv_heads, head_dim] or [tokens, kv_heads], of the type of the input
    zero: torch.Tensor  # as scale
    bits: int
    group: int

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes


def quantize_keys(k: torch.Tensor, bits: int, group: int) -> Quantized:
    """k [tokens, kv_heads, head_dim] fp16, bf16 or fp32, finite; `bits` 8 or 4; the last group of tokens may be shorter."""
    check(0 < group <= 256, "group", group, "1 .. 256 tokens")
    return _quantize_any(k, "k", bits, group)


def quantize_values(v: torch.Tensor, bits: int) -> Quantized:
    """v [tokens, kv_heads, head_dim], as in quantize_keys."""
    return _quantize_any(v, "v", bits, 0)


def dequantize_keys(q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, kv_heads, head_dim] in `dtype`."""
    check(q.group > 0, "q", "values", "keys, which have a group")
    return _dequantize_any(q, dtype)


def dequantize_values(q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, kv_heads, head_dim] in `dtype`."""
    check(q.group == 0, "q", "keys", "values, whose group is 0")
    return _dequantize_any(q, dtype)


def empty_quantized(x: torch.Tensor, name: str, bits: int, group: int) -> Quantized:
    """Memory for the quantised x; raises ValueError for shapes and types that cannot be packed."""
    check(bits in (4, 8), "bits", bits, "4 or 8")
    check(x.dim() == 3 and x.shape[2] * bits % 8 == 0, name, list(x.shape),
          "[tokens, kv_heads, head_dim], head_dim even for 4 bits")
    tokens, kv_heads, head_dim = x.shape
    scales = (-(-tokens // group), kv_heads, head_dim) if group else (tokens, kv_heads)
    codes = torch.empty(tokens, kv_heads, head_dim * bits // 8, device=x.device, dtype=torch.uint8)
    return Quantized(codes, x.new_empty(scales), x.new_empty(scales), bits, group)


def _quantize_any(x: torch.Tensor, name: str, bits: int, group: int) -> Quantized:
    q = empty_quantized(x, name, bits, group)
    check(x[:1].is_contiguous(), name, f"strides {x.stride()}", "contiguous but for the first axis")
    check_float(name, x)
    tokens, heads, head_dim = x.shape
    relative, absolute = ROUNDING[x.dtype]
    if x.numel():
        rows = group or _VALUE_ROWS
        _quantize[(triton.cdiv(tokens, rows), heads)](
            x, q.codes, q.scale, q.zero, tokens, heads, head_dim, rows, x.stride(0), 1.0 + relative, absolute,
            PER_CHANNEL=group > 0, BITS=bits, ROWS=triton.next_power_of_2(rows),
            CHANNELS=max(2, triton.next_power_of_2(head_dim)), num_warps=4,
        )  # fmt: skip
    return q


def _dequantize_any(q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    check(dtype in ROUNDING, "dtype", dtype, "fp16, bf16 or fp32")
    tokens, heads, packed = q.codes.shape
    head_dim = packed * 8 // q.bits
    out = torch.empty(tokens, heads, head_dim, device=q.codes.device, dtype=dtype)
    if out.numel():
        rows = q.group or _VALUE_ROWS
        _dequantize[(triton.cdiv(tokens, rows), heads)](
            q.codes, q.scale, q.zero, out, tokens, heads, head_dim, rows, PER_CHANNEL=q.group > 0, BITS=q.bits,
            ROWS=triton.next_power_of_2(rows), CHANNELS=max(2, triton.next_power_of_2(head_dim)), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _quantize(
    x, codes, scales, zeros, tokens, heads, head_dim, rows, x_stride, round_up, round_up_by, PER_CHANNEL: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """`rows` tokens of one head: for keys just one group."""
    group, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, ROWS)
    token = group.to(tl.int64) * rows + i
    channel = tl.arange(0, CHANNELS)
    there = (i < rows) & (token < tokens)
    inside = there[:, None] & (channel < head_dim)[None, :]
    at = token[:, None] * x_stride + head * head_dim + channel[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    axis: tl.constexpr = 0 if PER_CHANNEL else 1
    if PER_CHANNEL:
        scale_at = (group.to(tl.int64) * heads + head) * head_dim + channel
        has_scale = channel < head_dim
    else:
        scale_at = token * heads + head
        has_scale = there
    low = tl.min(tl.where(inside, value, float("inf")), axis=axis)
    high = tl.max(tl.where(inside, value, float("-inf")), axis=axis)
    # Where nothing is stored low and high are infinite.
    low = tl.where(has_scale, low, 0.0)
    levels: tl.constexpr = 2**BITS - 1
    scale = tl.where(has_scale, high - low, 0.0) / levels * round_up + round_up_by
    scale = scale.to(scales.dtype.element_ty)
    tl.store(scales + scale_at, scale, mask=has_scale)
    tl.store(zeros + scale_at, low.to(zeros.dtype.element_ty), mask=has_scale)
    inverse = 1.0 / tl.where(scale > 0, scale.to(tl.float32), 1.0)  # of a group of constants every difference is 0
    code = (value - tl.expand_dims(low, axis)) * tl.expand_dims(inverse, axis)
    # Below 0 is only what stands in for values that are not there.
    code = tl.minimum(tl.maximum(tl.floor(code + 0.5), 0.0), levels).to(tl.uint8)
    if BITS == 8:
        tl.store(codes + (token[:, None] * heads + head) * head_dim + channel[None, :], code, mask=inside)
    else:
        even, odd = code.reshape(ROWS, CHANNELS // 2, 2).split()
        pair = tl.arange(0, CHANNELS // 2)
        pairs = head_dim // 2
        in_pairs = there[:, None] & (pair < pairs)[None, :]
        tl.store(codes + (token[:, None] * heads + head) * pairs + pair[None, :], even | (odd << 4), mask=in_pairs)


@triton.jit
def _dequantize(
    codes, scales, zeros, out, tokens, heads, head_dim, rows, PER_CHANNEL: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """`rows` tokens of one head."""
    group, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, ROWS)
    token = group.to(tl.int64) * rows + i
    channel = tl.arange(0, CHANNELS)
    there = (i < rows) & (token < tokens)
    inside = there[:, None] & (channel < head_dim)[None, :]
    axis: tl.constexpr = 0 if PER_CHANNEL else 1
    if PER_CHANNEL:
        scale_at = (group.to(tl.int64) * heads + head) * head_dim + channel
        has_scale = channel < head_dim
    else:
        scale_at = token * heads + head
        has_scale = there
    scale = tl.load(scales + scale_at, mask=has_scale, other=0.0).to(tl.float32)
    zero = tl.load(zeros + scale_at, mask=has_scale, other=0.0).to(tl.float32)
    if BITS == 8:
        code = tl.load(codes + (token[:, None] * heads + head) * head_dim + channel[None, :], mask=inside, other=0)
    else:
        pair = tl.arange(0, CHANNELS // 2)
        pairs = head_dim // 2
        in_pairs = there[:, None] & (pair < pairs)[None, :]
        both = tl.load(codes + (token[:, None] * heads + head) * pairs + pair[None, :], mask=in_pairs, other=0)
        code = tl.join(both & 15, both >> 4).reshape(ROWS, CHANNELS)
    value = code.to(tl.float32) * tl.expand_dims(scale, axis) + tl.expand_dims(zero, axis)
    at = (token[:, None] * heads + head) * head_dim + channel[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
