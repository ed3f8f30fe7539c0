"""Decode attention against float64: GQA, block boundaries, splits, poisoned memory, and what it refuses."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from paged_cases import TOLERANCE, drawn_queries, formula, paged  # noqa: E402

from simcore.kernels import decode_attention as kernel  # noqa: E402
from simcore.kernels import reference  # noqa: E402
from simcore.kernels.decode_attention import decode_attention  # noqa: E402
from simcore.kernels.tiles import decode_attention_configs, prune_attention  # noqa: E402

DTYPES = list(TOLERANCE)


@pytest.fixture(scope="module", autouse=True)
def one_tile():
    """One tile for every shape and type, on a GPU as under the interpreter: to tune for each test would take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel._attend_chunk, "configs", decode_attention_configs()[-1:])
        yield


def expected(q, k_cache, v_cache, table, lens, scale):
    """The reference in float64, on what the inputs were rounded to."""
    return reference.decode_attention(q.double(), k_cache.double(), v_cache.double(), table, lens, scale=scale,
                                      max_context=int(lens.max()))


def agrees(device, contexts, kv_heads=2, group=4, head_dim=64, block_size=16, dtype=torch.float32, splits=None, seed=0):
    cache = paged(seed, contexts, kv_heads, head_dim, block_size, dtype, device)
    q = drawn_queries(seed, len(contexts), kv_heads * group, head_dim, dtype, device)
    scale = head_dim**-0.5
    out = torch.full_like(q, float("nan"))
    got = decode_attention(q, *cache, scale=scale, max_context=max(contexts), out=out, splits=splits)
    assert got is out
    torch.testing.assert_close(got.double(), expected(q, *cache, scale), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 4, 8])
def test_grouped_heads(device, group, dtype):
    agrees(device, [37, 1], group=group, dtype=dtype, splits=2)


@pytest.mark.parametrize("group", [3, 17])
def test_groups_that_are_no_power_of_two(device, group):
    agrees(device, [21], kv_heads=1, group=group)


@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_head_dims(device, head_dim):
    agrees(device, [33, 5], head_dim=head_dim, splits=2)


@pytest.mark.parametrize("block_size", [16, 24, 32, 48, 64])
def test_block_boundaries(device, block_size):
    """Tiles of several blocks and of a part of one; contexts at a boundary and one to either side of it."""
    agrees(device, [block_size - 1, block_size, block_size + 1, 2 * block_size, 0, 1], kv_heads=1, block_size=block_size)


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 100])
def test_splits_change_nothing(device, splits):
    """Whole sequences, chunks of less than a tile, sequences that end in the first chunk, and one that is empty."""
    agrees(device, [97, 16, 0, 3], splits=splits)


@pytest.mark.parametrize("splits", [None, 2])
def test_an_empty_sequence_gives_zeros(device, splits):
    cache = paged(0, [0, 40], 2, 64, 16, torch.float16, device)
    q = drawn_queries(0, 2, 4, 64, torch.float16, device)
    out = torch.full_like(q, float("nan"))
    decode_attention(q, *cache, scale=1, max_context=40, out=out, splits=splits)
    assert (out[0] == 0).all() and not out.isnan().any()


def test_only_empty_sequences_and_no_sequence(device):
    agrees(device, [0, 0])
    cache = paged(0, [], 2, 64, 16, torch.float32, device)
    q = drawn_queries(0, 0, 4, 64, torch.float32, device)
    assert decode_attention(q, *cache, scale=1, max_context=0).shape == (0, 4, 64)


def test_large_scores_do_not_overflow(device):
    """Scores of hundreds: what the running maximum is for, within a chunk and between chunks."""
    cache = paged(0, [70], 1, 64, 16, torch.float32, device)
    q = drawn_queries(0, 1, 4, 64, torch.float32, device) * 100
    got = decode_attention(q, *cache, scale=1, max_context=70, splits=3)
    torch.testing.assert_close(got.double(), expected(q, *cache, 1), rtol=1e-3, atol=1e-3)


def test_strided_inputs(device):
    """q from a wider product, K and V beside one another in each block, out in a larger buffer."""
    k_cache, v_cache, table, lens = paged(0, [50, 20], 2, 64, 16, torch.float32, device)
    wide = drawn_queries(0, 2, 12, 64, torch.float32, device)
    k, v = torch.stack([k_cache, v_cache], 1).unbind(1)
    q = wide[:, 2:10]
    out = torch.zeros(2, 10, 64, device=device)
    decode_attention(q, k, v, table, lens, scale=0.125, max_context=50, out=out[:, 1:9])
    torch.testing.assert_close(out[:, 1:9].double(), expected(q, k, v, table, lens, 0.125), rtol=1e-5, atol=1e-5)
    assert (out[:, [0, 9]] == 0).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_the_reference_is_the_formula(dtype):
    contexts = [18, 0, 16]
    cache = paged(3, contexts, 2, 32, 16, dtype, "cpu")
    q = drawn_queries(3, 3, 6, 32, dtype, "cpu")
    got = reference.decode_attention(q, *cache, scale=0.3, max_context=18)
    wanted = formula(q, *cache[:3], [0, 1, 1, 2], cache[3], 0.3)[[0, 1]]
    tolerance = TOLERANCE.get(dtype, 1e-12)
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=tolerance, atol=tolerance)
    assert (got[1] == 0).all()
    last = formula(q[2:], *(x[2:] if x.dtype == torch.int32 else x for x in cache[:3]), [0, 1], cache[3][2:], 0.3)
    torch.testing.assert_close(got[2:].double(), last, rtol=tolerance, atol=tolerance)


