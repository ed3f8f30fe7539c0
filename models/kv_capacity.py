"""How many KV blocks fit beside the weights: measured where the user has the number, estimated with a margin where not.

vLLM finds its number by a profiling run (`GPU KV cache size` and `num_gpu_blocks` in its log). The estimate takes the
same budget, `gpu_memory_utilization` x memory, less weights, activations and what the runtime holds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from simcore.errors import ConfigError
from simcore.models.dtypes import BF16_BYTES
from simcore.models.gpu import GpuSpec
from simcore.models.llm import LlmSpec, MixtureOfExperts

LEAST_BLOCKS = 2  # block 0 and one to use
MARGIN = 0.20  # an estimate is shown with this share of blocks less and more (DESIGN: numbers of a model)


@dataclass(frozen=True)
class MemoryAssumptions:
    """What the estimate takes for the part of memory that only a profiling run knows. All of it is assumed."""

    runtime_bytes: int = 3 * 2**29  # a GPU: CUDA context, NCCL buffers and CUDA graphs, together in the order of 1.5 GiB
    hidden_copies: int = 4  # hidden-sized bf16 activations alive at once: residual, norm output, attention in and out
    logit_bytes: int = 6  # an element of the logits of `max_num_seqs` sequences: bf16 and the sampler's float32 copy

    def listed(self) -> dict[str, float]:
        """Each assumed number by name."""
        return {f"memory.{name}": value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class KvCapacity:
    """KV blocks of one replica; a block holds `block_size` tokens of every full-attention layer, over all ranks."""

    blocks: int  # vLLM's num_gpu_blocks: block 0, which is never handed out, included
    tokens: int  # that the other blocks hold
    estimated: bool  # False where the blocks were measured
    low: int  # blocks at -20 % and +20 % of an estimate; a measured number is its own low and high
    high: int
    breakdown: dict[str, int] = field(compare=False)  # bytes over all ranks; memory = the sum of the others


def kv_capacity(
    llm: LlmSpec,
    gpu: GpuSpec,
    *,
    tensor_parallel_size: int,
    gpu_memory_utilization: float,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_gpu_blocks: int | None = None,
    assumptions: MemoryAssumptions | None = None,
) -> KvCapacity:
    """Capacity of one replica of `tensor_parallel_size` GPUs.

    `num_gpu_blocks` is a measured number, as vLLM logs it (block 0 included), and wins over the estimate. Raises
    ConfigError where the model does not fit, naming what needs how many bytes.
    """
    tp = tensor_parallel_size
    _check(gpu_memory_utilization, block_size, max_num_seqs, max_num_batched_tokens, num_gpu_blocks)
    assumed = assumptions or MemoryAssumptions()
    copies = llm.kv_copies(tp)
    memory = tp * gpu.memory
    needs = {
        "reserved": memory - int(memory * gpu_memory_utilization),
        "weights": _weights(llm, tp),
        "activations (assumed)": tp * _activations(llm, tp, max_num_seqs, max_num_batched_tokens, assumed),
        "runtime (assumed)": tp * assumed.runtime_bytes,
        "fixed_state": max_num_seqs * copies * llm.fixed_state_bytes,
    }
    per_block = block_size * copies * llm.kv_bytes_per_token
    if num_gpu_blocks is not None:
        return KvCapacity(
            blocks=num_gpu_blocks,
            tokens=(num_gpu_blocks - 1) * block_size,
            estimated=False,
            low=num_gpu_blocks,
            high=num_gpu_blocks,
            breakdown={"weights": needs["weights"], "kv": num_gpu_blocks * per_block},
        )
    free = memory - sum(needs.values())
    blocks = free // per_block
    if blocks < LEAST_BLOCKS:
        parts = ", ".join(f"{name} {count:,}" for name, count in needs.items() if count)
        why = f"{llm.name} leaves no room for a KV block of {per_block:,} bytes on {tp} x {gpu.name}: {parts}"
        allowed = "more GPUs (tensor_parallel_size), fewer bytes a weight (weight_dtype), or fewer max_num_seqs"
        raise ConfigError("kv_capacity", found=f"{memory:,} bytes of memory", allowed=allowed, why=why)
    return KvCapacity(
        blocks=blocks,
        tokens=(blocks - 1) * block_size,
        estimated=True,
        low=int(blocks * (1 - MARGIN)),
        high=int(blocks * (1 + MARGIN)),
        breakdown={"memory": memory, **needs, "kv": blocks * per_block, "unused": free - blocks * per_block},
    )


def _weights(llm: LlmSpec, tp: int) -> int:
    """Bytes of the weights over all ranks: matrices are split; routers, norms and projections of shared KV heads repeat."""
    weights = llm.weight_bytes
    extra_heads = (llm.kv_copies(tp) - 1) * llm.kv_heads
    repeated_kv = 0
    if extra_heads:
        for group in llm.layers:
            qkv = group.attention.qkv.bytes(llm.attention_dtype)
            share = 2 * extra_heads / (group.attention.heads + 2 * group.attention.kv_heads)
            repeated_kv += group.count * round(qkv * share)
    return weights.total + (tp - 1) * (weights.router + weights.norms) + repeated_kv


def _activations(
    llm: LlmSpec, tp: int, max_num_seqs: int, max_num_batched_tokens: int, assumed: MemoryAssumptions
) -> int:
    """Peak bytes a rank in the largest step: hidden-sized tensors, the widest MLP (gate, up and product), and the logits."""
    per_token = 0
    for group in llm.layers:
        mlp = group.mlp
        if isinstance(mlp, MixtureOfExperts):  # the k copies of a token pass together, then their outputs
            width = mlp.top_k * (3 * mlp.expert.down.n_in // tp + llm.hidden)
        else:
            width = 3 * mlp.down.n_in // tp
        per_token = max(per_token, (assumed.hidden_copies * llm.hidden + width) * BF16_BYTES)
    return max_num_batched_tokens * per_token + max_num_seqs * llm.vocab * assumed.logit_bytes


def _check(
    utilization: float, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, num_gpu_blocks: int | None
) -> None:
    if not 0 < utilization <= 1:
        raise ConfigError("gpu_memory_utilization", found=utilization, allowed="above 0 and at most 1")
    counts = {"block_size": block_size, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    if num_gpu_blocks is not None and num_gpu_blocks < LEAST_BLOCKS:
        raise ConfigError("num_gpu_blocks", found=num_gpu_blocks, allowed=f"an integer of at least {LEAST_BLOCKS}")
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(name, found=count, allowed="an integer of at least 1")
