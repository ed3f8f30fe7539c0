"""Random numbers by name: functions of their arguments, and nothing else."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.randomness import digest, generator, uniform

entities = st.lists(st.integers() | st.text(max_size=4) | st.text(alphabet="\x1f\\s:1", max_size=4), max_size=3)


def test_known_values():
    """Frozen: a change here changes every workload ever generated from a seed."""
    assert uniform(0, "arrival") == 0.09172757527585573
    assert uniform(7, "tool", 3, "search") == 0.18501718195653705
    assert generator(7, "length", 3).integers(1000, size=4).tolist() == [346, 489, 727, 538]


def test_another_process_with_another_hash_seed_draws_the_same():
    code = "from simcore.randomness import *; print(uniform(3, 'a', 'b', 4), generator(3, 'a', 'b', 4).random(3).tolist())"
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        printed = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
        assert printed.stdout.strip() == f"{uniform(3, 'a', 'b', 4)} {generator(3, 'a', 'b', 4).random(3).tolist()}"


@given(st.integers(), st.lists(st.tuples(st.text(max_size=3), entities), min_size=1, max_size=5))
def test_independent_of_the_order_of_the_calls(seed, calls):
    forward = [uniform(seed, name, *entity) for name, entity in calls]
    backward = [uniform(seed, name, *entity) for name, entity in reversed(calls)]
    assert forward == backward[::-1]
    assert all(0 <= value < 1 for value in forward)


def test_two_generators_of_one_name_do_not_share_their_state():
    one, two = generator(1, "x"), generator(1, "x")
    one.random(10)
    assert two.random() == generator(1, "x").random()


key = st.tuples(st.integers(), st.text(max_size=4) | st.text(alphabet="\x1f\\s:1", max_size=4), entities)


@given(key, key)
def test_distinct_arguments_give_distinct_streams(one, two):
    same = one == two
    assert (digest(one[0], one[1], *one[2]) == digest(two[0], two[1], *two[2])) == same


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("x", "1"), ("x", 1)),
        (("x", "a", "b"), ("x", "ab")),
        (("x", "a", "b"), ("x", "b", "a")),
        (("x", "a"), ("xa",)),
        (("x", 12), ("x", 1, 2)),
        (("x",), ("x", "")),
        (("x", "a", "b"), ("x", "a\x1fstr:b")),  # a string that imitates our separator
        (("x", "\x1f"), ("x", "\\s")),  # ... or what we write for it
    ],
)
def test_look_alikes_differ(one, two):
    assert uniform(0, *one) != uniform(0, *two)


def test_an_integer_of_numpy_is_that_integer():
    assert digest(np.int64(5), "x", np.int32(3), np.str_("a")) == digest(5, "x", 3, "a")


@pytest.mark.parametrize("entity", [1.0, None, ("a", 1), b"a"])
def test_entities_without_one_clear_text_are_refused(entity):
    with pytest.raises(TypeError):
        digest(0, "x", entity)


def test_roughly_uniform():
    """Chi-square over 64 cells; 63 degrees of freedom, so 103.4 is passed by one sample in a thousand. The seed is fixed."""
    draws = np.array([uniform(2024, "chi", i) for i in range(20_000)])
    counts = np.bincount((draws * 64).astype(int), minlength=64)
    expected = len(draws) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 103.4
    # Neighbouring entities are unrelated: the correlation of n pairs has a standard deviation of n ** -0.5.
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 4 * len(draws) ** -0.5