CASES = st.fixed_dictionaries({
    "contexts": st.lists(st.integers(0, 70), min_size=1, max_size=3), "kv_heads": st.integers(1, 2),
    "group": st.integers(1, 5), "head_dim": st.sampled_from([16, 32, 64]), "block_size": st.integers(16, 40),
    "dtype": st.sampled_from(DTYPES), "splits": st.sampled_from([None, 1, 2, 4]), "seed": st.integers(0, 99),
})  # fmt: skip


@settings(max_examples=8)
@given(CASES)
def test_any_shape(device, case):
    agrees(device, **case)


@pytest.mark.study
@settings(max_examples=400)
@given(CASES)
def test_many_shapes(device, case):
    agrees(device, **case)


@pytest.mark.study
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_of_the_table(device, monkeypatch, dtype, block_size):
    for tile in prune_attention(decode_attention_configs(), {"q": torch.zeros(1, dtype=dtype)}, HEAD_DIM=64):
        monkeypatch.setattr(kernel._attend_chunk, "configs", [tile])
        agrees(device, [300, 129, 0, 64], dtype=dtype, block_size=block_size, splits=2)


def test_some_tile_fits_every_shape():
    for head_dim in (16, 32, 64, 128, 256):
        for dtype in DTYPES:
            assert prune_attention(decode_attention_configs(), {"q": torch.zeros(1, dtype=dtype)}, HEAD_DIM=head_dim)


@pytest.mark.parametrize("sequences", [1, 8, 64, 512, 5000])
@pytest.mark.parametrize("context", [1, 500, 4096, 32768, 131072])
def test_chunks_fill_the_gpu(monkeypatch, sequences, context):
    monkeypatch.setattr(kernel, "_multiprocessors", lambda device: 132)
    chunk = kernel._chunk(sequences, context, None, None)
    programs = sequences * -(-context // chunk)
    assert chunk & (chunk - 1) == 0 and chunk >= 512
    assert programs >= 132 * 8 or chunk == 512 or sequences >= 132 * 8
    assert programs <= 2 * 132 * 8 + 2 * sequences


def refused(**changes):
    k_cache, v_cache, table, lens = paged(0, [20, 4], 2, 64, 16, torch.float32, "cpu")
    given = {"q": torch.zeros(2, 4, 64), "k_cache": k_cache, "v_cache": v_cache, "block_table": table, "context_lens": lens,
             "scale": 1.0, "max_context": 20} | changes  # fmt: skip
    return decode_attention(**given)


BLOCKS = torch.zeros(2, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(2, 64)}, r"q: found \[2, 64\]; allowed: \[.., heads, head_dim\]"),
        ({"q": torch.zeros(2, 5, 64)}, "q: found 5 heads; allowed: a multiple of 2"),
        ({"q": torch.zeros(2, 4, 32)}, "k_cache: found"),
        ({"q": torch.zeros(3, 4, 64)}, "block_table: found"),
        ({"q": torch.zeros(2, 4, 64).half()}, "k_cache: found torch.float32; allowed: q's torch.float16"),
        ({"q": torch.zeros(2, 64, 4).mT}, "q: found strides"),
        ({"v_cache": torch.zeros(3, 16, 2, 64)}, "v_cache: found"),
        ({"context_lens": torch.tensor([20, 4])}, "context_lens: found torch.int64; allowed: torch.int32"),
        ({"context_lens": torch.tensor([-1, 4], dtype=torch.int32)}, "context_lens: found -1 .. 4"),
        ({"context_lens": torch.tensor([21, 4], dtype=torch.int32)}, "context_lens: found 21; allowed: <= max_context 20"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "context_lens: found 4 .. 20; allowed: 0 .. 16"),
        ({"max_context": 65}, "max_context: found 65; allowed: 0 .. 64"),
        ({"out": torch.zeros(2, 4, 32)}, "out: found"),
        ({"out": torch.zeros(2, 4, 64).bfloat16()}, "out: found torch.bfloat16"),
        ({"scale": 0.0}, "scale: found 0.0; allowed: > 0"),
        ({"splits": 0}, "splits: found 0; allowed: > 0"),
        ({"k_cache": torch.zeros(4, 8, 2, 64), "v_cache": torch.zeros(4, 8, 2, 64), "block_table": BLOCKS},
         "block_size: found 8; allowed: 16 .. 256"),
        ({"k_cache": torch.zeros(4, 16, 2, 96), "v_cache": torch.zeros(4, 16, 2, 96), "q": torch.zeros(2, 4, 96)},
         "head_dim: found 96; allowed: 16, 32, 64, 128 or 256"),
        ({name: torch.zeros(shape).double() for name, shape in
          {"q": (2, 4, 64), "k_cache": (4, 16, 2, 64), "v_cache": (4, 16, 2, 64)}.items()}, "q: found torch.float64"),
    ],
)  # fmt: skip
def test_what_it_refuses(changes, words):
    with pytest.raises(ValueError, match=words):
        refused(**changes)
