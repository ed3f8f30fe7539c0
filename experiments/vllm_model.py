"""The model that a vLLM server names: a preset by its Hugging Face name, or a folder with its config.json."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from simcore.errors import ConfigError
from simcore.models.hf_config import PRESETS, llm_names, load_llm
from simcore.models.llm import LlmSpec

# Last part of a Hugging Face name in lower case -> preset, and the model's own max_position_embeddings where that of the
# preset is another (the architecture is the same).
_NAMES: tuple[tuple[str, str, int | None], ...] = (
    (r"(meta-)?llama-3\.1-8b(-instruct)?|deepseek-r1-distill-llama-8b", "llama-3.1-8b", None),
    (r"(meta-)?llama-3-8b(-instruct)?", "llama-3.1-8b", 8192),
    (r"(meta-)?llama-3\.1-70b(-instruct)?|llama-3\.3-70b-instruct|deepseek-r1-distill-llama-70b", "llama-3.1-70b", None),
    (r"(meta-)?llama-3-70b(-instruct)?", "llama-3.1-70b", 8192),
    (r"mixtral-8x7b(-instruct)?(-v0\.1)?", "mixtral-8x7b", None),
    (r"qwen3-8b", "qwen3-8b", None),
    (r"qwen3-8b-base", "qwen3-8b", 32768),
    (r"qwen3-32b", "qwen3-32b", None),
    (r"qwen3-30b-a3b", "qwen3-30b-a3b", None),
    (r"qwen3-30b-a3b-(instruct|thinking)-2507|qwen3-coder-30b-a3b-instruct", "qwen3-30b-a3b", 262144),
    (r"gpt-oss-20b", "gpt-oss-20b", None),
    (r"gpt-oss-120b", "gpt-oss-120b", None),
)
# How names say that a checkpoint is quantised, and the weight_dtype that comes nearest.
_SUFFIXES = (
    (r"-fp8(-dynamic|-kv|-block)?", "fp8"), (r"-nvfp4(a16)?|-fp4", "nvfp4"), (r"-mxfp4", "mxfp4"),
    (r"-(awq|gptq)(-int4)?|-int4|[-.](quantized\.)?w4a16", "int4"), (r"-(gptq-)?int8|[-.](quantized\.)?w8a8", "int8"),
)  # fmt: skip
# --quantization -> weight_dtype; None = what the checkpoint itself says.
_METHODS: dict[str, str | None] = {
    **dict.fromkeys(("awq", "awq_marlin", "auto_awq", "gptq", "gptq_marlin", "auto_gptq", "moe_wna16"), "int4"),
    "bitsandbytes": "int4",
    **dict.fromkeys(("fp8", "fp8_per_tensor", "fp8_per_channel", "fbgemm_fp8", "ptpc_fp8", "modelopt"), "fp8"),
    "fp8_per_block": "fp8_block", "mxfp4": "mxfp4", "gpt_oss_mxfp4": "mxfp4",
    **dict.fromkeys(("modelopt_fp4", "nvfp4_per_token", "nvfp4"), "nvfp4"),
    **dict.fromkeys(("compressed-tensors", "none", ""), None),
}  # fmt: skip
_ROPE_SCALED_ALREADY = ("su", "longrope", "llama3", "default", "mrope")


@dataclass
class Model:
    """What stands in the study as `model`, and why."""

    name: str
    llm: LlmSpec
    limit: int  # the longest context that the server can have
    says: str
    weight_dtype: str | None = None
    weight_says: str = ""
    file: dict[str, Any] | None = None  # a preset to be written beside the study, where the checkpoint's own is changed
    warnings: list[str] = field(default_factory=list)


def resolve_model(
    served: str, *, where: str, config: Path | None, quantization: str | None, kv_cache_dtype: str,
    overrides: dict[str, Any], longest: int | None, allow_long: bool,
) -> Model:
    """The model of a server. `served`: as vLLM was told; `config`: config.json or its folder, which counts before all
    else; `longest`: the max_model_len asked for. Raises ConfigError saying how to get a config.json."""
    warnings: list[str] = []
    suffix, limit = None, None
    if config is not None:
        name, says = str(config.resolve()), f"--model-config, for {served}"
    elif (Path(served) / "config.json").is_file() or (served.endswith(".json") and Path(served).is_file()):
        name, says = str(Path(served).resolve()), "the folder that the server loads from"
    else:
        name, suffix, limit = _preset(served, where)
        if suffix == "fp8" and f"{name}-fp8" in llm_names():
            name = f"{name}-fp8"
        says = f"preset, by the name {served}"
    llm = load_llm(name, None, kv_cache_dtype)
    changed = {**({"max_position_embeddings": limit} if limit and limit > llm.max_position_embeddings else {}), **overrides}
    limit = limit or llm.max_position_embeddings
    if allow_long and longest is not None and longest > limit:
        changed["max_position_embeddings"] = longest
    file = None
    if changed:
        file = _as_served(name, served, changed)
        llm = _load_file(file, kv_cache_dtype)
        limit = llm.max_position_embeddings
        says += f", with {', '.join(sorted(changed))} as served"
    if longest is not None and longest > limit:
        raise ConfigError(
            where, "max-model-len", found=longest, why=f"{served} is known here to read {limit} tokens",
            allowed="--model-config with the checkpoint's own config.json, or --hf-overrides as the server has them")
    wanted, weight_says = _weights(llm, quantization, suffix, warnings)
    return Model(name, llm, limit, says, wanted, weight_says, file, warnings)


def _load_file(file: dict[str, Any], kv_cache_dtype: str) -> LlmSpec:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hf-overrides.yaml"
        path.write_text(yaml.safe_dump(file), encoding="utf-8")
        try:
            return load_llm(path, None, kv_cache_dtype)
        except ConfigError as error:
            raise ConfigError("--hf-overrides", error.key, found=error.found, allowed=error.allowed, why=error.why) from None


def _base(served: str) -> tuple[str, str | None]:
    """The last part of a name in lower case without what says that it is quantised, and the weight dtype that this says."""
    cached = re.search(r"models--[^/]+?--([^/]+)", served)  # Hugging Face's cache on disk
    base = (cached[1] if cached else served.rstrip("/").rsplit("/", 1)[-1]).lower()
    for pattern, dtype in _SUFFIXES:
        cut = re.sub(rf"({pattern})$", "", base)
        if cut != base:
            return cut, dtype
    return base, None


def _preset(served: str, where: str) -> tuple[str, str | None, int | None]:
    base, dtype = _base(served)
    if served.lower() in llm_names():
        return served.lower(), None, None
    for pattern, preset, length in _NAMES:
        if re.fullmatch(pattern, base):
            return preset, dtype, length
    is_path = served.startswith(("/", ".", "~"))
    fetch = ("copy the server's config.json here" if is_path else
             f"hf download {served} config.json --local-dir {served.rsplit('/', 1)[-1]}")
    raise ConfigError(
        where, "model", found=served, why="is no preset, and no folder with a config.json that can be seen from here",
        allowed=f"--model-config FOLDER with its config.json ({fetch}); presets: {', '.join(llm_names())}")


def _weights(llm: LlmSpec, method: str | None, suffix: str | None, warnings: list[str]) -> tuple[str | None, str]:
    """The weight_dtype to put into the study, None = the model's own; and why."""
    if method is not None:
        key = method.lower().replace("compressed_tensors", "compressed-tensors")
        if key not in _METHODS:
            warnings.append(f"--quantization {method}: not understood, weights are taken as {llm.weight_dtype}; "
                            "set model.weight_dtype")
            return None, ""
        if key == "bitsandbytes":
            warnings.append("--quantization bitsandbytes: taken as 4-bit weights of 128 to a group; its kernels are slower")
        if _METHODS[key] is not None and llm.weight_dtype == "bf16":
            return _METHODS[key], f"--quantization {method}"
        if _METHODS[key] is not None or llm.weight_dtype != "bf16":
            return None, ""  # the flag only says what the checkpoint says
    if suffix == "int8":
        warnings.append("8-bit integer weights: the study has fp8, which is as large and as fast on most GPUs")
        suffix = "fp8"
    if suffix is not None and llm.weight_dtype == "bf16":
        return suffix, "by the model's name"
    return None, ""


