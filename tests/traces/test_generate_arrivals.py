"""Gamma gaps and rates by the time of day."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.errors import TraceError
from simcore.traces.generate import poisson
from simcore.traces.generate_arrivals import at_mass, diurnal, gamma


@pytest.mark.parametrize("cv", [0.25, 1.0, 3.0])
def test_gamma_gaps_have_their_rate_and_variation(cv: float) -> None:
    w = gamma(40_000, 5.0, cv, (400, 300), [10, 30], 3)
    gaps = np.diff(w.arrival)
    assert gaps.mean() == pytest.approx(0.2, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)
    assert w.input_tokens.mean() == pytest.approx(400, rel=0.03)
    assert f"Gamma gaps of CV {cv:g}, 40000 requests at 5/s" in w.source.notes[0]


def test_columns_have_streams_of_their_own() -> None:
    a, b = gamma(50, 2.0, 2.0, (100, 50), 7, 1), gamma(50, 4.0, 2.0, (100, 50), [1, 2], 1)
    assert np.array_equal(a.input_tokens, b.input_tokens) and np.allclose(a.arrival, 2 * b.arrival, rtol=1e-12)
    assert not np.array_equal(a.arrival, gamma(50, 2.0, 2.0, (100, 50), 7, 2).arrival)
    shared = gamma(60, 1.0, 2.0, 40, 8, 5, prefix_groups=3, prefix_tokens=50)
    assert (shared.known_tokens == 50).all() and (shared.input_tokens == 90).all()


def test_the_rate_follows_the_time_of_day() -> None:
    w = diurnal(40_000, [1.0, 0.0, 3.0], 5, 5, 1, period=300.0)
    place = w.arrival % 300
    counts = np.histogram(place, [0, 100, 200, 300])[0]
    assert counts / counts.sum() == pytest.approx([0.25, 0, 0.75], abs=0.02)
    assert w.arrival[-1] == pytest.approx(40_000 / (400 / 3) * 100, rel=0.05)
    later = diurnal(5000, [1.0, 0.0, 3.0], 5, 5, 1, period=300.0, start=150.0)
    assert later.arrival[0] >= 50 and (later.arrival[:50] < 150).all()  # the day's last third comes first


def test_a_flat_day_is_a_poisson_process() -> None:
    w = diurnal(20_000, [5.0] * 24, 5, 5, 4)
    gaps = np.diff(w.arrival)
    assert gaps.mean() == pytest.approx(0.2, rel=0.03) and gaps.std() == pytest.approx(gaps.mean(), rel=0.03)
    burst = np.diff(diurnal(20_000, [5.0] * 24, 5, 5, 4, cv=2.0).arrival)
    assert burst.std() / burst.mean() == pytest.approx(2, rel=0.06)


@given(st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=1, max_size=6).filter(any), st.integers(1, 40),
       st.floats(0, 0.99))
def test_no_request_lies_where_the_rate_is_zero(rates: list[float], n: int, share: float) -> None:
    w = diurnal(n, rates, 3, 3, 7, period=10.0, start=10.0 * share)
    assert len(w) == n and (np.diff(w.arrival) >= 0).all() and (w.arrival >= 0).all()
    part = ((w.arrival + 10.0 * share) % 10.0) / (10.0 / len(rates))
    inside = np.minimum((part + 1e-9).astype(int), len(rates) - 1)
    edge = np.abs(part - np.rint(part)) < 1e-6
    assert all(rates[k] > 0 or e for k, e in zip(inside.tolist(), edge.tolist(), strict=True))


def test_the_integral_is_turned_round() -> None:
    begin, mass = np.array([0.0, 1, 2, 3]), np.array([0.0, 2, 2, 5])
    assert at_mass(np.array([0, 1, 2, 3.5, 5]), begin, mass).tolist() == [0, 0.5, 2, 2.5, 3]


@pytest.mark.parametrize(("change", "message"), [
    ({"n": 0}, "generate.gamma: n: found 0"), ({"rate": 0.0}, "rate: found 0.0"), ({"cv": -1.0}, "cv: found -1.0"),
    ({"cv": float("nan")}, "cv: found nan"), ({"input_tokens": 0}, "input_tokens: found 0"),
    ({"prefix_groups": 2}, "prefix_groups, prefix_tokens"),
])
def test_gamma_arguments_that_are_refused(change: dict, message: str) -> None:
    with pytest.raises(TraceError) as error:
        gamma(**{"n": 3, "rate": 1.0, "cv": 1.0, "input_tokens": 5, "output_tokens": 5, "seed": 1} | change)
    assert message in str(error.value)


@pytest.mark.parametrize("change", [{"n": 0}, {"rates": []}, {"rates": [0.0]}, {"rates": [-1.0, 2.0]}, {"period": 0.0},
                                    {"start": -1.0}, {"start": 86_400.0}, {"rates": [float("inf")]}])
def test_diurnal_arguments_that_are_refused(change: dict) -> None:
    with pytest.raises(TraceError, match=r"generate\.diurnal"):
        diurnal(**{"n": 3, "rates": [1.0], "input_tokens": 5, "output_tokens": 5, "seed": 1} | change)


def test_poisson_draws_are_what_they_were() -> None:
    w = poisson(3, 2.0, (100, 50), [3, 5], 7, prefix_groups=2, prefix_tokens=20)
    assert w.arrival.tolist() == [1.112273356271953, 1.182279123503147, 1.2419126230673134]
    assert w.input_tokens.tolist() == [88, 126, 165]
    assert w.source.notes[0] == "generated: Poisson arrivals, 3 requests at 2/s, seed 7"
