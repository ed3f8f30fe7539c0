"""Each kernel's time as a share of what the memory or the matrix units of this GPU can do, both measured here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from simcore.experiments.gpu_validation.checks import BLOCK_SIZE, EXPERTS, HEADS, normal, routed
from simcore.experiments.gpu_validation.processes import Emit
from simcore.experiments.gpu_validation.timing import Ceilings, Timing, device, free, measure_ceilings, rounds_for, timed
from simcore.experiments.gpu_validation.timing import row as line
from simcore.kernels import experts, kv_blocks, kv_quant
from simcore.kernels.decode_attention import decode_attention
from simcore.kernels.install import require
from simcore.kernels.prefill_attention import prefill_attention
from simcore.kernels.rms_norm import rms_norm

torch = require()

WIDTH = 2  # bytes of a bf16 value
# Shares of the measured ceilings that the kernels are to reach; the others are only reported.
DECODE_TARGET, DECODE_TARGET_CONTEXT = 0.8, 32768
PREFILL_TARGET = 0.5
GROUPED_TARGET = 0.6
MOVE_TARGET = 0.8

DECODE_CONTEXTS, DECODE_BATCHES = (32768, 8192, 1024), (1, 8, 32)
CHUNK, PREFIXES = 2048, (32768, 8192, 0)
TOKENS_PER_EXPERT = (256, 1024)
EXPERTS_HERE = 128
CACHE_BLOCKS = 131072  # of 16 x 8 x 128 bf16: 4 GiB
ROWS = 16384  # tokens of the operators on rows
QUANT_TOKENS = 131072

Row = dict[str, Any]


class _Bench:
    """What the timings share: ceilings and sizes."""

    def __init__(self, ceilings: Ceilings, tiny: bool) -> None:
        self.ceilings, self.tiny = ceilings, tiny

    def bytes(self, name: str, took: Timing, count: float, target: float | None = None, **numbers: Any) -> Row:
        """A line of a kernel that bytes bind: `count` read and written."""
        share = count / took.seconds / self.ceilings.copy
        return line(name, took, share=share, target=target, tiny=self.tiny, bound="bytes", bytes=count, **numbers)

    def flops(self, name: str, took: Timing, count: float, target: float | None = None, **numbers: Any) -> Row:
        share = count / took.seconds / self.ceilings.matmul
        return line(name, took, share=share, target=target, tiny=self.tiny, bound="flops", flops=count, **numbers)


def rooflines(emit: Emit, tiny: bool) -> None:
    """The section `rooflines`; a kernel that fails leaves its error in `failed` and the others go on."""
    ceilings, _, _ = measure_ceilings(tiny)
    bench = _Bench(ceilings, tiny)
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for kernel in (_decode, _prefill, _grouped, _blocks, _rows, _quantise, _layer):
        try:
            for row in kernel(bench):
                rows.append(row)
                emit({"rows": rows, "ceilings": vars(ceilings), "failed": failed})
        except Exception as error:  # of whatever kind: torch's, the driver's, those of Triton's compiler
            failed[kernel.__name__.strip("_")] = f"{type(error).__name__}: {str(error)[:500]}"
        free()
    emit({"rows": rows, "ceilings": vars(ceilings), "failed": failed})


def shuffled_tables(sets: int, sequences: int, context: int, blocks: int) -> Any:
    """Block tables of sequences that share no block, in a random order: int32[sets, sequences, context / BLOCK_SIZE]."""
    each = -(-context // BLOCK_SIZE)
    order = torch.randperm(blocks, device=device())[: sets * sequences * each]
    return order.view(sets, sequences, each).to(torch.int32)


def _decode(bench: _Bench) -> Iterator[Row]:
    heads, kv_heads, head_dim = HEADS["llama-3.1-8b"] if not bench.tiny else (4, 2, 16)
    contexts, batches = (DECODE_CONTEXTS, DECODE_BATCHES) if not bench.tiny else ((32,), (1, 2))
    blocks = max(contexts) * max(batches) // BLOCK_SIZE
    k_cache, v_cache = (normal(blocks, BLOCK_SIZE, kv_heads, head_dim, dtype=torch.bfloat16) for _ in range(2))
    for context in contexts:
        for batch in reversed(batches):  # tuned on the largest
            read = 2 * batch * context * kv_heads * head_dim * WIDTH
            moved = read + 2 * batch * heads * head_dim * WIDTH
            sets = min(rounds_for(read), max(contexts) * max(batches) // (context * batch)) if not bench.tiny else 1
            tables = shuffled_tables(sets, batch, context, blocks)
            lens = torch.full((batch,), context, dtype=torch.int32, device=device())
            q = normal(batch, heads, head_dim, dtype=torch.bfloat16)
            took = timed([partial(decode_attention, q, k_cache, v_cache, table, lens, scale=head_dim**-0.5,
                                  max_context=context, out=torch.empty_like(q)) for table in tables])
            target = DECODE_TARGET if context == DECODE_TARGET_CONTEXT else None
            yield bench.bytes(f"decode_attention, {batch} x {context}", took, moved, target, batch=batch, context=context)


def causal_flops(chunk: int, prefix: int, heads: int, head_dim: int) -> int:
    """Of both products of attention: query i of the chunk sees prefix + i + 1 keys."""
    return 4 * heads * head_dim * (chunk * prefix + chunk * (chunk + 1) // 2)


def _prefill(bench: _Bench) -> Iterator[Row]:
    heads, kv_heads, head_dim = HEADS["llama-3.1-8b"] if not bench.tiny else (4, 2, 16)
    chunk, prefixes = (CHUNK, PREFIXES) if not bench.tiny else (8, (16, 0))
    sets = 4 if not bench.tiny else 1
    blocks = sets * -(-(max(prefixes) + chunk) // BLOCK_SIZE)
    k_cache, v_cache = (normal(blocks, BLOCK_SIZE, kv_heads, head_dim, dtype=torch.bfloat16) for _ in range(2))
    starts = torch.tensor([0, chunk], dtype=torch.int32, device=device())
    for prefix in prefixes:
        tables = shuffled_tables(sets, 1, prefix + chunk, blocks)
        lens = torch.tensor([prefix + chunk], dtype=torch.int32, device=device())
        q = normal(sets, chunk, heads, head_dim, dtype=torch.bfloat16)
        took = timed([partial(prefill_attention, one, k_cache, v_cache, table, starts, lens, scale=head_dim**-0.5,
                              max_query=chunk, out=torch.empty_like(one)) for one, table in zip(q, tables, strict=True)])
        yield bench.flops(f"prefill_attention, {chunk} after {prefix}", took, causal_flops(chunk, prefix, heads, head_dim),
                          PREFILL_TARGET, chunk=chunk, prefix=prefix)


def _grouped(bench: _Bench) -> Iterator[Row]:
    """Both products of a layer's experts, which all have the same number of rows; a line of both, with the share of each."""
    shapes = EXPERTS if not bench.tiny else {"tiny": (48, 24)}
    for model, (hidden, inner) in shapes.items():
        count = EXPERTS_HERE if not bench.tiny else 2
        gate_up = normal(count, 2 * inner, hidden, dtype=torch.bfloat16, scale=hidden**-0.5)
        down = normal(count, hidden, inner, dtype=torch.bfloat16, scale=inner**-0.5)
        for tokens in TOKENS_PER_EXPERT if not bench.tiny else (3,):
            offsets = (torch.arange(count + 1, device=device()) * tokens).to(torch.int32)
            x, h = (normal(count * tokens, n, dtype=torch.bfloat16) for n in (hidden, inner))
            first = timed([partial(experts.grouped_swiglu, x, gate_up, offsets)])
            second = timed([partial(experts.grouped_matmul, h, down, offsets)])
            both = Timing(first.seconds + second.seconds, first.low + second.low, first.high + second.high,
                          min(first.repeats, second.repeats), 1, first.by)
            flops = 6 * hidden * inner * count * tokens
            shares = {"gate_up_share": flops * 2 / 3 / first.seconds / bench.ceilings.matmul,
                      "down_share": flops / 3 / second.seconds / bench.ceilings.matmul}
            yield bench.flops(f"grouped GEMM, {model}, {count} experts x {tokens}", both, flops, GROUPED_TARGET,
                              model=model, experts=count, tokens_per_expert=tokens, **shares)
        del gate_up, down, x, h, first, second
        free()


