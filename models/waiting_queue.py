"""The waiting queue: a heap by (policy key, request id), with removal and re-keying by invalidating the old entry."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any

from simcore.models.request import Request


class WaitingQueue:
    """Requests in service order. Entries are lists [key, id, number, request]; a dead entry holds None for the request.
    The running number keeps a dead entry and its successor under the same key apart."""

    def __init__(self, *, count_programs: bool = True) -> None:
        self.tokens = 0  # known tokens of all waiting requests
        self.programs: dict[int, int] = {}  # program -> how many of its requests wait, if they are counted
        self.count_programs = count_programs
        self._heap: list[list[Any]] = []
        self.size = 0  # how many wait
        self._pushed = 0

    def __len__(self) -> int:
        return self.size

    def push(self, request: Request, key: tuple) -> None:
        self._pushed += 1
        request.queue_entry = [key, request.id, self._pushed, request]
        heappush(self._heap, request.queue_entry)
        self.size += 1
        self.tokens += request.known
        if self.count_programs:
            self.programs[request.program] = self.programs.get(request.program, 0) + 1

    def head(self) -> Request:
        """The next request to serve; the queue is not empty."""
        heap = self._heap
        while heap[0][3] is None:
            heappop(heap)
        return heap[0][3]

    def head_key(self) -> tuple:
        self.head()
        return self._heap[0][0]

    def remove(self, request: Request) -> None:
        """Take a waiting request out, wherever it stands."""
        entry = request.queue_entry
        assert entry is not None
        entry[3] = request.queue_entry = None
        if self._heap[0] is entry:
            heappop(self._heap)
        self.size -= 1
        self.tokens -= request.known
        if self.count_programs:
            self._uncount(request.program)
        if len(self._heap) > 64 + 4 * self.size:  # dead entries of a policy that re-keys often
            self._heap = [entry for entry in self._heap if entry[3] is not None]
            heapify(self._heap)

    def _uncount(self, program: int) -> None:
        self.programs[program] -= 1
        if not self.programs[program]:
            del self.programs[program]

    def in_order(self) -> list[Request]:
        """All waiting requests, next first (for reports and tests)."""
        return [entry[3] for entry in sorted(entry for entry in self._heap if entry[3] is not None)]
