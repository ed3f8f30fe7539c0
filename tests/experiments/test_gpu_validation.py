"""The GPU script on a CPU: tiny shapes under Triton's interpreter; nothing here looks at how long anything took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from triton.runtime.autotuner import Autotuner, OutOfResources  # noqa: E402

from simcore.experiments.gpu_validation import kernels_sha256, script  # noqa: E402
from simcore.experiments.gpu_validation.checks import every_configuration  # noqa: E402
from simcore.experiments.gpu_validation.experts_sweep import MIXTURES, judge, roofline  # noqa: E402
from simcore.experiments.gpu_validation.processes import run_jobs  # noqa: E402
from simcore.experiments.gpu_validation.rooflines import causal_flops  # noqa: E402
from simcore.experiments.gpu_validation.timing import Ceilings  # noqa: E402

CEILINGS = Ceilings(copy=4.3e12, matmul=7.8e14)


def run(out, *arguments):
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "simcore.experiments.gpu_validation.script", "--tiny", "--out", str(out), *arguments],
        env=environment, capture_output=True, text=True, check=False)
    return done, json.loads(out.read_text()) if out.exists() else None


def test_all_sections_run_and_merge(tmp_path):
    out = tmp_path / "found.json"
    done, found = run(out, "--only", "bandwidth,kernels,rooflines,experts")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(found["sections"]) == sorted(("bandwidth", "kernels", "rooflines", "experts"))
    assert found["kernels_sha256"] == kernels_sha256() and found["device"] == "CPU" and found["tiny"] is True
    sections = found["sections"]
    assert all("error" not in section and section["seconds"] > 0 for section in sections.values())
    assert sections["kernels"]["ok"] is True and len(sections["kernels"]["worst"]) == 18
    for name in ("bandwidth", "rooflines", "experts"):  # no claims about speed
        assert sections[name]["rows"] and all(row["ok"] is None for row in sections[name]["rows"])
    names = " ".join(row["name"] for row in sections["rooflines"]["rows"])
    for kernel in ("decode_attention", "prefill_attention", "grouped GEMM", "gather_blocks", "scatter_blocks", "write_kv",
                   "rms_norm", "combine", "quantize_keys", "dequantize_values", "moe"):
        assert kernel in names
    shape = sections["experts"]["shapes"]["tiny"]
    assert len(shape["even"]) == 4 and len(shape["uneven"]) == 2 and shape["t0"] >= 0

    # Another section of the same kernels stands beside those.
    done, more = run(out, "--only", "live-qwen")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name: more["sections"].pop(name) for name in sections} == sections
    (live,) = more["sections"].values()
    assert {"TTFT mean", "TPOT mean"} < {row["metric"] for row in live["rows"]} and live["requests"] == 4
    assert out.with_name("found-profile-qwen3-30b-a3b.json").is_file()


def test_a_result_of_other_kernels_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "about_device", lambda: {"device": "CPU"})
    out = tmp_path / "found.json"
    kept = script.begin(out, tiny=True) | {"sections": {"kernels": {"ok": True}}}
    for change, sections in (({}, kept["sections"]), ({"kernels_sha256": "of others"}, {}), ({"device": "another"}, {})):
        out.write_text(json.dumps(kept | change))
        assert script.begin(out, tiny=True)["sections"] == sections
    assert script.begin(out, tiny=False)["sections"] == {}


def test_a_section_without_time_says_so():
    found = script.run_section(script.plan(Path("found.json"))["bandwidth"], -1.0, tiny=True)
    assert found["error"] == "not begun: the time was up" and found["ok"] is False


def test_an_unknown_section_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["--out", str(tmp_path / "found.json"), "--only", "nothing"])
    assert "bandwidth, kernels" in capsys.readouterr().err and not (tmp_path / "found.json").exists()


def _fine(emit):
    emit({"n": 1})
    emit({"n": 2})


def _raises(emit):
    emit({"n": 1})
    raise ValueError("what happened")


def _dies(emit):
    os._exit(3)


def _hangs(emit):
    emit({"n": 1})
    time.sleep(60)


def test_jobs_fail_alone():
    found = run_jobs({"fine": _fine, "raises": _raises, "dies": _dies, "hangs": _hangs, "late": _fine}, workers=2,
                     seconds=60, each=1.0)
    assert list(found) == ["fine", "raises", "dies", "hangs", "late"]
    assert found["fine"].found == found["late"].found == {"n": 2} and found["fine"].error is None
    assert found["raises"].found == {"n": 1} and "ValueError: what happened" in found["raises"].error
    assert found["dies"].error == "the process died, exit code 3"
    assert found["hangs"].found == {"n": 1} and found["hangs"].error.startswith("not done after 1")
    late = run_jobs({"hangs": _hangs, "fine": _fine}, workers=1, seconds=0.3)
    assert late["fine"].error == "not begun: the time was up"


def test_every_configuration_that_fits_is_tried():
    tried = []

    class Kernel:
        def __init__(self):
            self.fn = lambda n, BLOCK: None

        def run(self, n, BLOCK, **settings):
            if BLOCK == 64:
                raise OutOfResources(2, 1, "shared memory")
            tried.append(BLOCK)

    configs = [triton.Config({"BLOCK": size}) for size in (16, 32, 64, 128)]
    tuner = Autotuner(Kernel(), ["n", "BLOCK"], configs, ["n"], None, None)
    for n in (1, 2):
        names = [name for name, _ in every_configuration(tuner, partial(tuner.run, n))]
        assert names == ["chosen", str(configs[1]), str(configs[3])]
        assert tried == [16, 32, 128, 16, 32, 128]  # tuned, then run by each
        tried.clear()


def test_causal_flops_are_counted_query_by_query():
    assert causal_flops(5, 7, 3, 16) == sum(4 * 3 * 16 * (7 + i + 1) for i in range(5))


def cells(shape, t0, bandwidth=CEILINGS.copy):
    slow = Ceilings(bandwidth, CEILINGS.matmul)
    return [{"experts": g, "tokens": n, "rows": g * n, "seconds": roofline(shape, g, g * n, slow) + t0}
            for g in (128, 64, 16, 4, 1) for n in (256, 64, 16, 8, 4, 2, 1)]


def test_a_machine_that_is_the_model_is_found_to_be():
    found = judge((2048, 768), cells((2048, 768), 5e-6), [], CEILINGS)
    assert found["t0"] == pytest.approx(5e-6)
    assert found["p95_error"] < 1e-9 and found["flatness"] < 0.02 and found["slope_off"] < 0.01
    assert found["crossover_off"] < 1.1 and 170 < found["crossover_expected"] < 190


def test_a_machine_of_half_the_bandwidth_is_not():
    found = judge((2048, 768), cells((2048, 768), 0.0, CEILINGS.copy / 2), [], CEILINGS)
    assert found["slope_off"] == pytest.approx(1.0, abs=0.02) and found["median_error"] > 0.3


@pytest.mark.parametrize(("model", "tokens", "ones", "few"), [
    ("qwen3-30b-a3b", 64, 0.202, 0.476), ("gpt-oss-120b", 64, 0.326, 0.659), ("gpt-oss-120b", 256, 0.235, 0.566)])
def test_uneven_splits_are_as_skewed_as_published(model, tokens, ones, few):
    """Shares of the activated experts with one token, and with at most four (arXiv 2605.11277)."""
    mixture, random = MIXTURES[model], np.random.default_rng(1)
    counts = np.concatenate([mixture.counts(tokens, random) for _ in range(100)])
    active = counts[counts > 0]
    assert (active == 1).mean() == pytest.approx(ones, abs=0.04) and (active <= 4).mean() == pytest.approx(few, abs=0.04)
    assert len(counts) == 100 * mixture.here and mixture.counts(7, random).sum() <= 7 * mixture.top_k
