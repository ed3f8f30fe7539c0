"""Tile configurations: small tables chosen by shape; Triton tunes over them on CUDA, the interpreter takes a small entry."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, total):
    """total + a b, the product in the type of a and b and summed in fp32; fp32 is not cut to TF32."""
    if INTERPRETED:  # it multiplies the bits of bf16 as if they were integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


def _gemm(block_n: int, block_k: int, warps: int, stages: int, group_m: int = 8) -> triton.Config:
    """`group_m`: row tiles that run side by side over the same columns of the weights, so that L2 serves both operands."""
    blocks = {"BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": group_m}
    return triton.Config(blocks, num_warps=warps, num_stages=stages)


# By rows of a tile. 16: the weights' bytes bind, so what counts is loads in flight: deep pipelines and several programs
# an SM. 64 and 128: warp-group MMA; the accumulator takes half or all of the registers and BLOCK_N is its widest.
GROUPED_GEMM = {
    16: [_gemm(64, 128, 4, 4), _gemm(128, 64, 4, 5), _gemm(32, 256, 4, 4), _gemm(64, 64, 4, 6)],
    64: [_gemm(128, 64, 4, 4), _gemm(256, 64, 4, 3), _gemm(128, 128, 8, 3), _gemm(64, 128, 4, 4)],
    128: [_gemm(256, 64, 8, 4), _gemm(256, 64, 8, 3), _gemm(128, 64, 8, 4), _gemm(128, 64, 4, 4)],
}
_GROUPED_GEMM_FP32 = [_gemm(64, 32, 4, 3)]  # no tensor cores at full precision: correct is enough
_GROUPED_GEMM_INTERPRETED = [_gemm(32, 32, 4, 1, group_m=2)]


def grouped_gemm_rows(rows: int, experts: int) -> int:
    """Rows of a tile by the mean rows of an expert: about twice those, so that few experts read their weights twice.

    An H200 moves a weight (bf16) in the time in which it multiplies 200 rows with it: unused rows of a tile of 64 are free.
    """
    if INTERPRETED:
        return 16
    mean = rows / experts
    return 16 if mean <= 8 else 64 if mean <= 48 else 128


def grouped_gemm_configs() -> list[triton.Config]:
    """All that `prune_grouped_gemm` chooses from."""
    if INTERPRETED:
        return _GROUPED_GEMM_INTERPRETED
    return [*_GROUPED_GEMM_FP32, *(config for configs in GROUPED_GEMM.values() for config in configs)]


def prune_grouped_gemm(configs: list[triton.Config], arguments: dict[str, Any], **blocks: Any) -> list[triton.Config]:
    """The entries for the kernel's BLOCK_M and dtype (triton.autotune's early_config_prune)."""
    if INTERPRETED:
        return configs
    return _GROUPED_GEMM_FP32 if arguments["x"].element_size() == 4 else GROUPED_GEMM[blocks["BLOCK_M"]]


def _attention(block_n: int, warps: int, stages: int, block_m: int | None = None) -> triton.Config:
    """`block_n`: keys of a tile; `block_m`: rows of a prefill tile."""
    blocks = {"BLOCK_N": block_n} if block_m is None else {"BLOCK_N": block_n, "BLOCK_M": block_m}
    return triton.Config(blocks, num_warps=warps, num_stages=stages)


# Bytes bind: some 3.5 MB must be under way to keep HBM busy, 26 KB an SM, and two programs or more should fit an SM.
_DECODE = [_attention(64, 4, 3), _attention(64, 4, 4), _attention(128, 4, 3), _attention(128, 8, 3), _attention(32, 2, 4),
           _attention(32, 4, 5)]
_DECODE_FP32 = [_attention(32, 4, 3), _attention(32, 8, 3)]
# By rows. 16: chunks so short that they fill no more. 64: one warp group, so that one program's softmax runs beside
# another's products. 128: two warp groups over the same keys.
_PREFILL = [
    _attention(64, 4, 3, 16), _attention(128, 4, 2, 16),
    _attention(64, 4, 3, 64), _attention(64, 4, 2, 64), _attention(64, 8, 2, 64),
    _attention(64, 8, 3, 128), _attention(128, 8, 2, 128), _attention(64, 8, 2, 128), _attention(128, 8, 3, 128),
]  # fmt: skip
_PREFILL_FP32 = [_attention(32, 8, 2, 16)]
_SHARED_MEMORY = 227 * 1024  # bytes that one program of an H100 or H200 may take


def decode_attention_configs() -> list[triton.Config]:
    """All that `prune_attention` chooses from."""
    return [_attention(32, 4, 1)] if INTERPRETED else [*_DECODE, *_DECODE_FP32]


def prefill_attention_configs() -> list[triton.Config]:
    """All that `prune_attention` chooses from."""
    return [_attention(32, 4, 1, 16)] if INTERPRETED else [*_PREFILL, *_PREFILL_FP32]


def prune_attention(configs: list[triton.Config], arguments: dict[str, Any], **blocks: Any) -> list[triton.Config]:
    """Those for the dtype, of about ROWS rows, that fit the shared memory (triton.autotune's early_config_prune)."""
    size = arguments["q"].element_size()
    prefill = "BLOCK_M" in configs[0].kwargs
    if size == 4:  # no tensor cores at full precision: correct is enough
        configs = _PREFILL_FP32 if prefill else _DECODE_FP32
    else:
        configs = _PREFILL if prefill else _DECODE

    def fits(config: triton.Config) -> bool:
        rows, keys = config.kwargs.get("BLOCK_M", 16), config.kwargs["BLOCK_N"]
        of_rows = size == 4 or not prefill or min(64, blocks["ROWS"]) <= rows <= blocks["ROWS"]
        return of_rows and (rows + 2 * keys * config.num_stages) * blocks["HEAD_DIM"] * size <= _SHARED_MEMORY

    return [config for config in configs if fits(config)]
