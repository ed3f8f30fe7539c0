"""Sessions: found from the prefixes that requests share where a trace names none, and their turns counted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def common_root(block_ids: Sequence[np.ndarray]) -> int:
    """How many leading blocks all requests share (a system prompt, say); 0 for no requests."""
    if not block_ids:
        return 0
    root = block_ids[0]
    for ids in block_ids:
        length = min(len(root), len(ids))
        differs = np.flatnonzero(root[:length] != ids[:length])
        root = root[: differs[0] if len(differs) else length]
    return len(root)


def by_prefix(block_ids: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(program, turn), int64[n] each. A session is a prefix chain after the common root.

    All requests with the same first block after the root are one session; its turns are its requests in row order. A
    request with no block after the root is a session of its own. Limit: a first turn so short that this block was only
    partly full may carry another id than the full block of the next turn, and then stands alone.
    """
    root = common_root(block_ids)
    program = np.zeros(len(block_ids), dtype=np.int64)
    turn = np.zeros(len(block_ids), dtype=np.int64)
    session_of: dict[int, int] = {}
    turns: list[int] = []
    for row, ids in enumerate(block_ids):
        session = session_of.setdefault(int(ids[root]), len(turns)) if len(ids) > root else len(turns)
        if session == len(turns):
            turns.append(0)
        program[row], turn[row] = session, turns[session]
        turns[session] += 1
    return program, turn


def counted(program: np.ndarray) -> np.ndarray:
    """turn, int64[n]: the place of each row within its program, in row order."""
    order = np.argsort(program, kind="stable")
    turn = np.empty(len(program), dtype=np.int64)
    turn[order] = np.arange(len(program)) - np.searchsorted(program[order], program[order])
    return turn
