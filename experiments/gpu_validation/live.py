"""`simcore validate live` as a section: the engine against its model on this GPU."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from simcore.experiments.gpu_validation.processes import Emit
from simcore.experiments.live_validation import validate_live
from simcore.experiments.study import StudyFile, read_study

STUDY = Path(__file__).parent.parent / "live" / "cuda.yaml"
SEED = 1
# What differs from the study. 60 GB of weights in bf16, and some 25 launches a layer: fewer and shorter requests, and fewer
# shapes of batches to measure.
MODELS: dict[str, list[str]] = {
    "llama-3.1-8b": [],
    "qwen3-30b-a3b": ["model=qwen3-30b-a3b", "workload.head=12", "workload.shrink=4", "engine.max_num_seqs=8",
                      "engine.max_num_batched_tokens=1024"],
}
_TINY_MODEL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 256}
_TINY_KINDS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 16, "head_dim": 8,
        "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "tie_word_embeddings": False},
}
_TINY_SETTINGS = ["workload.head=4", "workload.shrink=128", "engine.block_size=4", "engine.max_num_seqs=2",
                  "engine.max_num_batched_tokens=32", "engine.max_model_len=256", "engine.num_gpu_blocks=200"]


def live(model: str, profile: Path, emit: Emit, tiny: bool) -> None:
    """The section of one model; `profile`: where its operators' times are kept, so that another try goes on from there."""
    with tempfile.TemporaryDirectory() as folder:
        file, device = _study(model, Path(folder), tiny)

        def report(what: str, share: float) -> None:
            emit({"reached": f"{what}, {share:.0%}"})

        found = validate_live(file, device, profile, seed=SEED, report=report).as_json()
    if tiny:  # says nothing about speed
        for row in found["rows"]:
            row["ok"] = None
    emit({**found, "study": file.study.model_dump(mode="json", include={"workload", "model", "engine"})})


def _study(model: str, folder: Path, tiny: bool) -> tuple[StudyFile, str]:
    if not tiny:
        return read_study(STUDY, MODELS[model]), "cuda"
    config = folder / "config.json"
    config.write_text(json.dumps({**_TINY_MODEL, **_TINY_KINDS[model]}), encoding="utf-8")
    return read_study(STUDY, [f"model={config}", *_TINY_SETTINGS]), "cpu"


def verdict(found: dict[str, Any]) -> bool | None:
    """Whether every row with a target meets it; None where there is none."""
    judged = [row["ok"] for row in found.get("rows", []) if row["ok"] is not None]
    return all(judged) if judged else None
