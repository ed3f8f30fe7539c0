"""A layer of experts: rows sorted by expert, two grouped matrix products (SwiGLU in the first), the weighted sum back.

The host knows the number of rows but not how they fall on experts, and never waits to learn it: a grid is launched that is
large enough for any split, and each program finds its expert and tile from the offsets on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from simcore.kernels.checks import check, check_float
from simcore.kernels.tiles import dot, grouped_gemm_configs, grouped_gemm_rows, prune_grouped_gemm

_FEW_EXPERTS = 128  # up to so many, one compiled kernel serves all counts


@dataclass(frozen=True)
class Routing:
    """Where the rows (token, slot) of a batch stand once they are sorted by expert; a row is one token at one expert."""

    order: torch.Tensor  # int64[rows]: token * top_k + slot of each row
    places: torch.Tensor  # int64[tokens, top_k]: the row of each token and slot
    offsets: torch.Tensor  # int32[experts + 1]: rows offsets[e] .. offsets[e + 1] - 1 are those of expert e


def sort_by_expert(top_experts: torch.Tensor, num_experts: int) -> Routing:
    """The routing of top_experts int64[tokens, top_k], each 0 .. num_experts - 1; tokens of an expert keep their order."""
    check(top_experts.dim() == 2, "top_experts", list(top_experts.shape), "[tokens, top_k]")
    check(0 < num_experts < 1 << 15, "num_experts", num_experts, "1 .. 32767")
    flat = top_experts.flatten()
    device, rows = flat.device, len(flat)
    # Radix sort takes a pass per byte of the key: 2 instead of 8.
    experts, order = torch.sort(flat.to(torch.int16), stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(rows, device=device))
    # Not bincount: it asks the device for the largest entry, and waits.
    offsets = torch.searchsorted(experts, torch.arange(num_experts + 1, device=device, dtype=torch.int16), out_int32=True)
    return Routing(order, places.view(top_experts.shape), offsets)


def grouped_swiglu(
    x: torch.Tensor, gate_up: torch.Tensor, offsets: torch.Tensor, routing: Routing | None = None
) -> torch.Tensor:
    """silu(x gate^T) * (x up^T), each row by its expert's weights: [rows, inner].

    x [rows, hidden] sorted by expert, or with `routing` [tokens, hidden] as they came: rows are then gathered on the way.
    gate_up [experts, 2 * inner, hidden], gate first; offsets int32[experts + 1]. fp16, bf16 or fp32, summed in fp32.
    """
    check(gate_up.dim() == 3 and gate_up.shape[1] % 2 == 0, "gate_up", list(gate_up.shape), "[experts, 2 * inner, hidden]")
    return _grouped(x, gate_up, "gate_up", offsets, routing, swiglu=True)


def grouped_matmul(x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x W^T, each row by its expert's weights: [rows, n_out].

    x [rows, n_in] sorted by expert, weights [experts, n_out, n_in], offsets int32[experts + 1]. Types as in grouped_swiglu.
    """
    check(weights.dim() == 3, "weights", list(weights.shape), "[experts, n_out, n_in]")
    return _grouped(x, weights, "weights", offsets, None, swiglu=False)


def combine(y_sorted: torch.Tensor, routing: Routing, weights: torch.Tensor) -> torch.Tensor:
    """The sum of each token's rows of y_sorted [rows, hidden] times its weights fp32[tokens, top_k]: [tokens, hidden].

    Each token collects its own rows in the order of its slots, in fp32: no atomics, the same bits every time.
    """
    check(y_sorted.dim() == 2 and y_sorted.is_contiguous(), "y_sorted", list(y_sorted.shape), "contiguous [rows, hidden]")
    check_float("y_sorted", y_sorted)
    check(weights.shape == routing.places.shape, "weights", list(weights.shape), f"{list(routing.places.shape)}")
    check(len(y_sorted) == weights.numel(), "y_sorted", f"{len(y_sorted)} rows", f"{weights.numel()}")
    (tokens, top_k), hidden = weights.shape, y_sorted.shape[1]
    out = y_sorted.new_empty(tokens, hidden)
    if out.numel():
        block = min(1024, triton.next_power_of_2(hidden))
        _combine[(tokens, triton.cdiv(hidden, block))](
            y_sorted, routing.places, weights.contiguous(), out, hidden, TOP_K=top_k, BLOCK=block, num_warps=4
        )
    return out


def moe(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, top_experts: torch.Tensor, top_weights: torch.Tensor
) -> torch.Tensor:
    """The whole layer: [tokens, hidden].

    x [tokens, hidden], gate_up [experts, 2 * inner, hidden], gate first, down [experts, hidden, inner], all of one type;
    top_experts int64[tokens, top_k], top_weights fp32[tokens, top_k].
    """
    routing = sort_by_expert(top_experts, len(gate_up))
    h = grouped_swiglu(x, gate_up, routing.offsets, routing)
    return combine(grouped_matmul(h, down, routing.offsets), routing, top_weights)


