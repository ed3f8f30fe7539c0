"""`simcore config from-vllm`: command lines as people write them and logs as vLLM prints them become studies that run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from vllm_servers import made, values

from simcore.errors import ConfigError
from simcore.experiments import vllm_flags
from simcore.experiments.from_vllm import Choices, convert, run_from_vllm
from simcore.experiments.run import Job, play
from simcore.experiments.study import read_study
from simcore.models.hf_config import PRESETS, load_llm

# --- the table of flags --------------------------------------------------------------------------------------------------


def test_no_flag_stands_twice_and_aliases_lead_to_flags():
    words = [word.partition("=")[0].rstrip("?*~")
             for names in [vllm_flags.MAPPED, *vllm_flags.HARMLESS.values(), *vllm_flags.MATTERS.values()]
             for word in names.split()]
    assert len(words) == len(set(words)) == len(vllm_flags.FLAGS) > 350
    assert set(vllm_flags.ALIASES.values()) <= set(vllm_flags.FLAGS)
    assert all(flag.why for flag in vllm_flags.FLAGS.values() if flag.effect != "mapped")


@pytest.mark.parametrize(
    ("typed", "name", "on"),
    [
        ("tp", "tensor-parallel-size", True), ("max_num_seqs", "max-num-seqs", True),
        ("no-enable-prefix-caching", "enable-prefix-caching", False),
        ("disable-prefix-caching", "enable-prefix-caching", False),
        ("no-async-scheduling", "async-scheduling", False), ("tensor-parallel", "tensor-parallel-size", True),
        ("no-disable-sliding-window", "disable-sliding-window", False),
        ("enable-sliding-window", "disable-sliding-window", False),
        ("disable-log-requests", "disable-log-requests", True), ("q", "quantization", True),
    ],
)
def test_forms_of_a_flag(typed, name, on):
    found = vllm_flags.find(typed)
    assert found is not None and (found[0].name, found[1]) == (name, on)


@given(st.sampled_from(sorted(vllm_flags.FLAGS)))
def test_every_flag_is_found_under_its_own_name_and_does_what_its_class_says(name):
    flag = vllm_flags.FLAGS[name]
    assert vllm_flags.find(name) == vllm_flags.find(name.replace("-", "_")) == (flag, True)
    value = {"switch": [], "list": ["7", "8"], "optional": [], "value": ["7"]}[flag.takes]
    command = " ".join(["vllm serve Qwen/Qwen3-8B", f"--{name}", *value])
    if flag.effect != "mapped":
        written = convert(command, None, Choices(gpu="h100-sxm"))
        listed = [item for names in written.harmless.values() for item in names]
        where = written.matters if flag.effect == "matters" else listed
        assert any(f"--{name}" in item for item in where)
        assert f"--{name}" in written.text
        if flag.takes == "switch":
            off = f"vllm serve Qwen/Qwen3-8B --no-{name}"
            assert not any(f"--{name}" in item for item in convert(off, None, Choices(gpu="h100-sxm")).matters)


# --- commands ------------------------------------------------------------------------------------------------------------


def test_everything_that_has_a_key_is_mapped():
    got = values(made(
        "vllm serve Qwen/Qwen3-32B -tp 4 --data-parallel-size=2 --max-num-seqs 64 --max-num-batched-tokens 4k "
        "--block-size 32 --gpu-memory-utilization 0.85 --no-enable-prefix-caching --no-enable-chunked-prefill "
        "--max-model-len 16K --kv-cache-dtype fp8_e4m3 --quantization awq --scheduling-policy priority "
        "--no-async-scheduling --max-num-active-seqs 60 --long-prefill-token-threshold 512 "
        "--long-prefill-token-threshold-adaptive "
        "--no-scheduler-reserve-full-isl --watermark 0.02 --prefill-schedule-interval 3 --max-num-scheduled-tokens 3000"))
    assert got == {
        "model.name": "qwen3-32b", "model.weight_dtype": "int4", "model.kv_cache_dtype": "fp8", "cluster.replicas": 2,
        "cluster.gpu": "h100-sxm", "cluster.tensor_parallel_size": 4, "engine.version": "0.33.0", "engine.block_size": 32,
        "engine.gpu_memory_utilization": 0.85, "engine.max_num_seqs": 64, "engine.max_num_batched_tokens": 4000,
        "engine.max_num_scheduled_tokens": 3000, "engine.max_num_active_seqs": 60, "engine.max_model_len": 16384,
        "engine.enable_prefix_caching": False, "engine.enable_chunked_prefill": False,
        "engine.scheduler_reserve_full_isl": False, "engine.long_prefill_token_threshold": 512,
        "engine.long_prefill_token_threshold_adaptive": True, "engine.watermark": 0.02,
        "engine.prefill_schedule_interval": 3, "engine.async_scheduling": False, "policies.admission": "priority",
        "policies.retention": "lru", "policies.replica_routing": "least-loaded",
    }


@pytest.mark.parametrize(
    ("gpu", "version", "seqs", "tokens", "utilisation"),
    [  # get_batch_defaults and CacheConfig of the three releases
        ("h100-sxm", "0.19.0", 1024, 8192, 0.9), ("h100-sxm", "0.33.0", 1024, 8192, 0.92),
        ("a100-80gb-sxm", "0.33.0", 256, 2048, 0.92), ("l40s", "0.24.0", 256, 2048, 0.92),
        ("b200-sxm", "0.24.0", 1024, 8192, 0.92), ("b200-sxm", "0.33.0", 1024, 16384, 0.92),
    ],
)
def test_defaults_follow_version_and_gpu(gpu, version, seqs, tokens, utilisation):
    got = values(made("vllm serve Qwen/Qwen3-8B", gpu=gpu, version=version))
    assert (got["engine.version"], got["engine.max_num_seqs"], got["engine.max_num_batched_tokens"],
            got["engine.gpu_memory_utilization"]) == (version, seqs, tokens, utilisation)
    assert got["engine.async_scheduling"] and got["engine.max_model_len"] == 40960


def test_defaults_that_follow_other_flags():
    assert values(made("vllm serve Qwen/Qwen3-8B --performance-mode throughput"))["engine.max_num_batched_tokens"] == 16384
    unchunked = values(made("vllm serve Qwen/Qwen3-8B --no-enable-chunked-prefill --max-model-len 20000"))
    assert unchunked["engine.max_num_batched_tokens"] == 20000
    short = values(made("vllm serve Qwen/Qwen3-8B --max-model-len 16 --max-num-seqs 4"))
    assert short["engine.max_num_batched_tokens"] == 64
    assert values(made("vllm serve Qwen/Qwen3-8B --max-num-batched-tokens 512"))["engine.max_num_seqs"] == 512
    old = made("docker run vllm/vllm-openai:v0.10.2 --model Qwen/Qwen3-8B")
    assert not values(old)["engine.async_scheduling"] and "0.10.2" in old.matters[0]
    assert values(made("vllm serve Qwen/Qwen3-8B", version="0.27.1"))["engine.version"] == "0.24.0"


@pytest.mark.parametrize(
    "command",
    [
        "VLLM_USE_V1=1 CUDA_VISIBLE_DEVICES=0,1 HF_TOKEN=hf_secret vllm serve Qwen/Qwen3-8B -tp 2 --api-key sk-secret",
        "nohup vllm serve Qwen/Qwen3-8B --tensor-parallel-size=2 --host 0.0.0.0 > server.log 2>&1 &",
        "vllm serve \\\n  --served-model-name a b \\\n  --tensor_parallel_size 2 \\\n  --model Qwen/Qwen3-8B",
        "python3 -m vllm.entrypoints.openai.api_server --model=Qwen/Qwen3-8B -tp 2 --seed -1",
        "docker run --runtime nvidia --gpus all -itd --rm -v ~/.cache/huggingface:/srv/.cache --env HF_TOKEN=hf_secret "
        "-p8000:8000 --ipc=host vllm/vllm-openai:v0.33.0 --model Qwen/Qwen3-8B --tensor-parallel-size 2",
        "sudo docker run --gpus '\"device=0,1\"' --entrypoint vllm my/image serve Qwen/Qwen3-8B -tp 2",
        "docker run --entrypoint bash my/image -c 'pip install x && vllm serve Qwen/Qwen3-8B -tp 2'",
        "#!/bin/bash\n# a script\nexport HF_TOKEN=hf_secret\nMODEL=Qwen/Qwen3-8B\nls; vllm serve ${MODEL} -tp ${N:-2}\n",
        "$ vllm serve Qwen/Qwen3-8B -tp 2",
    ],
)
def test_ways_to_start_the_same_server(command):
    written = made(command)
    got = values(written)
    assert (got["model.name"], got["cluster.tensor_parallel_size"]) == ("qwen3-8b", 2)
    assert not written.matters and "secret" not in written.text


def test_a_configuration_file_yields_to_the_command(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("model: Qwen/Qwen3-8B\nport: 80\nmax-num-seqs: 32\nblock-size: 32\nenable-prefix-caching: false\n"
                    "speculative-config:\n  method: ngram\nno-enable-lora: true\n")
    written = made(f"vllm serve --config {path} --max-num-seqs 48")
    got = values(written)
    assert (got["engine.max_num_seqs"], got["engine.block_size"], got["engine.enable_prefix_caching"]) == (48, 32, False)
    assert f"block_size: 32 # {path}:4" in written.text
    assert len(written.matters) == 1 and "speculative" in written.matters[0]
    path.write_text("model: Qwen/Qwen3-8B\nmax-num-sequences: 3\n")
    with pytest.raises(ConfigError, match=r"serve.yaml:2: --max-num-sequences: .*nearest.*|serve.yaml:2.*--max-num-seqs"):
        made(f"vllm serve --config {path}")
    with pytest.raises(ConfigError, match="cannot be read"):
        made("vllm serve --config nowhere.yaml")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("vllm serve Qwen/Qwen3-8B --max-num-sequences 4", r"--max-num-sequences: is no flag .*--max-num-seqs is"),
        ("vllm serve Qwen/Qwen3-8B --max-num-seqs", r"--max-num-seqs: has no value"),
        ("vllm serve Qwen/Qwen3-8B --max-num-seqs --port 1", r"--max-num-seqs: has no value: found '--port'"),
        ("vllm serve Qwen/Qwen3-8B --max-num-seqs many", r"max-num-seqs: found 'many': allowed: an integer"),
        ("vllm serve Qwen/Qwen3-8B --max-num-seqs 0", r"max-num-seqs: found '0': allowed: an integer of at least 1"),
        ("vllm serve Qwen/Qwen3-8B --max-model-len 1.5K", r"max-model-len: found '1.5K'"),
        ("vllm serve Qwen/Qwen3-8B 4", r"the model is known already: found '4'"),
        ("vllm serve Qwen/Qwen3-8B --block-size $SIZE", r"block-size: holds a variable of the shell"),
        ("vllm serve Qwen/Qwen3-8B --gpu-memory-utilization 1.4", r"gpu_memory_utilization: found 1.4"),
        ("vllm serve Qwen/Qwen3-8B --watermark 0.1 --no-x", r"--no-x: is no flag"),
        ("vllm serve Qwen/Qwen3-8B --scheduling-policy edf", r"scheduling-policy: found 'edf': allowed: fcfs or priority"),
        ("vllm serve Qwen/Qwen3-8B --runner pooling", r"runner: does not generate text: found 'pooling'"),
        ("vllm serve Qwen/Qwen3-8B --hf-overrides 3", r"hf-overrides: found '3': allowed: a JSON mapping"),
        ("vllm serve Qwen/Qwen3-8B --hf-overrides '{\"kv_lora_rank\": 4}'", r"--hf-overrides: kv_lora_rank: unknown key"),
        ("vllm serve Qwen/Qwen3-8B --max-model-len 131072", r"max-model-len: .*40960 tokens.*--model-config"),
        ("vllm serve Qwen/Qwen3-8B -tp 3", r"tensor_parallel_size: found 3"),
        ("vllm serve acme/strange-7b", r"acme/strange-7b.*hf download acme/strange-7b config.json --local-dir strange-7b"),
        ("vllm serve /models/strange", r"/models/strange.*copy the server's config.json here"),
        ("vllm serve --port 80", r"model: is not named"),
        ("vllm bench serve --model x", r"found 'vllm bench': allowed: vllm serve"),
        ("ls -l", r"starts no vLLM server"),
        ("API=secret ls", r"found 'API=... ls'"),
        ("vllm serve 'Qwen", r"cannot be split into words"),
        ("docker run --gpus all", r"no image is named"),
        ("docker run --gpus all nginx:1.2.3 -g x", r"is no image of vLLM.*found 'nginx:1.2.3'"),
        ("vllm serve Qwen/Qwen3-8B --kv-offloading-size 4 --no-enable-prefix-caching", r"kv-offloading-size: .*prefix"),
        ("vllm serve Qwen/Qwen3-8B --kv-cache-memory-bytes 10k", r"kv-cache-memory-bytes: holds no KV block"),
    ],
)
def test_refusals_name_the_flag(command, message):
    with pytest.raises(ConfigError, match=message):
        made(command)


def test_settings_of_another_release_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"watermark exists from version 0.24.0 on"):
        made("vllm serve Qwen/Qwen3-8B --watermark 0.1", version="0.19.0")
    with pytest.raises(ConfigError, match=r"--vllm-version: found 'newest'"):
        made("vllm serve Qwen/Qwen3-8B", version="newest")
    with pytest.raises(ConfigError, match=r"--gpu: the server's GPU is not known: allowed: a100-80gb-sxm"):
        made("vllm serve Qwen/Qwen3-8B", gpu=None)
    with pytest.raises(ConfigError, match=r"--trace: no such file"):
        made("vllm serve Qwen/Qwen3-8B", trace="nowhere.csv")
    with pytest.raises(ConfigError, match=r"--requests: found 0"):
        made("vllm serve Qwen/Qwen3-8B", requests=0)


def test_unknown_flags_can_be_listed_instead():
    written = made("vllm serve Qwen/Qwen3-8B --new-thing 3 --other --max-num-seqs 9", skip_unknown=True)
    assert written.unknown == ["--new-thing", "--other"] and values(written)["engine.max_num_seqs"] == 9
    assert "# Not known here, and left out: --new-thing, --other" in written.text


def test_a_default_that_is_spelled_out_is_no_warning():
    written = made("vllm serve Qwen/Qwen3-8B --pipeline-parallel-size 1 --no-enforce-eager --stream-interval 1 -O2 -n 1")
    assert written.matters == []
    assert len(made("vllm serve Qwen/Qwen3-8B -pp 2 --enforce-eager -O0 --compilation-config.mode 3").matters) == 4


def test_environment():
    written = made("VLLM_USE_V1=0 VLLM_ATTENTION_BACKEND=FLASHINFER NCCL_P2P_DISABLE=1 FOO=1 VLLM_LOGGING_LEVEL=DEBUG "
                   "vllm serve Qwen/Qwen3-8B")
    assert [item.split(":")[0] for item in written.matters] == [
        "VLLM_USE_V1=0", "VLLM_ATTENTION_BACKEND", "NCCL_P2P_DISABLE"]
    assert "FOO" in written.text and "DEBUG" not in written.text


# --- models --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("served", "preset", "dtype"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", None),
        ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b", None),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b", None),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "llama-3.1-8b-fp8", None),
        ("nvidia/Llama-3.1-8B-Instruct-NVFP4", "llama-3.1-8b", "nvfp4"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama-3.1-8b", "int4"),
        ("Qwen/Qwen3-32B-AWQ", "qwen3-32b", "int4"), ("Qwen/Qwen3-30B-A3B-GPTQ-Int4", "qwen3-30b-a3b", "int4"),
        ("Qwen/Qwen3-8B-FP8", "qwen3-8b-fp8", None), ("openai/gpt-oss-120b", "gpt-oss-120b", None),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b", None), ("/models/Qwen3-8B/", "qwen3-8b", None),
        ("/srv/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/b968826d", "qwen3-8b", None),
        ("llama-3.1-8b-fp8", "llama-3.1-8b-fp8", None),
    ],
)
def test_hugging_face_names(served, preset, dtype):
    got = values(made(f"vllm serve {served}"))
    assert (got["model.name"], got.get("model.weight_dtype")) == (preset, dtype)


def test_quantization_flags():
    assert values(made("vllm serve Qwen/Qwen3-8B -q fp8"))["model.weight_dtype"] == "fp8"  # quantised as it is loaded
    assert "model.weight_dtype" not in values(made("vllm serve Qwen/Qwen3-8B-FP8 -q fp8"))
    assert "model.weight_dtype" not in values(made("vllm serve openai/gpt-oss-20b --quantization mxfp4"))
    assert any("int8" in item or "8-bit integer" in item
               for item in made("vllm serve RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8").matters)
    assert any("quark" in item for item in made("vllm serve Qwen/Qwen3-8B --quantization quark").matters)


def test_a_model_whose_context_is_not_the_presets(tmp_path):
    assert values(made("vllm serve meta-llama/Meta-Llama-3-8B-Instruct"))["engine.max_model_len"] == 8192
    with pytest.raises(ConfigError, match="known here to read 8192 tokens"):
        made("vllm serve meta-llama/Meta-Llama-3-8B-Instruct --max-model-len 16k")
    out = tmp_path / "study.yaml"
    run_from_vllm("vllm serve Qwen/Qwen3-30B-A3B-Instruct-2507 --max-model-len 100000", out=out, gpu="h200-sxm")
    study = read_study(out).study
    assert load_llm(study.llm.name).max_position_embeddings == 262144
    assert load_llm(study.llm.name).parameters == load_llm("qwen3-30b-a3b").parameters


def test_rope_overrides_lengthen_the_context(tmp_path, capsys):
    rope = json.dumps({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}})
    command = f"vllm serve Qwen/Qwen3-8B --hf-overrides '{rope}' --max-model-len 131072"
    with pytest.raises(ConfigError, match="--out: the model's configuration as served is a file"):
        run_from_vllm(command, gpu="h200-sxm")
    out = tmp_path / "study.yaml"
    run_from_vllm(command, out=out, gpu="h200-sxm")
    assert load_llm(read_study(out).study.llm.name).max_position_embeddings == 131072
    with pytest.raises(ConfigError, match=r"--out: exists"):
        run_from_vllm(command, out=out, gpu="h200-sxm")
    run_from_vllm(command, out=out, gpu="h200-sxm", force=True)
    allowed = values(made("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve Qwen/Qwen3-8B --max-model-len 65536"))
    assert allowed["engine.max_model_len"] == 65536


def test_a_local_configuration(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    config = yaml.safe_load((PRESETS / "qwen3-8b.yaml").read_text())["config"]
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10}))
    for written in (made(f"vllm serve {folder}"), made("vllm serve acme/mine", model_config=folder)):
        assert load_llm(values(written)["model.name"]).n_layers == 10
    with pytest.raises(ConfigError, match="cannot be read"):
        made("vllm serve acme/mine", model_config=tmp_path / "nowhere.json")


# --- memory and tiers ----------------------------------------------------------------------------------------------------


def test_kv_size_by_flags():
    assert values(made("vllm serve Qwen/Qwen3-8B --num-gpu-blocks-override 900"))["engine.num_gpu_blocks"] == 900
    got = values(made("vllm serve Qwen/Qwen3-8B -tp 2 --kv-cache-memory-bytes 1G"))
    assert got["engine.num_gpu_blocks"] == 2 * 2**30 // (16 * load_llm("qwen3-8b").kv_bytes_per_token)


@pytest.mark.parametrize(
    ("flags", "size", "backend"),
    [
        ("--kv-offloading-size 32", 32.0, "native"),
        ("--kv-offloading-size 32 --kv-offloading-backend lmcache", 32.0, "lmcache"),
        ("""--kv-transfer-config '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}' -tp 2""", 10.0, "lmcache"),
        ("""--kv-transfer-config.kv_connector OffloadingConnector """
         """--kv-transfer-config.kv_connector_extra_config.cpu_bytes_to_use 2147483648""", 2.0, "native"),
        ("""--kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": """
         """{"num_cpu_blocks": 1000}}'""", None, "native"),
    ],
)
def test_host_tiers(flags, size, backend):
    written = made(f"vllm serve Qwen/Qwen3-8B {flags}")
    got = values(written)
    size = 1000 * 16 * load_llm("qwen3-8b").kv_bytes_per_token / 2**30 if size is None else size
    assert got["engine.kv_offloading_size"] == pytest.approx(size) and got["engine.kv_offloading_backend"] == backend
    assert not got["engine.async_scheduling"] and any("asynchronous" in item for item in written.matters)


