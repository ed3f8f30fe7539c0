"""The operators that the decoder takes from here, in two kinds: plain torch, and Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from simcore.kernels.install import require

Kind = Literal["torch", "triton"]


@dataclass(frozen=True)
class Operators:
    """Functions of the same signatures in either kind; see their own files."""

    decode_attention: Callable[..., Any]
    prefill_attention: Callable[..., Any]
    rms_norm: Callable[..., Any]
    write_kv: Callable[..., Any]
    moe: Callable[..., Any]


def load_operators(kind: Kind) -> Operators:
    """Raises ConfigError where torch or Triton is not installed."""
    require()
    if kind == "torch":
        from simcore.kernels import reference as r

        return Operators(r.decode_attention, r.prefill_attention, r.rms_norm, r.write_kv, r.moe)
    from simcore.kernels.decode_attention import decode_attention
    from simcore.kernels.experts import moe
    from simcore.kernels.kv_blocks import write_kv
    from simcore.kernels.prefill_attention import prefill_attention
    from simcore.kernels.rms_norm import rms_norm

    return Operators(decode_attention, prefill_attention, rms_norm, write_kv, moe)
