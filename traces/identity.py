"""Prefix identity of block ids: an id must mean equal tokens in its block and in all blocks before it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from simcore.traces.workload import Workload

_UNSEEN = -2
_ROOT = -1


class Numbering:
    """Maps the ids that occur in some inclusive runs to 0 .. size-1, so that tables over ids stay small."""

    def __init__(self, run_first: np.ndarray, run_last: np.ndarray) -> None:
        order = np.argsort(run_first, kind="stable")
        first, reach = run_first[order], np.maximum.accumulate(run_last[order])
        starts = np.flatnonzero(np.concatenate(([True], first[1:] > reach[:-1]))) if len(first) else order
        self._first = first[starts]
        lengths = reach[np.append(starts[1:], len(reach)) - 1] - self._first + 1 if len(first) else first
        ends = np.cumsum(lengths)
        self._base = ends - lengths
        self.size = int(ends[-1]) if len(ends) else 0

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        island = np.searchsorted(self._first, ids, side="right") - 1
        return self._base[island] + ids - self._first[island]


def first_conflict(block_ids: Iterable[np.ndarray], size: int) -> int | None:
    """The first row in which an id stands behind another parent than before; None when ids are prefix identities.

    One parent an id is enough: its place in the row follows from the chain of parents. Ids are 0 .. size-1.
    """
    parent_of = np.full(size, _UNSEEN, dtype=np.int64)
    for row, ids in enumerate(block_ids):
        if len(ids):
            parents = np.concatenate(([_ROOT], ids[:-1]))
            known = parent_of[ids]
            parent_of[ids] = parents
            if ((known != _UNSEEN) & (known != parents)).any() or (parent_of[ids] != parents).any():
                return row
    return None


def numbered_ids(workload: Workload) -> tuple[Iterable[np.ndarray], int]:
    """(ids of each request as small numbers, how many there are)."""
    number = Numbering(workload.run_first, workload.run_last)
    return (number(workload.ids(i)) for i in range(len(workload))), number.size


def chained(block_ids: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Prefix identities, int64 and dense, from content ids: one per (id of the block before, content id)."""
    number: dict[tuple[int, int], int] = {}
    rows = []
    for ids in block_ids:
        parent, row = _ROOT, []
        for content in ids.tolist():
            parent = number.setdefault((parent, content), len(number))
            row.append(parent)
        rows.append(np.asarray(row, dtype=np.int64))
    return rows
