"""Compiles and caches every kernel by playing a few requests: `make` runs it, so that a first run compiles nothing."""

from __future__ import annotations

from pathlib import Path

from simcore.experiments.run import Job, play
from simcore.experiments.study import Study


def main() -> None:
    workload = {"generate": {"requests": 60, "rate": 50, "input_tokens": 300, "output_tokens": 40,
                             "prefix_groups": 2, "prefix_tokens": 64}}
    for blocks, routing in ((20_000, "prefix-aware"), (90, "round-robin")):  # the small pool preempts
        play(Job(Study.model_validate({
            "workload": workload, "model": "llama-3.1-8b", "engine": {"num_gpu_blocks": blocks, "max_model_len": 1024},
            "policies": {"replica_routing": routing},
        }), Path.cwd(), 1))


if __name__ == "__main__":
    main()
