"""Every kernel against its torch reference in float64, under every tile configuration that its tuner may choose.

Each case runs in a process of its own, many at a time: what it compiles is then ready for what is timed later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from math import inf, isfinite
from typing import Any

from simcore.experiments.gpu_validation.processes import Emit, Job
from simcore.experiments.gpu_validation.timing import device
from simcore.kernels import decode_attention as decode
from simcore.kernels import experts, kv_blocks, kv_quant, reference
from simcore.kernels import prefill_attention as prefill
from simcore.kernels.install import require
from simcore.kernels.rms_norm import rms_norm

torch = require()

BLOCK_SIZE = 16
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3}  # of norm(found - reference) / norm(reference)
NOWHERE = 1 << 30  # a block that no cache has
# (query heads, kv heads, head_dim)
HEADS = {"llama-3.1-8b": (32, 8, 128), "gpt-oss-120b": (64, 8, 64), "qwen3-30b-a3b": (32, 4, 128),
         "qwen3.5-397b": (32, 2, 256), "no-gqa": (8, 8, 128)}
# (hidden, inner) of an expert
EXPERTS = {"qwen3-30b-a3b": (2048, 768), "gpt-oss-120b": (2880, 2880), "qwen3.5-397b": (4096, 1024)}
ODD_EXPERT = (200, 72)
CONTEXTS = {"split": (1, 16, 17, 511, 513, 0, 4097, 8192), "whole": (0, 1, 15, 16, 17, 500), "32k": (32768, 30001)}
CHUNKS = {  # (tokens, context before them) of each sequence; named by the rows of the longest one at four heads a group
    "4096": ((300, 0), (0, 33), (17, 4097), (1024, 1000)), "512": ((100, 50), (37, 0), (1, 16)), "64": ((16, 31), (5, 0)),
    "16": ((3, 0), (1, 500), (2, 15)),
}


def cases(tiny: bool) -> dict[str, Job]:
    """name -> job that emits {"kernel", "dtype", "error", "tolerance", "configurations", "worst"}; longest first."""
    jobs: dict[str, Job] = {}

    def add(kernel: str, dtype: str, label: str, run: Callable[..., Iterator[tuple[str, float]]], *arguments: Any,
            exact: bool = False) -> None:
        jobs[f"{kernel} {dtype} {label}"] = partial(_case, kernel, dtype, run, arguments, exact)

    if tiny:
        for dtype in TOLERANCE:
            add("prefill_attention", dtype, "tiny", _prefill, (4, 2, 16), ((5, 17), (0, 3), (3, 0)))
            add("decode_attention", dtype, "tiny", _decode, (4, 2, 16), (1, 0, 33), 2)
            add("grouped", dtype, "tiny", _grouped, (48, 24), (3, 0, 17))
            add("moe", dtype, "tiny", _moe, (32, 16), 5, 4, 2)
            _add_memory(add, dtype, 9, 64, 2, 16)
        return jobs
    for dtype in TOLERANCE:
        for model, heads in HEADS.items():
            both = dtype == "bfloat16" or model in ("llama-3.1-8b", "gpt-oss-120b")
            for rows, chunks in CHUNKS.items():
                if both and (rows == "4096" or (dtype == "bfloat16" and model in ("llama-3.1-8b", "qwen3-30b-a3b"))):
                    add("prefill_attention", dtype, f"{model} {rows}", _prefill, heads, chunks)
            for name, contexts in CONTEXTS.items():
                if both and (name == "split" or model == "llama-3.1-8b" or (name == "whole" and dtype == "bfloat16")):
                    add("decode_attention", dtype, f"{model} {name}", _decode, heads, contexts, None)
    add("prefill_attention", "bfloat16", "table of odd width", _prefill, HEADS["llama-3.1-8b"], CHUNKS["4096"], 1)
    add("decode_attention", "bfloat16", "table of odd width", _decode, HEADS["llama-3.1-8b"], CONTEXTS["split"], None, 1)
    for dtype in TOLERANCE:
        for model, shape in EXPERTS.items():
            # Few, some, many rows an expert: the three heights of a tile. Some experts have none.
            for label, counts in (("few", (1, 0, 3, 7)), ("some", (9, 0, 64, 31)), ("many", (256, 0, 129, 1))):
                if dtype == "bfloat16" or (model == "qwen3-30b-a3b" and label != "few"):
                    add("grouped", dtype, f"{model} {label}", _grouped, shape, counts * 32)
        add("grouped", dtype, "odd", _grouped, ODD_EXPERT, (17, 0, 5, 130, 1, 300))
    for tokens in (3, 200, 2048):
        add("moe", "bfloat16", f"qwen3-30b-a3b {tokens}", _moe, EXPERTS["qwen3-30b-a3b"], tokens, 128, 8)
    add("moe", "float16", "odd", _moe, ODD_EXPERT, 77, 8, 2)
    for dtype in TOLERANCE:
        _add_memory(add, dtype, 4099, 4096, 8, 128)
    return jobs


def _add_memory(add: Callable[..., None], dtype: str, tokens: int, hidden: int, kv_heads: int, head_dim: int) -> None:
    add("rms_norm", dtype, f"[{tokens}, {hidden}]", _rms_norm, tokens, hidden)
    add("combine", dtype, f"[{tokens}, {hidden}]", _combine, tokens, hidden)
    add("sort_by_expert", dtype, f"{tokens} tokens", _sort, tokens, exact=True)
    add("kv_blocks", dtype, f"{tokens} tokens", _kv_blocks, tokens, kv_heads, head_dim, exact=True)
    for bits in (8, 4):
        add("kv_quant", dtype, f"{bits} bits", _kv_quant, tokens, kv_heads, head_dim, bits, exact=True)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The worst of each kernel and type."""
    worst: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "error" not in row:
            continue
        key = f"{row['kernel']} {row['dtype']}"
        if key not in worst or not row["error"] <= worst[key]["error"]:
            worst[key] = {"error": row["error"], "tolerance": row["tolerance"], "case": row["name"]}
    return worst


