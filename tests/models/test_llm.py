"""Sizes derived from the architecture against published ones, and refusals."""

import json
import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from simcore.errors import ConfigError
from simcore.models.dtypes import matrix_bytes
from simcore.models.hf_config import PRESETS, llm_names, load_llm

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001], "hidden_act": "silu", "initializer_range": 0.02, "mlp_bias": False, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {"rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.43.0", "use_cache": True,
}  # fmt: skip


@pytest.fixture
def from_config(tmp_path):
    def load(config, **kwargs):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return load_llm(path, **kwargs)

    return load


def published(name):
    data = yaml.safe_load((PRESETS / f"{name}.yaml").read_text())
    return data.get("published") or published(data["base"])


@pytest.mark.parametrize("name", llm_names())
def test_parameters_are_the_published_ones(name):
    llm, known = load_llm(name), published(name)
    assert llm.parameters == pytest.approx(known["parameters"], rel=0.005)
    if "active_parameters" in known:
        table = llm.hidden * llm.vocab if known["active_counts_embedding"] else 0
        # Qwen says 3.3 B for 3.35 B: model cards round
        assert llm.active_parameters + table == pytest.approx(known["active_parameters"], rel=0.02)
    if "checkpoint_bytes" in known:
        assert llm.weight_bytes.total == pytest.approx(known["checkpoint_bytes"], rel=0.005)


@pytest.mark.parametrize("name", llm_names())
def test_every_preset_has_a_source(name):
    assert yaml.safe_load((PRESETS / f"{name}.yaml").read_text())["source"]


def test_llama_sizes_by_hand():
    llm = load_llm("llama-3.1-8b")
    assert (llm.hidden, llm.heads, llm.kv_heads, llm.head_dim, llm.n_layers) == (4096, 32, 8, 128, 32)
    assert llm.kv_bytes_per_token == 2 * 8 * 128 * 2 * 32
    assert llm.fixed_state_bytes == llm.window == llm.experts == llm.top_k == llm.n_window_layers == 0
    parts = llm.weight_bytes
    assert parts.attention == 32 * 2 * (4096 * 6144 + 4096 * 4096)
    assert parts.dense_mlp == 32 * 2 * 3 * 4096 * 14336
    assert parts.embedding == parts.lm_head == 2 * 128256 * 4096
    assert parts.total == 2 * llm.parameters
    assert load_llm("llama-3.1-8b", kv_cache_dtype="fp8").kv_bytes_per_token == llm.kv_bytes_per_token // 2


def test_gpt_oss_alternates_and_quantises_the_experts_alone():
    llm = load_llm("gpt-oss-120b")
    assert (llm.n_full_layers, llm.n_window_layers, llm.window) == (18, 18, 128)
    assert llm.kv_bytes_per_token == 18 * 2 * 8 * 64 * 2
    assert llm.fixed_state_bytes == 128 * llm.kv_bytes_per_token
    assert (llm.weight_dtype, llm.attention_dtype) == ("mxfp4", "bf16")
    one = 3 * 2880 * 2880 * (4 + 8 / 32) / 8 + 2 * 3 * 2880  # 4 bits and a scale byte per 32; biases in bf16
    assert llm.weight_bytes.one_expert == one
    assert llm.weight_bytes.experts == 36 * 128 * one
    bf16 = load_llm("gpt-oss-120b", weight_dtype="bf16")
    assert bf16.weight_bytes.total == 2 * bf16.parameters
    assert load_llm("gpt-oss-120b", weight_dtype="fp8").attention_dtype == "fp8"


def test_qwen3_has_wide_heads():
    llm = load_llm("qwen3-30b-a3b")
    assert (llm.head_dim, llm.experts, llm.top_k, llm.moe.expert.down.n_in) == (128, 128, 8, 768)
    assert llm.layers[0].attention.qkv.n_out == (32 + 2 * 4) * 128  # not hidden / heads = 64


def test_fp8_halves_the_linear_weights_only():
    bf16, fp8, block = load_llm("qwen3-32b"), load_llm("qwen3-32b", "fp8"), load_llm("qwen3-32b-fp8")
    assert fp8.weight_bytes.dense_mlp * 2 == bf16.weight_bytes.dense_mlp
    assert fp8.weight_bytes.attention == pytest.approx(bf16.weight_bytes.attention / 2, rel=1e-4)  # QK-norm stays
    assert fp8.weight_bytes.lm_head == bf16.weight_bytes.lm_head
    assert block.weight_bytes.dense_mlp == fp8.weight_bytes.dense_mlp * (1 + 4 / 128**2)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("bf16", 16), ("fp8", 8), ("fp8_block", 8 + 32 / 128**2), ("int4", 4 + 16 / 128), ("mxfp4", 4.25), ("nvfp4", 4.5)],
)
def test_bits_per_weight(dtype, bits):
    assert matrix_bytes(4096, 1024, dtype) == 4096 * 1024 * bits / 8