def _as_served(name: str, served: str, changed: dict[str, Any]) -> dict[str, Any]:
    """A preset file: the configuration of `name` with the server's changes laid over it."""
    raw = _raw(name)
    config = {**raw["config"], **changed}
    rope = changed.get("rope_scaling") or changed.get("rope_parameters")
    if isinstance(rope, dict) and "max_position_embeddings" not in changed:
        kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor", 1.0)
        if kind not in _ROPE_SCALED_ALREADY and isinstance(factor, (int, float)):
            original = rope.get("original_max_position_embeddings", raw["config"].get("max_position_embeddings", 0))
            config["max_position_embeddings"] = max(int(original * factor), config.get("max_position_embeddings", 0))
    file = {"source": f"{name} as a vLLM server has it ({served}): changed {', '.join(sorted(changed))}", "config": config}
    return {**file, **({"weight_dtype": raw["weight_dtype"]} if "weight_dtype" in raw else {})}


def _raw(name: str) -> dict[str, Any]:
    """The keys of a preset (its base filled in) or of a config.json; load_llm has read it before, so it is well-formed."""
    path = PRESETS / f"{name}.yaml" if name in llm_names() else Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return {"config": json.loads(path.read_text(encoding="utf-8"))}
    data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {**_raw(data["base"]), **data} if "base" in data else data
