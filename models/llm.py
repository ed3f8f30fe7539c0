"""The architecture of an LLM and the sizes that follow from it.

`load_llm` reads a preset (`llms/<name>.yaml`) or any Hugging Face `config.json` of a family listed in `_FAMILIES`. The
result is a list of layer groups; a new kind of layer (MLA, linear attention) is another class beside
`GroupedQueryAttention` with the same members.

All sizes are of the whole model; what a tensor-parallel rank holds is worked out where it is needed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from simcore.errors import ConfigError
from simcore.models.dtypes import BF16_BYTES, check_kv_cache_dtype, check_weight_dtype, kv_element_bytes, matrix_bytes

PRESETS = Path(__file__).parent / "llms"


@dataclass(frozen=True)
class Linear:
    """A weight matrix [n_in, n_out], with a bias (bf16) where the family has one."""

    n_in: int
    n_out: int
    bias: bool = False

    @property
    def parameters(self) -> int:
        return self.n_in * self.n_out + self.bias * self.n_out

    def bytes(self, dtype: str) -> int:
        """Bytes when the matrix is stored in `dtype`."""
        return matrix_bytes(self.n_in, self.n_out, dtype) + self.bias * self.n_out * BF16_BYTES


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Attention of one layer: `heads` query heads share `kv_heads` keys and values; `window` None is the whole context."""

    qkv: Linear
    out: Linear
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None  # tokens that a query sees, itself included
    vectors: int  # parameters beside the two matrices: QK-norm weights, attention sinks

    @property
    def parameters(self) -> int:
        return self.qkv.parameters + self.out.parameters + self.vectors

    def bytes(self, dtype: str) -> int:
        """Bytes when the two matrices are stored in `dtype`."""
        return self.qkv.bytes(dtype) + self.out.bytes(dtype) + self.vectors * BF16_BYTES

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes of the keys and values of one token in this layer."""
        return 2 * self.kv_heads * self.head_dim * kv_element_bytes(kv_dtype)


@dataclass(frozen=True)
class GatedMlp:
    """SwiGLU MLP: gate and up projection as one matrix, then down."""

    gate_up: Linear
    down: Linear

    @property
    def parameters(self) -> int:
        return self.gate_up.parameters + self.down.parameters

    def bytes(self, dtype: str) -> int:
        """Bytes when both matrices are stored in `dtype`."""
        return self.gate_up.bytes(dtype) + self.down.bytes(dtype)


@dataclass(frozen=True)
class MixtureOfExperts:
    """A router that sends each token to `top_k` of `experts` equal experts."""

    router: Linear
    expert: GatedMlp
    experts: int
    top_k: int


@dataclass(frozen=True)
class LayerGroup:
    """`count` equal layers."""

    count: int
    attention: GroupedQueryAttention
    mlp: GatedMlp | MixtureOfExperts


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of the weights by part, over all layers except `one_expert`, which is one expert of one layer."""

    attention: int
    dense_mlp: int
    experts: int
    one_expert: int
    router: int
    norms: int
    embedding: int
    lm_head: int  # 0 where it is tied to the embedding

    @property
    def total(self) -> int:
        return (
            self.attention + self.dense_mlp + self.experts + self.router + self.norms + self.embedding + self.lm_head
        )