def test_size_of_lmcache_from_its_environment_and_other_connectors():
    config = """--kv-transfer-config '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'"""
    got = values(made(f"LMCACHE_MAX_LOCAL_CPU_SIZE=60 LMCACHE_CHUNK_SIZE=256 vllm serve Qwen/Qwen3-8B {config} -tp 2"))
    assert got["engine.kv_offloading_size"] == 120.0
    written = made("""vllm serve Qwen/Qwen3-8B --kv-transfer-config '{"kv_connector": "NixlConnector"}'""")
    assert "NixlConnector" in written.matters[0] and "engine.kv_offloading_size" not in values(written)


# --- there and back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "gpu"),
    [
        ("vllm serve meta-llama/Llama-3.1-8B-Instruct --max-num-seqs 16", "l40s"),
        ("vllm serve openai/gpt-oss-20b --max-model-len auto", "rtx-4090"),
        ("vllm serve Qwen/Qwen3-32B -q awq --max-model-len 8k -dp 2 --scheduling-policy priority", "rtx-pro-6000-server"),
        ("vllm serve Qwen/Qwen3-30B-A3B-Instruct-2507 --kv-offloading-size 8 --max-model-len 32K", "b200-sxm"),
        ("vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 2 --watermark 0.01", "mi300x"),
    ],
)
def test_the_study_runs(tmp_path, capsys, command, gpu):
    out = tmp_path / "study.yaml"
    run_from_vllm(command, out=out, gpu=gpu, json=tmp_path / "made.json")
    assert "refuses" not in capsys.readouterr().err
    file = read_study(out, ["workload.generate.requests=6"])
    result = play(Job(file.study, file.folder, 1))
    assert (result.requests.status == "finished").sum() >= 5  # a drawn length may be past a small max_model_len
    summary = json.loads((tmp_path / "made.json").read_text())
    assert {"engine.max_num_seqs", "cluster.gpu"} <= {key["key"] for key in summary["keys"]}


