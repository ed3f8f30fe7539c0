"""The bisection on functions whose answer is known, monotone and not."""

from __future__ import annotations

from math import log2

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from simcore.experiments.bisection import Found, least, not_monotone
from simcore.randomness import uniform

BOUND = st.integers(-10_000, 10_000)


@st.composite
def searches(draw):
    """(fewest, start, most, stride)."""
    fewest, start, most = sorted(draw(st.tuples(BOUND, BOUND, BOUND)))
    return fewest, start, most, draw(st.integers(1, 50))


@given(searches(), st.integers(-10_100, 10_100))
@example((1, 1, 1, 1), 1)
@example((1, 1, 1, 1), 2)
def test_on_a_monotone_function_the_answer_is_exact_and_found_quickly(search, threshold):
    fewest, start, most, stride = search
    asked: list[int] = []

    def holds(n: int) -> bool:
        assert fewest <= n <= most
        asked.append(n)
        return n >= threshold

    found = least(holds, start, fewest=fewest, most=most, stride=stride)
    assert len(asked) == len(set(asked)) <= 2 * log2(abs(start - threshold) / stride + 2) + log2(stride) + 4
    if threshold > most:
        assert found == Found(None, most, most)
    else:
        assert found.answer == max(fewest, threshold)
        assert found.failed == (None if threshold <= fewest else threshold - 1)
    assert not_monotone({n: n >= threshold for n in asked}) == []


@given(searches(), st.integers(0, 10**6))
def test_whatever_the_function_the_answer_holds_and_what_lies_below_does_not(search, seed):
    fewest, start, most, stride = search

    def holds(n: int) -> bool:
        return uniform(seed, "holds", n) < 0.5

    found = least(holds, start, fewest=fewest, most=most, stride=stride)
    if found.answer is None:
        assert found.failed == most and not holds(most)
    else:
        assert holds(found.answer)
        assert found.answer == fewest if found.failed is None else (
            found.failed == found.answer - 1 and not holds(found.failed))


@given(st.integers(1, 400), st.floats(0, 0.2), st.integers(0, 10**6))
def test_noise_moves_the_answer_no_further_than_it_reaches(threshold, noise, seed):
    """A share that rises with n, seen with an error of at most `noise`: the answer lies where the error can decide."""

    def share(n: int) -> float:
        return n / (n + threshold)

    def seen(n: int) -> float:
        return share(n) + noise * (2 * uniform(seed, "noise", n) - 1)

    found = least(lambda n: seen(n) >= 0.5, 1, fewest=1, most=100_000)
    assert found.answer is not None
    assert share(found.answer) >= 0.5 - noise and (found.answer == 1 or share(found.answer - 1) <= 0.5 + noise)


def test_a_way_up_that_leads_nowhere_is_left():
    asked: list[int] = []

    def holds(n: int) -> bool:
        asked.append(n)
        return False

    assert least(holds, 1, fewest=1, most=1 << 20, hopeless=lambda n: n >= 8) == Found(None, 8, 8)
    assert asked == [1, 2, 4, 8]


def test_what_falls_back_is_found():
    assert not_monotone({1: False, 2: True, 3: False, 8: True}) == [(2, 3)]
    assert not_monotone({}) == []


@pytest.mark.parametrize(("start", "stride"), [(0, 1), (11, 1), (5, 0)])
def test_a_start_out_of_bounds_is_refused(start, stride):
    with pytest.raises(ValueError, match=r"must lie in 1 \.\. 10"):
        least(lambda n: True, start, fewest=1, most=10, stride=stride)
