"""GPU specifications: memory, peak rates, link and power.

A preset is a YAML file in `gpus/` in which each number has its source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from simcore.errors import ConfigError

PRESETS = Path(__file__).parent / "gpus"
FLOP_DTYPES = ("bf16", "fp8", "int8", "fp4")

# Dtype in which a matrix product runs for weights stored in the key, where the GPU has that rate; bf16 otherwise.
# 4-bit weights need a GPU with 4-bit tensor cores (`fp4`); on Hopper and Ampere they are dequantised in the kernel and
# the product runs in bf16 (w4a16: Marlin, Triton MXFP4). int4 is weight-only everywhere.
_MATH = {"bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "int4": "bf16", "mxfp4": "fp4", "nvfp4": "fp4"}


@dataclass(frozen=True)
class GpuSpec:
    """One GPU. All rates are peaks of the data sheet, dense (without structured sparsity)."""

    name: str
    memory: int  # bytes that a CUDA process sees in total, the number to which vLLM's gpu_memory_utilization applies
    memory_bandwidth: float  # bytes/s
    flops: dict[str, float] = field(hash=False)  # FLOP/s by dtype of the operands; bf16 is always present
    link_bandwidth: float  # bytes/s per direction to the other GPUs of the node
    host_bandwidth: float | None  # bytes/s per direction to the host's memory, as copies reach it; None = not given
    power: float  # W, the board's limit
    sources: dict[str, str] = field(hash=False)  # where each number comes from, by key of the file

    def math_flops(self, weight_dtype: str) -> float:
        """FLOP/s of a matrix product whose weights are stored in `weight_dtype` and whose activations arrive in bf16."""
        return self.flops.get(_MATH[weight_dtype], self.flops["bf16"])


def gpu_names() -> list[str]:
    """Names of the presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load_gpu(name_or_path: str | Path) -> GpuSpec:
    """The preset of that name, or the YAML file at that path.

    Raises ConfigError naming file, key, what was found and what is allowed.
    """
    text = str(name_or_path)
    if text.endswith((".yaml", ".yml")):
        path = Path(text)
    elif text.lower() in gpu_names():
        path = PRESETS / f"{text.lower()}.yaml"
    else:
        raise ConfigError("gpu", found=text, allowed=f"a path to a YAML file, or one of {', '.join(gpu_names())}")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(text, why=f"cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(text, why=f"is not YAML ({' '.join(str(error).split())})") from None
    try:
        file = _GpuFile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part != "[key]")
        raise ConfigError(str(path), key, found=first["input"], allowed=_allowed(first)) from None
    return GpuSpec(
        name=path.stem,
        memory=int(file.memory.value),
        memory_bandwidth=file.memory_bandwidth.value,
        flops={dtype: number.value for dtype, number in file.flops.items()},
        link_bandwidth=file.link_bandwidth.value,
        host_bandwidth=file.host_bandwidth.value if file.host_bandwidth else None,
        power=file.power.value,
        sources={
            "memory": file.memory.source,
            "memory_bandwidth": file.memory_bandwidth.source,
            **{f"flops.{dtype}": number.source for dtype, number in file.flops.items()},
            "link_bandwidth": file.link_bandwidth.source,
            **({"host_bandwidth": file.host_bandwidth.source} if file.host_bandwidth else {}),
            "power": file.power.source,
        },
    )


class _Number(BaseModel):
    model_config = ConfigDict(extra="forbid")
    value: float = Field(gt=0, allow_inf_nan=False)
    source: str = Field(min_length=1)


class _GpuFile(BaseModel):
    """Schema of a GPU file."""

    model_config = ConfigDict(extra="forbid")
    memory: _Number
    memory_bandwidth: _Number
    flops: dict[str, _Number]
    link_bandwidth: _Number
    host_bandwidth: _Number | None = None  # needed for a KV tier in host memory only
    power: _Number

    @field_validator("flops")
    @classmethod
    def _known_dtypes(cls, flops: dict[str, _Number]) -> dict[str, _Number]:
        if "bf16" not in flops or not set(flops) <= set(FLOP_DTYPES):
            raise ValueError(f"bf16, and any of {', '.join(FLOP_DTYPES[1:])}")
        return flops


def _allowed(error) -> str:
    """What a pydantic error says is allowed, in words of the file."""
    if error["type"] == "extra_forbidden":
        keys = _Number.model_fields if len(error["loc"]) > 1 else _GpuFile.model_fields
        return f"only the keys {', '.join(keys)}"
    return error["msg"].removeprefix("Value error, ")
