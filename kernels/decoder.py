"""A Llama-shaped or MoE-shaped decoder with random weights over paged KV memory: one step for one batch.

Its operators are those of the roofline (models/roofline.py), under the same names. Left out, since they change neither the
schedule nor much time: biases, QK-norm, attention sinks. The router normalises over its chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from simcore.errors import ConfigError
from simcore.kernels.install import require
from simcore.kernels.operators import Operators
from simcore.models.llm import LayerGroup, LlmSpec, MixtureOfExperts

torch = require()

EPSILON = 1e-5
ROPE_BASE = 500_000.0  # Llama 3
OPERATORS = ("embedding", "norms", "qkv_proj", "rope", "attention", "o_proj", "gate_up_proj", "activation", "down_proj",
             "router", "experts", "lm_head")


@dataclass(frozen=True)
class StepInputs:
    """One batch for the decoder; sequences that compute one token stand first, `decodes` of them.

    Per token, int64[tokens]: `token_ids`, `positions`, `slots` (block * block_size + offset). Per sequence, int32:
    `block_table` [sequences, most blocks], `context_lens` (this step's tokens included), `query_starts` [sequences -
    decodes + 1] of the others, counted from the first of them. `sampled`: int64, rows of tokens that yield one.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    block_table: np.ndarray
    context_lens: np.ndarray
    query_starts: np.ndarray
    sampled: np.ndarray
    decodes: int


class _Layer:
    """Weights of one layer; matrices [n_out, n_in]."""

    def __init__(self, group: LayerGroup, llm: LlmSpec, draw: Callable[..., Any]) -> None:
        a, hidden = group.attention, llm.hidden
        self.heads, self.kv_heads, self.head_dim = a.heads, a.kv_heads, a.head_dim
        self.before_attention, self.before_mlp = draw(hidden, ones=True), draw(hidden, ones=True)
        self.qkv, self.out = draw((a.heads + 2 * a.kv_heads) * a.head_dim, hidden), draw(hidden, a.heads * a.head_dim)
        mlp = group.mlp
        self.router = None
        self.top_k = 0
        if isinstance(mlp, MixtureOfExperts):
            inner = mlp.expert.down.n_in
            self.router, self.top_k = draw(mlp.experts, hidden), mlp.top_k
            self.gate_up, self.down = draw(mlp.experts, 2 * inner, hidden), draw(mlp.experts, hidden, inner)
        else:
            self.gate_up, self.down = draw(2 * mlp.down.n_in, hidden), draw(hidden, mlp.down.n_in)


