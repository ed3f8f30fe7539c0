"""vLLM start-up logs as several releases print them, commands of any text, and numbers as people write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_servers import made, values

from simcore.errors import ConfigError
from simcore.experiments import vllm_flags
from simcore.experiments.vllm_command import parse_command
from simcore.experiments.vllm_log import pairs, read_log
from simcore.experiments.vllm_server import length, whole

ARGS = ("(APIServer pid=1) INFO 06-01 09:20:16 [utils.py:278] non-default args: {'model_tag': 'Qwen/Qwen3-32B', 'api_key': "
        "['sk-secret'], 'model': 'Qwen/Qwen3-32B', 'max_model_len': 32768, 'tensor_parallel_size': 2, 'max_num_seqs': 128, "
        "'kv_cache_dtype': 'fp8', 'compilation_config': CompilationConfig(level=None, passes={'a': [1, 2]}), "
        "'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 3}}")
ENGINE = ("(EngineCore pid=120) INFO 06-01 09:20:52 [core.py:112] Initializing a V1 LLM engine (v0.24.0) with config: "
          "model='Qwen/Qwen3-32B', speculative_config=None, tokenizer='Qwen/Qwen3-32B', dtype=torch.bfloat16, "
          "max_seq_len=32768, tensor_parallel_size=2, pipeline_parallel_size=1, quantization=None, enforce_eager=False, "
          "kv_cache_dtype=fp8, enable_prefix_caching=True, enable_chunked_prefill=True, compilation_config={'mode': 3}")
SIZE = ["INFO 06-01 09:22:30 [kv_cache_utils.py:1733] GPU KV cache size: 620,944 tokens",
        "INFO 06-01 09:22:30 [kv_cache_utils.py:1734] Maximum concurrency for 32,768 tokens per request: 18.95x"]
REST = ["INFO [scheduler.py:222] Chunked prefill is enabled with max_num_batched_tokens=8192.",
        "INFO [vllm.py:1008] Asynchronous scheduling is enabled.",
        "WARNING [fused_moe.py:1] config file not found at E=128,N=768,device_name=NVIDIA_H100_80GB_HBM3.json"]


def log_file(tmp_path, *lines, name="server.log"):
    path = tmp_path / name
    path.write_text("\x1b[36m" + "\x1b[0m\n".join(lines) + "\n")
    return path


def test_a_log_alone_is_enough(tmp_path):
    log = log_file(tmp_path, "INFO vLLM API server version 0.24.0", ARGS, *REST, ENGINE, *SIZE)
    written = made(str(log), gpu=None)
    got = values(written)
    assert got["engine.num_gpu_blocks"] == 620_944 // 16
    assert (got["engine.version"], got["cluster.gpu"], got["cluster.tensor_parallel_size"]) == ("0.24.0", "h100-sxm", 2)
    assert (got["engine.max_num_seqs"], got["engine.max_num_batched_tokens"]) == (128, 8192)
    assert got["engine.max_model_len"] == 32768
    assert got["model.kv_cache_dtype"] == "fp8" and got["engine.async_scheduling"]
    assert "num_gpu_blocks: 38809 # server.log:7: 620,944 tokens" in written.text
    assert "sk-secret" not in written.text and any("--speculative-config" in item for item in written.matters)
    assert values(made(None, log))["engine.num_gpu_blocks"] == 38809


@pytest.mark.parametrize(
    ("lines", "blocks"),
    [
        (["INFO GPU KV cache size: 1,000,000 tokens, Maximum concurrency for 40,960 tokens per request: 24.41x"], 62_500),
        (["INFO 01-30 03:19:14 kv_cache_utils.py:395] # GPU blocks: 1381"], 1381),
        (["INFO executor_base.py:111] # cuda blocks: 27896, # CPU blocks: 2048"], 27896),
        (["INFO num_gpu_blocks is: 4,300"], 4300), (['vllm:cache_config_info{block_size="16",num_gpu_blocks="77"} 1.0'], 77),
        (["Overriding num_gpu_blocks=5000 with num_gpu_blocks_override=100", "INFO GPU KV cache size: 1,600 tokens"], 100),
        # Of a length that is no multiple of the block, newer releases print int(n / 7 x 100): 17 blocks are 242 tokens.
        (["INFO GPU KV cache size: 242 tokens", "INFO Maximum concurrency for 100 tokens per request: 2.43x"], 17),
        (["INFO (rank 0) GPU KV cache size: 3,200 tokens", "INFO (rank 1) GPU KV cache size: 1,600 tokens"], 100),
        (["Initializing a V1 LLM engine (v0.24.0) with config: model='Qwen/Qwen3-8B'", "GPU KV cache size: 3,200 tokens",
          "Initializing a V1 LLM engine (v0.24.0) with config: model='Qwen/Qwen3-8B'", "GPU KV cache size: 6,400 tokens"],
         400),
    ],
)
def test_kv_sizes_as_releases_print_them(tmp_path, lines, blocks):
    written = made("vllm serve Qwen/Qwen3-8B", log_file(tmp_path, *lines))
    assert values(written)["engine.num_gpu_blocks"] == blocks


def test_a_log_of_another_server_is_refused(tmp_path):
    log = log_file(tmp_path, ARGS, ENGINE, *SIZE)
    values(made("vllm serve Qwen/Qwen3-32B -tp 2 --max-model-len 32768", log))
    with pytest.raises(ConfigError, match=r"server.log:1: tensor-parallel-size: .* other flags: found 2"):
        made("vllm serve Qwen/Qwen3-32B -tp 4", log)
    with pytest.raises(ConfigError, match="says nothing of a vLLM server"):
        made("vllm serve Qwen/Qwen3-32B", log_file(tmp_path, "hello", name="other.log"))
    with pytest.raises(ConfigError, match="cannot be read"):
        made("vllm serve Qwen/Qwen3-32B", tmp_path / "nowhere.log")
    with pytest.raises(ConfigError, match="there is none, and no log"):
        made(None)
    without = made("vllm serve Qwen/Qwen3-32B", log_file(tmp_path, "INFO vLLM API server version 0.24.0", ARGS))
    assert any("no line with the KV cache size" in item for item in without.matters)
    unknown = log_file(tmp_path, "non-default args: {'model': 'Qwen/Qwen3-8B', 'block_sizes': 3}", name="unknown.log")
    with pytest.raises(ConfigError, match=r"unknown.log:1: block_sizes: is no flag .*--block-size"):
        made(None, unknown)
    assert made(None, unknown, skip_unknown=True).unknown == ["--block-sizes"]


def test_sliding_windows_make_the_logged_size_uncertain(tmp_path):
    log = log_file(tmp_path, "GPU KV cache size: 640,000 tokens", "Maximum concurrency for 131,072 tokens per request: 4.9x")
    assert any("sliding windows" in item for item in made("vllm serve openai/gpt-oss-20b", log).matters)


# --- properties ----------------------------------------------------------------------------------------------------------

WORDS = st.lists(st.one_of(
    st.sampled_from([*(f"--{name}" for name in sorted(vllm_flags.FLAGS)), "-tp", "=", "vllm", "serve", "docker", "run"]),
    st.text(alphabet="ab1={}'\"$-;&|\n >\\#.", max_size=6)), max_size=8)


@given(WORDS)
def test_any_text_is_a_command_or_refused(words):
    with contextlib.suppress(ConfigError):
        parse_command("vllm serve " + " ".join(words), "the command")


@given(st.text(alphabet="ab:={}()[]<>'\", \\1.", max_size=60), st.sampled_from("=:"))
def test_any_text_splits_into_pairs(text, sign):
    assert all(isinstance(key, str) for key, _ in pairs(text, sign))


PRINTED = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=9),
                       lambda inner: st.lists(inner, max_size=3), max_leaves=4)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), PRINTED))
def test_arguments_are_read_back_as_python_prints_them(values):
    assert dict(pairs(repr(values)[1:-1], ":")) == values


@given(st.lists(st.text(max_size=80), max_size=6))
def test_any_file_is_a_log_or_refused(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("log") / "server.log"
    path.write_text("\n".join(["GPU KV cache size: 160 tokens", *lines]), encoding="utf-8", errors="replace")
    try:
        assert read_log(path).kv_tokens is not None
    except ConfigError as error:
        assert path.name in str(error)


@given(st.integers(1, 10**12))
def test_human_integers(n):
    assert whole(str(n)) == n and whole(f"{n}k") == 1000 * n and whole(f"{n}K") == 1024 * n and whole(f"{n}M") == n * 2**20


def test_lengths():
    assert (length("32k"), length("25.6k"), length("1M"), length("auto"), length("-1")) == (32000, 25600, 2**20, -1, -1)
    for bad in ("1.5K", "k", "", "3 4", "1e3"):
        with pytest.raises(ValueError, match="an integer"):
            whole(bad)
