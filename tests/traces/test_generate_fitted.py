"""Fitted workloads: what was put into a trace is found again in what is drawn from it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.agents import start_programs
from simcore.traces.generate import poisson
from simcore.traces.generate_arrivals import diurnal, gamma
from simcore.traces.generate_fitted import fit, generate_fitted
from simcore.traces.identity import first_conflict, numbered_ids
from simcore.traces.info import describe
from simcore.traces.read import read


def test_rates_and_bursts_by_window() -> None:
    made = diurnal(20_000, [2.0, 10.0], (300, 200), [5, 50], 1, period=2000.0, cv=2.0)
    fitted = fit(made, window=1000.0)
    assert fitted.rates[:4] == pytest.approx([2, 10, 2, 10], rel=0.15)
    assert fitted.cvs[:4] == pytest.approx([2, 2, 2, 2], rel=0.15)
    assert fitted.turns.tolist() == [1] * len(fitted.turns) and not fitted.grows and len(fitted.pauses) == 0
    again = generate_fitted(fitted, 20_000, 5)
    assert np.histogram(again.arrival, [0, 1000, 2000])[0] == pytest.approx([2000, 10_000], rel=0.15)
    assert again.input_tokens.mean() == pytest.approx(made.input_tokens.mean(), rel=0.05)
    assert set(again.output_tokens.tolist()) == {5, 50}
    refit = fit(again, window=1000.0)
    assert refit.rates[:4] == pytest.approx(fitted.rates[:4], rel=0.2)
    assert refit.cvs[:4] == pytest.approx(fitted.cvs[:4], rel=0.2)


def test_rates_are_scaled_and_windows_begin_again() -> None:
    fitted = fit(poisson(1000, 2.0, 10, 10, 1), window=100.0)
    twice = generate_fitted(fitted, 4000, 1, rate=2.0)
    assert twice.arrival[-1] == pytest.approx(1000, rel=0.1)
    assert np.allclose(generate_fitted(fitted, 4000, 1).arrival, 2 * twice.arrival)


def test_sessions_of_a_real_trace() -> None:
    trace = start_programs(read("coding-agents", context=65_536), 0.05, 1)
    fitted = fit(trace, window=600.0)
    assert fitted.grows and not fitted.recorded and len(fitted.turns) == min(1001, trace.n_programs)
    w = generate_fitted(fitted, 150, 2, context=65_536)
    assert first_conflict(*numbered_ids(w)) is None
    before, after = describe(trace), describe(w)
    assert after["turns_mean"] == pytest.approx(before["turns_mean"], rel=0.7)
    assert np.median(w.pause[w.turn > 0]) == pytest.approx(float(np.median(trace.pause[trace.turn > 0])), rel=0.3)
    assert w.total_tokens.max() <= 65_536
    later = np.flatnonzero(w.turn > 0)
    assert (w.input_tokens[later] > w.input_tokens[later - 1] + w.output_tokens[later - 1] - 1).all()
    assert after["best_hit_rate"] > 0.5


def test_a_common_root_and_recorded_pauses() -> None:
    trace = read("mooncake-conversation")
    fitted = fit(trace)
    assert fitted.root_tokens == 512 and fitted.recorded
    w = generate_fitted(fitted, 300, 1)
    firsts = [w.ids(row)[0] for row in np.flatnonzero(w.turn == 0).tolist()]
    assert set(firsts) == {0}
    assert any("pauses are times between recorded arrivals" in note for note in w.source.notes)
    assert w.source.licence == "Apache-2.0" and w.source.name == "fitted to mooncake-conversation"


def test_seeds_and_parameters() -> None:
    fitted = fit(gamma(500, 3.0, 1.5, (100, 80), 20, 1))
    a, b, c = (generate_fitted(fitted, 50, seed) for seed in (1, 1, 2))
    assert np.array_equal(a.arrival, b.arrival) and not np.array_equal(a.arrival, c.arrival)
    assert np.array_equal(a.input_tokens[:20], generate_fitted(fitted, 20, 1).input_tokens)
    assert json.loads(json.dumps(fitted.parameters()))["window"] == 300.0


def test_a_short_last_window_belongs_to_the_one_before() -> None:
    w = poisson(200, 1.0, 5, 5, 3)
    last = float(w.arrival[-1] - w.arrival[0])
    fitted = fit(w, window=last / 2.05)
    assert len(fitted.rates) == 2 and fitted.rates.max() < 2


@pytest.mark.parametrize(("call", "message"), [
    (lambda: fit(poisson(5, 1.0, 5, 5, 1), window=0.0), "window: found 0.0"),
    (lambda: fit(poisson(5, 0.0, 5, 5, 1)), "arrival: no rate to fit: found '5 programs that start at one time'"),
    (lambda: fit(poisson(1, 1.0, 5, 5, 1)), "found '1 programs that start at one time'"),
    (lambda: generate_fitted(fit(poisson(5, 1.0, 5, 5, 1)), 0, 1), "programs: found 0"),
    (lambda: generate_fitted(fit(poisson(5, 1.0, 5, 5, 1)), 5, 1, rate=0.0), "rate: found 0.0"),
    (lambda: generate_fitted(fit(poisson(5, 1.0, 5, 5, 1)), 5, 1, context=9), "context: found 9: allowed: room for at"),
])
def test_what_is_refused(call, message: str) -> None:
    with pytest.raises(TraceError) as error:
        call()
    assert message in str(error.value)
