"""Quantised KV: no value further than half a step away, constants exact, bytes laid out as documented."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from simcore.kernels import kv_quant, reference  # noqa: E402
from simcore.kernels.kv_quant import dequantize_keys, dequantize_values, quantize_keys, quantize_values  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS = ["kernel", "reference"]


def drawn(device, dtype, *shape, scale=1.0, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).to(device)


def module_of(kind):
    return kv_quant if kind == "kernel" else reference


def spread(q, part):
    """Scales or zeros, one for each value: float64[tokens, kv_heads, head_dim or 1]."""
    part = part.double()
    return part.repeat_interleave(q.group, dim=0)[: len(q.codes)] if q.group else part[..., None]


def codes_of(q):
    """The codes one by one: float64[tokens, kv_heads, head_dim]."""
    if q.bits == 8:
        return q.codes.double()
    return torch.stack((q.codes % 16, q.codes // 16), dim=-1).flatten(-2).double()


def check_all(x, q, back):
    """`back`: dequantised to fp32."""
    scale, zero = spread(q, q.scale), spread(q, q.zero)
    rounding = 1e-6 * (zero.abs() + 2**q.bits * scale)  # of the fp32 arithmetic
    exact = codes_of(q) * scale + zero
    assert ((exact - x.double()).abs() <= scale / 2 + rounding).all()
    assert ((back.double() - exact).abs() <= rounding).all()


def compare(device, dtype, tokens, kv_heads, head_dim, bits, group, scale, seed):
    x = drawn(device, dtype, tokens, kv_heads, head_dim, scale=scale, seed=seed)
    keys, values = quantize_keys(x, bits, group), quantize_values(x, bits)
    assert keys.codes.shape == values.codes.shape == (tokens, kv_heads, head_dim * bits // 8)
    assert keys.scale.shape == keys.zero.shape == (-(-tokens // group), kv_heads, head_dim)
    assert values.scale.shape == values.zero.shape == (tokens, kv_heads)
    check_all(x, keys, dequantize_keys(keys, torch.float32))
    check_all(x, values, dequantize_values(values, torch.float32))
    for q, plain in ((keys, reference.quantize_keys(x, bits, group)), (values, reference.quantize_values(x, bits))):
        # A value halfway between two codes, or a scale between two numbers of its type, may fall to either side.
        assert torch.equal(q.zero, plain.zero)
        torch.testing.assert_close(q.scale.double(), plain.scale.double(), rtol=2.0**-7, atol=2.0**-24)
        check_all(x, plain, reference.dequantize_keys(plain, torch.float32) if plain.group
                  else reference.dequantize_values(plain, torch.float32))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "group"), [(1, 32), (32, 32), (33, 32), (70, 24)])
def test_no_value_is_further_than_half_a_step(device, dtype, bits, tokens, group):
    compare(device, dtype, tokens, 2, 64, bits, group, 1.0, 0)


SHAPES = {"dtype": st.sampled_from(DTYPES), "tokens": st.integers(0, 40), "kv_heads": st.integers(1, 3),
          "head_dim": st.sampled_from([2, 6, 64]), "bits": st.sampled_from([4, 8]), "group": st.integers(1, 40),
          "scale": st.sampled_from([1e-6, 1e-3, 1.0, 1000.0]), "seed": st.integers(0, 1000)}  # fmt: skip


@settings(max_examples=10)
@given(**SHAPES)
def test_any_shape(device, dtype, tokens, kv_heads, head_dim, bits, group, scale, seed):
    compare(device, dtype, tokens, kv_heads, head_dim, bits, group, scale, seed)


@pytest.mark.study
@settings(max_examples=300)
@given(**SHAPES)
def test_any_shape_at_length(device, dtype, tokens, kv_heads, head_dim, bits, group, scale, seed):
    compare(device, dtype, tokens, kv_heads, head_dim, bits, group, scale, seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_constants_are_exact(device, kind, dtype, bits):
    of = module_of(kind)
    channels = drawn(device, dtype, 1, 2, 8, scale=300.0).expand(5, 2, 8).contiguous()
    assert torch.equal(of.dequantize_keys(of.quantize_keys(channels, bits, 4), dtype), channels)
    tokens = drawn(device, dtype, 5, 2, 1, scale=300.0).expand(5, 2, 8).contiguous()
    assert torch.equal(of.dequantize_values(of.quantize_values(tokens, bits), dtype), tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_bits_are(device, kind):
    """Values that are their own codes; the nibble of an even channel is the low one."""
    of = module_of(kind)
    v = torch.tensor([[[0.0, 15.0, 1.0, 2.0, 7.0, 8.0]]], device=device)
    q = of.quantize_values(v, 4)
    assert q.codes.tolist() == [[[0xF0, 0x21, 0x87]]]
    assert (q.scale.item(), q.zero.item()) == (1.0, 0.0)
    k = torch.tensor([[[0.0, 100.0]], [[255.0, 101.0]], [[51.0, 355.0]], [[9.0, 9.0]]], device=device)
    q = of.quantize_keys(k, 8, 3)
    assert q.codes.tolist() == [[[0, 0]], [[255, 1]], [[51, 255]], [[0, 0]]]
    assert q.scale.tolist() == [[[1.0, 1.0]], [[0.0, 0.0]]]
    assert q.zero.tolist() == [[[0.0, 100.0]], [[9.0, 9.0]]]
    assert q.nbytes == 8 + 2 * 4 * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_in_the_types_of_the_cache(device, dtype):
    """To fp16 and bf16 as to fp32, but for their rounding; the interpreter cuts bf16 off where a GPU rounds it."""
    q = quantize_values(drawn(device, torch.float32, 3, 2, 64), 8)
    got, want = dequantize_values(q, dtype), dequantize_values(q, torch.float32)
    torch.testing.assert_close(got.float(), want, rtol=2.0**-7, atol=1e-7)


@pytest.mark.parametrize("bits", [4, 8])
def test_slices_of_a_wider_product(device, bits):
    qkv = drawn(device, torch.float16, 9, 5, 16)
    got, want = quantize_keys(qkv[:, 3:], bits, 4), quantize_keys(qkv[:, 3:].contiguous(), bits, 4)
    assert torch.equal(got.codes, want.codes) and torch.equal(got.scale, want.scale)


def test_channels_of_one_outlier_do_not_blur_the_others(device):
    """What keys are quantised per channel for: KIVI, section 3.2."""
    k = drawn(device, torch.float32, 32, 1, 16)
    k[:, :, 3] *= 100.0
    others = [c for c in range(16) if c != 3]
    worst = (dequantize_keys(quantize_keys(k, 4, 32), torch.float32) - k).abs()[:, :, others].max()
    blurred = (dequantize_values(quantize_values(k, 4), torch.float32) - k).abs()[:, :, others].max()
    assert worst < 0.25 < 1.0 < blurred


def test_what_is_refused():
    x = torch.zeros(3, 2, 8)
    with pytest.raises(ValueError, match="bits: found 2; allowed: 4 or 8"):
        quantize_values(x, 2)
    with pytest.raises(ValueError, match="group: found 0"):
        quantize_keys(x, 8, 0)
    with pytest.raises(ValueError, match=r"v: found \[3, 2, 7\]"):
        quantize_values(x[:, :, :7], 4)
    with pytest.raises(ValueError, match="k: found strides"):
        quantize_keys(torch.zeros(3, 8, 2).mT, 8, 4)
    with pytest.raises(ValueError, match=r"k: found torch\.float64"):
        quantize_keys(x.double(), 8, 4)
    with pytest.raises(ValueError, match="q: found values; allowed: keys"):
        dequantize_keys(quantize_values(x, 8), torch.float32)
    with pytest.raises(ValueError, match="q: found keys; allowed: values"):
        dequantize_values(quantize_keys(x, 8, 2), torch.float32)
    with pytest.raises(ValueError, match=r"dtype: found torch\.int8"):
        dequantize_values(quantize_values(x, 8), torch.int8)
