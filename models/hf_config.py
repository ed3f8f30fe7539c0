"""Reads an LLM from a preset (`llms/<name>.yaml`) or any Hugging Face `config.json` of a family listed in `_FAMILIES`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from simcore.errors import ConfigError
from simcore.models.dtypes import check_kv_cache_dtype, check_weight_dtype
from simcore.models.llm import GatedMlp, GroupedQueryAttention, LayerGroup, Linear, LlmSpec, MixtureOfExperts

PRESETS = Path(__file__).parent / "llms"


def llm_names() -> list[str]:
    """Names of the presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load_llm(name_or_path: str | Path, weight_dtype: str | None = None, kv_cache_dtype: str = "auto") -> LlmSpec:
    """The preset of that name; or a preset file (.yaml), a config.json, or a folder that holds one.

    `weight_dtype` (bf16, fp8, fp8_block, int4, mxfp4, nvfp4) wins over the checkpoint's own quantisation.
    Raises ConfigError naming file, key, what was found and what is allowed; an unknown family, or a key that is not known
    to leave sizes and times alone, is refused.
    """
    text = str(name_or_path)
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        config, name = _load_mapping(path, json.loads), path.parent.name or path.stem
    else:
        if path.suffix not in (".yaml", ".yml"):
            path = _preset(text)
        preset = _read_preset(path)
        config, name = preset["config"], path.stem
        weight_dtype = weight_dtype or preset.get("weight_dtype")
    if weight_dtype is not None:
        check_weight_dtype(text, weight_dtype)
    return _parse(_Reader(str(path), config), name, weight_dtype, check_kv_cache_dtype(text, kv_cache_dtype))


def _preset(name: str) -> Path:
    if name.lower() not in llm_names():
        allowed = f"a path to a config.json, or one of {', '.join(llm_names())}"
        raise ConfigError("llm", found=name, allowed=allowed)
    return PRESETS / f"{name.lower()}.yaml"


def _read_preset(path: Path) -> dict[str, Any]:
    """A preset file with its `base`, if it has one, filled in."""
    preset = _load_mapping(path, yaml.safe_load)
    keys = ("config", "base", "weight_dtype", "source", "published")
    for key in preset:
        if key not in keys:
            raise ConfigError(str(path), str(key), found=preset[key], allowed=f"only the keys {', '.join(keys)}")
    if ("base" in preset) == ("config" in preset):
        raise ConfigError(str(path), "config", allowed="either `config` (keys of a config.json) or `base` (a preset)")
    if "base" in preset:
        preset = {**_read_preset(_preset(str(preset["base"]))), **preset}
    if not isinstance(preset["config"], dict):
        raise ConfigError(str(path), "config", found=preset["config"], allowed="a mapping with the keys of a config.json")
    return preset


def _load_mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        data = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), why=f"cannot be read ({error.strerror})") from None
    except (ValueError, yaml.YAMLError) as error:  # json.JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ConfigError(str(path), why=f"cannot be parsed ({' '.join(str(error).split())})") from None
    if not isinstance(data, dict):
        raise ConfigError(str(path), found=data, allowed="a mapping")
    return data


# Keys that change neither a size nor a time. Positions, norms' epsilons, routing weights and losses do not; nor does
# torch_dtype: engines load in 16 bits.
_IGNORED = frozenset((
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "attention_dropout",
    "attn_implementation", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "embd_pdrop", "eos_token_id",
    "finetuning_task", "gradient_checkpointing", "hidden_act", "hidden_dropout", "id2label", "initial_context_length",
    "initializer_range", "is_llama_config", "label2id", "max_length", "max_sequence_length", "model_max_length",
    "neftune_noise_alpha", "norm_topk_prob", "original_max_position_embeddings", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token", "pad_token_id", "partial_rotary_factor", "pretraining_tp",
    "problem_type", "resid_pdrop", "return_dict", "rms_norm_eps", "rope_interleaved", "rope_parameters", "rope_scaling",
    "rope_theta", "router_aux_loss_coef", "router_jitter_noise", "sep_token_id", "swiglu_limit", "task_specific_params",
    "tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "unk_token_id", "unsloth_fixed",
    "unsloth_version", "use_cache",
))  # fmt: skip
_IGNORED_QUANTIZATION = frozenset((
    "global_compression_ratio", "quantization_status", "version", "sparsity_config", "transform_config",
))  # fmt: skip
# Of AWQ and GPTQ checkpoints: how they were made, and which kernels run them.
_IGNORED_INT4 = frozenset((
    "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "checkpoint_format", "damp_percent",
    "damp_auto_increment", "dataset", "desc_act", "do_fuse", "exllama_config", "fuse_max_seq_len", "is_marlin_format",
    "max_input_length", "meta", "mse", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "modules_to_fuse", "pad_token_id", "pack_dtype", "quantizer", "static_groups",
    "sym", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "version", "zero_point",
))  # fmt: skip


