"""The decoder and the executor that runs batches: reuse, preemption, Triton against torch, the same decisions."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from serving_runs import tables, workload  # noqa: E402

from simcore.errors import ConfigError  # noqa: E402
from simcore.kernels.decoder import Decoder  # noqa: E402
from simcore.kernels.executor import RealExecutor  # noqa: E402
from simcore.kernels.measure import made_up  # noqa: E402
from simcore.kernels.operators import load_operators  # noqa: E402
from simcore.models.engine import EngineSettings  # noqa: E402
from simcore.models.executor import Completion  # noqa: E402
from simcore.models.hf_config import load_llm  # noqa: E402
from simcore.models.serving import Deployment, Policies, serve  # noqa: E402
from simcore.policies.admission.fcfs import Fcfs  # noqa: E402
from simcore.policies.replica_routing.round_robin import RoundRobin  # noqa: E402
from simcore.policies.retention.lru import Lru  # noqa: E402
from simcore.policies.retention.none import None_ as NoReuse  # noqa: E402

BLOCK = 4
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "max_position_embeddings": 256}
CONFIGS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE},
    "moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, **SHAPE},
}


@pytest.fixture(params=list(CONFIGS))
def llm(request, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[request.param]))
    return load_llm(path)


def decoder(llm, blocks: int = 60, kind: str = "torch", dtype=torch.float64, block_size: int = BLOCK) -> Decoder:
    return Decoder(llm, blocks, block_size, max_model_len=256, operators=load_operators(kind), device="cpu", dtype=dtype)


WORK = [  # the second shares 12 tokens with the first, the third comes back to all of the first
    {"at": 0.0, "prompt": 21, "output": 6, "ids": [1, 2, 3, 4, 5, 6], "known": 24},
    {"at": 0.1, "prompt": 30, "output": 5, "ids": [1, 2, 3, 14, 15, 16, 17]},
    {"at": 1e3, "prompt": 25, "output": 7, "ids": [1, 2, 3, 4, 5, 6], "known": 24},
    {"at": 1e3, "prompt": 3, "output": 20}, {"at": 1e3, "prompt": 9, "output": 18},
]


def play(executor, blocks: int = 60, retention=Lru, **engine):
    settings = EngineSettings(version="0.33.0", block_size=BLOCK, max_num_seqs=4, **{"max_num_batched_tokens": 16, **engine})
    deployment = Deployment(settings, 1, blocks, 256, tables())
    policies = Policies(lambda r: Fcfs(), lambda r, a: retention(), RoundRobin)
    return serve(workload(WORK), deployment, policies, executor=lambda r: executor)


def logits(executor) -> dict[tuple[int, int], np.ndarray]:
    return {(request, computed): row.numpy() for request, computed, row in executor.logits}


def same(a, b) -> None:
    assert a.keys() == b.keys() and len(a) == sum(row["output"] for row in WORK)
    for key, row in a.items():
        np.testing.assert_allclose(row, b[key], rtol=1e-9, atol=1e-9)


def test_a_reused_prefix_gives_the_logits_of_a_recomputed_one(llm):
    reused, whole = (RealExecutor(decoder(llm), keep_logits=True) for _ in range(2))
    assert play(reused).requests["cached_tokens"].sum() >= 12 + 24
    assert play(whole, retention=NoReuse).requests["cached_tokens"].sum() <= 12  # of one that still ran
    same(logits(reused), logits(whole))


def test_blocks_found_again_hold_what_computing_gives(llm):
    """Whatever is reused or computed again after a preemption, each token's logits are those of a run with room for all."""
    roomy, short = (RealExecutor(decoder(llm), keep_logits=True) for _ in range(2))
    first, second = play(roomy), play(short, blocks=14)
    assert second.summary["preemptions"] > 0 and first.summary["preemptions"] == 0
    assert first.requests["cached_tokens"].sum() > 0
    same(logits(roomy), logits(short))


def test_logits_do_not_depend_on_the_batches(llm):
    """Long chunks or short ones, beside decodes or alone: the same tokens after the same context."""
    many, few = (RealExecutor(decoder(llm), keep_logits=True) for _ in range(2))
    play(many)
    play(few, max_num_batched_tokens=5)
    assert len(few.steps) > len(many.steps)
    same(logits(many), logits(few))


class _Recorded:
    """A simulated executor that takes what a real one took."""

    def __init__(self, seconds) -> None:
        self.seconds = iter(seconds)
        self.batches = []

    def start(self, batch, now):
        took = next(self.seconds)
        self.batches.append((tuple(r.id for r in batch.requests), tuple(batch.counts), tuple(batch.before)))
        return Completion(now + (took + batch.decision_seconds), took)


def test_both_executors_meet_the_same_decisions(llm):
    real = RealExecutor(decoder(llm, dtype=torch.float32))
    first = play(real, blocks=14)
    simulated = _Recorded([step.seconds for step in real.steps])
    second = play(simulated, blocks=14)
    assert [(step.counts, step.before) for step in real.steps] == [batch[1:] for batch in simulated.batches]
    for name, table in first.tables.items():
        assert table.equals(second.tables[name]), name
    assert first.summary == second.summary and first.speed["why_not_planned"] == ["batches are run, not priced"]


def test_times_can_be_replayed_on_the_real_executor(llm):
    real = RealExecutor(decoder(llm, dtype=torch.float32))
    first = play(real)
    again = RealExecutor(decoder(llm, dtype=torch.float32), replayed=[step.seconds for step in real.steps])
    second = play(again)
    assert first.requests.equals(second.requests)
    assert [replace(step, seconds=0.0) for step in real.steps] == [replace(step, seconds=0.0) for step in again.steps]


def test_triton_gives_the_logits_of_torch(llm):
    """Under the interpreter: one batch of decodes and chunks after prefixes."""
    found = []
    for kind in ("torch", "triton"):
        d = decoder(llm, kind=kind, dtype=torch.float32, block_size=16)
        executor = RealExecutor(d, keep_logits=True)
        for counts, before in (([17, 5], [0, 0]), ([1, 1, 19, 1], [17, 5, 13, 3])):
            executor.start(made_up(d, counts, before), 0.0)
        found.append(torch.stack([row for _, _, row in executor.logits]))
    assert len(found[0]) == 6
    torch.testing.assert_close(found[0], found[1], rtol=2e-3, atol=2e-3)


def test_layers_that_it_has_not_are_refused():
    with pytest.raises(ConfigError, match="sliding-window"):
        decoder(load_llm("gpt-oss-20b"))