class Decoder:
    """The model and its KV memory: `num_blocks` blocks of `block_size` tokens a layer.

    `lap(name)` is called when a step begins (with "") and after each of its operators. Raises ConfigError for layers that
    it has not: sliding windows.
    """

    def __init__(
        self, llm: LlmSpec, num_blocks: int, block_size: int, *, max_model_len: int, operators: Operators, device: str,
        dtype: Any, seed: int = 0,
    ) -> None:
        if llm.n_window_layers:
            raise ConfigError("model", found=llm.name, why="it has sliding-window layers",
                              allowed="models whose layers all see the whole context")
        self.llm, self.block_size, self.num_blocks, self.max_model_len = llm, block_size, num_blocks, max_model_len
        self.ops, self.device, self.dtype = operators, device, dtype
        self.lap: Callable[[str], None] = no_lap
        random = torch.Generator(device=device).manual_seed(seed)

        def draw(*shape: int, ones: bool = False) -> Any:
            if ones:
                return torch.ones(shape, device=device, dtype=dtype)
            weight = torch.empty(shape, device=device, dtype=dtype)
            return weight.normal_(0.0, shape[-1] ** -0.5, generator=random)

        self.embedding = draw(llm.vocab, llm.hidden)
        self.layers = [_Layer(group, llm, draw) for group in llm.layers for _ in range(group.count)]
        self.last_norm = draw(llm.hidden, ones=True)
        self.lm_head = self.embedding if llm.tie_word_embeddings else draw(llm.vocab, llm.hidden)
        # Zeros, not what the memory held: what is never written is never read, but a NaN there would hide that it is.
        self.kv = [[torch.zeros(num_blocks, block_size, layer.kv_heads, layer.head_dim, device=device, dtype=dtype)
                    for _ in range(2)] for layer in self.layers]
        dims = torch.arange(0, llm.head_dim, 2, device=device, dtype=torch.float32) / llm.head_dim
        angles = torch.arange(max_model_len, device=device, dtype=torch.float32)[:, None] * ROPE_BASE**-dims
        self.cos, self.sin = torch.cos(angles).to(dtype), torch.sin(angles).to(dtype)

    @torch.inference_mode()
    def step(self, inputs: StepInputs) -> Any:
        """Logits of the sampled tokens, [sampled, vocab]; the KV of all tokens of the batch is then in the memory."""
        lap, ops = self.lap, self.ops
        put = self._put
        lap("")
        token_ids, positions, slots = put(inputs.token_ids), put(inputs.positions), put(inputs.slots)
        tables = put(inputs.block_table), put(inputs.context_lens), put(inputs.query_starts)
        sampled = put(inputs.sampled)
        x = torch.nn.functional.embedding(token_ids, self.embedding)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        lap("embedding")
        residual = None
        for layer, (k_cache, v_cache) in zip(self.layers, self.kv, strict=True):
            h, residual = self._norm(x, layer.before_attention, residual)
            lap("norms")
            qkv = torch.nn.functional.linear(h, layer.qkv)
            lap("qkv_proj")
            q, k, v = qkv.unflatten(1, (-1, layer.head_dim)).split([layer.heads, layer.kv_heads, layer.kv_heads], dim=1)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            ops.write_kv(k, v, k_cache, v_cache, slots)
            lap("rope")
            h = self._attend(q, k_cache, v_cache, inputs, *tables)
            lap("attention")
            x = torch.nn.functional.linear(h.flatten(1), layer.out)
            lap("o_proj")
            h, residual = self._norm(x, layer.before_mlp, residual)
            lap("norms")
            x = self._mlp(layer, h)
        x, _ = self._norm(x, self.last_norm, residual)
        lap("norms")
        logits = torch.nn.functional.linear(x[sampled], self.lm_head)
        lap("lm_head")
        return logits

    def _put(self, array: np.ndarray) -> Any:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _norm(self, x: Any, weight: Any, residual: Any) -> tuple[Any, Any]:
        """(normalised sum, sum) of x and what came before it."""
        if residual is None:
            return self.ops.rms_norm(x, weight, EPSILON), x
        return self.ops.rms_norm(x, weight, EPSILON, residual)

    def _attend(
        self, q: Any, k_cache: Any, v_cache: Any, inputs: StepInputs, table: Any, context_lens: Any, query_starts: Any
    ) -> Any:
        """Attention of the batch: its decodes by one kernel, its prompts' chunks by another. [tokens, heads, head_dim]"""
        n, scale = inputs.decodes, q.shape[-1] ** -0.5
        out = torch.empty_like(q)
        if n:
            self.ops.decode_attention(q[:n], k_cache, v_cache, table[:n], context_lens[:n], scale=scale,
                                      max_context=int(inputs.context_lens[:n].max()), out=out[:n])
        if n < len(q):
            self.ops.prefill_attention(q[n:], k_cache, v_cache, table[n:], query_starts, context_lens[n:], scale=scale,
                                       max_query=int(np.diff(inputs.query_starts).max()), out=out[n:])
        return out

    def _mlp(self, layer: _Layer, h: Any) -> Any:
        lap = self.lap
        if layer.router is None:
            gate, up = torch.nn.functional.linear(h, layer.gate_up).chunk(2, dim=-1)
            lap("gate_up_proj")
            h = torch.nn.functional.silu(gate) * up
            lap("activation")
            h = torch.nn.functional.linear(h, layer.down)
            lap("down_proj")
            return h
        scores = torch.softmax(torch.nn.functional.linear(h, layer.router).float(), dim=-1)
        weights, chosen = torch.topk(scores, layer.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        lap("router")
        h = self.ops.moe(h, layer.gate_up, layer.down, chosen, weights)
        lap("experts")
        return h


def no_lap(name: str) -> None:
    pass


def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary positions, halves apart as in Llama: x [tokens, heads, head_dim]; cos, sin [tokens, 1, head_dim / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