class _Reader:
    """Takes keys from a mapping one by one, so that those nobody took can be refused."""

    def __init__(self, where: str, data: dict[str, Any], prefix: str = "") -> None:
        self.where, self.data, self.prefix = where, data, prefix
        self.taken: set[str] = set()

    def fail(self, key: str, allowed: str, why: str = "") -> ConfigError:
        found = self.data.get(key, "nothing")
        return ConfigError(self.where, self.prefix + key, found="null" if found is None else found, allowed=allowed, why=why)

    def any(self, key: str, default: Any = None) -> Any:
        self.taken.add(key)
        return self.data.get(key, default)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; without a default the key must be there. None counts as absent (Hugging Face writes null)."""
        value = self.any(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fail(key, "an integer of at least 1")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.any(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def items(self, key: str) -> list[Any]:
        """A list; absent and null are empty."""
        value = self.any(key)
        if value is not None and not isinstance(value, list):
            raise self.fail(key, "a list")
        return value or []

    def only(self, key: str, *values: Any) -> None:
        """The key may be absent; if it is there its value must be one of these."""
        if self.any(key, values[0]) not in values:
            raise self.fail(key, " or ".join(map(repr, values)))

    def finish(self, ignored: frozenset[str] = frozenset()) -> None:
        for key in self.data:
            if key not in self.taken and key not in ignored:
                raise self.fail(key, f"of the keys that matter only {', '.join(sorted(self.taken))}", "unknown key")


def _parse(config: _Reader, name: str, weight_dtype: str | None, kv_cache_dtype: str) -> LlmSpec:
    family = config.any("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise config.fail("model_type", ", ".join(sorted(_FAMILIES)))
    for architecture in config.items("architectures"):
        if not str(architecture).endswith("ForCausalLM"):
            raise config.fail("architectures", "a causal language model (...ForCausalLM)")
    hidden, n_layers = config.count("hidden_size"), config.count("num_hidden_layers")
    attentions = _attentions(config, family, hidden, n_layers)
    groups = Counter(zip(attentions, _FAMILIES[family](config, hidden, n_layers), strict=True))
    vocab, longest = config.count("vocab_size"), config.count("max_position_embeddings")
    tied = config.flag("tie_word_embeddings")
    stored = _stored_dtype(config)
    config.finish(_IGNORED)
    spec = LlmSpec(
        name=name,
        family=family,
        hidden=hidden,
        vocab=vocab,
        max_position_embeddings=longest,
        tie_word_embeddings=tied,
        layers=tuple(LayerGroup(count, attention, mlp) for (attention, mlp), count in groups.items()),
        weight_dtype=weight_dtype or stored,
        experts_only=family == "gpt_oss" and (weight_dtype or stored) == "mxfp4",
        kv_cache_dtype=kv_cache_dtype,
    )
    if not spec.n_full_layers:
        raise config.fail("sliding_window", "a model with at least one full-attention layer", "every layer is windowed")
    return spec


def _attentions(config: _Reader, family: str, hidden: int, n_layers: int) -> list[GroupedQueryAttention]:
    """The attention of each layer."""
    heads = config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.fail("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if config.any("head_dim") is None and hidden % heads:
        raise config.fail("num_attention_heads", f"a divisor of hidden_size = {hidden}, where there is no head_dim")
    qwen3, gpt_oss = family in ("qwen3", "qwen3_moe"), family == "gpt_oss"
    config.only("is_encoder_decoder", False, None)
    config.only("add_cross_attention", False, None)
    config.only("use_mrope", False, None)
    config.only("qkv_bias", family == "qwen2", None)
    config.only("use_qk_norm", qwen3, None)
    # Qwen3 and gpt-oss have heads that are not hidden / heads wide, so guessing would be wrong.
    head_dim = config.count("head_dim", None if qwen3 or gpt_oss else hidden // heads)
    bias = config.flag("attention_bias", gpt_oss)
    qkv = Linear(hidden, (heads + 2 * kv_heads) * head_dim, bias or family == "qwen2")  # Qwen2's, whatever the key says
    out = Linear(heads * head_dim, hidden, bias)
    vectors = (2 * head_dim if qwen3 else 0) + (heads if gpt_oss else 0)
    return [
        GroupedQueryAttention(qkv, out, heads, kv_heads, head_dim, window, vectors)
        for window in _windows(config, family, n_layers)
    ]


def _windows(config: _Reader, family: str, n_layers: int) -> list[int | None]:
    """The sliding window of each layer in tokens, None for full attention."""
    window = config.count("sliding_window") if config.any("sliding_window") is not None else None
    qwen = family.startswith("qwen")
    first_windowed = config.count("max_window_layers", n_layers) if qwen else 0
    if qwen and not config.flag("use_sliding_window"):
        window = None
    kinds = config.items("layer_types")
    if not kinds:
        full = [window is None or i < first_windowed or (family == "gpt_oss" and i % 2 == 1) for i in range(n_layers)]
        kinds = ["full_attention" if is_full else "sliding_attention" for is_full in full]
    if len(kinds) != n_layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise config.fail("layer_types", f"{n_layers} times full_attention or sliding_attention")
    if window is None and "sliding_attention" in kinds:
        raise config.fail("sliding_window", "an integer of at least 1, since layer_types has sliding_attention")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _gated_mlp(hidden: int, intermediate: int, bias: bool = False) -> GatedMlp:
    return GatedMlp(Linear(hidden, 2 * intermediate, bias), Linear(intermediate, hidden, bias))


def _dense(config: _Reader, hidden: int, n_layers: int) -> list[GatedMlp | MixtureOfExperts]:
    return [_gated_mlp(hidden, config.count("intermediate_size"), config.flag("mlp_bias"))] * n_layers


def _moe(
    config: _Reader, hidden: int, experts_key: str, intermediate_key: str, bias: bool = False
) -> MixtureOfExperts:
    experts, top_k = config.count(experts_key), config.count("num_experts_per_tok")
    if top_k > experts:
        raise config.fail("num_experts_per_tok", f"at most {experts_key} = {experts}")
    expert = _gated_mlp(hidden, config.count(intermediate_key), bias)
    return MixtureOfExperts(Linear(hidden, experts, bias), expert, experts, top_k)


def _mixtral(config: _Reader, hidden: int, n_layers: int) -> list[GatedMlp | MixtureOfExperts]:
    return [_moe(config, hidden, "num_local_experts", "intermediate_size")] * n_layers


def _gpt_oss(config: _Reader, hidden: int, n_layers: int) -> list[GatedMlp | MixtureOfExperts]:
    config.any("experts_per_token")  # the same number as num_experts_per_tok, under its first name
    return [_moe(config, hidden, "num_local_experts", "intermediate_size", bias=True)] * n_layers


def _qwen3_moe(config: _Reader, hidden: int, n_layers: int) -> list[GatedMlp | MixtureOfExperts]:
    """Layer i is sparse if (i + 1) is a multiple of decoder_sparse_step and i is not in mlp_only_layers."""
    config.only("shared_expert_intermediate_size", 0, None)
    step, dense_layers = config.count("decoder_sparse_step", 1), config.items("mlp_only_layers")
    moe = _moe(config, hidden, "num_experts", "moe_intermediate_size")
    dense = _gated_mlp(hidden, config.count("intermediate_size"))
    return [dense if i in dense_layers or (i + 1) % step else moe for i in range(n_layers)]


_FAMILIES: dict[str, Callable[[_Reader, int, int], list[GatedMlp | MixtureOfExperts]]] = {
    "llama": _dense,
    "mistral": _dense,
    "qwen2": _dense,
    "qwen3": _dense,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
}

# Last part of the names of modules that stay in bf16 under every weight dtype, so that a checkpoint may list them.
_KEPT = (
    *("lm_head", "embed_tokens", "router", "gate"),
    *("norm", "q_norm", "k_norm", "input_layernorm", "post_attention_layernorm"),
)


def _stored_dtype(config: _Reader) -> str:
    """The weight dtype that `quantization_config` states; bf16 without one."""
    data = config.any("quantization_config")
    if data is None:
        return "bf16"
    if not isinstance(data, dict):
        raise config.fail("quantization_config", "a mapping")
    quant = _Reader(config.where, data, "quantization_config.")
    method = quant.any("quant_method")
    if method == "mxfp4" and config.data.get("model_type") == "gpt_oss":
        _check_kept(quant, "modules_to_not_convert", (*_KEPT, "self_attn"))
        dtype = "mxfp4"
    elif method == "fp8":
        quant.only("fmt", "e4m3")
        quant.only("activation_scheme", "dynamic", "static")
        quant.only("weight_block_size", None, [128, 128])
        _check_kept(quant, "modules_to_not_convert", _KEPT)
        _check_kept(quant, "ignored_layers", _KEPT)
        dtype = "fp8_block" if data.get("weight_block_size") else "fp8"
    elif method == "compressed-tensors":
        _check_kept(quant, "ignore", _KEPT)
        quant.only("kv_cache_scheme", None)
        quant.only("format", "float-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized")
        dtype = _compressed_tensors_dtype(quant)
    elif method in ("awq", "gptq"):
        for key, allowed in (("bits", 4), ("group_size", 128)):
            if quant.any(key) != allowed:
                raise quant.fail(key, str(allowed))
        quant.only("lm_head", False)
        _check_kept(quant, "modules_to_not_convert", _KEPT)
        quant.finish(_IGNORED_INT4)
        return "int4"
    else:
        raise quant.fail("quant_method", "fp8, awq, gptq, compressed-tensors, or mxfp4 with model_type gpt_oss")
    quant.finish(_IGNORED_QUANTIZATION)
    return dtype


def _compressed_tensors_dtype(quant: _Reader) -> str:
    groups = quant.any("config_groups")
    try:
        (group,) = groups.values()
        weights = group["weights"]
        found = (weights["type"], weights["num_bits"], weights["strategy"], weights.get("block_structure"))
        size = weights.get("group_size")
    except (AttributeError, KeyError, TypeError, ValueError):
        raise quant.fail("config_groups", "one group with type, num_bits and strategy of its weights") from None
    if found[:3] in (("float", 8, "tensor"), ("float", 8, "channel")):
        return "fp8"
    if found == ("float", 8, "block", [128, 128]):
        return "fp8_block"
    if found[:3] == ("int", 4, "group") and size == 128:
        return "int4"
    if found[:3] == ("float", 4, "tensor_group") and size == 16:
        return "nvfp4"
    raise quant.fail("config_groups", "8-bit float weights, scaled per tensor, per channel or per 128 x 128 block; "
                     "4-bit integers, 128 to a group; or NVFP4")


def _check_kept(quant: _Reader, key: str, kept: tuple[str, ...]) -> None:
    """Refuse a checkpoint that leaves unquantised a module which `weight_dtype` is taken to cover."""
    for module in quant.items(key):
        if str(module).rsplit(".", 1)[-1] not in kept and str(module).removeprefix("re:.*") not in kept:
            why = f"{module} is not quantised, but would be counted as if it were"
            raise quant.fail(key, f"modules among {', '.join(kept)}", why)