def _grouped(
    x: torch.Tensor, weights: torch.Tensor, name: str, offsets: torch.Tensor, routing: Routing | None, *, swiglu: bool
) -> torch.Tensor:
    experts, n, k = weights.shape
    check(x.dim() == 2 and x.shape[1] == k and x[:1].is_contiguous(), "x", list(x.shape), f"[rows, {k}], rows contiguous")
    check_float("x", x)
    check(weights.is_contiguous(), name, "strides " + str(weights.stride()), "contiguous")
    check(weights.dtype == x.dtype, name, weights.dtype, f"x's {x.dtype}")
    check(offsets.shape == (experts + 1,), "offsets", list(offsets.shape), f"[{experts + 1}]")
    check(offsets.dtype == torch.int32, "offsets", offsets.dtype, "int32")
    top_k = 1
    if routing is not None:
        check(len(x) == len(routing.places), "x", f"{len(x)} tokens", f"the routing's {len(routing.places)}")
        top_k = routing.places.shape[1]
    rows = len(x) * top_k
    out = x.new_empty(rows, n // 2 if swiglu else n)
    if not out.numel():
        return out
    block_m = grouped_gemm_rows(rows, experts)
    # Each expert that has rows leaves at most one tile not full.
    most_tiles = rows // block_m + min(experts, rows)
    _grouped_gemm[lambda blocks: (most_tiles * triton.cdiv(n, blocks["BLOCK_N"]),)](
        x, routing.order if routing is not None else offsets, weights, offsets, out, n, x.stride(0), experts, K=k,
        EXPERTS=max(_FEW_EXPERTS, triton.next_power_of_2(experts)), TOP_K=top_k, GATHER=routing is not None, SWIGLU=swiglu,
        BLOCK_M=block_m,
    )  # fmt: skip
    return out


@triton.autotune(
    grouped_gemm_configs(), key=["n", "K", "BLOCK_M", "GATHER", "SWIGLU"],
    prune_configs_by={"early_config_prune": prune_grouped_gemm},
)  # fmt: skip
@triton.jit(do_not_specialize=["experts"])
def _grouped_gemm(
    x, order, weights, offsets, out, n, x_stride, experts, K: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    GATHER: tl.constexpr, SWIGLU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M rows of one expert times BLOCK_N rows of its weights.

    With SWIGLU gate and up rows of the weights alternate in the tile: one product yields both, and as neighbours in the
    accumulator they are in the same thread.
    """
    e = tl.arange(0, EXPERTS)
    starts = tl.load(offsets + e, mask=e < experts, other=0)
    ends = tl.load(offsets + e + 1, mask=e < experts, other=0)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    row_tiles = tl.sum(tiles, axis=0)
    column_tiles = tl.cdiv(n, BLOCK_N)
    program = tl.program_id(0)
    if program >= row_tiles * column_tiles:
        return
    band = program // (GROUP_M * column_tiles)
    in_band = program % (GROUP_M * column_tiles)
    band_rows = tl.minimum(row_tiles - band * GROUP_M, GROUP_M)
    row_tile = band * GROUP_M + in_band % band_rows
    column_tile = in_band // band_rows
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= row_tile).to(tl.int32), axis=0)
    row_tile -= tl.sum(tl.where(e < expert, tiles, 0), axis=0)
    end = tl.load(offsets + expert + 1)
    row = tl.load(offsets + expert) + row_tile * BLOCK_M + tl.arange(0, BLOCK_M)

    # Rows and columns past the end repeat the last one, which needs no mask in the loop; they are not stored.
    source = tl.minimum(row, end - 1)
    if GATHER:
        source = (tl.load(order + source) // TOP_K).to(tl.int32)
    column = tl.minimum(column_tile * BLOCK_N + tl.arange(0, BLOCK_N), n - 1)
    if SWIGLU:
        column = column % 2 * (n // 2) + column // 2
    inner = tl.arange(0, BLOCK_K)
    a_at = x + source.to(tl.int64)[:, None] * x_stride + inner[None, :]
    b_at = weights + (expert.to(tl.int64) * n + column)[None, :] * K + inner[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(a_at)
            b = tl.load(b_at)
        else:
            a = tl.load(a_at, mask=inner[None, :] < K - start, other=0.0)
            b = tl.load(b_at, mask=inner[:, None] < K - start, other=0.0)
        total = dot(a, b, total)
        a_at += BLOCK_K
        b_at += BLOCK_K

    if SWIGLU:
        gate, up = total.reshape(BLOCK_M, BLOCK_N // 2, 2).split()
        result = gate / (1.0 + tl.exp(-gate)) * up
        columns = n // 2
        out_column = column_tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        result = total
        columns = n
        out_column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    out_at = out + row.to(tl.int64)[:, None] * columns + out_column[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=(row < end)[:, None] & (out_column < columns)[None, :])


@triton.jit
def _combine(y, places, weights, out, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK channels of one token."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < hidden
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + slot)
        weight = tl.load(weights + token * TOP_K + slot).to(tl.float32)
        total += weight * tl.load(y + place * hidden + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + channel, total.to(out.dtype.element_ty), mask=inside)
