"""From checked rows to a workload: the reading half that our CSV and JSONL share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from simcore.errors import TraceError
from simcore.traces import rows as strict
from simcore.traces.identity import first_conflict, numbered_ids
from simcore.traces.sessions import counted
from simcore.traces.workload import Source, Workload, build

REQUIRED = ("input_tokens", "output_tokens")
OPTIONAL = ("priority", "program", "turn", "gap", "wait_for", "tool", "calls")
IDENTITY = ("known_tokens", "ids")
_EVERY_OR_NONE = ("program", "turn")


class _Checked(NamedTuple):
    where: str
    arrival: float  # s, NaN where waits is not empty
    input_tokens: int
    output_tokens: int
    priority: int
    program: int  # -1 = not given
    turn: int  # -1 = not given
    gap: float  # s
    waits: list[int]  # rows of the workload
    tool: int
    calls: list[tuple[int, float]]  # index of the tool, s
    known_tokens: int
    runs: np.ndarray  # int64[k, 2], inclusive


class Table:
    """Reads rows (dicts with the keys above and `arrival`) one after the other, then gives the workload."""

    def __init__(
        self, path: str | Path, *, block_tokens: int = 16, tools: tuple[str, ...] | None = None, ends_known: bool = False,
        workers: int = 0,
    ) -> None:
        self.path, self.block_tokens, self.ends_known, self.workers = path, block_tokens, ends_known, workers
        self.tools = {name: index for index, name in enumerate(tools or ())}
        self.more_tools = tools is None  # without a list of them, tools are numbered by first appearance
        self.kept: list[_Checked] = []
        self.new_row: list[int | None] = []  # row of the file -> row of the workload, None = left out
        self.now = 0.0

    def read(self, rows: Iterable[tuple[str, dict[str, object] | TraceError]], bad: strict.BadRows) -> None:
        for where, row in rows:
            try:
                if isinstance(row, TraceError):
                    raise row
                checked = self._check(where, row)
            except TraceError as error:
                bad.refuse(error)
                self.new_row.append(None)
                continue
            self.new_row.append(len(self.kept))
            self.kept.append(checked)
            if not np.isnan(checked.arrival):
                self.now = checked.arrival

    def _check(self, where: str, row: dict[str, object]) -> _Checked:
        strict.check_keys(where, row, REQUIRED, ("arrival", *OPTIONAL, *IDENTITY))
        waits = self._waits(where, row)
        if waits and "arrival" in row:
            raise TraceError(where, "arrival", found="both", allowed="either arrival or wait_for")
        if not waits and "arrival" not in row and not self.workers:
            raise TraceError(where, "arrival", found="neither", allowed="either arrival or wait_for")
        arrival = strict.real(where, row, "arrival") if "arrival" in row else float("nan")
        if arrival < self.now:
            raise TraceError(
                where, "arrival", why="time goes backwards", found=arrival,
                allowed=f"at least {self.now!r}, the arrival before it",
            )
        gap = strict.real(where, row, "gap") if "gap" in row else 0.0
        if gap and not waits:
            raise TraceError(where, "gap", found=gap, allowed="0 in a row that waits for none")
        for key in _EVERY_OR_NONE:
            if self.kept and (key in row) != (getattr(self.kept[0], key) >= 0):
                raise TraceError(where, key, why="given in some rows only", allowed="in every row or in none")
        inputs, outputs = strict.tokens(where, row, "input_tokens"), strict.tokens(where, row, "output_tokens")
        known, runs = self._identity(where, row, inputs + outputs)
        if "calls" in row and not waits:
            raise TraceError(where, "calls", found=row["calls"], allowed="none in a row that waits for none")
        return _Checked(
            where, arrival, inputs, outputs,
            strict.whole(where, row, "priority", least=-(1 << 63)) if "priority" in row else 0,
            strict.whole(where, row, "program") if "program" in row else -1,
            strict.whole(where, row, "turn") if "turn" in row else -1,
            gap, waits, *self._tools(where, row), known, runs,
        )

    def _waits(self, where: str, row: dict[str, object]) -> list[int]:
        found = row.get("wait_for", [])
        if not isinstance(found, list) or not all(type(k) is int and 0 <= k < len(self.new_row) for k in found):
            raise TraceError(
                where, "wait_for", found=found,
                allowed=f"numbers of earlier rows, counted from 0 (this is row {len(self.new_row)})",
            )
        rows = [self.new_row[k] for k in found]
        if None in rows:
            raise TraceError(where, "wait_for", why="a row that it waits for was left out", found=found)
        return [k for k in rows if k is not None]

    def _tools(self, where: str, row: dict[str, object]) -> tuple[int, list[tuple[int, float]]]:
        """(index of the tool, calls). The last check of a row, so that a refused row names no tool."""
        calls = row.get("calls", [])
        if not isinstance(calls, list):
            raise TraceError(where, "calls", found=calls, allowed="a list of [tool, seconds]")
        named = []
        for call in calls:
            if not isinstance(call, list) or len(call) != 2:
                raise TraceError(where, "calls", found=call, allowed="[tool, seconds]")
            named.append((self._named(where, "calls", call[0]), strict.real(where, {"calls": call[1]}, "calls")))
        own = self._named(where, "tool", row["tool"]) if "tool" in row else None
        number = self.tools.setdefault
        tool = -1 if own is None else number(own, len(self.tools))
        return tool, [(number(name, len(self.tools)), seconds) for name, seconds in named]

    def _named(self, where: str, key: str, name: object) -> str:
        if not isinstance(name, str) or not name:
            raise TraceError(where, key, found=name, allowed="a name")
        if name not in self.tools and not self.more_tools:
            raise TraceError(where, key, found=name, allowed=", ".join(self.tools) or "none: the header lists no tools")
        return name

    def _identity(self, where: str, row: dict[str, object], total: int) -> tuple[int, np.ndarray]:
        if ("ids" in row) != ("known_tokens" in row):
            raise TraceError(where, "ids", why="ids and known_tokens come together or not at all")
        if "ids" not in row:
            return 0, np.zeros((0, 2), dtype=np.int64)
        known = strict.whole(where, row, "known_tokens", most=total)
        largest = ((1 << 63) - 1) // self.block_tokens - 1  # block_keys multiplies by block_tokens
        ids = row["ids"]
        covered = 0
        for run in ids if isinstance(ids, list) else [ids]:
            if not (
                isinstance(run, list) and len(run) == 2 and type(run[0]) is int and type(run[1]) is int
                and 0 <= run[0] <= run[1] <= largest
            ):
                raise TraceError(where, "ids", found=run, allowed=f"inclusive runs [first, last] of ids 0 to {largest}")
            covered += run[1] - run[0] + 1
        blocks = -(-known // self.block_tokens)
        if covered != blocks:
            raise TraceError(
                where, "ids", found=f"{covered} ids",
                allowed=f"{blocks} ids: known_tokens {known} in blocks of {self.block_tokens} tokens",
            )
        return known, np.asarray(ids, dtype=np.int64).reshape(-1, 2)

    def workload(self, source: Source, skipped: tuple[str, ...]) -> Workload:
        kept = self.kept
        if not kept:
            raise TraceError(str(self.path), found="no requests", allowed="at least one row")
        columns = dict(zip(_Checked._fields, zip(*kept, strict=True), strict=True))
        program = _dense(np.array(columns["program"])) if kept[0].program >= 0 else np.arange(len(kept))
        runs = np.concatenate(columns["runs"])
        workload = build(
            arrival=np.array(columns["arrival"]),
            input_tokens=np.array(columns["input_tokens"]),
            output_tokens=np.array(columns["output_tokens"]),
            source=source,
            block_tokens=self.block_tokens,
            known_tokens=np.array(columns["known_tokens"]),
            runs=(np.cumsum([0, *map(len, columns["runs"])]), runs[:, 0].copy(), runs[:, 1].copy()),
            priority=np.array(columns["priority"]),
            program=program,
            turn=np.array(columns["turn"]) if kept[0].turn >= 0 else counted(program),
            gap=np.array(columns["gap"]),
            tool=np.array(columns["tool"]),
            waits=list(columns["waits"]),
            calls=list(columns["calls"]),
            workers=self.workers, ends_known=self.ends_known, tools=tuple(self.tools),
            skipped=skipped,
        )
        row = first_conflict(*numbered_ids(workload))
        if row is not None:
            raise TraceError(
                kept[row].where, "ids", why="an id stands behind another prefix than before",
                allowed="prefix identities: equal id = equal tokens in this block and in all before it",
            )
        return workload


def _dense(program: np.ndarray) -> np.ndarray:
    """Program numbers as they are when they are 0 .. n-1 without a hole, else renumbered by first appearance."""
    values, first_seen, inverse = np.unique(program, return_index=True, return_inverse=True)
    if values[-1] == len(values) - 1:
        return program
    rank = np.empty(len(values), dtype=np.int64)
    rank[np.argsort(first_seen)] = np.arange(len(values))
    return rank[inverse]
