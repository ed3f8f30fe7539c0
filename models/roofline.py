"""Roofline cost model: each operator of a step takes the longer of its arithmetic and its memory traffic.

    seconds of an operator = max(FLOPs / (peak x efficiency), bytes / (bandwidth x efficiency))

(Williams, Waterman, Patterson, "Roofline", CACM 2009.) FLOPs and bytes follow from the LLM, peaks from the GPU's data
sheet; every other number is in `RooflineAssumptions`. The operators are linear in the features of step_time.py, so the
model is compiled once to `StepTables`.

What it leaves out: kernels' shape effects (tiles, waves), overlap between operators, skewed routing, and the extra cost
of attention over prefill chunks and decodes in one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from simcore.errors import ConfigError
from simcore.models.dtypes import BF16_BYTES
from simcore.models.gpu import GpuSpec
from simcore.models.llm import GatedMlp, GroupedQueryAttention, Linear, LlmSpec, MixtureOfExperts
from simcore.models.step_time import (
    COLUMNS,
    CONSTANT,
    EXPERTS,
    KV_READ,
    KV_READ_WINDOW,
    QK_PAIRS,
    QK_PAIRS_WINDOW,
    SAMPLED,
    TOKENS,
    StepTables,
)


def _share(default: float, description: str) -> Any:
    return Field(default, gt=0, le=1, description=description)


def _seconds(default: float, description: str) -> Any:
    return Field(default, ge=0, allow_inf_nan=False, description=description)


class RooflineAssumptions(BaseModel):
    """Every number of the roofline that is neither a specification nor follows from one. Round values, fitted to nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["roofline"] = "roofline"
    # Large GEMMs reach 0.6 to 0.8 of the data sheet on A100 and H100 (cuBLAS, power-limited).
    compute_efficiency: float = _share(0.70, "share of peak FLOP/s in dense matrix products")
    # Grouped GEMMs have small, uneven groups, and 4-bit weights are dequantised on the way.
    moe_compute_efficiency: float = _share(0.50, "share of peak FLOP/s in the experts")
    # NVIDIA aiconfigurator takes 0.8 as its memory factor.
    memory_efficiency: float = _share(0.80, "share of peak bandwidth in weights and activations")
    # FlashAttention 2 and 3 report 0.35 to 0.75 on H100, less under a causal mask and with small heads.
    attention_compute_efficiency: float = _share(0.50, "share of peak FLOP/s in attention")
    # Paged KV is gathered block by block, and sequences of uneven length leave processors idle.
    attention_memory_efficiency: float = _share(0.70, "share of peak bandwidth in reading KV")
    # Bus bandwidth of NCCL's ring on large messages stays below the link's peak.
    link_efficiency: float = _share(0.75, "share of peak link bandwidth in an all-reduce")
    # NVIDIA aiconfigurator takes 10 us for a point-to-point message.
    allreduce_latency: float = _seconds(10e-6, "seconds of an all-reduce of no bytes")
    # The host's work is no operator: SimulatedExecutor adds it, or hides it under asynchronous scheduling.
    # Scheduling, input preparation and launches that the GPU waits for: of the order of a millisecond in Python engines.
    step_overhead: float = _seconds(1e-3, "host seconds a step")
    # Sampling, detokenisation and output handling: of the order of ten microseconds a sequence.
    sequence_overhead: float = _seconds(10e-6, "host seconds a sequence and step")

    def listed(self) -> dict[str, float]:
        """Each assumed number by name, as results print it."""
        return {f"roofline.{name}": value for name, value in self.model_dump(exclude={"kind"}).items()}


@dataclass(frozen=True)
class Operator:
    """One row of the tables. `compute` and `memory` are seconds per unit of each column of step_time.py."""

    name: str
    compute: tuple[float, ...]
    memory: tuple[float, ...]


def roofline_tables(
    llm: LlmSpec,
    gpu: GpuSpec,
    *,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
    assumptions: RooflineAssumptions | None = None,
) -> StepTables:
    """Tables of `llm` on `tensor_parallel_size` GPUs. Raises ConfigError where its heads do not divide over them."""
    operators = roofline_operators(llm, gpu, tensor_parallel_size=tensor_parallel_size, assumptions=assumptions)
    if max_num_batched_tokens < 1:
        raise ConfigError("max_num_batched_tokens", found=max_num_batched_tokens, allowed="an integer of at least 1")
    return StepTables(
        compute=np.array([operator.compute for operator in operators]),
        memory=np.array([operator.memory for operator in operators]),
        of_tokens=with_seconds(distinct_experts(llm.experts, llm.top_k, max_num_batched_tokens)),
    )


