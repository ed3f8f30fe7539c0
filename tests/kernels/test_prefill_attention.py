"""Prefill attention against float64: chunks of prompts, GQA, the causal edge, poisoned memory, and what it refuses."""

from itertools import accumulate

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from paged_cases import TOLERANCE, drawn_queries, formula, paged  # noqa: E402

from simcore.kernels import prefill_attention as kernel  # noqa: E402
from simcore.kernels import reference  # noqa: E402
from simcore.kernels.decode_attention import decode_attention  # noqa: E402
from simcore.kernels.prefill_attention import prefill_attention  # noqa: E402
from simcore.kernels.tiles import prefill_attention_configs, prune_attention  # noqa: E402

DTYPES = list(TOLERANCE)


@pytest.fixture(scope="module", autouse=True)
def one_tile():
    """One tile for every shape and type, on a GPU as under the interpreter: to tune for each test would take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel._attend, "configs", prefill_attention_configs()[-1:])
        yield


def starts_of(chunks, device="cpu"):
    return torch.tensor([0, *accumulate(chunks)], dtype=torch.int32, device=device)


def agrees(device, sequences, kv_heads=2, group=4, head_dim=64, block_size=16, dtype=torch.float32, seed=0):
    """sequences: (tokens before the chunk, tokens of the chunk) of each."""
    chunks = [chunk for _, chunk in sequences]
    cache = paged(seed, [sum(sequence) for sequence in sequences], kv_heads, head_dim, block_size, dtype, device)
    q = drawn_queries(seed, sum(chunks), kv_heads * group, head_dim, dtype, device)
    starts, options = starts_of(chunks, device), {"scale": head_dim**-0.5, "max_query": max(chunks)}
    out = torch.full_like(q, float("nan"))
    got = prefill_attention(q, *cache[:3], starts, cache[3], **options, out=out)
    assert got is out
    wide = (x.double() for x in (q, *cache[:2]))
    wanted = reference.prefill_attention(*wide, cache[2], starts, cache[3], **options)
    torch.testing.assert_close(got.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 4, 8])
def test_grouped_heads(device, group, dtype):
    agrees(device, [(30, 7), (0, 1)], group=group, dtype=dtype)


@pytest.mark.parametrize("group", [3, 17])
def test_groups_that_are_no_power_of_two(device, group):
    agrees(device, [(20, 5)], kv_heads=1, group=group)


@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_head_dims(device, head_dim):
    agrees(device, [(33, 9)], kv_heads=1, head_dim=head_dim)


@pytest.mark.parametrize("block_size", [16, 24, 32, 48])
def test_block_boundaries(device, block_size):
    """Chunks that begin and end at a boundary and one to either side of it."""
    for end in (block_size - 1, block_size, block_size + 1):
        agrees(device, [(0, end), (block_size, end), (end, 1)], kv_heads=1, group=2, block_size=block_size, head_dim=16)


def test_chunks_of_every_kind_in_one_batch(device):
    """A whole prompt, a later chunk, none, an empty sequence, a single token, and a chunk after a long context."""
    agrees(device, [(0, 33), (17, 5), (20, 0), (0, 0), (40, 1), (90, 3)], group=2)


@pytest.mark.parametrize("sequences", [[], [(0, 0)], [(5, 0), (0, 0)]])
def test_no_query_at_all(device, sequences):
    cache = paged(0, [sum(x) for x in sequences], 2, 64, 16, torch.float32, device)
    q = drawn_queries(0, 0, 4, 64, torch.float32, device)
    starts = starts_of([0] * len(sequences), device)
    assert prefill_attention(q, *cache[:3], starts, cache[3], scale=1, max_query=0).shape == (0, 4, 64)


def test_rows_of_no_sequence_are_left_alone(device):
    cache = paged(0, [9], 1, 64, 16, torch.float32, device)
    q = drawn_queries(0, 20, 2, 64, torch.float32, device)
    out = torch.full_like(q, 7)
    starts = torch.tensor([3, 12], dtype=torch.int32, device=device)
    prefill_attention(q, *cache[:3], starts, cache[3], scale=1, max_query=20, out=out)
    assert (out[:3] == 7).all() and (out[12:] == 7).all() and not (out[3:12] == 7).any()


def test_chunks_give_what_the_whole_prompt_gives(device):
    cache = paged(0, [45], 2, 64, 16, torch.float32, device)
    q = drawn_queries(0, 45, 4, 64, torch.float32, device)

    def chunk(start, stop):
        context = torch.tensor([stop], dtype=torch.int32, device=device)
        return prefill_attention(q[start:stop], *cache[:3], starts_of([stop - start], device), context, scale=0.1,
                                 max_query=stop - start)

    in_chunks = torch.cat([chunk(0, 16), chunk(16, 17), chunk(17, 45)])
    torch.testing.assert_close(in_chunks, chunk(0, 45), rtol=1e-5, atol=1e-5)


def test_one_query_is_a_decode(device):
    cache = paged(0, [45, 7], 2, 64, 16, torch.float32, device)
    q = drawn_queries(0, 2, 8, 64, torch.float32, device)
    as_chunks = prefill_attention(q, *cache[:3], starts_of([1, 1], device), cache[3], scale=0.1, max_query=1)
    decoded = decode_attention(q, *cache, scale=0.1, max_context=45, splits=2)
    torch.testing.assert_close(as_chunks, decoded, rtol=1e-5, atol=1e-5)


def test_strided_inputs(device):
    k_cache, v_cache, table, lens = paged(0, [20], 2, 64, 16, torch.float32, device)
    wide = drawn_queries(0, 12, 12, 64, torch.float32, device)
    k, v = torch.stack([k_cache, v_cache], 1).unbind(1)
    out = torch.zeros(12, 10, 64, device=device)
    arguments = (table, starts_of([12], device), lens)
    prefill_attention(wide[:, 2:10], k, v, *arguments, scale=0.125, max_query=12, out=out[:, 1:9])
    wanted = reference.prefill_attention(*(x.double() for x in (wide[:, 2:10], k, v)), *arguments, scale=0.125, max_query=12)
    torch.testing.assert_close(out[:, 1:9].double(), wanted, rtol=1e-5, atol=1e-5)
    assert (out[:, [0, 9]] == 0).all()


@pytest.mark.parametrize("slab", [4, 512])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_the_reference_is_the_formula(monkeypatch, dtype, slab):
    monkeypatch.setattr(reference, "_MOST_QUERIES", slab)
    chunks = [7, 0, 9, 1]
    cache = paged(3, [18, 3, 9, 16], 2, 32, 16, dtype, "cpu")
    q = drawn_queries(3, 17, 6, 32, dtype, "cpu")
    starts = starts_of(chunks)
    got = reference.prefill_attention(q, *cache[:3], starts, cache[3], scale=0.3, max_query=9)
    tolerance = TOLERANCE.get(dtype, 1e-12)
    wanted = formula(q, *cache[:3], starts.tolist(), cache[3], 0.3)
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


CASES = st.fixed_dictionaries({
    "sequences": st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=3),
    "kv_heads": st.integers(1, 2), "group": st.integers(1, 5), "head_dim": st.sampled_from([16, 32, 64]),
    "block_size": st.integers(16, 40), "dtype": st.sampled_from(DTYPES), "seed": st.integers(0, 99),
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
    for rows in (16, 64, 4096):
        for tile in prune_attention(prefill_attention_configs(), {"q": torch.zeros(1, dtype=dtype)}, HEAD_DIM=64, ROWS=rows):
            monkeypatch.setattr(kernel._attend, "configs", [tile])
            agrees(device, [(130, 40), (0, 65), (64, 0)], kv_heads=1, dtype=dtype, block_size=block_size)


@pytest.mark.parametrize("rows", kernel._ROWS_BUCKETS)
def test_some_tile_fits_every_shape(rows):
    for head_dim in (16, 32, 64, 128, 256):
        for dtype in DTYPES:
            query = {"q": torch.zeros(1, dtype=dtype)}
            assert prune_attention(prefill_attention_configs(), query, HEAD_DIM=head_dim, ROWS=rows)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query_starts": torch.tensor([0, 3, 8])}, "query_starts: found torch.int64"),
        ({"query_starts": torch.tensor([0, 9, 8], dtype=torch.int32)}, r"query_starts: found \[0, 9, 8\]"),
        ({"query_starts": torch.tensor([0, 3, 9], dtype=torch.int32)}, "query_starts: found .* within 0 .. 8"),
        ({"query_starts": torch.tensor([0, 3], dtype=torch.int32)}, "block_table: found"),
        ({"max_query": 4}, r"query_starts: found \[3, 5\] queries; allowed: <= max_query 4"),
        ({"context_lens": torch.tensor([20, 4], dtype=torch.int32)}, r"context_lens: found \[20, 4\]; allowed: >= queries"),
        ({"q": torch.zeros(8, 3, 64)}, "q: found 3 heads"),
        ({"scale": -1.0}, "scale: found -1.0; allowed: > 0"),
    ],
)
def test_what_it_refuses(changes, words):
    k_cache, v_cache, table, lens = paged(0, [20, 6], 2, 64, 16, torch.float32, "cpu")
    given = {"q": torch.zeros(8, 4, 64), "k_cache": k_cache, "v_cache": v_cache, "block_table": table,
             "query_starts": starts_of([3, 5]), "context_lens": lens, "scale": 1.0, "max_query": 5} | changes  # fmt: skip
    with pytest.raises(ValueError, match=words):
        prefill_attention(**given)