@dataclass(frozen=True)
class LlmSpec:
    """An LLM: its layers, and how its weights and its KV cache are stored.

    `weight_dtype` holds for the matrices of attention and MLP; with `experts_only` (gpt-oss in MXFP4) for those of the
    experts alone. Embedding, LM head, norms, routers and biases stay in bf16.
    """

    name: str
    family: str  # model_type of the config.json
    hidden: int
    vocab: int
    max_position_embeddings: int  # longest context in tokens
    tie_word_embeddings: bool
    layers: tuple[LayerGroup, ...]
    weight_dtype: str
    experts_only: bool
    kv_cache_dtype: str

    @property
    def attention_dtype(self) -> str:
        """Dtype of the attention matrices."""
        return "bf16" if self.experts_only else self.weight_dtype

    @property
    def n_layers(self) -> int:
        return sum(group.count for group in self.layers)

    @property
    def n_full_layers(self) -> int:
        """Layers that keep the KV of the whole context."""
        return sum(group.count for group in self.layers if group.attention.window is None)

    @property
    def n_window_layers(self) -> int:
        """Sliding-window layers."""
        return self.n_layers - self.n_full_layers

    @property
    def window(self) -> int:
        """Tokens that a query of a sliding-window layer sees, itself included; 0 where there is no such layer."""
        return max((group.attention.window or 0 for group in self.layers), default=0)

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return self.layers[0].attention.heads

    @property
    def kv_heads(self) -> int:
        """Key-value heads of a layer."""
        return self.layers[0].attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].attention.head_dim

    @property
    def moe(self) -> MixtureOfExperts | None:
        """The mixture of experts of the layers that have one (all alike), None for a dense model."""
        return next((group.mlp for group in self.layers if isinstance(group.mlp, MixtureOfExperts)), None)

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0 for a dense model."""
        return self.moe.experts if self.moe else 0

    @property
    def top_k(self) -> int:
        """Experts that a token activates in a layer; 0 for a dense model."""
        return self.moe.top_k if self.moe else 0

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self._count(lambda moe: moe.experts) + self.hidden * self.vocab * (1 if self.tie_word_embeddings else 2)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token multiplies with: `top_k` experts, and the LM head but not the embedding table.

        Model cards differ here: gpt-oss counts like this, Qwen3 and Mixtral add the embedding.
        """
        return self._count(lambda moe: moe.top_k) + self.hidden * self.vocab

    def _count(self, experts: Callable[[MixtureOfExperts], int]) -> int:
        """Parameters without embedding and LM head, `experts(moe)` experts a layer."""
        total = self.hidden  # final norm
        for group in self.layers:
            mlp = group.mlp
            if isinstance(mlp, MixtureOfExperts):
                width = mlp.router.parameters + experts(mlp) * mlp.expert.parameters
            else:
                width = mlp.parameters
            total += group.count * (group.attention.parameters + width + 2 * self.hidden)
        return total

    @property
    def weight_bytes(self) -> WeightBytes:
        """Bytes of the weights by part."""
        dense, moes = [], []
        for group in self.layers:
            if isinstance(group.mlp, MixtureOfExperts):
                moes.append((group.count, group.mlp))
            else:
                dense.append((group.count, group.mlp))
        table = self.hidden * self.vocab * BF16_BYTES
        dtype = self.weight_dtype
        return WeightBytes(
            attention=sum(group.count * group.attention.bytes(self.attention_dtype) for group in self.layers),
            dense_mlp=sum(count * mlp.bytes(dtype) for count, mlp in dense),
            experts=sum(count * moe.experts * moe.expert.bytes(dtype) for count, moe in moes),
            one_expert=self.moe.expert.bytes(dtype) if self.moe else 0,
            router=sum(count * moe.router.bytes("bf16") for count, moe in moes),
            norms=(2 * self.n_layers + 1) * self.hidden * BF16_BYTES,
            embedding=table,
            lm_head=0 if self.tie_word_embeddings else table,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV that one more token of context takes, over the layers that keep the whole context."""
        return sum(
            group.count * group.attention.kv_bytes_per_token(self.kv_cache_dtype)
            for group in self.layers
            if group.attention.window is None
        )

    @property
    def fixed_state_bytes(self) -> int:
        """Bytes that each running sequence sets aside whatever its length: the KV of a full window in each window layer."""
        return sum(
            group.count * group.attention.window * group.attention.kv_bytes_per_token(self.kv_cache_dtype)
            for group in self.layers
            if group.attention.window is not None
        )

    def kv_copies(self, tensor_parallel_size: int) -> int:
        """How often each KV head is stored: once, or more where there are more ranks than KV heads.

        Raises ConfigError where the heads do not divide evenly over the ranks (vLLM refuses the same).
        """
        tp = tensor_parallel_size
        if tp < 1 or self.heads % tp or (self.kv_heads % tp and tp % self.kv_heads):
            fits = [n for n in range(1, self.heads + 1)
                    if not self.heads % n and (not self.kv_heads % n or not n % self.kv_heads)]  # fmt: skip
            raise ConfigError("tensor_parallel_size", found=tp, allowed=f"{', '.join(map(str, fits))} for {self.name}")
        return max(1, tp // self.kv_heads)


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
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "attention_dropout", "bos_token_id", "dtype",
    "embd_pdrop", "eos_token_id", "hidden_act", "hidden_dropout", "id2label", "initial_context_length",
    "initializer_range", "label2id", "max_length", "norm_topk_prob", "output_attentions", "output_hidden_states",
    "output_router_logits", "pad_token_id", "partial_rotary_factor", "pretraining_tp", "resid_pdrop", "return_dict",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "router_aux_loss_coef", "router_jitter_noise",
    "swiglu_limit", "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version", "unk_token_id",
    "use_cache",
))  # fmt: skip
_IGNORED_QUANTIZATION = frozenset((
    "global_compression_ratio", "quantization_status", "version", "sparsity_config", "transform_config",
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
    # Qwen3 and gpt-oss have heads that are not hidden / heads wide, so guessing would be wrong.
    head_dim = config.count("head_dim", None if qwen3 or gpt_oss else hidden // heads)
    bias = config.flag("attention_bias", gpt_oss)
    qkv = Linear(hidden, (heads + 2 * kv_heads) * head_dim, bias)
    out = Linear(heads * head_dim, hidden, bias)
    vectors = (2 * head_dim if qwen3 else 0) + (heads if gpt_oss else 0)
    return [
        GroupedQueryAttention(qkv, out, heads, kv_heads, head_dim, window, vectors)
        for window in _windows(config, family, n_layers)
    ]


def _windows(config: _Reader, family: str, n_layers: int) -> list[int | None]:
    """The sliding window of each layer in tokens, None for full attention."""
    window = config.count("sliding_window") if config.any("sliding_window") is not None else None
    first_windowed = config.count("max_window_layers", n_layers) if family.startswith("qwen3") else 0
    if family.startswith("qwen3") and not config.flag("use_sliding_window"):
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
    step, dense_layers = config.count("decoder_sparse_step", 1), config.items("mlp_only_layers")
    moe = _moe(config, hidden, "num_experts", "moe_intermediate_size")
    dense = _gated_mlp(hidden, config.count("intermediate_size"))
    return [dense if i in dense_layers or (i + 1) % step else moe for i in range(n_layers)]


_FAMILIES: dict[str, Callable[[_Reader, int, int], list[GatedMlp | MixtureOfExperts]]] = {
    "llama": _dense,
    "mistral": _dense,
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
        quant.only("format", "float-quantized", "naive-quantized")
        dtype = _compressed_tensors_dtype(quant)
    else:
        raise quant.fail("quant_method", "fp8, compressed-tensors (8-bit float), or mxfp4 with model_type gpt_oss")
    quant.finish(_IGNORED_QUANTIZATION)
    return dtype


def _compressed_tensors_dtype(quant: _Reader) -> str:
    groups = quant.any("config_groups")
    try:
        (group,) = groups.values()
        weights = group["weights"]
        found = (weights["type"], weights["num_bits"], weights["strategy"], weights.get("block_structure"))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise quant.fail("config_groups", "one group with type, num_bits and strategy of its weights") from None
    if found[:3] in (("float", 8, "tensor"), ("float", 8, "channel")):
        return "fp8"
    if found == ("float", 8, "block", [128, 128]):
        return "fp8_block"
    raise quant.fail("config_groups", "8-bit float weights, scaled per tensor, per channel or per 128 x 128 block")


def _check_kept(quant: _Reader, key: str, kept: tuple[str, ...]) -> None:
    """Refuse a checkpoint that leaves unquantised a module which `weight_dtype` is taken to cover."""
    for module in quant.items(key):
        if str(module).rsplit(".", 1)[-1] not in kept and str(module).removeprefix("re:.*") not in kept:
            why = f"{module} is not quantised, but would be counted as if it were"
            raise quant.fail(key, f"modules among {', '.join(kept)}", why)