def with_seconds(experts: np.ndarray, seconds: np.ndarray | None = None) -> np.ndarray:
    """`of_tokens` of StepTables from expected experts and tabulated seconds (None = none), float64[any number of tokens + 1]
    each; where one ends its last value stands."""
    parts = [experts, np.zeros(1) if seconds is None else seconds]
    longest = max(map(len, parts))
    return np.array([np.pad(part, (0, longest - len(part)), mode="edge") for part in parts])


def distinct_experts(experts: int, top_k: int, max_tokens: int) -> np.ndarray:
    """Expected distinct experts that 0 .. max_tokens tokens activate in a layer: float64[max_tokens + 1].

    Independent uniform routing: E (1 - (1 - k/E)^T). Real routers are more skewed, so they touch fewer experts at the
    same T (Sieve 2605.11277); a cost model that draws expert counts replaces this. One entry of 0 for a dense model.
    """
    if experts == 0:
        return np.zeros(1)
    return experts * (1.0 - (1.0 - top_k / experts) ** np.arange(max_tokens + 1))


def roofline_operators(
    llm: LlmSpec, gpu: GpuSpec, *, tensor_parallel_size: int, assumptions: RooflineAssumptions | None = None
) -> list[Operator]:
    """The operators of a step, equal ones of all layers together, in the order in which a token meets them."""
    builder = _Builder(llm, gpu, tensor_parallel_size, assumptions or RooflineAssumptions())
    builder.embedding()
    for group in llm.layers:
        builder.attention(group.count, group.attention)
        if isinstance(group.mlp, MixtureOfExperts):
            builder.experts(group.count, group.mlp)
        else:
            builder.mlp(group.count, group.mlp)
        builder.norms(group.count)
        builder.all_reduce(2 * group.count)  # after the output projection and after the MLP
    builder.lm_head()
    return [
        Operator(name, tuple(count * x for x in compute), tuple(count * x for x in memory))
        for (name, compute, memory), count in builder.rows.items()
    ]


