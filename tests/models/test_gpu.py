"""GPU presets and the refusals of the file format."""

import pickle

import pytest
import yaml

from simcore.errors import ConfigError
from simcore.models.gpu import PRESETS, gpu_names, load_gpu


def test_presets_have_a_source_for_every_number():
    assert {"a100-80gb-sxm", "h100-sxm", "h200-sxm"} <= set(gpu_names())
    for name in gpu_names():
        gpu = load_gpu(name)
        rates = {f"flops.{dtype}" for dtype in gpu.flops}
        assert set(gpu.sources) == {"memory", "memory_bandwidth", "link_bandwidth", "host_bandwidth", "power"} | rates
        assert gpu.memory > 16e9
        assert pickle.loads(pickle.dumps(gpu)) == gpu


def test_h100_numbers():
    gpu = load_gpu("H100-SXM")
    assert gpu.memory_bandwidth == 3.35e12
    assert gpu.flops["fp8"] == 2 * gpu.flops["bf16"] == 1979e12
    assert gpu.link_bandwidth == 450e9
    assert gpu.host_bandwidth == 50e9
    assert 80e9 < gpu.memory < 81559 * 2**20  # what CUDA sees is below what nvidia-smi prints


def test_math_follows_the_tensor_cores():
    h100, a100 = load_gpu("h100-sxm"), load_gpu("a100-80gb-sxm")
    assert h100.math_flops("fp8_block") == h100.flops["fp8"]
    for weight_only in ("int4", "mxfp4", "nvfp4"):
        assert h100.math_flops(weight_only) == h100.flops["bf16"]
    assert a100.math_flops("fp8") == a100.flops["bf16"]


@pytest.fixture
def h100_file():
    return yaml.safe_load((PRESETS / "h100-sxm.yaml").read_text())


def write(tmp_path, data):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_a_file_of_ones_own(tmp_path, h100_file):
    h100_file["flops"]["fp4"] = {"value": 4e15, "source": "a wish"}
    del h100_file["host_bandwidth"]
    gpu = load_gpu(write(tmp_path, h100_file))
    assert gpu.name == "mine" and gpu.host_bandwidth is None
    assert gpu.math_flops("mxfp4") == 4e15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memry": 1}, r"mine.yaml: memry: found 1: allowed: only the keys memory, memory_bandwidth"),
        ({"memory": {"value": 8e10}}, r"mine.yaml: memory.source"),
        ({"memory": {"value": -1, "source": "x"}}, r"memory.value: found -1: allowed: .*greater than 0"),
        ({"memory": {"value": 1, "source": "x", "unit": "GB"}}, r"memory.unit: found 'GB': allowed: only the keys value"),
        ({"flops": {"fp8": {"value": 1, "source": "x"}}}, r"flops: .*allowed: bf16, and any of fp8, int8, fp4"),
        ({"flops": {"bf16": {"value": 1, "source": "x"}, "fp3": {"value": 1, "source": "x"}}}, r"flops: .*allowed: bf16"),
    ],
)
def test_refusals_name_file_key_found_and_allowed(tmp_path, h100_file, change, message):
    with pytest.raises(ConfigError, match=message):
        load_gpu(write(tmp_path, h100_file | change))


def test_missing_key_unknown_name_and_unreadable_file(tmp_path, h100_file):
    del h100_file["power"]
    with pytest.raises(ConfigError, match=r"mine.yaml: power: .*allowed: Field required"):
        load_gpu(write(tmp_path, h100_file))
    with pytest.raises(ConfigError, match=r"gpu: found 'h999': allowed: .*h100-sxm"):
        load_gpu("h999")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_gpu(tmp_path / "no.yaml")
    (tmp_path / "torn.yaml").write_text("memory: {value: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_gpu(tmp_path / "torn.yaml")
