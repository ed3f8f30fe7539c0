"""The roofline against hand calculations, its limits and its monotonicity; batch features against brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from simcore.errors import ConfigError
from simcore.models.gpu import load_gpu
from simcore.models.hf_config import load_llm
from simcore.models.roofline import RooflineAssumptions, distinct_experts, roofline_operators, roofline_tables
from simcore.models.step_time import (
    CHUNKS,
    COLUMNS,
    CONSTANT,
    EXPERTS,
    FIXED,
    KV_READ,
    KV_READ_WINDOW,
    QK_PAIRS,
    QK_PAIRS_WINDOW,
    SAMPLED,
    SEQUENCES,
    TOKENS,
    features,
    step_time,
)

H100 = load_gpu("h100-sxm")
# Peaks reached and no overheads: what remains is arithmetic that a hand can do.
IDEAL = RooflineAssumptions(
    compute_efficiency=1, moe_compute_efficiency=1, memory_efficiency=1, attention_compute_efficiency=1,
    attention_memory_efficiency=1, link_efficiency=1, allreduce_latency=0, step_overhead=0, sequence_overhead=0,
)  # fmt: skip


def tables(name, tp=1, assumptions=None, gpu=H100, **dtypes):
    return roofline_tables(
        load_llm(name, **dtypes), gpu, tensor_parallel_size=tp, max_num_batched_tokens=8192, assumptions=assumptions
    )


def features_of_sequences(sequences, window=0):
    """`features` for a list of (before, chunk, samples)."""
    before, counts, samples = zip(*sequences, strict=True) if sequences else ((), (), ())
    return features(counts, before, samples, window)


def seconds(made, sequences, window=0):
    return step_time(made, features_of_sequences(sequences, window))


def decode(n, context):
    return [(context, 1, True)] * n


def operator(name, operators):
    (found,) = [op for op in operators if op.name == name]
    return found


# --- features -----------------------------------------------------------------------------------------------------

sequence = st.tuples(st.integers(0, 300), st.integers(1, 200), st.booleans())


@given(st.lists(sequence, min_size=1, max_size=5), st.integers(1, 250))
def test_features_by_brute_force(sequences, window):
    """Walk over each query and count the keys that it sees; then the set of keys that any query of a sequence sees."""
    pairs = pairs_window = read = read_window = 0
    for before, chunk, _ in sequences:
        seen, seen_window = set(), set()
        for query in range(before, before + chunk):
            keys, keys_window = range(query + 1), range(max(0, query - window + 1), query + 1)
            pairs += len(keys)
            pairs_window += len(keys_window)
            seen |= set(keys)
            seen_window |= set(keys_window)
        read += len(seen)
        read_window += len(seen_window)
    found = features_of_sequences(sequences, window)
    assert found.dtype == np.int64
    chunks = [(chunk, before) for before, chunk, _ in sequences if chunk > 1]
    assert len(found) == FIXED + 2 * len(chunks)
    expected = {
        TOKENS: sum(chunk for _, chunk, _ in sequences), SAMPLED: sum(samples for *_, samples in sequences),
        SEQUENCES: len(sequences), KV_READ: read, QK_PAIRS: pairs, KV_READ_WINDOW: read_window,
        QK_PAIRS_WINDOW: pairs_window, CHUNKS: len(chunks),
    }  # fmt: skip
    assert {key: int(found[key]) for key in expected} == expected
    assert list(found[FIXED:]) == [number for chunk in chunks for number in chunk]


def test_without_a_window_its_features_are_zero():
    found = features_of_sequences([(10, 5, True)])
    assert found[KV_READ_WINDOW] == found[QK_PAIRS_WINDOW] == 0


# --- by hand ------------------------------------------------------------------------------------------------------


def test_one_decode_step_reads_the_weights():
    """Llama-3.1-8B, one H100, bf16, one sequence at 1,000 tokens, at peak rates.

    Weights read: all but the embedding, 2 x (8,030,261,248 - 525,336,576) = 15.01 GB; KV 1,001 x 131,072 = 0.131 GB.
    15.14 GB / 3.35e12 B/s = 4.52 ms. Norm weights are left out and activations added: both far below 1 %.
    """
    found = seconds(tables("llama-3.1-8b", assumptions=IDEAL), decode(1, 1000))
    assert found == pytest.approx((2 * (8_030_261_248 - 525_336_576) + 1001 * 131_072) / 3.35e12, rel=0.002)


def test_a_long_prefill_is_compute_bound():
    """4,096 tokens of Llama-3.1-8B, one token sampled, at peak rates.

    Matrices of the layers: 2 FLOPs x 6,979,321,856 parameters x 4,096 = 57.2 TFLOP. Attention: 32 layers x 4 x 4,096 x
    4,096 x 4,097 / 2 pairs = 4.4 TFLOP. 61.6 TFLOP / 989.5e12 = 62.2 ms. On top come traffic of norms and activations
    (8.5 GB + 11.3 GB, 5.9 ms) and the LM head's weights (1.05 GB, 0.3 ms).
    """
    found = seconds(tables("llama-3.1-8b", assumptions=IDEAL), [(0, 4096, True)])
    matrices = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    flops = 2 * matrices * 4096 + 32 * 4 * 4096 * (4096 * 4097 // 2)
    traffic = 32 * 4096 * 2 * (8 * 4096 + 3 * 14336) + 2 * 4096 * 128256
    assert found == pytest.approx(flops / 989.5e12 + traffic / 3.35e12, rel=0.002)


def test_all_reduce_by_hand():
    """gpt-oss-120b on 4 GPUs: 73 all-reduces (2 x 36 layers, embedding); a token sends 2 x 3/4 x 2,880 x 2 bytes each."""
    assumed = RooflineAssumptions(link_efficiency=0.5, allreduce_latency=7e-6)
    found = operator(
        "all_reduce", roofline_operators(load_llm("gpt-oss-120b"), H100, tensor_parallel_size=4, assumptions=assumed)
    )
    assert found.compute == (0.0,) * COLUMNS
    assert found.memory[TOKENS] == pytest.approx(73 * 2 * 3 / 4 * 5760 / (450e9 * 0.5))
    assert found.memory[CONSTANT] == pytest.approx(73 * 7e-6)
    single = roofline_operators(load_llm("gpt-oss-120b"), H100, tensor_parallel_size=1)
    assert not {"all_reduce", "logits_gather"} & {op.name for op in single}


def test_experts_by_hand():
    """Qwen3-30B-A3B on 2 GPUs: half of an expert of 3 x 2,048 x 768 bf16 weights a touched expert; 8 experts a token."""
    found = operator(
        "experts", roofline_operators(load_llm("qwen3-30b-a3b"), H100, tensor_parallel_size=2, assumptions=IDEAL)
    )
    assert found.memory[EXPERTS] == pytest.approx(48 * 3 * 2048 * 768 * 2 / 2 / 3.35e12)
    assert found.compute[TOKENS] == pytest.approx(48 * 8 * 2 * 3 * 2048 * 768 / 2 / 989.5e12)


def test_window_layers_are_charged_by_the_window():
    operators = roofline_operators(load_llm("gpt-oss-120b"), H100, tensor_parallel_size=1, assumptions=IDEAL)
    full, window = operator("attention", operators), operator("attention_window", operators)
    assert full.memory[KV_READ] == window.memory[KV_READ_WINDOW] == pytest.approx(18 * 2048 / 3.35e12)
    assert full.compute[QK_PAIRS] == window.compute[QK_PAIRS_WINDOW] == pytest.approx(18 * 4 * 64 * 64 / 989.5e12)
    assert full.memory[KV_READ_WINDOW] == window.memory[KV_READ] == 0


# --- limits -------------------------------------------------------------------------------------------------------


def test_distinct_experts_saturate():
    found = distinct_experts(128, 4, 1000)
    assert len(found) == 1001
    assert found[0] == 0
    assert found[1] == pytest.approx(4)
    assert np.all(np.diff(found) >= 0)
    assert found[2] == pytest.approx(4 + 4 * (1 - 4 / 128))  # the second token finds 4/128 of its experts taken
    assert found[-1] == pytest.approx(128)
    assert distinct_experts(0, 0, 1000).tolist() == [0]


def test_fp8_weights_and_cache():
    wide, narrow = tables("llama-3.1-8b"), tables("llama-3.1-8b-fp8")
    prefill = [(0, 4096, True)]
    assert seconds(narrow, decode(1, 100)) < 0.7 * seconds(wide, decode(1, 100))  # bytes
    assert seconds(narrow, prefill) < 0.7 * seconds(wide, prefill)  # FLOP/s
    a100 = load_gpu("a100-80gb-sxm")
    # Ampere has no fp8 tensor cores: compute-bound steps gain nothing
    assert seconds(tables("llama-3.1-8b-fp8", gpu=a100), prefill) > 0.97 * seconds(tables("llama-3.1-8b", gpu=a100), prefill)
    cache = tables("llama-3.1-8b", assumptions=IDEAL, kv_cache_dtype="fp8")
    saved = seconds(tables("llama-3.1-8b", assumptions=IDEAL), decode(64, 4000)) - seconds(cache, decode(64, 4000))
    assert saved == pytest.approx(64 * 4001 * 131_072 / 2 / 3.35e12, rel=0.001)


def test_more_ranks_are_faster_on_big_batches():
    for name in ("llama-3.1-8b", "qwen3-30b-a3b"):
        one, two, four = (tables(name, tp) for tp in (1, 2, 4))
        for batch in ([(0, 8192, True)], decode(256, 2000)):
            assert seconds(four, batch) < seconds(two, batch) < seconds(one, batch)


def test_ranks_beyond_the_kv_heads_read_copies():
    """Qwen3-30B-A3B has 4 KV heads: at 8 ranks each reads one whole head, as at 4."""
    llm = load_llm("qwen3-30b-a3b")
    read = [
        operator("attention", roofline_operators(llm, H100, tensor_parallel_size=tp)).memory[KV_READ] for tp in (2, 4, 8)
    ]
    assert read[1] == pytest.approx(read[0] / 2)
    assert read[2] == pytest.approx(read[1])


@pytest.mark.parametrize(
    ("name", "tp", "batch", "low", "high"),
    [
        ("llama-3.1-8b", 1, 1, 5e-3, 8e-3),
        ("gpt-oss-120b", 2, 8, 3e-3, 9e-3),
        ("llama-3.1-70b", 4, 1, 12e-3, 20e-3),
    ],
)
def test_decode_steps_are_of_the_right_order(name, tp, batch, low, high):
    """Wide bounds from common experience with these models: a slipped factor shows, an efficiency does not."""
    llm = load_llm(name)
    assert low < seconds(tables(name, tp), decode(batch, 2000), llm.window) < high


# --- properties ---------------------------------------------------------------------------------------------------

PROPERTY_TABLES = {
    (name, tp): (tables(name, tp), load_llm(name).window)
    for name, tp in (("llama-3.1-8b", 1), ("gpt-oss-20b", 2), ("mixtral-8x7b", 4))
}


@given(st.sampled_from(sorted(PROPERTY_TABLES)), st.lists(sequence, min_size=1, max_size=4), sequence)
def test_more_work_never_takes_less_time(key, sequences, extra):
    made, window = PROPERTY_TABLES[key]
    base = seconds(made, sequences, window)
    (before, chunk, samples), *rest = sequences
    assert np.isfinite(base)
    assert base > 0
    assert seconds(made, [*sequences, extra], window) > base
    assert seconds(made, [(before, chunk + 1, samples), *rest], window) >= base
    assert seconds(made, [(before + 50, chunk, samples), *rest], window) >= base


@given(st.lists(sequence, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_order_of_sequences_does_not_matter(sequences, random):
    made, window = PROPERTY_TABLES["gpt-oss-20b", 2]
    shuffled = list(sequences)
    random.shuffle(shuffled)
    assert seconds(made, shuffled, window) == seconds(made, sequences, window)


# --- assumptions and refusals -------------------------------------------------------------------------------------


def test_every_assumption_is_listed_and_acts():
    listed = RooflineAssumptions().listed()
    names = [name for name in RooflineAssumptions.model_fields if name != "kind"]
    assert set(listed) == {f"roofline.{name}" for name in names}
    assert all(RooflineAssumptions.model_fields[name].description for name in names)
    batch = [(0, 4096, True), *decode(32, 2000)]
    for name in names:
        if name in ("step_overhead", "sequence_overhead"):
            continue  # the executor's: no operator takes them
        moved = RooflineAssumptions(**{name: listed[f"roofline.{name}"] * 0.9})
        assert any(
            seconds(tables("gpt-oss-20b", 2, moved), work, 128) != seconds(tables("gpt-oss-20b", 2), work, 128)
            for work in (batch, decode(32, 2000))
        ), name


@pytest.mark.parametrize("change", [{"compute_efficiency": 0}, {"link_efficiency": 1.1}, {"step_overhead": -1}, {"s": 2}])
def test_impossible_assumptions_are_refused(change):
    with pytest.raises(ValidationError):
        RooflineAssumptions(**change)


def test_bad_parallelism_is_refused():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: found 5: allowed: 1, 2, 4, 8, 16, 32 for llama-3.1-8b"):
        tables("llama-3.1-8b", 5)
