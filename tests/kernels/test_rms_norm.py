"""RMSNorm against float64, with and without the residual addition."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from simcore.kernels import reference  # noqa: E402
from simcore.kernels.rms_norm import rms_norm  # noqa: E402

# Relative error of one rounding of the sum and one of the result; the interpreter cuts bf16 off where a GPU rounds it.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
DTYPES = list(TOLERANCE)
EPS = 1e-5


def drawn(device, dtype, *shape, scale=1.0, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).to(device)


def near(got, want, dtype):
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=1e-6)


def compare(device, dtype, tokens, hidden, scale, seed):
    x, residual = (drawn(device, dtype, tokens, hidden, scale=scale, seed=seed + i) for i in range(2))
    weight = drawn(device, dtype, hidden, seed=seed + 2)
    before = x.clone(), residual.clone()
    near(rms_norm(x, weight, EPS), reference.rms_norm(x.double(), weight.double(), EPS), dtype)
    out, summed = rms_norm(x, weight, EPS, residual)
    want, want_sum = reference.rms_norm(x.double(), weight.double(), EPS, residual.double())
    near(out, want, dtype)
    near(summed, want_sum, dtype)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("hidden", [1, 7, 64, 129, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_that_of_float64(device, dtype, hidden):
    compare(device, dtype, 3, hidden, 1.0, 0)


SHAPES = {"dtype": st.sampled_from(DTYPES), "tokens": st.integers(0, 5), "hidden": st.integers(1, 300),
          "scale": st.sampled_from([1e-3, 1.0, 100.0]), "seed": st.integers(0, 1000)}


@settings(max_examples=10)
@given(**SHAPES)
def test_any_shape(device, dtype, tokens, hidden, scale, seed):
    compare(device, dtype, tokens, hidden, scale, seed)


@pytest.mark.study
@settings(max_examples=300)
@given(**SHAPES)
def test_any_shape_at_length(device, dtype, tokens, hidden, scale, seed):
    compare(device, dtype, tokens, hidden, scale, seed)


def test_the_reference_is_the_formula():
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    got = reference.rms_norm(x, torch.tensor([1.0, 2.0], dtype=torch.float64), 0.0)
    torch.testing.assert_close(got, torch.tensor([[3.0, 8.0]], dtype=torch.float64) / 12.5**0.5)
    half = reference.rms_norm(torch.full((1, 8), 200.0, dtype=torch.float16), torch.ones(8, dtype=torch.float16), EPS)
    torch.testing.assert_close(half, torch.ones(1, 8, dtype=torch.float16))  # 200^2 * 8 is more than fp16 can hold


def test_rows_of_zeros_stay_zeros_and_rows_do_not_meet(device):
    x = drawn(device, torch.float32, 3, 40)
    x[0], x[1] = 0.0, float("nan")
    out = rms_norm(x, torch.ones(40, device=device), EPS)
    assert (out[0] == 0).all() and out[1].isnan().all() and out[2].isfinite().all()


def test_rows_of_a_wider_matrix(device):
    x, weight = drawn(device, torch.float32, 4, 90), drawn(device, torch.float32, 30, seed=1)
    assert torch.equal(rms_norm(x[:, 30:60], weight, EPS), rms_norm(x[:, 30:60].contiguous(), weight, EPS))


@pytest.mark.parametrize(("change", "said"), [
    ({"x": torch.zeros(4)}, "x: found"),
    ({"x": torch.zeros(8, 2).T}, "x: found"),
    ({"x": torch.zeros(2, 8, dtype=torch.float64)}, "x: found torch.float64"),
    ({"weight": torch.zeros(7)}, r"weight: found \[7\]; allowed: contiguous \[8\]"),
    ({"residual": torch.zeros(3, 8)}, "residual: found"),
    ({"residual": torch.zeros(2, 8, dtype=torch.float16)}, "residual: found torch.float16"),
])  # fmt: skip
def test_what_is_refused(change, said):
    arguments = {"x": torch.zeros(2, 8), "weight": torch.zeros(8), "eps": EPS} | change
    with pytest.raises(ValueError, match=said):
        rms_norm(**arguments)
