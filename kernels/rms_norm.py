"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), with the residual addition before it in the same pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from simcore.kernels.checks import check, check_float

_MOST_CHANNELS = 1 << 16  # a row stays in the registers of one program


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; with `residual`, that of x + residual, and the sum itself.

    x, residual [tokens, hidden] fp16, bf16 or fp32, weight [hidden]. Statistics in fp32; the sum is rounded to x's type
    before it is normalised, so that what is normalised is what the next layer adds to.
    """
    tokens, hidden = x.shape if x.dim() == 2 else (0, 0)
    check(x.dim() == 2 and 0 < hidden <= _MOST_CHANNELS and x[:1].is_contiguous(), "x", list(x.shape),
          f"[tokens, hidden], hidden 1 .. {_MOST_CHANNELS}, rows contiguous")
    check_float("x", x)
    check(weight.shape == (hidden,) and weight.is_contiguous(), "weight", list(weight.shape), f"contiguous [{hidden}]")
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    summed = None
    if residual is not None:
        check(residual.shape == x.shape and residual[:1].is_contiguous(), "residual", list(residual.shape),
              f"{list(x.shape)}, rows contiguous")
        check(residual.dtype == x.dtype, "residual", residual.dtype, f"x's {x.dtype}")
        summed = torch.empty_like(out)
    if tokens:
        block = triton.next_power_of_2(hidden)
        _rms_norm[(tokens,)](
            x, residual if residual is not None else x, weight, out, summed if summed is not None else out, hidden, eps,
            x.stride(0), residual.stride(0) if residual is not None else 0, ADD=residual is not None, BLOCK=block,
            num_warps=min(16, max(4, block // 1024)),
        )  # fmt: skip
    return out if summed is None else (out, summed)


@triton.jit
def _rms_norm(
    x, residual, weight, out, summed, hidden, eps, x_stride, residual_stride, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < hidden
    row = tl.load(x + token * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        row += tl.load(residual + token * residual_stride + channel, mask=inside, other=0.0).to(tl.float32)
        rounded = row.to(summed.dtype.element_ty)
        tl.store(summed + token * hidden + channel, rounded, mask=inside)
        row = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(row * row, axis=0) / hidden + eps)
    tl.store(out + token * hidden + channel, (row * inverse * scale).to(out.dtype.element_ty), mask=inside)
