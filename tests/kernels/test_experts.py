"""Routing, grouped products and the whole layer of experts against float64, whatever the split of rows over experts."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from simcore.kernels import reference, tiles  # noqa: E402
from simcore.kernels.experts import combine, grouped_matmul, grouped_swiglu, moe, sort_by_expert  # noqa: E402

# Relative error of one rounding to the type; the interpreter cuts bf16 off where a GPU rounds it.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
DTYPES = list(TOLERANCE)
# Rows of each expert: one in all, none at the ends, all to one, tiles just full and just over, as many tiles as can be.
SPLITS = [(1,), (0, 0, 1, 0), (0, 37, 0), (16, 32, 0), (17, 1, 15, 33), (1, 1, 1, 1, 1, 1, 1, 17)]


def drawn(device, dtype, *shape, scale=1.0, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).to(device)


def near(got, want, dtype, roundings=1):
    """`roundings`: more than one = of intermediate results that are as large as the largest of the result."""
    tolerance = TOLERANCE[dtype]
    spread = (roundings - 1) * tolerance * float(want.abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=2e-5 + spread)


def offsets_of(split, device):
    return torch.tensor([0, *split], device=device).cumsum(0).to(torch.int32)


def routed(tokens, experts, top_k, seed, device):
    """(top_experts, top_weights): different experts for a token, as a router picks them."""
    random = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=random).argsort(dim=-1)[:, :top_k]
    return chosen.to(device), torch.rand(tokens, top_k, generator=random).to(device)


def test_routing_sorts_rows_by_expert_and_knows_the_way_back(device):
    top_experts = torch.tensor([[4, 1], [1, 0], [4, 3], [1, 4]], device=device)
    routing = sort_by_expert(top_experts, 6)
    flat = top_experts.flatten().tolist()
    assert routing.order.tolist() == sorted(range(8), key=lambda row: flat[row])
    assert routing.order[routing.places.flatten()].tolist() == list(range(8))
    assert routing.places.shape == top_experts.shape
    assert routing.offsets.tolist() == [0, 1, 4, 4, 5, 8, 8] and routing.offsets.dtype == torch.int32


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_matmul(device, dtype, split):
    offsets = offsets_of(split, device)
    x = drawn(device, dtype, sum(split), 50)
    weights = drawn(device, dtype, len(split), 35, 50, scale=50**-0.5, seed=1)
    near(grouped_matmul(x, weights, offsets), reference.grouped_matmul(x.double(), weights.double(), offsets), dtype)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_swiglu(device, dtype, split):
    offsets = offsets_of(split, device)
    x = drawn(device, dtype, sum(split), 33)
    gate_up = drawn(device, dtype, len(split), 2 * 23, 33, scale=33**-0.5, seed=1)
    near(grouped_swiglu(x, gate_up, offsets), reference.grouped_swiglu(x.double(), gate_up.double(), offsets), dtype)


@pytest.mark.parametrize(("n_out", "n_in"), [(1, 1), (31, 64), (32, 65), (97, 16)])
def test_sizes_that_are_and_are_not_multiples_of_tiles(device, n_out, n_in):
    offsets = offsets_of((5, 20), device)
    x, weights = drawn(device, torch.float32, 25, n_in), drawn(device, torch.float32, 2, n_out, n_in, seed=1)
    want = reference.grouped_matmul(x.double(), weights.double(), offsets)
    torch.testing.assert_close(grouped_matmul(x, weights, offsets).double(), want, rtol=2e-5, atol=1e-4)


def test_rows_are_gathered_on_the_way(device):
    x, gate_up = drawn(device, torch.float32, 9, 24), drawn(device, torch.float32, 5, 12, 24, seed=1)
    routing = sort_by_expert(routed(9, 5, 3, 0, device)[0], 5)
    want = grouped_swiglu(x[routing.order // 3], gate_up, routing.offsets)
    assert torch.equal(grouped_swiglu(x, gate_up, routing.offsets, routing), want)


def test_experts_do_not_meet(device):
    """NaN in the rows of one expert and in the weights of one without rows stay where they are."""
    offsets = offsets_of((3, 18, 0, 2), device)
    x, weights = drawn(device, torch.float32, 23, 20), drawn(device, torch.float32, 4, 10, 20, seed=1)
    want = grouped_matmul(x, weights, offsets)
    x[3:21], weights[2] = float("nan"), float("nan")
    got = grouped_matmul(x, weights, offsets)
    assert got[3:21].isnan().all()
    assert torch.equal(got[:3], want[:3]) and torch.equal(got[21:], want[21:])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # infinity, which is what is meant
def test_gates_far_from_zero(device):
    gate_up = torch.tensor([[[1.0], [1.0]]], device=device)
    x = torch.tensor([[-1e4], [-90.0], [0.0], [90.0], [1e4]], device=device)
    got = grouped_swiglu(x, gate_up, offsets_of((5,), device))
    torch.testing.assert_close(got.flatten().cpu(), torch.tensor([0.0, 0.0, 0.0, 8100.0, 1e8]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine(device, dtype):
    top_experts, weights = routed(6, 7, 3, 0, device)
    routing = sort_by_expert(top_experts, 7)
    y = drawn(device, dtype, 18, 1030)
    got = combine(y, routing, weights)
    near(got, reference.combine(y.double(), routing, weights.double()), dtype)
    assert torch.equal(got, combine(y, routing, weights))


def layer(device, dtype, tokens, experts, top_k, hidden, inner, seed):
    x = drawn(device, dtype, tokens, hidden, seed=seed)
    gate_up = drawn(device, dtype, experts, 2 * inner, hidden, scale=hidden**-0.5, seed=seed + 1)
    down = drawn(device, dtype, experts, hidden, inner, scale=inner**-0.5, seed=seed + 2)
    top_experts, weights = routed(tokens, experts, min(top_k, experts), seed, device)
    return x, gate_up, down, top_experts, weights


def compare(device, *arguments):
    x, gate_up, down, top_experts, weights = layer(device, *arguments)
    want = reference.moe(x.double(), gate_up.double(), down.double(), top_experts, weights.double())
    near(moe(x, gate_up, down, top_experts, weights), want, x.dtype, roundings=3)


LAYERS = {"dtype": st.sampled_from(DTYPES), "tokens": st.integers(0, 24), "experts": st.integers(1, 9),
          "top_k": st.integers(1, 4), "hidden": st.sampled_from([16, 45, 64]), "inner": st.sampled_from([8, 21, 32]),
          "seed": st.integers(0, 1000)}  # fmt: skip


@settings(max_examples=10)
@given(**LAYERS)
def test_any_layer(device, dtype, tokens, experts, top_k, hidden, inner, seed):
    compare(device, dtype, tokens, experts, top_k, hidden, inner, seed)


@pytest.mark.study
@settings(max_examples=200)
@given(**LAYERS)
def test_any_layer_at_length(device, dtype, tokens, experts, top_k, hidden, inner, seed):
    compare(device, dtype, tokens, experts, top_k, hidden, inner, seed)


def test_a_layer_is_the_sum_of_its_experts():
    """The reference, token by token and expert by expert."""
    x, gate_up, down, top_experts, weights = layer("cpu", torch.float64, 5, 4, 2, 6, 3, 0)
    want = torch.zeros(5, 6, dtype=torch.float64)
    for token, slots in enumerate(top_experts.tolist()):
        for slot, expert in enumerate(slots):
            gate, up = (gate_up[expert] @ x[token]).split(3)
            want[token] += weights[token, slot] * (down[expert] @ (gate * torch.sigmoid(gate) * up))
    torch.testing.assert_close(reference.moe(x, gate_up, down, top_experts, weights), want)


def test_all_tokens_to_one_of_many_experts(device):
    x, gate_up, down, _, weights = layer(device, torch.float32, 21, 33, 1, 16, 8, 0)
    chosen = torch.full((21, 1), 32, device=device)
    want = reference.moe(x.double(), gate_up.double(), down.double(), chosen, weights.double())
    near(moe(x, gate_up, down, chosen, weights), want, torch.float32, roundings=3)


def test_every_number_of_rows_has_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    for dtype in DTYPES:
        for rows in (1, 8, 9, 48, 49, 10_000):
            block_m = tiles.grouped_gemm_rows(rows * 8, 8)
            configs = tiles.grouped_gemm_configs()
            chosen = tiles.prune_grouped_gemm(configs, {"x": torch.zeros(1, dtype=dtype)}, BLOCK_M=block_m)
            assert chosen and all(config in configs for config in chosen)
            assert block_m >= min(rows, 128)


OFFSETS = torch.tensor([0, 1, 3], dtype=torch.int32)


@pytest.mark.parametrize(("change", "said"), [
    ({"x": torch.zeros(3, 5)}, r"x: found \[3, 5\]; allowed: \[rows, 4\]"),
    ({"x": torch.zeros(3, 4, dtype=torch.float64)}, "x: found torch.float64"),
    ({"weights": torch.zeros(2, 6, 4, dtype=torch.float16)}, "weights: found torch.float16"),
    ({"weights": torch.zeros(2, 4, 6).mT}, "weights: found strides"),
    ({"weights": torch.zeros(6, 4)}, r"weights: found \[6, 4\]"),
    ({"offsets": OFFSETS[:2]}, r"offsets: found \[2\]; allowed: \[3\]"),
    ({"offsets": OFFSETS.long()}, "offsets: found torch.int64"),
])  # fmt: skip
def test_what_a_grouped_product_refuses(change, said):
    arguments = {"x": torch.zeros(3, 4), "weights": torch.zeros(2, 6, 4), "offsets": OFFSETS} | change
    with pytest.raises(ValueError, match=said):
        grouped_matmul(**arguments)


def test_what_the_rest_refuses():
    routing = sort_by_expert(torch.zeros(3, 2, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match=r"top_experts: found \[3\]"):
        sort_by_expert(torch.zeros(3, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match="num_experts: found 0"):
        sort_by_expert(torch.zeros(3, 2, dtype=torch.int64), 0)
    with pytest.raises(ValueError, match="gate_up: found"):
        grouped_swiglu(torch.zeros(3, 4), torch.zeros(2, 5, 4), OFFSETS)
    with pytest.raises(ValueError, match="x: found 4 tokens; allowed: the routing's 3"):
        grouped_swiglu(torch.zeros(4, 4), torch.zeros(2, 6, 4), routing.offsets, routing)
    with pytest.raises(ValueError, match="y_sorted: found 5 rows; allowed: 6"):
        combine(torch.zeros(5, 4), routing, torch.zeros(3, 2))
    with pytest.raises(ValueError, match="weights: found"):
        combine(torch.zeros(6, 4), routing, torch.zeros(2, 3))
