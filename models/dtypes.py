"""Bytes of a stored weight matrix and of a KV-cache element, by dtype.

Quantised formats carry scales beside the weights, and these enter the bytes:

| dtype     | weight | scale                                | source                                             |
|-----------|--------|--------------------------------------|----------------------------------------------------|
| bf16      | 16 bit | none                                 |                                                    |
| fp8       | 8 bit  | one a tensor or channel: neglected   | compressed-tensors FP8 checkpoints                 |
| fp8_block | 8 bit  | 4 bytes per 128 x 128 block          | DeepSeek-V3 report (2412.19437) section 3.3        |
| int4      | 4 bit  | 2 bytes per 128 inputs of an output  | AWQ (2306.00978), GPTQ with group_size 128         |
| mxfp4     | 4 bit  | 1 byte (E8M0) per 32 inputs          | OCP Microscaling Formats 1.0                       |
| nvfp4     | 4 bit  | 1 byte (E4M3) per 16 inputs          | NVIDIA Blackwell: NVFP4 (its scale a tensor is neglected) |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from simcore.errors import ConfigError

WeightDtype = Literal["bf16", "fp8", "fp8_block", "int4", "mxfp4", "nvfp4"]
KvDtype = Literal["bf16", "fp8"]

BF16_BYTES = 2  # activations, norms, biases, routers, embeddings and LM head stay in bf16 under every weight dtype


@dataclass(frozen=True)
class _Format:
    bits: int
    scale_bytes: int = 0
    group_in: int = 1  # inputs that share a scale
    group_out: int = 1  # outputs that share a scale


_FORMATS: dict[str, _Format] = {
    "bf16": _Format(bits=16),
    "fp8": _Format(bits=8),
    "fp8_block": _Format(bits=8, scale_bytes=4, group_in=128, group_out=128),
    "int4": _Format(bits=4, scale_bytes=2, group_in=128),
    "mxfp4": _Format(bits=4, scale_bytes=1, group_in=32),
    "nvfp4": _Format(bits=4, scale_bytes=1, group_in=16),
}
_KV_BYTES: dict[str, int] = {"bf16": 2, "fp8": 1}


def matrix_bytes(n_in: int, n_out: int, dtype: str) -> int:
    """Bytes of an [n_in, n_out] weight matrix stored in `dtype`, scales included."""
    form = _FORMATS[dtype]
    scales = -(-n_in // form.group_in) * -(-n_out // form.group_out) * form.scale_bytes
    return -(-n_in * n_out * form.bits // 8) + scales


def kv_element_bytes(dtype: str) -> int:
    """Bytes of one element of a key or value in the cache."""
    return _KV_BYTES[dtype]


def check_weight_dtype(where: str, found: object) -> str:
    """`found` if it names a weight dtype, else ConfigError."""
    if not isinstance(found, str) or found not in _FORMATS:
        raise ConfigError(where, "weight_dtype", found=found, allowed=", ".join(get_args(WeightDtype)))
    return found


def check_kv_cache_dtype(where: str, found: object) -> str:
    """bf16 or fp8; `auto` is the dtype of the activations, bf16, as in vLLM."""
    if found == "auto":
        return "bf16"
    if not isinstance(found, str) or found not in _KV_BYTES:
        raise ConfigError(where, "kv_cache_dtype", found=found, allowed=", ".join(("auto", *get_args(KvDtype))))
    return found
