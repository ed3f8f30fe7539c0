"""Compiles and caches every kernel by playing a few requests: `make` runs it, so that a first run compiles nothing."""

from __future__ import annotations

from pathlib import Path

from simcore.experiments.run import Job, play
from simcore.experiments.study import Study


def main() -> None:
    workload = {"generate": {"requests": 60, "rate": 50, "input_tokens": 300, "output_tokens": 40,
                             "prefix_groups": 2, "prefix_tokens": 64}}
    agents = {"generate": {"kind": "agents", "name": "bfcl", "programs": 6}, "start": {"rate": 1}}
    small = {"num_gpu_blocks": 90, "max_model_len": 1024}
    for work, engine, policies in (
        (workload, {"num_gpu_blocks": 20_000, "max_model_len": 1024}, {"replica_routing": "prefix-aware"}),
        (workload, small, {}),  # the small pool preempts
        (workload, small | {"kv_offloading_size": 0.1}, {}),
        (agents, {"num_gpu_blocks": 9_000}, {"retention": "continuum"}),  # pins
    ):
        play(Job(Study.model_validate({
            "workload": work, "model": "llama-3.1-8b", "engine": engine, "policies": policies,
        }), Path.cwd(), 1))


if __name__ == "__main__":
    main()