class _Builder:
    """Collects rows of one rank: `rows[name, compute, memory]` is how many equal operators a step runs."""

    def __init__(self, llm: LlmSpec, gpu: GpuSpec, tp: int, assumed: RooflineAssumptions) -> None:
        self.llm, self.gpu, self.tp, self.assumed = llm, gpu, tp, assumed
        self.kv_copies = llm.kv_copies(tp)
        self.bandwidth = gpu.memory_bandwidth * assumed.memory_efficiency
        self.rows: dict[tuple[str, tuple[float, ...], tuple[float, ...]], int] = {}

    def add(self, name: str, count: int, compute: dict[int, float], memory: dict[int, float]) -> None:
        """`count` operators with these seconds per unit of each column."""
        row = (name, _columns(compute), _columns(memory))
        self.rows[row] = self.rows.get(row, 0) + count

    def linear(self, name: str, count: int, dtype: str, per: int, weights: float, macs: float, values: float) -> None:
        """A matrix product: `weights` bytes read once; multiply-adds and bf16 activations in and out per unit of `per`."""
        flops = self.gpu.math_flops(dtype) * self.assumed.compute_efficiency
        traffic = {CONSTANT: weights / self.bandwidth, per: values * BF16_BYTES / self.bandwidth}
        self.add(name, count, {per: 2 * macs / flops}, traffic)

    def embedding(self) -> None:
        """One row of the table read and one hidden vector written a token."""
        self.add("embedding", 1, {}, {TOKENS: 2 * self.llm.hidden * BF16_BYTES / self.bandwidth})
        self.all_reduce(1)  # the table is split over the vocabulary

    def attention(self, count: int, attention: GroupedQueryAttention) -> None:
        llm, tp, dtype = self.llm, self.tp, self.llm.attention_dtype
        # KV heads that two ranks share are computed on both.
        shared = 2 * (self.kv_copies - 1) * attention.kv_heads * attention.head_dim
        n_out = (attention.qkv.n_out + shared) / tp
        weights = attention.qkv.bytes(dtype) * n_out / attention.qkv.n_out
        self.linear("qkv_proj", count, dtype, TOKENS, weights, llm.hidden * n_out, llm.hidden + n_out)
        self.attention_core(count, attention)
        self.sharded("o_proj", count, attention.out, dtype, TOKENS, split_input=True)

    def attention_core(self, count: int, attention: GroupedQueryAttention) -> None:
        """Scores and weighted sum. KV is read once a sequence (query heads of a group and queries of a chunk share it)."""
        windowed = attention.window is not None
        pairs, read = (QK_PAIRS_WINDOW, KV_READ_WINDOW) if windowed else (QK_PAIRS, KV_READ)
        heads = attention.heads / self.tp
        # The two products run in bf16 whatever the dtype of the cache, which is converted on load.
        flops = self.gpu.flops["bf16"] * self.assumed.attention_compute_efficiency
        bandwidth = self.gpu.memory_bandwidth * self.assumed.attention_memory_efficiency
        kv = attention.kv_bytes_per_token(self.llm.kv_cache_dtype) * self.kv_copies / self.tp
        query_and_output = 2 * heads * attention.head_dim * BF16_BYTES
        self.add(
            "attention_window" if windowed else "attention",
            count,
            {pairs: 4 * heads * attention.head_dim / flops},  # 2 products x 2 FLOPs a multiply-add
            {read: kv / bandwidth, TOKENS: (query_and_output + kv) / bandwidth},  # new keys and values are written too
        )

    def sharded(self, name: str, count: int, linear: Linear, dtype: str, per: int, *, split_input: bool) -> None:
        """A matrix of which each rank holds 1/tp, split along its input or its output."""
        n_in = linear.n_in / self.tp if split_input else linear.n_in
        n_out = linear.n_out if split_input else linear.n_out / self.tp
        self.linear(name, count, dtype, per, linear.bytes(dtype) / self.tp, n_in * n_out, n_in + n_out)

    def mlp(self, count: int, mlp: GatedMlp) -> None:
        self.sharded("gate_up_proj", count, mlp.gate_up, self.llm.weight_dtype, TOKENS, split_input=False)
        # silu(gate) x up: two values read, one written
        self.add("activation", count, {}, {TOKENS: 3 * mlp.down.n_in / self.tp * BF16_BYTES / self.bandwidth})
        self.sharded("down_proj", count, mlp.down, self.llm.weight_dtype, TOKENS, split_input=True)

    def experts(self, count: int, moe: MixtureOfExperts) -> None:
        """Router on every rank, then each token through `top_k` experts, each of which is split over the ranks."""
        llm, router, expert = self.llm, moe.router, moe.expert
        macs, values = router.n_in * router.n_out, float(router.n_in + router.n_out)
        self.linear("router", count, "bf16", TOKENS, router.bytes("bf16"), macs, values)
        inner = expert.down.n_in / self.tp
        flops = self.gpu.math_flops(llm.weight_dtype) * self.assumed.moe_compute_efficiency
        # Per token and expert: gate_up in and out, activation in and out, down in and out, then the sum over experts.
        values = moe.top_k * (llm.hidden + 2 * inner + 3 * inner + inner + llm.hidden + llm.hidden) + llm.hidden
        self.add(
            "experts",
            count,
            {TOKENS: 2 * moe.top_k * 3 * llm.hidden * inner / flops},
            {
                EXPERTS: expert.bytes(llm.weight_dtype) / self.tp / self.bandwidth,
                TOKENS: values * BF16_BYTES / self.bandwidth,
            },
        )

    def norms(self, count: int) -> None:
        """Two RMSNorms with residual a layer: input and residual read, output and residual written, on every rank."""
        self.add("norms", count, {}, {TOKENS: 2 * 4 * self.llm.hidden * BF16_BYTES / self.bandwidth})

    def all_reduce(self, count: int) -> None:
        """Ring all-reduce of a bf16 hidden vector a token: each rank sends 2 (n - 1) / n of the bytes, plus the latency."""
        if self.tp == 1:
            return
        link = self.gpu.link_bandwidth * self.assumed.link_efficiency
        sent = 2 * (self.tp - 1) / self.tp * self.llm.hidden * BF16_BYTES
        self.add("all_reduce", count, {}, {TOKENS: sent / link, CONSTANT: self.assumed.allreduce_latency})

    def lm_head(self) -> None:
        """Logits of the sampled positions, split over the vocabulary and then gathered."""
        head = Linear(self.llm.hidden, self.llm.vocab)
        self.sharded("lm_head", 1, head, "bf16", SAMPLED, split_input=False)
        if self.tp > 1:
            link = self.gpu.link_bandwidth * self.assumed.link_efficiency
            sent = (self.tp - 1) / self.tp * self.llm.vocab * BF16_BYTES
            self.add("logits_gather", 1, {}, {SAMPLED: sent / link, CONSTANT: self.assumed.allreduce_latency})


def _columns(seconds: dict[int, float]) -> tuple[float, ...]:
    return tuple(seconds.get(column, 0.0) for column in range(COLUMNS))
