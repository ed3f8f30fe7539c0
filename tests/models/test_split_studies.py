"""A split cluster as keys of a study: what is read, what is refused with which line, and docs/disaggregation.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from simcore.errors import ConfigError
from simcore.experiments.run import Job, build_deployment, play
from simcore.experiments.study import Study, label, read_study

PAGE = Path(__file__).parents[2] / "docs" / "disaggregation.md"
HEAD = """workload:
  generate: {requests: 30, rate: 8, input_tokens: 200, output_tokens: 20}
model: llama-3.1-8b
"""
SPLIT = HEAD + "cluster: {prefill_replicas: 2, decode_replicas: 3, kv_link_gbps: 400, kv_link_latency: 10us}\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_keys_are_read_and_a_study_that_is_written_out_is_read_again(tmp_path: Path) -> None:
    study = read_study(written(tmp_path, SPLIT)).study
    assert (study.cluster.prefill_replicas, study.cluster.decode_replicas, study.cluster.replicas) == (2, 3, 5)
    again = yaml.safe_load(yaml.safe_dump(study.model_dump()))
    assert again["cluster"]["replicas"] == 5 and Study.model_validate(again) == study
    deployment, _ = build_deployment(study)
    assert (deployment.replicas, deployment.prefill_replicas, deployment.kv_link_bandwidth) == (5, 2, 50e9)
    assert deployment.kv_link_latency == pytest.approx(10e-6)
    assert [deployment.role(r) for r in range(5)] == ["prefill"] * 2 + ["decode"] * 3


def test_a_study_has_none_of_it_by_default(tmp_path: Path) -> None:
    study = read_study(written(tmp_path, HEAD)).study
    assert study.cluster.replicas == 1 and study.cluster.prefill_replicas is study.cluster.kv_link_gbps is None
    deployment, _ = build_deployment(study)
    assert deployment.prefill_replicas == 0 and deployment.role(0) == "both"
    result = play(Job(study, tmp_path, 1))
    assert result.speed["path"] == "planned" and "prefill_replica" not in result.requests and "pushes" not in result.summary


def test_a_link_that_is_not_given_is_that_of_the_gpus_and_a_rank_has_its_own(tmp_path: Path) -> None:
    """H100: 450 GB/s a GPU. 400 Gbit/s are those of a replica, however many ranks it has."""
    path = written(tmp_path, SPLIT)
    of_gpus, given = (
        build_deployment(read_study(path, ["cluster.tensor_parallel_size=4", f"cluster.kv_link_gbps={gbps}"]).study)[0]
        for gbps in ("null", "400"))
    assert (of_gpus.kv_link_bandwidth, given.kv_link_bandwidth) == (4 * 450e9, 50e9)


def test_the_bytes_of_all_ranks_are_pushed(tmp_path: Path) -> None:
    """8 KV heads on 16 ranks lie twice. 200 tokens are 13 blocks of 16, at 128 KiB a token."""
    for tp, copies in ((1, 1), (2, 1), (16, 2)):
        result = play(Job(read_study(written(tmp_path, SPLIT), [f"cluster.tensor_parallel_size={tp}"]).study, tmp_path, 1))
        push = result.tables["transfers"].iloc[0]
        assert push["bytes"] == 13 * 16 * 131072 * copies
        assert push["seconds"] == pytest.approx(push["bytes"] / 50e9 + 10e-6)
        assert result.summary["gpus"] == 5 * tp and (result.requests["status"] == "finished").all()


@pytest.mark.parametrize(("settings", "message"), [
    (["cluster.replicas=4"], r"give either replicas or prefill_replicas and decode_replicas \(together 5\), not both"),
    (["cluster.decode_replicas=null"], r"study.yaml:4: cluster: prefill_replicas and decode_replicas go together"),
    (["cluster.decode_replicas=0"], r"cluster.decode_replicas: found 0: allowed: greater than or equal to 1"),
    (["cluster.prefill_replicas=1.5"], r"cluster.prefill_replicas: found 1.5: allowed: .*integer.*"),
    (["cluster={kv_link_gbps: 3}"], r"kv_link_gbps is of a cluster with prefill_replicas and decode_replicas"),
    (["cluster.kv_link_gbps=0"], r"cluster.kv_link_gbps: found 0: allowed: greater than 0"),
    (["cluster.kv_link_latency=-1us"], r"cluster.kv_link_latency: found '-1us': .*"),
    (["engine.kv_offloading_size=4"], r"--set engine.kv_offloading_size=4: engine.kv_offloading_size: not simulated .*"),
    (["clients.timeout=9s"], r"--set clients.timeout=9s: clients: not simulated together with prefill_replicas.*"),
    (["events=[{at: 1s, kill: 0}]"], r"--set events=.*: events: not simulated together with prefill_replicas.*"),
    (["cluster.view_delay=1s"], r"cluster.view_delay: not simulated together with prefill_replicas: found 1.0.*"),
])
def test_what_cannot_be_is_refused_with_its_line(tmp_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_study(written(tmp_path, SPLIT), settings)


def test_an_arm_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"study.yaml:7: engine.kv_offloading_size: not simulated"):
        read_study(written(tmp_path, SPLIT + "compare:\n  vary:\n    engine.kv_offloading_size: [null, 4]\n"))


def test_arms_of_clusters_have_names(tmp_path: Path) -> None:
    assert label("cluster", {"prefill_replicas": 2, "decode_replicas": 3}) == "2P3D"
    assert label("cluster", {"prefill_replicas": 2, "decode_replicas": 3, "gpu": "l40s"}) == "2P3D gpu=l40s"
    assert label("cluster", {"replicas": 4}) == "replicas=4"
    arms = read_study(written(tmp_path, SPLIT), vary=["cluster.prefill_replicas=1,2"]).arms
    assert [(arm.label, arm.study.cluster.replicas) for arm in arms] == [("1", 4), ("2", 5)]


def test_the_page_shows_what_its_study_gives(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    text = re.search(r"<!-- file: split.yaml -->\n```yaml\n(.*?)```", page, re.DOTALL)
    assert text is not None
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| `")]
    arms = read_study(written(tmp_path, text[1])).arms
    shown = {row[0].strip("`"): row[1:] for row in rows if len(row) == 7}
    assert list(shown) == [arm.label.split(" ")[0] for arm in arms]
    for arm, cells in zip(arms, shown.values(), strict=True):
        s: dict[str, Any] = play(Job(arm.study, tmp_path, 1)).summary
        busy = [f"{100 * s[key]:.0f}" if key in s else "" for key in ("prefill_utilization", "decode_utilization")]
        assert cells == [f"{s['mean_ttft_ms']:,.0f}", f"{s['p99_ttft_ms']:,.0f}", f"{s['p99_tpot_ms']:.1f}",
                         f"{100 * s['slo_attainment']:.2f}", *busy]
    assert f"pushed in {1e3 * s['mean_push_time']:.0f} ms" in page.replace("\n", " ")
