"""The architecture of an LLM and the sizes that follow from it.

`hf_config.load_llm` makes one from a preset (`llms/<name>.yaml`) or a Hugging Face `config.json`. An LLM is a list of
layer groups; a new kind of layer (MLA, linear attention) is another class beside
`GroupedQueryAttention` with the same members.

All sizes are of the whole model; what a tensor-parallel rank holds is worked out where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simcore.errors import ConfigError
from simcore.models.dtypes import BF16_BYTES, kv_element_bytes, matrix_bytes


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
