import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.randomness import generator
from simcore.traces.tool_times import Constant, Empirical, Lognormal, ToolMix, ToolTime, lognormal, tool_time


@pytest.mark.parametrize("time", [
    Constant(2.0), Empirical((1.0, 4.0)), Lognormal(0.5, 0.7), Lognormal(0.1, 0.2, 0.25, 20.0), lognormal(3.0, 1.5),
])
def test_draws_have_the_mean_and_sd_that_are_stated(time: ToolTime) -> None:
    drawn = time.draw(generator(1, "tool"), 200_000)
    assert drawn.mean() == pytest.approx(time.mean, rel=0.02)
    assert drawn.std() == pytest.approx(time.sd, rel=0.03, abs=1e-12)
    assert np.array_equal(drawn, time.draw(generator(1, "tool"), 200_000))


def test_a_spike_is_a_share_of_the_calls() -> None:
    drawn = Lognormal(0.1, 0.2, 0.25, 20.0).draw(generator(2, "tool"), 40_000)
    assert (drawn == 20.0).mean() == pytest.approx(0.25, abs=0.01)
    assert drawn[drawn < 20].max() < 1
    assert lognormal(3.0, 1.5).mean == pytest.approx(3.0)


def test_a_mix_draws_tools_by_their_share() -> None:
    mix = ToolMix({"a": (3.0, Constant(1.0)), "b": (1.0, Empirical((2.0, 10.0)))})
    calls = mix.draw(generator(3, "mix"), 40_000)
    seconds = np.array([s for _, s in calls])
    assert np.mean([tool == "a" for tool, _ in calls]) == pytest.approx(0.75, abs=0.01)
    assert {s for tool, s in calls if tool == "a"} == {1.0}
    assert (mix.mean, mix.sd) == (pytest.approx(2.25), pytest.approx(np.sqrt(0.75 * 1 + 0.25 * 52 - 2.25**2)))
    assert seconds.mean() == pytest.approx(mix.mean, rel=0.02)
    assert mix.draw(generator(3, "mix"), 0) == []


def test_what_a_file_may_say() -> None:
    assert tool_time("f", 2) == tool_time("f", {"kind": "constant", "seconds": 2.0}) == Constant(2.0)
    assert tool_time("f", {"kind": "empirical", "seconds": [1, 2]}) == Empirical((1.0, 2.0))
    assert tool_time("f", {"kind": "lognormal", "median": 1, "sigma": 0.5}) == Lognormal(1.0, 0.5)
    bins = {"kind": "histogram", "start": 1.0, "width": 2.0, "counts": [2, 0, 1], "single": [9.0]}
    assert tool_time("f", bins) == Empirical((1.5, 2.5, 6.0, 9.0))


@pytest.mark.parametrize(("given", "message"), [
    (-1, "seconds: found -1: allowed: a number, 0 to inf"),
    (float("inf"), "seconds: found inf"),
    (True, "kind: found True: allowed: a number of seconds, or a kind: constant, empirical, histogram, lognormal"),
    ({"kind": "gamma"}, "kind: found {'kind': 'gamma'}"),
    ({"kind": "constant", "median": 1}, "median: unknown key: allowed: seconds"),
    ({"kind": "constant"}, "seconds: allowed: a number"),
    ({"kind": "empirical", "seconds": []}, "seconds: found []: allowed: a list of numbers"),
    ({"kind": "empirical", "seconds": [-1]}, "seconds: found -1"),
    ({"kind": "lognormal", "median": 0, "sigma": 1}, "median: found 0.0: allowed: above 0"),
    ({"kind": "lognormal", "median": 1, "sigma": 1, "spike_share": 1.5}, "spike_share: found 1.5: allowed: a number"),
])
def test_what_it_may_not(given: object, message: str) -> None:
    with pytest.raises(TraceError) as refused:
        tool_time("study.yaml", given)
    assert str(refused.value).startswith("study.yaml: ")
    assert message in str(refused.value)
