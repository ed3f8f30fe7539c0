"""What the wrappers refuse: shapes and types that a kernel would read out of bounds or compute nonsense from."""

from __future__ import annotations

from typing import Any


def check(ok: bool, argument: str, found: object, allowed: str) -> None:
    """Raises ValueError, which names the argument, what was found and what is allowed, unless `ok`."""
    if not ok:
        raise ValueError(f"{argument}: found {found}; allowed: {allowed}")


def check_float(argument: str, tensor: Any) -> None:
    """Raises ValueError unless the kernels compute with the tensor's type."""
    allowed = ("torch.float16", "torch.bfloat16", "torch.float32")
    check(str(tensor.dtype) in allowed, argument, tensor.dtype, ", ".join(allowed))


def check_paged(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, context_lens: Any, out: Any, scale: float, sequences: int
) -> None:
    """What paged attention needs of its arguments, whichever way it is computed; looks at no value that lies on a GPU."""
    check(q.dim() == 3, "q", list(q.shape), "[.., heads, head_dim]")
    check(k_cache.dim() == 4 and k_cache.shape[3] == q.shape[2], "k_cache", list(k_cache.shape),
          f"[num_blocks, block_size, kv_heads, {q.shape[2]}]")
    check(v_cache.shape == k_cache.shape, "v_cache", list(v_cache.shape), f"{list(k_cache.shape)}")
    check(q.shape[1] % k_cache.shape[2] == 0, "q", f"{q.shape[1]} heads", f"a multiple of {k_cache.shape[2]} kv heads")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache), ("out", q if out is None else out)):
        check(tensor.dtype == q.dtype, name, tensor.dtype, f"q's {q.dtype}")
    check(out is None or out.shape == q.shape, "out", None if out is None else list(out.shape), f"{list(q.shape)}")
    check(block_table.dim() == 2 and len(block_table) == sequences, "block_table", list(block_table.shape),
          f"[{sequences}, max_blocks]")
    check(context_lens.shape == (sequences,), "context_lens", list(context_lens.shape), f"[{sequences}]")
    check(scale > 0, "scale", scale, "> 0")
    if sequences and not context_lens.is_cuda:
        capacity = block_table.shape[1] * k_cache.shape[1]
        longest, shortest = int(context_lens.max()), int(context_lens.min())
        check(shortest >= 0 and longest <= capacity, "context_lens", f"{shortest} .. {longest}",
              f"0 .. {capacity}, the tokens that a row of block_table holds")


def check_paged_kernel(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, context_lens: Any, out: Any, dtypes: tuple[Any, ...]
) -> None:
    """What the two attention kernels need beyond `check_paged`."""
    block_size, head_dim = k_cache.shape[1], k_cache.shape[3]
    check(q.dtype in dtypes, "q", q.dtype, f"{dtypes}")
    check(16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0, "head_dim", head_dim, "16, 32, 64, 128 or 256")
    check(16 <= block_size <= 256, "block_size", block_size, "16 .. 256")
    check(k_cache.stride() == v_cache.stride(), "v_cache", f"strides {v_cache.stride()}", f"k_cache's {k_cache.stride()}")
    for name, tensor in (("q", q), ("k_cache", k_cache), ("block_table", block_table), ("out", q if out is None else out)):
        check(tensor.stride(-1) == 1, name, f"strides {tensor.stride()}", "contiguous along the last axis")
    check(context_lens.is_contiguous(), "context_lens", f"strides {context_lens.stride()}", "contiguous")
    for name, tensor in (("block_table", block_table), ("context_lens", context_lens)):
        check(str(tensor.dtype) == "torch.int32", name, tensor.dtype, "torch.int32")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache), ("block_table", block_table),
                         ("context_lens", context_lens), ("out", q if out is None else out)):
        check(tensor.device == q.device, name, tensor.device, f"q's {q.device}")


def check_queries(query_starts: Any, context_lens: Any, tokens: int, max_query: int) -> None:
    """Raises ValueError where the chunks do not lie within q, max_query or their contexts."""
    counts = query_starts.diff()
    ordered = int(query_starts[0]) >= 0 and bool((counts >= 0).all()) and int(query_starts[-1]) <= tokens
    check(ordered, "query_starts", query_starts.tolist(), f"not falling, within 0 .. {tokens}")
    check(bool((counts <= max_query).all()), "query_starts", f"{counts.tolist()} queries", f"<= max_query {max_query}")
    check(bool((counts <= context_lens).all()), "context_lens", context_lens.tolist(), f">= queries {counts.tolist()}")
