"""A profile whose times follow from known costs, for tests of fits."""

from __future__ import annotations

import numpy as np

from simcore.experiments.calibrate import columns
from simcore.models.calibrated import UNITS
from simcore.models.hf_config import load_llm
from simcore.models.operator_profile import OperatorProfile, ProfileRow

# What the made-up machine takes: seconds per unit.
TRUTH = {
    "qkv_proj": {"constant": 2e-3, "tokens": 4e-5},
    "attention": {"kv_read": 3e-7, "qk_pairs": 2e-8, "sequences": 1e-4, "chunks": 2e-4, "tokens": 1e-6, "constant": 1e-4},
    "lm_head": {"sampled": 5e-5, "constant": 1e-3},
}
HOST = {"constant": 5e-4, "sequences": 2e-5}
LLM = load_llm("tiny-llama")


def batches(seed: int, count: int):
    random = np.random.default_rng(seed)
    for _ in range(count):
        n, chunks = int(random.integers(0, 9)), int(random.integers(0, 3))
        counts = [1] * n + [int(x) for x in random.integers(2, 300, chunks)]
        if counts:
            yield counts, [int(x) for x in random.integers(0, 2000, len(counts))]


def profile(noise: float = 0.0) -> OperatorProfile:
    random = np.random.default_rng(5)
    rows = []
    for k, (counts, before) in enumerate(batches(1, 80)):
        row = ProfileRow(
            counts=counts, before=before, samples=len(counts), seconds=0, low=0, high=0, repeats=3, operators={})
        x = columns([row], LLM)[0]

        def total(part, x=x):
            return sum(value * x[UNITS[unit]] for unit, value in part.items())

        operators = {
            name: total(part) * (1 + noise * random.standard_normal()) for name, part in TRUTH.items()}
        seconds = sum(operators.values()) + total(HOST)
        rows.append(row.model_copy(update={"operators": operators, "seconds": seconds, "held_out": k % 4 == 0}))
    return OperatorProfile(model="tiny-llama", parameters=LLM.parameters, device="none", software="none", dtype="float32",
                           block_size=16, rows=rows)
