import numpy as np
import pytest

from simcore.errors import TraceError
from simcore.traces.generate import poisson


def test_the_same_seed_gives_the_same_workload_and_another_another() -> None:
    a, b, c = (poisson(50, 2.0, (100, 50), [3, 5], seed) for seed in (1, 1, 2))
    for column in ("arrival", "input_tokens", "output_tokens"):
        assert np.array_equal(getattr(a, column), getattr(b, column))
        assert not np.array_equal(getattr(a, column), getattr(c, column))


def test_columns_have_streams_of_their_own() -> None:
    a = poisson(50, 2.0, (100, 50), 7, 1)
    b = poisson(50, 4.0, (100, 50), [1, 2], 1)
    assert np.array_equal(a.input_tokens, b.input_tokens)
    assert np.allclose(a.arrival, 2 * b.arrival, rtol=1e-12)


def test_moments() -> None:
    w = poisson(20_000, 5.0, (400, 300), [10, 30], 3)
    assert w.arrival[-1] == pytest.approx(4000, rel=0.03)
    gaps = np.diff(w.arrival)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)
    assert w.input_tokens.mean() == pytest.approx(400, rel=0.03)
    assert w.input_tokens.std() == pytest.approx(300, rel=0.08)
    assert set(w.output_tokens.tolist()) == {10, 30}
    assert w.output_tokens.mean() == pytest.approx(20, rel=0.03)


def test_no_rate_means_all_at_once() -> None:
    assert poisson(3, 0, 5, 1, 1).arrival.tolist() == [0, 0, 0]
    assert poisson(3, 0, 5, 1, 1).input_tokens.tolist() == [5, 5, 5]


def test_prefix_groups_share_their_prefix_and_nothing_else() -> None:
    w = poisson(60, 1.0, 40, 8, 5, prefix_groups=3, prefix_tokens=50, prefix_share=0.7)
    shares = w.known_tokens == 50
    assert 0 < shares.sum() < 60
    assert (w.input_tokens == np.where(shares, 90, 40)).all()
    assert (w.known_tokens[~shares] == 0).all()
    keys = [w.block_keys(i, 10).tolist() for i in range(60)]
    groups = {int(w.ids(i)[0]) for i in np.flatnonzero(shares)}
    assert len(groups) == 3
    for i in range(60):
        for j in range(i):
            same = shares[i] and shares[j] and w.ids(i)[0] == w.ids(j)[0]
            assert len(set(keys[i]) & set(keys[j])) == (5 if same else 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "n: found 0: allowed: at least 1"),
        ({"rate": float("nan")}, "rate: found nan: allowed: a finite number"),
        ({"input_tokens": 0}, "input_tokens: found 0: allowed: whole numbers from 1"),
        ({"input_tokens": []}, "input_tokens: found .*: allowed: whole numbers from 1"),
        ({"input_tokens": [1.5]}, "input_tokens: found .*: allowed: whole numbers from 1"),
        ({"output_tokens": (0.0, 1.0)}, "output_tokens: found .*: allowed: .mean, sd. with mean at least 1"),
        ({"prefix_groups": 2}, "prefix_groups, prefix_tokens: found .2, 0.: allowed: both 0 or both above 0"),
        ({"prefix_share": 1.5}, "prefix_share: found 1.5: allowed: 0 to 1"),
        ({"block_tokens": 0}, "block_tokens: found 0: allowed: at least 1"),
    ],
)
def test_bad_arguments(change: dict, message: str) -> None:
    good = {"n": 3, "rate": 1.0, "input_tokens": 5, "output_tokens": 1, "seed": 1}
    with pytest.raises(TraceError, match=message):
        poisson(**{**good, **change})