def test_the_page(tmp_path, monkeypatch):
    """docs/bring-your-own-server.md: its commands give what it says."""
    page = (Path(__file__).parents[2] / "docs" / "bring-your-own-server.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    log = re.search(r"<!-- file: server.log -->\n```text\n(.*?)```", page, re.DOTALL)
    assert log is not None
    Path("server.log").write_text(log[1], encoding="utf-8")
    lines = re.findall(r"^simcore config from-vllm (.*)$", page, re.MULTILINE)
    assert len(lines) == 3
    for line in lines[:2]:
        words = shlex.split(line)
        options = dict(zip(words[1::2], words[2::2], strict=True))
        run_from_vllm(words[0], gpu=options["--gpu"], out=Path(options["--out"]))
    assert read_study("study.yaml").study.engine.max_num_seqs == 128
    study = read_study("from-log.yaml").study
    assert f"num_gpu_blocks: {study.engine.num_gpu_blocks} # server.log:3: 275,776 tokens" in page
    assert f"num_gpu_blocks: {study.engine.num_gpu_blocks} # server.log:3" in Path("from-log.yaml").read_text()


def test_output(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("start.sh").write_text("vllm serve Qwen/Qwen3-8B --enforce-eager\n")
    run_from_vllm("start.sh", gpu="h100-sxm", trace="mooncake-conversation")
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["workload"] == {"trace": "mooncake-conversation"}
    assert printed.err.startswith("warning: --enforce-eager: without CUDA graphs")
    run_from_vllm("vllm serve Qwen/Qwen3-32B", gpu="rtx-4090", out=Path("big.yaml"), replicas=3)
    assert "as it stands, simcore refuses to run it" in capsys.readouterr().err
    assert read_study("big.yaml").study.cluster.replicas == 3
    with pytest.raises(ConfigError, match="stdout is the JSON's"):
        run_from_vllm("start.sh", gpu="h100-sxm", json=Path("-"))
