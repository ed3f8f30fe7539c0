"""GPU presets and the refusals of the file format."""

import pickle

import pytest
import yaml

from simcore.errors import ConfigError
from simcore.models.gpu import PRESETS, gpu_names, load_gpu


def test_presets_have_a_source_for_every_number():
    assert {
        "a100-80gb-sxm", "b200-sxm", "h100-sxm", "h200-sxm", "l40s", "mi300x", "rtx-4090", "rtx-pro-6000-server",
    } <= set(gpu_names())
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


@pytest.mark.parametrize(
    ("name", "bandwidth", "rates", "seen", "printed"),
    # dense TFLOP/s; GiB that a process sees, below what nvidia-smi or the data sheet prints
    [
        ("b200-sxm", 7.7e12, {"bf16": 2250, "fp8": 4500, "int8": 4500, "fp4": 9000}, 178.35, 180),
        ("l40s", 864e9, {"bf16": 362.05, "fp8": 733, "int8": 733}, 44.42, 46068 / 1024),
        ("rtx-4090", 1.008e12, {"bf16": 165.2, "fp8": 330.3, "int8": 660.6}, 23.64, 24564 / 1024),
        ("rtx-pro-6000-server", 1.792e12, {"bf16": 467.8, "fp8": 935.6, "int8": 935.6, "fp4": 1871.2}, 94.97, 97887 / 1024),
        ("mi300x", 5.3e12, {"bf16": 1307.4, "fp8": 2614.9, "int8": 2614.9}, 191.98, 192),
    ],
)
def test_numbers_of_the_data_sheets(name, bandwidth, rates, seen, printed):
    gpu = load_gpu(name)
    assert gpu.memory_bandwidth == bandwidth
    assert gpu.flops == {dtype: rate * 1e12 for dtype, rate in rates.items()}
    assert gpu.memory / 2**30 == pytest.approx(seen, abs=0.001) and gpu.memory < printed * 2**30
    assert gpu.host_bandwidth <= gpu.link_bandwidth


def test_rates_are_whole_multiples_of_each_other():
    """A slip of a digit, or a rate with sparsity, would show: half the bits run twice as fast."""
    for name in gpu_names():
        flops = load_gpu(name).flops
        assert flops.get("fp8", 2 * flops["bf16"]) == pytest.approx(2 * flops["bf16"], rel=0.02)
        assert flops["int8"] / flops["bf16"] == pytest.approx(4 if name == "rtx-4090" else 2, rel=0.02)
        assert flops.get("fp4", 4 * flops["bf16"]) == pytest.approx(4 * flops["bf16"], rel=0.02)


def test_the_rtx_pro_rate_is_that_of_its_clock():
    assert load_gpu("rtx-pro-6000-server").flops["bf16"] == pytest.approx(188 * 1024 * 2430e6, rel=0.001)


def test_math_follows_the_tensor_cores():
    h100, a100 = load_gpu("h100-sxm"), load_gpu("a100-80gb-sxm")
    assert h100.math_flops("fp8_block") == h100.flops["fp8"]
    for weight_only in ("int4", "mxfp4", "nvfp4"):
        assert h100.math_flops(weight_only) == h100.flops["bf16"]
    assert a100.math_flops("fp8") == a100.flops["bf16"]
    b200 = load_gpu("b200-sxm")
    assert b200.math_flops("nvfp4") == b200.flops["fp4"] and b200.math_flops("int4") == b200.flops["bf16"]


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
