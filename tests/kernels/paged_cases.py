"""Sequences in paged KV memory whose unused places are poisoned, and attention over them written as the formula."""

import torch

# Of the values' size, about 1: half a unit in the last place of the result, and as much again for the weights of the sum.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
NOWHERE = 2**30  # a block that no cache has: an address made of it faults


def paged(seed, contexts, kv_heads, head_dim, block_size, dtype, device):
    """(k_cache, v_cache, block_table, context_lens): blocks in shuffled order, NaN and huge values in slots of no token."""
    made = torch.Generator().manual_seed(seed)
    needed = [-(-context // block_size) for context in contexts]
    blocks = torch.randperm(sum(needed) + 3, generator=made)
    table = torch.full((len(contexts), max(needed, default=0) + 2), NOWHERE, dtype=torch.int32)
    table[:, -1] = -1
    caches = torch.full((2, len(blocks), block_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    caches[:, :, :, :, ::2] = torch.finfo(dtype).max
    for i, context in enumerate(contexts):
        own, blocks = blocks[: needed[i]], blocks[needed[i]:]
        table[i, : needed[i]] = own
        tokens = torch.arange(context)
        drawn = torch.randn(2, context, kv_heads, head_dim, generator=made)
        caches[:, own[tokens // block_size], tokens % block_size] = drawn.to(dtype)
    lens = torch.tensor(contexts, dtype=torch.int32)
    return caches[0].to(device), caches[1].to(device), table.to(device), lens.to(device)


def drawn_queries(seed, tokens, heads, head_dim, dtype, device):
    return torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(seed + 1)).to(device, dtype)


def formula(q, k_cache, v_cache, block_table, query_starts, context_lens, scale):
    """Causal attention, float64[tokens, heads, head_dim], one query and one head at a time."""
    group = q.shape[1] // k_cache.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i, context in enumerate(context_lens.tolist()):
        start, stop = query_starts[i], query_starts[i + 1]
        for at in range(start, stop):
            seen = context - (stop - start) + at - start + 1
            slots = [(int(block_table[i, t // k_cache.shape[1]]), t % k_cache.shape[1]) for t in range(seen)]
            for head in range(q.shape[1]):
                keys, values = (torch.stack([x[b, o, head // group] for b, o in slots]).double() for x in (k_cache, v_cache))
                out[at, head] = torch.softmax(keys @ q[at, head].double() * scale, 0) @ values
    return out