def test_config_json(from_config, tmp_path):
    llm = from_config(LLAMA)
    assert llm.parameters == load_llm("llama-3.1-8b").parameters == 8_030_261_248  # the safetensors index
    assert load_llm(tmp_path) == llm  # a folder that holds a config.json
    assert llm.name == tmp_path.name
    small = LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64, "tie_word_embeddings": True
    }  # fmt: skip
    llama_1b = from_config(small)
    assert llama_1b.parameters == 1_235_814_400  # Llama-3.2-1B
    assert llama_1b.weight_bytes.lm_head == 0
    assert llama_1b.active_parameters == llama_1b.parameters  # the tied table is the LM head
    mistral = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 32768,
                       "sliding_window": None}  # fmt: skip
    assert from_config(mistral).parameters == 7_248_023_552  # Mistral-7B-v0.3


QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.1", "use_cache": True,
    "use_mrope": False, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip


def test_qwen2_has_biases_on_queries_keys_and_values_alone(from_config):
    assert from_config(QWEN2).parameters == 7_615_616_512  # Qwen2.5-7B, its safetensors index
    small = QWEN2 | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                     "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 151936}  # fmt: skip
    assert from_config(small).parameters == 494_032_768  # Qwen2.5-0.5B


def test_keys_that_published_files_hold_and_that_change_nothing(from_config):
    moe = yaml.safe_load((PRESETS / "qwen3-30b-a3b.yaml").read_text())["config"]
    coder = from_config(moe | {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True,
                               "head_dim": 128, "rope_scaling": None, "auto_map": {}, "unsloth_fixed": True})  # fmt: skip
    assert coder.parameters == from_config(moe).parameters
    with pytest.raises(ConfigError, match="shared_expert_intermediate_size: found 512"):
        from_config(moe | {"shared_expert_intermediate_size": 512})


def test_layer_types_and_mixed_layers(from_config):
    gpt_oss = yaml.safe_load((PRESETS / "gpt-oss-20b.yaml").read_text())["config"]
    types = ["full_attention"] * 4 + ["sliding_attention"] * 20
    assert from_config(gpt_oss | {"layer_types": types}).n_full_layers == 4
    with pytest.raises(ConfigError, match=r"layer_types.*allowed: 24 times"):
        from_config(gpt_oss | {"layer_types": types[1:]})
    moe = yaml.safe_load((PRESETS / "qwen3-30b-a3b.yaml").read_text())["config"]
    mixed = from_config(moe | {"mlp_only_layers": [0, 1]})
    assert [(group.count, group.mlp == mixed.moe) for group in mixed.layers] == [(2, False), (46, True)]
    windowed = from_config(moe | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 40})
    assert (windowed.n_full_layers, windowed.window) == (40, 4096)


COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None,
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": {"num_bits": 8},
                                  "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, "fp8_block"),
        ({"quant_method": "fp8", "activation_scheme": "static", "fmt": "e4m3", "ignored_layers": ["lm_head"]}, "fp8"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp.gate", "lm_head"]}, "fp8"),
        (COMPRESSED, "fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
          "modules_to_not_convert": None}, "int4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "damp_percent": 0.01,
          "static_groups": False, "true_sequential": True, "model_file_base_name": "model"}, "int4"),
        (COMPRESSED | {"format": "pack-quantized", "config_groups": {"group_0": {
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}}}, "int4"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized", "config_groups": {"group_0": {
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}}}, "nvfp4"),
    ],
)
def test_quantized_checkpoints(from_config, quantization, dtype):
    assert from_config(LLAMA | {"quantization_config": quantization}).weight_dtype == dtype
    assert from_config(LLAMA | {"quantization_config": quantization}, weight_dtype="bf16").weight_dtype == "bf16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, r"config.json: model_type: found 'mamba': allowed: gpt_oss, llama, mistral, mixtral, "),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"architectures.*ForCausalLM"),
        ({"kv_lora_rank": 512}, r"config.json: kv_lora_rank: unknown key: found 512: allowed: .*hidden_size"),
        ({"hidden_size": -1}, r"hidden_size: found -1: allowed: an integer of at least 1"),
        ({"hidden_size": None}, r"hidden_size: found 'null'"),
        ({"mlp_bias": "yes"}, r"mlp_bias: found 'yes': allowed: true or false"),
        ({"num_key_value_heads": 5}, r"num_key_value_heads: found 5: allowed: a divisor"),
        ({"model_type": "qwen3"}, r"head_dim: found 'nothing'"),
        ({"model_type": "mistral", "sliding_window": 4096}, r"sliding_window: every layer is windowed: found 4096"),
        ({"layer_types": ["sliding_attention"] * 32}, r"sliding_window: found 'nothing'"),
        ({"quantization_config": {"quant_method": "hqq"}}, r"quantization_config.quant_method: found 'hqq': allowed: fp8"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"quant_method: found 'mxfp4'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, r"quantization_config.bits: found 8: allowed: 4"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}, "group_size: found 64"),
        ({"is_encoder_decoder": True}, r"is_encoder_decoder: found True: allowed: False"),
        ({"qkv_bias": True}, r"qkv_bias: found True: allowed: False"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, r"weight_block_size"),
        ({"quantization_config": {"quant_method": "fp8", "bits": 8}}, r"quantization_config.bits: unknown key"),
        (
            {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp.gate_proj"]}},
            r"model.layers.0.mlp.gate_proj is not quantised",
        ),
        ({"quantization_config": COMPRESSED | {"config_groups": {}}}, r"config_groups.*one group"),
        ({"quantization_config": COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}}, r"kv_cache_scheme"),
    ],
)
def test_refusals_name_file_key_found_and_allowed(from_config, change, message):
    with pytest.raises(ConfigError, match=message):
        from_config(LLAMA | change)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 200), st.text(max_size=3), st.lists(st.text(max_size=2), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
)  # fmt: skip
BASES = [LLAMA | {"quantization_config": COMPRESSED}] + [
    yaml.safe_load((PRESETS / f"{name}.yaml").read_text())["config"]
    for name in ("gpt-oss-20b", "qwen3-30b-a3b", "mixtral-8x7b")
]


@given(st.sampled_from(BASES), st.data())
def test_junk_is_refused_or_makes_a_model(tmp_path_factory, base, data):
    """Whatever stands in a key, the outcome is a model or a ConfigError, never another exception."""
    keys = st.sampled_from([*sorted(base), "layer_types", "architectures", "sliding_window", "quantization_config"])
    path = tmp_path_factory.mktemp("junk") / "config.json"
    path.write_text(json.dumps(base | {data.draw(keys): data.draw(JUNK)}))
    try:
        llm = load_llm(path)
    except ConfigError as error:
        assert str(path) in str(error)
    else:
        assert llm.parameters > 0
        assert llm.kv_bytes_per_token > 0


def test_more_experts_per_token_than_experts_is_refused(from_config):
    config = yaml.safe_load((PRESETS / "mixtral-8x7b.yaml").read_text())["config"]
    with pytest.raises(ConfigError, match=r"num_experts_per_tok: found 9: allowed: at most num_local_experts = 8"):
        from_config(config | {"num_experts_per_tok": 9})


def test_bad_names_files_and_dtypes(tmp_path):
    with pytest.raises(ConfigError, match=r"llm: found 'gpt-9': allowed: .*gpt-oss-120b"):
        load_llm("gpt-9")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_llm(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"model_type": "llama",')
    with pytest.raises(ConfigError, match=r"cannot be parsed .*line 1"):
        load_llm(tmp_path)
    with pytest.raises(ConfigError, match=r"weight_dtype: found 'fp7': allowed: bf16, fp8"):
        load_llm("llama-3.1-8b", weight_dtype="fp7")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: found 'int2': allowed: auto, bf16, fp8"):
        load_llm("llama-3.1-8b", kv_cache_dtype="int2")
    preset = tmp_path / "mine.yaml"
    preset.write_text("base: llama-3.1-8b\nweight_dtype: int4\nspeed: 3\n")
    with pytest.raises(ConfigError, match=r"mine.yaml: speed: found 3: allowed: only the keys"):
        load_llm(preset)
    preset.write_text("weight_dtype: int4\n")
    with pytest.raises(ConfigError, match=r"either `config`"):
        load_llm(preset)
    preset.write_text("base: Llama-3.1-8B\nweight_dtype: int4\n")
    assert load_llm(preset).weight_dtype == "int4"


def test_kv_heads_are_copied_where_there_are_more_ranks():
    llm = load_llm("qwen3-30b-a3b")  # 4 KV heads
    assert [llm.kv_copies(tp) for tp in (1, 2, 4, 8, 16)] == [1, 1, 1, 2, 4]
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: found 3: allowed: 1, 2, 4, 8, 16, 32 for"):
        llm.kv_copies(3)


def test_numba_is_not_imported():
    """Listing models must not pay for the compiler."""
    code = "import sys, simcore.models.llm, simcore.models.gpu, simcore.models.kv_capacity; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
