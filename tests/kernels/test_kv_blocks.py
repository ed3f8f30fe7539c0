"""Copies into and out of KV memory: every byte that should move, and no other."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from simcore.kernels import reference  # noqa: E402
from simcore.kernels.kv_blocks import gather_blocks, scatter_blocks, write_kv  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def drawn(device, dtype, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def same_bytes(a, b):
    """Equal to the bit, NaN included."""
    assert a.dtype == b.dtype and a.shape == b.shape
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def poisoned(device, dtype, *shape):
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def write_and_compare(device, dtype, tokens, block_size, kv_heads, head_dim, seed):
    random = torch.Generator().manual_seed(seed)
    num_blocks = tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size, generator=random)[:tokens].to(device)
    slots[torch.rand(tokens, generator=random).to(device) < 0.2] = -1
    k, v = (drawn(device, dtype, tokens, kv_heads, head_dim, seed=seed + i) for i in range(2))
    caches = [poisoned(device, dtype, num_blocks, block_size, kv_heads, head_dim) for _ in range(2)]
    want = [cache.clone() for cache in caches]
    write_kv(k, v, *caches, slots)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[0][slot // block_size, slot % block_size] = k[token]
            want[1][slot // block_size, slot % block_size] = v[token]
    assert same_bytes(caches[0], want[0]) and same_bytes(caches[1], want[1])
    plain = [poisoned(device, dtype, num_blocks, block_size, kv_heads, head_dim) for _ in range(2)]
    reference.write_kv(k, v, *plain, slots)
    assert same_bytes(plain[0], want[0]) and same_bytes(plain[1], want[1])


WRITES = {"dtype": st.sampled_from(DTYPES), "tokens": st.integers(0, 12), "block_size": st.sampled_from([1, 4, 16]),
          "kv_heads": st.integers(1, 3), "head_dim": st.sampled_from([1, 5, 64]), "seed": st.integers(0, 1000)}


@settings(max_examples=10)
@given(**WRITES)
def test_any_write(device, dtype, tokens, block_size, kv_heads, head_dim, seed):
    write_and_compare(device, dtype, tokens, block_size, kv_heads, head_dim, seed)


@pytest.mark.study
@settings(max_examples=300)
@given(**WRITES)
def test_any_write_at_length(device, dtype, tokens, block_size, kv_heads, head_dim, seed):
    write_and_compare(device, dtype, tokens, block_size, kv_heads, head_dim, seed)


@pytest.mark.parametrize("head_dim", [3, 8, 1100])
def test_slices_of_a_wider_product_into_interleaved_caches(device, head_dim):
    """k and v as they come out of one projection; keys and values of a block side by side; rows of more than one program."""
    qkv = drawn(device, torch.float16, 5, 7, head_dim)
    k, v = qkv[:, 3:5], qkv[:, 5:]
    both = poisoned(device, torch.float16, 3, 2, 4, 2, head_dim)
    slots = torch.tensor([11, 0, 4, -1, 7], device=device)
    want = both.clone()
    for token in (0, 1, 2, 4):
        want[slots[token] // 4, :, slots[token] % 4] = torch.stack((k[token], v[token]))
    write_kv(k, v, both[:, 0], both[:, 1], slots)
    assert same_bytes(both, want)


@pytest.mark.parametrize("shape", [(1,), (3, 5), (16, 2, 64), (9, 1031)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
def test_blocks_out_and_back(device, dtype, shape):
    cache = (drawn(device, torch.float32, 6, *shape) * 50).to(dtype)
    blocks = torch.tensor([5, 0, 3], device=device)
    out = torch.full((3, *shape), 77, dtype=dtype, device=device)
    assert gather_blocks(cache, blocks, out) is out
    assert same_bytes(out, cache[blocks]) and same_bytes(gather_blocks(cache, blocks), out)
    assert same_bytes(reference.gather_blocks(cache, blocks), out)
    back, plain = (torch.full_like(cache, 55) for _ in range(2))
    scatter_blocks(out, back, blocks)
    reference.scatter_blocks(out, plain, blocks)
    assert same_bytes(back[blocks], out) and (back[[1, 2, 4]] == 55).all() and same_bytes(plain, back)


def test_nan_payloads_are_bytes_like_others(device):
    bits = torch.arange(0x7C01, 0x7C21, dtype=torch.int16, device=device).view(2, 16)
    got = gather_blocks(bits.view(torch.float16), torch.tensor([1, 0], device=device))
    assert torch.equal(got.view(torch.int16), bits.flip(0))


def test_addresses_that_no_wide_word_fits(device):
    memory = torch.arange(6 * 9 + 1, dtype=torch.uint8, device=device)
    cache = memory[1:].view(6, 9)[:, :8]
    blocks = torch.tensor([4, 1], device=device)
    assert torch.equal(gather_blocks(cache, blocks), cache[blocks])
    scatter_blocks(cache[[0, 2]].clone(), cache, blocks)
    assert torch.equal(cache[blocks], cache[[0, 2]])
    assert memory[0] == 0 and memory[9::9].tolist() == list(range(9, 55, 9))


def test_no_blocks(device):
    none = torch.zeros(0, dtype=torch.int64, device=device)
    cache = torch.ones(3, 4, device=device)
    assert gather_blocks(cache, none).shape == (0, 4)
    scatter_blocks(torch.zeros(0, 4, device=device), cache, none)
    assert (cache == 1).all()


@pytest.mark.study
def test_caches_of_more_words_than_32_bits_count(device):
    """Memory that is reserved but, for its ends, never touched."""
    stride = 2**31 + 1
    cache = torch.empty(stride + 16, dtype=torch.uint8, device=device).as_strided((2, 16), (stride, 1))
    values = torch.arange(32, dtype=torch.uint8, device=device).view(2, 16)
    blocks = torch.tensor([1, 0], device=device)
    scatter_blocks(values, cache, blocks)
    assert torch.equal(cache, values.flip(0)) and torch.equal(gather_blocks(cache, blocks), values)


KV = torch.zeros(3, 2, 8)
CACHE = torch.zeros(4, 16, 2, 8)
SLOTS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(("change", "said"), [
    ({"k": KV[0]}, r"k: found \[2, 8\]; allowed: \[tokens, kv_heads, head_dim\]"),
    ({"v": KV[:2]}, r"v: found \[2, 2, 8\]; allowed: \[3, 2, 8\]"),
    ({"v": KV.half()}, "v: found torch.float16"),
    ({"k": torch.zeros(3, 8, 2).mT}, "k: found strides"),
    ({"k_cache": CACHE[0]}, "k_cache: found"),
    ({"v_cache": CACHE[:2]}, "v_cache: found"),
    ({"v_cache": CACHE.half()}, "v_cache: found torch.float16"),
    ({"slots": SLOTS[:2]}, r"slots: found \[2\]; allowed: contiguous \[3\]"),
])  # fmt: skip
def test_what_a_write_refuses(change, said):
    arguments = {"k": KV, "v": KV, "k_cache": CACHE, "v_cache": CACHE.clone(), "slots": SLOTS} | change
    with pytest.raises(ValueError, match=said):
        write_kv(**arguments)


def test_what_a_move_refuses():
    with pytest.raises(ValueError, match=r"blocks: found torch\.float32"):
        gather_blocks(CACHE, torch.zeros(3))
    with pytest.raises(ValueError, match=r"blocks: found \[3, 1\]"):
        gather_blocks(CACHE, SLOTS[:, None])
    with pytest.raises(ValueError, match="out: found"):
        gather_blocks(CACHE, SLOTS, torch.zeros(2, 16, 2, 8))
    with pytest.raises(ValueError, match=r"out: found torch\.float16"):
        gather_blocks(CACHE, SLOTS, torch.zeros(3, 16, 2, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="values: found"):
        scatter_blocks(torch.zeros(3, 16, 2, 7), CACHE, SLOTS)
    with pytest.raises(ValueError, match="cache: found strides"):
        gather_blocks(CACHE.mT, SLOTS)
