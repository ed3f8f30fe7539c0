import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_worlds import World, worlds

from simcore.traces.generate import poisson
from simcore.traces.info import best_cached_tokens, describe, render
from simcore.traces.workload import Source, build


@given(worlds(), st.integers(1, 9))
def test_best_cached_tokens_against_brute_force(world: World, block_size: int) -> None:
    seen: set[tuple] = set()
    expected = []
    for i, tokens in enumerate(world.tokens):
        hit = 0
        while hit + block_size < world.workload.input_tokens[i] and tokens[: hit + block_size] in seen:
            hit += block_size
        expected.append(hit)
        seen |= {tokens[:end] for end in range(block_size, len(tokens) + 1, block_size)}
    assert best_cached_tokens(world.workload, block_size).tolist() == expected


@given(worlds(), st.integers(1, 9))
def test_best_cached_tokens_against_block_keys(world: World, block_size: int) -> None:
    w = world.workload
    seen: set[int] = set()
    for i, cached in enumerate(best_cached_tokens(w, block_size).tolist()):
        keys = w.block_keys(i, block_size).tolist()
        hit = 0
        while hit < (int(w.input_tokens[i]) - 1) // block_size and keys[hit] in seen:
            hit += 1
        assert cached == hit * block_size
        seen.update(keys)


def test_the_numbers() -> None:
    w = build(
        arrival=np.array([10.0, 11.0, 75.0, np.nan]), input_tokens=np.array([10, 20, 30, 40]),
        output_tokens=np.array([1, 2, 3, 4]), source=Source("four", "CC0", "here", ("a note",)),
        program=np.array([0, 0, 1, 0]), turn=np.array([0, 1, 0, 2]), waits=[[], [], [], [1]],
        skipped=("file:3: bad",),
    )
    info = describe(w)
    assert info["span"] == 65.0
    assert info["mean_rate"] == 3 / 65
    assert info["peak_rate"] == 2 / 60
    assert info["closed_loop_requests"] == 1
    expected = {"total": 100, "mean": 25.0, "p50": 25.0, "p90": 37.0, "p99": 39.7, "max": 40}
    assert info["input_tokens"] == pytest.approx(expected, rel=1e-12)
    assert (info["sessions"], info["turns_mean"], info["turns_max"]) == (2, 2.0, 3)
    assert (info["skipped"], info["licence"], info["notes"]) == (1, "CC0", ["a note"])
    assert json.loads(json.dumps(info)) == info
    text = render(info)
    for part in ("four  (CC0)", "note: a note", "skipped: file:3: bad", "hit rate 0.0000"):
        assert part in text


def test_all_at_once_has_no_rate() -> None:
    info = describe(poisson(3, 0, 5, 1, 1))
    assert info["mean_rate"] is None
    assert "mean -" in render(info)


def test_sharing_within_a_group_is_all_that_can_hit() -> None:
    w = poisson(10, 1.0, 14, 2, 1, prefix_groups=1, prefix_tokens=50)
    assert best_cached_tokens(w, 16).tolist() == [0, *[48] * 9]
