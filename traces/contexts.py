"""Block ids of contexts that grow turn by turn: given out so that equal ids are equal prefixes, and new tokens new ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Context:
    """`tokens` tokens as inclusive runs of block ids; the last block may be covered in part."""

    tokens: int
    runs: list[tuple[int, int]] = field(default_factory=list)
    # Whether the partly covered last block may be filled under its id: by one continuation only, or two contents share it.
    open: bool = True


class BlockIds:
    """Numbers blocks of `block_tokens` tokens from 0 on."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._next = 0

    def grow(self, base: Context | None, keep: int, tokens: int) -> Context:
        """A context of `tokens` tokens: the first `keep` of `base` (0 .. base.tokens), then tokens that are new."""
        size = self.block_tokens
        held = 0 if base is None else base.tokens
        if not 0 <= keep <= min(held, tokens):
            raise ValueError(f"keep {keep} of {held} tokens in a context of {tokens}")
        blocks, needed = keep // size, -(-tokens // size)
        opened = True
        if base is not None and keep % size:
            if tokens == keep:  # a mere prefix: its last block holds what the base's holds, and nothing may be added to it
                blocks, opened = blocks + 1, False
            elif keep == held and base.open:
                blocks, base.open = blocks + 1, False
        runs = _leading(base.runs, blocks) if base is not None else []
        if needed > blocks:
            first, self._next = self._next, self._next + needed - blocks
            if runs and runs[-1][1] == first - 1:
                runs[-1] = (runs[-1][0], self._next - 1)
            else:
                runs.append((first, self._next - 1))
        return Context(tokens, runs, opened)


def columns(contexts: Iterable[Context]) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(known_tokens, runs) of a workload whose request i holds contexts[i]."""
    contexts = list(contexts)
    flat = np.array([run for context in contexts for run in context.runs], dtype=np.int64).reshape(-1, 2)
    offsets = np.cumsum([0, *(len(context.runs) for context in contexts)]).astype(np.int64)
    known = np.array([context.tokens for context in contexts], dtype=np.int64)
    return known, (offsets, flat[:, 0].copy(), flat[:, 1].copy())


def _leading(runs: list[tuple[int, int]], blocks: int) -> list[tuple[int, int]]:
    out = []
    for first, last in runs:
        if blocks <= 0:
            break
        last = min(last, first + blocks - 1)
        blocks -= last - first + 1
        out.append((first, last))
    return out
