"""KV capacity: the budget adds up, measured numbers win, and what does not fit is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.errors import ConfigError
from simcore.models.gpu import load_gpu
from simcore.models.hf_config import load_llm
from simcore.models.kv_capacity import MemoryAssumptions, kv_capacity

H100 = load_gpu("h100-sxm")
SETTINGS = {
    "tensor_parallel_size": 1, "gpu_memory_utilization": 0.9, "block_size": 16, "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
}  # fmt: skip


def capacity(llm, gpu=H100, **changes):
    return kv_capacity(llm if not isinstance(llm, str) else load_llm(llm), gpu, **(SETTINGS | changes))


def test_llama_8b_by_hand():
    """0.9 x 84,932,978,278 = 76,439,680,450 bytes; weights 2 x 8,030,261,248 = 16,060,522,496; runtime 1,610,612,736.

    Activations: 8192 tokens x 2 bytes x (4 x 4096 + 3 x 14336) = 973,078,528, logits 256 x 128256 x 6 = 197,001,216.
    Left 57,598,465,475 bytes; a block is 16 x 131,072 = 2,097,152 bytes: 27,465 blocks.
    """
    found = capacity("llama-3.1-8b")
    assert found.breakdown["activations (assumed)"] == 973_078_528 + 197_001_216
    assert (found.blocks, found.tokens, found.estimated) == (27465, 27464 * 16, True)
    assert (found.low, found.high) == (21972, 32958)


def test_gpt_oss_on_two_gpus():
    found = capacity("gpt-oss-120b", tensor_parallel_size=2)
    assert found.tokens == pytest.approx(2.2e6, rel=0.02)
    assert found.breakdown["fixed_state"] == 256 * 128 * 36864  # window KV of 256 sequences


def test_fp8_kv_doubles_the_tokens():
    wide, narrow = load_llm("gpt-oss-120b"), load_llm("gpt-oss-120b", kv_cache_dtype="fp8")
    # a little more than double, since the fixed state shrinks too
    assert 2.0 < capacity(narrow, tensor_parallel_size=2).tokens / capacity(wide, tensor_parallel_size=2).tokens < 2.05


def test_kv_heads_are_replicated_beyond_their_number():
    """Qwen3-30B-A3B has 4 KV heads: at 8 ranks each is held twice, so a block takes twice the bytes."""
    llm = load_llm("qwen3-30b-a3b")
    per_block = [
        capacity(llm, tensor_parallel_size=tp, num_gpu_blocks=10).breakdown["kv"] // 10 for tp in (1, 4, 8)
    ]
    assert per_block == [16 * 98304, 16 * 98304, 2 * 16 * 98304]
    # 4 more KV heads of 128 in keys and values, [2048, 1024] a layer in bf16, and 7 more copies of routers and norms
    parts = llm.weight_bytes
    repeated = 48 * 2048 * 1024 * 2 + 7 * (parts.router + parts.norms)
    assert capacity(llm, tensor_parallel_size=8).breakdown["weights"] == parts.total + repeated


def test_a_measured_number_wins():
    found = capacity("llama-3.1-8b", num_gpu_blocks=27000)
    assert (found.blocks, found.tokens, found.low, found.high, found.estimated) == (27000, 26999 * 16, 27000, 27000, False)
    # even where the estimate would refuse
    assert not capacity("llama-3.1-70b", num_gpu_blocks=100).estimated


@given(
    utilization=st.floats(0.5, 1.0), block_size=st.sampled_from([1, 16, 64]), seqs=st.integers(1, 1024),
    tokens=st.integers(1, 16384), tp=st.sampled_from([1, 2, 4, 8]),
)  # fmt: skip
def test_the_breakdown_adds_up(utilization, block_size, seqs, tokens, tp):
    found = capacity(
        "gpt-oss-20b", gpu_memory_utilization=utilization, block_size=block_size, max_num_seqs=seqs,
        max_num_batched_tokens=tokens, tensor_parallel_size=tp,
    )  # fmt: skip
    parts = dict(found.breakdown)
    memory = parts.pop("memory")
    assert memory == tp * H100.memory == sum(parts.values())
    assert min(parts.values()) >= 0
    assert parts["unused"] < block_size * 24576
    assert found.low <= found.blocks <= found.high


def test_what_does_not_fit_is_refused_with_bytes():
    with pytest.raises(ConfigError, match=r"llama-3.1-70b leaves no room .* weights 141,107,412,992.*found '84,932,978,278"):
        capacity("llama-3.1-70b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization: found 90"),
        ({"block_size": 0}, "block_size: found 0"),
        ({"num_gpu_blocks": 1}, "num_gpu_blocks: found 1: allowed: an integer of at least 2"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size: found 3"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ConfigError, match=message):
        capacity("llama-3.1-8b", **change)


def test_assumptions_are_listed_and_used():
    assert set(MemoryAssumptions().listed()) == {"memory.runtime_bytes", "memory.hidden_copies", "memory.logit_bytes"}
    none = capacity("llama-3.1-8b", assumptions=MemoryAssumptions(runtime_bytes=0))
    assert none.blocks > capacity("llama-3.1-8b").blocks