def _blocks(bench: _Bench) -> Iterator[Row]:
    count, kv_heads, head_dim = (CACHE_BLOCKS, 8, 128) if not bench.tiny else (8, 2, 16)
    cache = normal(count, BLOCK_SIZE, kv_heads, head_dim, dtype=torch.bfloat16)
    half = torch.randperm(count, device=device())[: count // 2]
    values = torch.empty_like(cache[: len(half)])
    took = timed([partial(kv_blocks.gather_blocks, cache, half, values)])
    yield bench.bytes("gather_blocks, a random half", took, 2 * values.nbytes, MOVE_TARGET)
    took = timed([partial(kv_blocks.scatter_blocks, values, cache, half)])
    yield bench.bytes("scatter_blocks, a random half", took, 2 * values.nbytes, MOVE_TARGET)
    tokens = count * BLOCK_SIZE // 8
    k, v = (normal(tokens, kv_heads, head_dim, dtype=torch.bfloat16) for _ in range(2))
    slots = torch.randperm(count // 2 * BLOCK_SIZE, device=device())[:tokens]
    took = timed([partial(kv_blocks.write_kv, k, v, cache[: count // 2], cache[count // 2:], slots)])
    yield bench.bytes("write_kv, random slots", took, 2 * (k.nbytes + v.nbytes))


def _rows(bench: _Bench) -> Iterator[Row]:
    tokens, hidden = (ROWS, 4096) if not bench.tiny else (5, 32)
    x, residual = (normal(tokens, hidden, dtype=torch.bfloat16) for _ in range(2))
    weight = normal(hidden, dtype=torch.bfloat16)
    yield bench.bytes("rms_norm", timed([partial(rms_norm, x, weight, 1e-5)]), 2 * x.nbytes)
    yield bench.bytes("rms_norm with residual", timed([partial(rms_norm, x, weight, 1e-5, residual)]), 4 * x.nbytes)
    chosen, weights = routed(tokens // 4, 16, 4)
    routing = experts.sort_by_expert(chosen, 16)
    y = x[: chosen.numel()]
    moved = y.nbytes + y.nbytes // 4
    yield bench.bytes("combine, 4 experts a token", timed([partial(experts.combine, y, routing, weights)]), moved)


def _quantise(bench: _Bench) -> Iterator[Row]:
    tokens, kv_heads, head_dim = (QUANT_TOKENS, 8, 128) if not bench.tiny else (40, 2, 16)
    x = normal(tokens, kv_heads, head_dim, dtype=torch.bfloat16)
    for bits in (8, 4):
        for what, there, back in (
            ("keys", partial(kv_quant.quantize_keys, x, bits, 32), kv_quant.dequantize_keys),
            ("values", partial(kv_quant.quantize_values, x, bits), kv_quant.dequantize_values),
        ):
            q = there()
            yield bench.bytes(f"quantize_{what}, {bits} bits", timed([there]), x.nbytes + q.nbytes)
            took = timed([partial(back, q, torch.bfloat16)])
            yield bench.bytes(f"dequantize_{what}, {bits} bits", took, x.nbytes + q.nbytes)


def _layer(bench: _Bench) -> Iterator[Row]:
    """A whole layer of experts, routing and weighted sum included: what a step of a batch sees."""
    hidden, inner = EXPERTS["qwen3-30b-a3b"] if not bench.tiny else (32, 16)
    count, top_k = (EXPERTS_HERE, 8) if not bench.tiny else (4, 2)
    gate_up = normal(count, 2 * inner, hidden, dtype=torch.bfloat16, scale=hidden**-0.5)
    down = normal(count, hidden, inner, dtype=torch.bfloat16, scale=inner**-0.5)
    for tokens in (2048, 256, 32) if not bench.tiny else (3,):
        chosen, weights = routed(tokens, count, top_k)
        x = normal(tokens, hidden, dtype=torch.bfloat16)
        took = timed([partial(experts.moe, x, gate_up, down, chosen, weights)])
        flops = 6 * hidden * inner * tokens * top_k
        read = gate_up.nbytes + down.nbytes
        if flops / bench.ceilings.matmul > read / bench.ceilings.copy:
            yield bench.flops(f"moe, qwen3-30b-a3b, {tokens} tokens", took, flops)
        else:
            yield bench.bytes(f"moe, qwen3-30b-a3b, {tokens} tokens", took, read)