def relative_error(found: Any, want: Any) -> float:
    """norm(found - want) / norm(want); infinite for what is not a number or was never written."""
    if not want.numel():
        return 0.0
    off = float((found.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
    return off if isfinite(off) else inf


def _case(kernel: str, dtype: str, run: Callable[..., Iterator[tuple[str, float]]], arguments: tuple[Any, ...], exact: bool,
          emit: Emit) -> None:
    torch.manual_seed(1)
    tolerance = 0.0 if exact else TOLERANCE[dtype]
    errors: dict[str, float] = {}
    for name, error in run(getattr(torch, dtype), *arguments):
        errors[name] = max(error, errors.get(name, 0.0))
        worst = max(errors, key=lambda key: errors[key])
        emit({"kernel": kernel, "dtype": dtype, "error": errors[worst], "tolerance": tolerance, "worst": worst,
              "configurations": len(errors), "ok": errors[worst] <= tolerance})


def every_configuration(tuner: Any, call: Callable[[], Any]) -> Iterator[tuple[str, Any]]:
    """(tile configuration, what the call gives) for each one that the tuner would try for it; those that the GPU has not the
    memory for are left out, as tuning does. The interpreter has one."""
    tuner.do_bench = _once
    tuner.configs_timings = {}
    known = set(tuner.cache)
    yield "chosen", call()
    for key in set(tuner.cache) - known:
        chosen = tuner.cache[key]
        for config, took in list(tuner.configs_timings.items()):
            if config is not chosen and isfinite(took[0]):
                tuner.cache[key] = config
                yield str(config), call()


def _once(call: Callable[[], Any], quantiles: Any = None) -> list[float]:
    """In place of a benchmark: compiled and run."""
    call()
    return [0.0, 0.0, 0.0]


def paged(contexts: Sequence[int], kv_heads: int, head_dim: int, dtype: Any, widen: int = 0) -> tuple[Any, ...]:
    """(k_cache, v_cache, block_table, context_lens): shuffled blocks, NaN in slots of no token, blocks that do not exist in
    unused entries of the table, whose width is a multiple of 16, plus `widen`."""
    where = device()
    needed = [-(-context // BLOCK_SIZE) for context in contexts]
    blocks = torch.randperm(sum(needed) + 3, device=where)
    width = -(-max(needed) // 16) * 16 + widen
    table = torch.full((len(contexts), width), NOWHERE, dtype=torch.int32, device=where)
    caches = torch.full((2, len(blocks), BLOCK_SIZE, kv_heads, head_dim), float("nan"), dtype=dtype, device=where)
    for i, context in enumerate(contexts):
        own, blocks = blocks[: needed[i]], blocks[needed[i]:]
        table[i, : needed[i]] = own
        tokens = torch.arange(context, device=where)
        caches[:, own[tokens // BLOCK_SIZE], tokens % BLOCK_SIZE] = normal(2, context, kv_heads, head_dim, dtype=dtype)
    return caches[0], caches[1], table, torch.tensor(contexts, dtype=torch.int32, device=where)


def normal(*shape: int, dtype: Any, scale: float = 1.0) -> Any:
    """Independent normal values on the device."""
    return torch.empty(shape, dtype=dtype, device=device()).normal_(0.0, scale)


def unwritten(q: Any) -> Any:
    """Like q, of NaN."""
    return torch.full_like(q, float("nan"))


def _decode(dtype: Any, heads: tuple[int, int, int], contexts: Sequence[int], splits: int | None, widen: int = 0) -> Any:
    query_heads, kv_heads, head_dim = heads
    k_cache, v_cache, table, lens = paged(contexts, kv_heads, head_dim, dtype, widen)
    q = normal(len(contexts), query_heads, head_dim, dtype=dtype)
    scale = head_dim**-0.5
    want = reference.decode_attention(q.double(), k_cache.double(), v_cache.double(), table, lens, scale=scale,
                                      max_context=max(contexts))

    def call() -> Any:
        return decode.decode_attention(q, k_cache, v_cache, table, lens, scale=scale, max_context=max(contexts),
                                       out=unwritten(q), splits=splits)

    for name, found in every_configuration(decode._attend_chunk, call):
        yield name, relative_error(found, want)


def _prefill(dtype: Any, heads: tuple[int, int, int], chunks: Sequence[tuple[int, int]], widen: int = 0) -> Any:
    query_heads, kv_heads, head_dim = heads
    counts = [count for count, _ in chunks]
    k_cache, v_cache, table, lens = paged([sum(chunk) for chunk in chunks], kv_heads, head_dim, dtype, widen)
    starts = torch.tensor([0, *counts], device=device()).cumsum(0).to(torch.int32)
    q = normal(sum(counts), query_heads, head_dim, dtype=dtype)
    settings = {"scale": head_dim**-0.5, "max_query": max(counts)}
    want = reference.prefill_attention(q.double(), k_cache.double(), v_cache.double(), table, starts, lens, **settings)

    def call() -> Any:
        return prefill.prefill_attention(q, k_cache, v_cache, table, starts, lens, out=unwritten(q), **settings)

    for name, found in every_configuration(prefill._attend, call):
        yield name, relative_error(found, want)


def _by_expert(operator: Callable[..., Any], x: Any, weights: Any, offsets: Any) -> Any:
    """The reference in float64, one expert at a time: the weights of all would not fit beside other cases."""
    parts = [operator(x[start:stop].double(), weights[e : e + 1].double(), torch.tensor([0, stop - start]))
             for e, (start, stop) in enumerate(pairwise(offsets.tolist())) if stop > start]
    return torch.cat(parts)


def _grouped(dtype: Any, shape: tuple[int, int], counts: Sequence[int]) -> Any:
    """Both products, and the first with its rows gathered on the way."""
    hidden, inner = shape
    offsets = torch.tensor([0, *counts], device=device()).cumsum(0).to(torch.int32)
    tuner = experts._grouped_gemm
    x = normal(sum(counts), hidden, dtype=dtype)
    gate_up = normal(len(counts), 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
    want = _by_expert(reference.grouped_swiglu, x, gate_up, offsets)
    for name, found in every_configuration(tuner, partial(experts.grouped_swiglu, x, gate_up, offsets)):
        yield f"grouped_swiglu, {name}", relative_error(found, want)
    top_k = 8 if len(x) % 8 == 0 else 1
    of_row = torch.repeat_interleave(torch.arange(len(counts), device=device()), torch.tensor(counts, device=device()))
    routing = experts.sort_by_expert(of_row[torch.randperm(len(x), device=device())].view(-1, top_k), len(counts))
    x = x[: len(x) // top_k]
    want = _by_expert(reference.grouped_swiglu, x[routing.order // top_k], gate_up, offsets)
    for name, found in every_configuration(tuner, partial(experts.grouped_swiglu, x, gate_up, routing.offsets, routing)):
        yield f"grouped_swiglu gathering, {name}", relative_error(found, want)
    del gate_up
    down = normal(len(counts), hidden, inner, dtype=dtype, scale=inner**-0.5)
    h = normal(sum(counts), inner, dtype=dtype)
    want = _by_expert(reference.grouped_matmul, h, down, offsets)
    for name, found in every_configuration(tuner, partial(experts.grouped_matmul, h, down, offsets)):
        yield f"grouped_matmul, {name}", relative_error(found, want)


def routed(tokens: int, num_experts: int, top_k: int) -> tuple[Any, Any]:
    """(top_experts, top_weights) of a router without preferences."""
    chosen = torch.rand(tokens, num_experts, device=device()).topk(top_k, dim=-1).indices
    weights = torch.rand(tokens, top_k, device=device())
    return chosen, weights / weights.sum(-1, keepdim=True)


def _moe(dtype: Any, shape: tuple[int, int], tokens: int, num_experts: int, top_k: int) -> Any:
    hidden, inner = shape
    x = normal(tokens, hidden, dtype=dtype)
    gate_up = normal(num_experts, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
    down = normal(num_experts, hidden, inner, dtype=dtype, scale=inner**-0.5)
    chosen, weights = routed(tokens, num_experts, top_k)
    want = reference.moe(x.double(), gate_up.double(), down.double(), chosen, weights.double())
    yield "chosen", relative_error(experts.moe(x, gate_up, down, chosen, weights), want)


def _combine(dtype: Any, tokens: int, hidden: int) -> Any:
    chosen, weights = routed(tokens, 16, 4)
    routing = experts.sort_by_expert(chosen, 16)
    y = normal(4 * tokens, hidden, dtype=dtype)
    yield "", relative_error(experts.combine(y, routing, weights), reference.combine(y.double(), routing, weights.double()))


def _sort(dtype: Any, tokens: int) -> Any:
    chosen, _ = routed(tokens, 128, 8)
    routing = experts.sort_by_expert(chosen, 128)
    flat = chosen.flatten()
    yield "order", float(not torch.equal(routing.order, flat.argsort(stable=True)))
    yield "places", float(not torch.equal(routing.order[routing.places.flatten()], torch.arange(len(flat), device=device())))
    yield "offsets", float(not torch.equal(routing.offsets[1:].long(), flat.bincount(minlength=128).cumsum(0)))


def _rms_norm(dtype: Any, tokens: int, hidden: int) -> Any:
    x, residual, weight = (normal(*shape, dtype=dtype) for shape in ((tokens, hidden), (tokens, hidden), (hidden,)))
    yield "alone", relative_error(rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))
    found = rms_norm(x, weight, 1e-5, residual)
    summed = (x.double() + residual.double()).to(dtype)
    want = reference.rms_norm(summed.double(), weight.double(), 1e-5)
    yield "with residual", relative_error(found[0], want)
    yield "sum", relative_error(found[1], summed)


def _kv_blocks(dtype: Any, tokens: int, kv_heads: int, head_dim: int) -> Any:
    """Copies must be exact; every second block or slot is left alone and must stay as it was."""
    cache = normal(2 * tokens // BLOCK_SIZE + 2, BLOCK_SIZE, kv_heads, head_dim, dtype=dtype)
    order = torch.randperm(len(cache), device=device())[: len(cache) // 2]
    values = kv_blocks.gather_blocks(cache, order, unwritten(cache[order]))
    yield "gather_blocks", float(not torch.equal(values, cache[order]))
    found, want = cache.clone(), cache.clone()
    values = normal(*values.shape, dtype=dtype)
    kv_blocks.scatter_blocks(values, found, order)
    reference.scatter_blocks(values, want, order)
    yield "scatter_blocks", float(not torch.equal(found, want))
    _, k, v = normal(tokens, 3 * kv_heads, head_dim, dtype=dtype).chunk(3, dim=1)  # slices of one product
    slots = torch.randperm(len(cache) * BLOCK_SIZE, device=device())[:tokens]
    slots[::3] = -1
    caches, wanted = [cache.clone(), -cache], [cache.clone(), -cache]
    kv_blocks.write_kv(k, v, caches[0], caches[1], slots)
    reference.write_kv(k, v, wanted[0], wanted[1], slots)
    yield "write_kv", float(not all(map(torch.equal, caches, wanted)))


def _kv_quant(dtype: Any, tokens: int, kv_heads: int, head_dim: int, bits: int) -> Any:
    """By how much the worst value is off beyond half a step, in steps; the reference may round a tie the other way."""
    x = normal(tokens, kv_heads, head_dim, dtype=dtype)
    for name, q, back in (("keys", kv_quant.quantize_keys(x, bits, 32), kv_quant.dequantize_keys),
                          ("values", kv_quant.quantize_values(x, bits), kv_quant.dequantize_values)):
        step, zero = q.scale.double(), q.zero.double()
        step, zero = ((part.repeat_interleave(q.group, 0)[:tokens] if q.group else part[..., None]) for part in (step, zero))
        rounding = 1e-6 * (zero.abs() + 2**bits * step)  # of fp32 arithmetic
        off = ((back(q, torch.float32).double() - x.double()).abs() - rounding) / step.clamp(min=1e-30)
        worst = float(off.max())
        yield f"quantize_{name}", max(0.0, worst - 0.5) if isfinite(worst) else inf
