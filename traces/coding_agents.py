"""Recorded sessions of coding agents: JSONL, one session a line, with block ids that hold inside the session.

Format: github.com/callanjfox/kv-cache-tester (`traces/`), its `hash_ids` also as inclusive runs, `hash_id_ranges`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path

import numpy as np

from simcore.errors import TraceError
from simcore.traces import rows as strict
from simcore.traces.files import json_documents
from simcore.traces.sessions import counted
from simcore.traces.workload import Source, Workload, build

CLOCKS = ("closed-loop", "recorded")
LONG = ("drop", "truncate", "bigger-context")
TOOLS = ("tool", "human")
_SESSION = ("id", "block_size", "requests")
_SESSION_OPTIONAL = ("models", "hash_id_scope", "tool_tokens", "system_tokens", "totals")
_REQUEST = ("t", "type", "in", "out")
_REQUEST_OPTIONAL = (
    "model", "hash_ids", "hash_id_ranges", "input_types", "output_types", "stop", "api_time", "think_time", "ttft",
)
_SUB_AGENT = ("t", "type", "duration_ms", "requests")
_SUB_AGENT_OPTIONAL = (
    "agent_id", "models", "status", "subagent_type", "system_tokens", "tool_tokens", "tool_use_count", "total_tokens",
)
_MOST = 1 << 48  # ids of all sessions together stay within 64 bits
_TICK = 1.0  # s; session times are whole seconds
# Service of calls whose end was not recorded, s: the calls of the published set that have one, median within output lengths.
_SERVICE, _SERVICE_PER_TOKEN = 2.0, 0.0175


def read_coding_agents(
    path: str | Path, *, clock: str = "closed-loop", long: str = "drop", context: int = 131072,
    max_gap: float | None = None, source: Source | None = None, skip_bad: bool = False,
) -> Workload:
    """The sessions of a file (JSONL or JSON, plain or gzip), a program each; its requests are turns, sub-agents' too.

    All programs begin at t=0: `start_programs` or `with_workers` spreads them. `clock`: closed-loop, a turn comes its
    recorded client delay after the turn before it has ended (a sub-agent begins after the turn that called it, and the
    first turn that came after its end waits for it), or recorded, at its time since the session's start. `long`, for
    sessions with a turn of more than `context` tokens: drop them, truncate them before that turn, or keep all for a model
    of bigger context; counted in the notes. `max_gap`: longer pauses, s, are cut to this. A pause is called tool where the
    turn's input holds a tool result, else human.

    Prompts are identified in full blocks, ids by session; outputs are not. Raises TraceError with file, line and key for
    rows that are not of this form, go back in time or reuse an id behind another prefix; with `skip_bad` such sessions are
    left out and listed in `skipped`.
    """
    return read_sessions(path, json_documents(path), clock=clock, long=long, context=context, max_gap=max_gap, source=source,
                         skip_bad=skip_bad)


def read_sessions(
    path: str | Path, documents: Iterable[tuple[str, dict[str, object] | TraceError]], *, clock: str, long: str,
    context: int, max_gap: float | None, source: Source | None, skip_bad: bool, absolute: bool = False,
    unnamed: bool = False,
) -> Workload:
    """`read_coding_agents` of the sessions in `documents`. `absolute`: times in a sub-agent count from the start of the
    session, not of the sub-agent; `unnamed`: requests may have no ids, and share nothing then."""
    _demand(path, "clock", clock, CLOCKS)
    _demand(path, "long", long, LONG)
    if max_gap is not None and not (isfinite(max_gap) and max_gap >= 0):
        raise TraceError(str(path), "max_gap", found=max_gap, allowed="a finite time, at least 0 s")
    if type(context) is not int or context < 1:
        raise TraceError(str(path), "context", found=context, allowed="a whole number of tokens, at least 1")
    reading = _Reading(clock == "recorded", long, context, max_gap, absolute, unnamed)
    bad = strict.BadRows(skip_bad)
    for where, row in documents:
        try:
            if isinstance(row, TraceError):
                raise row
            reading.add(where, row)
        except TraceError as error:
            bad.refuse(error)
    if not reading.kept:
        raise TraceError(str(path), found="no sessions", allowed="at least one that fits the context")
    return reading.workload(source or Source(Path(path).name), tuple(bad.listed))


@dataclass
class _Turn:
    at: float  # s since the session's start
    ended: float  # s, NaN where the trace does not say
    input_tokens: int
    output_tokens: int
    runs: np.ndarray  # int64[k, 2], inclusive, as in the session
    known: int
    waits: list[int]
    gap: float
    tool: int
    marks: list[str]  # what was assumed


@dataclass
class _Session:
    """Turns of one session, in order; `waits` are places in it."""

    where: str
    block_tokens: int
    absolute: bool = False
    unnamed: bool = False
    turns: list[_Turn] = field(default_factory=list)

    def chain(self, requests: object, key: str, spawn: list[int], begin: float, gap: float) -> int:
        """Add a chain of requests that begins at `begin`, `gap` after the turns `spawn`; the place of its last turn."""
        if not isinstance(requests, list) or not requests:
            raise TraceError(self.where, key, found=requests, allowed="a list of at least one request")
        last, joins, now = -1, list(spawn), 0.0
        for k, row in enumerate(requests):
            at = f"{key}[{k}]"
            if not isinstance(row, dict):
                raise TraceError(self.where, at, found=row, allowed="an object")
            if row.get("type") == "subagent":
                joins.append(self._sub_agent(row, at, last, begin))
                continue
            turn = self._turn(row, at, begin)
            if turn.at < now:
                raise TraceError(self.where, f"{at}.t", why="time goes backwards", found=row["t"],
                                 allowed="not before the request above")
            now = turn.at
            if last < 0:
                turn.waits, turn.gap, joins = joins, gap, []
            else:
                joined = [k for k in joins if _end(self.turns[k]) <= turn.at + _TICK]
                joins = [k for k in joins if k not in joined]  # they run on in the background
                turn.waits, turn.gap = sorted([last, *joined]), self._gap(row, at, turn, last, joined)
            self.turns.append(turn)
            last = len(self.turns) - 1
        if last < 0:
            raise TraceError(self.where, key, found="sub-agents only", allowed="a request of the agent's own first")
        return last

    def _sub_agent(self, row: dict, key: str, last: int, begin: float) -> int:
        """Add a sub-agent's turns. The trace gives it the time of its end."""
        _keys(self.where, key, row, _SUB_AGENT, _SUB_AGENT_OPTIONAL)
        if last < 0:
            raise TraceError(self.where, key, why="a sub-agent before any request of its agent", allowed="a request first")
        ended = begin + _real(self.where, key, row, "t")
        first = row["requests"][0] if isinstance(row["requests"], list) and row["requests"] else None
        if self.absolute and isinstance(first, dict) and "t" in first:
            begun = max(_real(self.where, f"{key}.requests[0]", first, "t"), self.turns[last].at)
        else:
            begun = max(ended - _real(self.where, key, row, "duration_ms") / 1000, self.turns[last].at)
        gap = max(0.0, begun - _end(self.turns[last]))
        place = len(self.turns)
        end = self.chain(row["requests"], f"{key}.requests", [last], 0.0 if self.absolute else begun, gap)
        self.turns[place].marks.append("sub-agent")
        return end

    def _turn(self, row: dict, key: str, begin: float) -> _Turn:
        _keys(self.where, key, row, _REQUEST, _REQUEST_OPTIONAL)
        inputs = _whole(self.where, key, row, "in", 1)
        outputs = _whole(self.where, key, row, "out", 0)
        if row["type"] not in ("n", "s"):
            raise TraceError(self.where, f"{key}.type", found=row["type"], allowed="n, s or subagent")
        at = begin + _real(self.where, key, row, "t")
        ended = at + _real(self.where, key, row, "api_time") if "api_time" in row else float("nan")
        types = row.get("input_types", [])
        if not isinstance(types, list):
            raise TraceError(self.where, f"{key}.input_types", found=types, allowed="a list")
        marks = [] if outputs else ["no output"]
        if self.unnamed and "hash_ids" not in row and "hash_id_ranges" not in row:
            runs, known = np.zeros((0, 2), dtype=np.int64), 0
            marks.append("no ids")
        else:
            runs, known = self._identity(row, key, inputs)
        return _Turn(at, ended, inputs, max(1, outputs), runs, known, [], 0.0, 0 if "tool_result" in types else 1, marks)

    def _gap(self, row: dict, key: str, turn: _Turn, last: int, joins: list[int]) -> float:
        """Client delay, s: never with the service of what the turn waits for."""
        given = _real(self.where, key, row, "think_time") if "think_time" in row else None
        before = self.turns[last]
        if joins:  # the recorded delay began before the sub-agents did
            return max(0.0, turn.at - max(_end(self.turns[k]) for k in joins))
        if not isfinite(before.ended):  # the recorded delay, if any, began with an earlier turn's end
            turn.marks.append("no end")
            return max(0.0, turn.at - _end(before))
        return given if given is not None else max(0.0, turn.at - before.ended)

    def _identity(self, row: dict, key: str, inputs: int) -> tuple[np.ndarray, int]:
        """(runs, tokens covered): the prompt's full blocks, or all of it where a last part of a block has an id too."""
        if ("hash_ids" in row) == ("hash_id_ranges" in row):
            raise TraceError(self.where, key, why="either hash_ids or hash_id_ranges", found=sorted(row))
        name = "hash_ids" if "hash_ids" in row else "hash_id_ranges"
        key = f"{key}.{name}"
        runs = _runs(self.where, key, row[name], single=name == "hash_ids")
        blocks, size = int((runs[:, 1] - runs[:, 0] + 1).sum()), self.block_tokens
        if blocks not in (inputs // size, -(-inputs // size)):
            raise TraceError(self.where, key, found=f"{blocks} ids",
                             allowed=f"{inputs // size} ids: in {inputs} in blocks of {size} tokens")
        return runs, min(blocks * size, inputs)

    def check_prefixes(self) -> None:
        """TraceError where an id stands behind another block than before. Inside a run an id follows the one below it."""
        runs = np.concatenate([turn.runs for turn in self.turns])
        if not len(runs):
            return
        first = np.cumsum([0, *(len(turn.runs) for turn in self.turns)])[:-1]
        parent = np.append(-1, runs[:-1, 1])
        parent[first[first < len(parent)]] = -1
        pairs = np.unique(np.stack((runs[:, 0], parent), axis=1), axis=0)
        inside = np.unique(runs, axis=0)
        begin, reach = inside[:, 0] + 1, np.maximum.accumulate(inside[:, 1])
        at = np.searchsorted(begin, pairs[:, 0], side="right") - 1
        continues = (at >= 0) & (reach[at] >= pairs[:, 0]) & (pairs[:, 1] != pairs[:, 0] - 1)
        twice = np.append(False, pairs[1:, 0] == pairs[:-1, 0])
        if (continues | twice).any():
            found = int(pairs[np.argmax(continues | twice), 0])
            raise TraceError(self.where, "block ids", why="an id stands behind another prefix than before", found=found,
                             allowed="prefix identities: equal id = equal tokens in this block and in all before it")


class _Reading:
    """Sessions as they are read, and what was done to them."""

    def __init__(
        self, recorded: bool, long: str, context: int, max_gap: float | None, absolute: bool, unnamed: bool
    ) -> None:
        self.recorded, self.long, self.context, self.max_gap = recorded, long, context, max_gap
        self.absolute, self.unnamed = absolute, unnamed
        self.kept: list[_Session] = []
        self.counts: Counter[str] = Counter()
        self.block_tokens = 0

    def add(self, where: str, row: dict[str, object]) -> None:
        strict.check_keys(where, row, _SESSION, _SESSION_OPTIONAL)
        size = strict.whole(where, row, "block_size", least=1)
        if self.block_tokens not in (0, size):
            raise TraceError(where, "block_size", found=size, allowed=f"{self.block_tokens}, as in the sessions before")
        if row.get("hash_id_scope", "local") != "local":
            raise TraceError(where, "hash_id_scope", found=row["hash_id_scope"], allowed="local")
        session = _Session(where, size, self.absolute, self.unnamed)
        session.chain(row["requests"], "requests", [], 0.0, 0.0)
        session.check_prefixes()
        self.block_tokens = size
        self.counts["sessions"] += 1
        turns = session.turns
        fits = next((k for k, t in enumerate(turns) if t.input_tokens + t.output_tokens > self.context), len(turns))
        if fits < len(turns):
            self.counts["long"] += 1
            if self.long == "drop" or (self.long == "truncate" and not fits):
                return
            if self.long == "truncate":
                self.counts["cut turns"] += len(turns) - fits
                del turns[fits:]
        self.counts.update(mark for turn in turns for mark in turn.marks)
        self.kept.append(session)

    def workload(self, source: Source, skipped: tuple[str, ...]) -> Workload:
        turns = [turn for session in self.kept for turn in session.turns]
        sizes = [len(session.turns) for session in self.kept]
        base = np.cumsum([0, *sizes])[:-1]  # of a session's rows
        program = np.repeat(np.arange(len(sizes)), sizes)
        shift = self._shifts()
        order = np.argsort([turn.at for turn in turns], kind="stable") if self.recorded else np.arange(len(turns))
        gaps = np.array([turn.gap for turn in turns])
        if self.max_gap is not None:
            self.counts["cut gaps"] = int((gaps > self.max_gap).sum())
            gaps = np.minimum(gaps, self.max_gap)
        waits = [[int(base[p]) + k for k in t.waits] for p, t in zip(program.tolist(), turns, strict=True)]
        opens = np.array([not w for w in waits])
        ordered = [turns[k] for k in order.tolist()]
        runs = np.concatenate([turn.runs + shift[p] for p, turn in zip(program[order].tolist(), ordered, strict=True)])
        return build(
            arrival=np.array([t.at for t in ordered]) if self.recorded else np.where(opens, 0.0, np.nan),
            input_tokens=np.array([t.input_tokens for t in ordered]),
            output_tokens=np.array([t.output_tokens for t in ordered]),
            source=replace(source, notes=(*source.notes, *self._notes())),
            block_tokens=self.block_tokens,
            known_tokens=np.array([t.known for t in ordered]),
            runs=(np.cumsum([0, *(len(t.runs) for t in ordered)]), runs[:, 0].copy(), runs[:, 1].copy()),
            program=program[order], turn=counted(program[order]),
            gap=np.zeros(len(turns)) if self.recorded else gaps,
            tool=np.where(opens, -1, np.array([t.tool for t in turns]))[order],
            waits=None if self.recorded else waits, tools=TOOLS, skipped=skipped,
        )

    def _shifts(self) -> np.ndarray:
        """int64[sessions]: what to add to each session's ids so that no two sessions share one."""
        largest = [max((int(t.runs[:, 1].max(initial=-1)) for t in s.turns), default=-1) + 1 for s in self.kept]
        if sum(largest) > ((1 << 63) - 1) // self.block_tokens:
            raise TraceError(self.kept[0].where, "block ids", found=max(largest), why="too large to be told apart")
        return np.cumsum([0, *largest])[:-1]

    def _notes(self) -> list[str]:
        c = self.counts
        long = {"drop": "dropped", "truncate": f"truncated before it ({c['cut turns']} turns cut)", "bigger-context": "kept"}
        clock = "arrivals as recorded since each session's start" if self.recorded else (
            "closed loop: recorded client delays (whole seconds) after the turn before has ended")
        return [
            f"coding agents: {len(self.kept)} of {c['sessions']} sessions, {c['sub-agent']} sub-agents; all start at t=0",
            clock,
            f"{c['long']} sessions have a turn of more than {self.context} tokens: {long[self.long]}",
            "no tool names: a pause is called tool where a tool result follows, else human (one pooled distribution each)",
            f"{self.block_tokens}-token block ids are local: sessions share nothing; outputs are not identified",
            *([f"{c['no end']} turns follow one whose end is not recorded: it is taken to have run for {_SERVICE:g} s and "
               f"{_SERVICE_PER_TOKEN:g} s an output token"] if c["no end"] and not self.recorded else []),
            *([f"{c['no output']} turns with 0 output tokens count as 1"] if c["no output"] else []),
            *([f"{c['no ids']} turns without ids share nothing"] if c["no ids"] else []),
            *([f"{c['cut gaps']} pauses cut to {self.max_gap:g} s"] if c["cut gaps"] else []),
        ]


def _end(turn: _Turn) -> float:
    """When a turn ended, s since the session's start; assumed where it is not recorded."""
    return turn.ended if isfinite(turn.ended) else turn.at + _SERVICE + _SERVICE_PER_TOKEN * turn.output_tokens


def _runs(where: str, key: str, given: object, *, single: bool) -> np.ndarray:
    """int64[k, 2]: inclusive runs, from a list of them or of single ids."""
    pairs = [[k, k] for k in given] if single and isinstance(given, list) else given
    if not isinstance(pairs, list) or not all(
        isinstance(run, list) and len(run) == 2 and type(run[0]) is type(run[1]) is int and 0 <= run[0] <= run[1] < _MOST
        for run in pairs
    ):
        allowed = f"a list of {'' if single else 'inclusive runs of '}whole numbers, 0 to {_MOST - 1}"
        raise TraceError(where, key, found=given, allowed=allowed)
    runs = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    if single and len(runs):
        cut = np.flatnonzero(np.diff(runs[:, 0]) != 1)
        runs = np.stack((runs[np.append(0, cut + 1), 0], runs[np.append(cut, len(runs) - 1), 1]), axis=1)
    return runs


def _demand(path: str | Path, key: str, found: str, allowed: tuple[str, ...]) -> None:
    if found not in allowed:
        raise TraceError(str(path), key, found=found, allowed=", ".join(allowed))


def _keys(where: str, key: str, row: dict, required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    try:
        strict.check_keys(where, row, required, optional)
    except TraceError as error:
        raise TraceError(where, f"{key}.{error.key}", why=error.why, allowed=error.allowed) from None


def _real(where: str, key: str, row: dict, name: str) -> float:
    value = row[name]
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise TraceError(where, f"{key}.{name}", found=value, allowed="a finite number, at least 0")
    return float(value)


def _whole(where: str, key: str, row: dict, name: str, least: int) -> int:
    value = row[name]
    if type(value) is not int or not least <= value <= strict.MOST_TOKENS:
        raise TraceError(where, f"{key}.{name}", found=value, allowed=f"a whole number, {least} to {strict.MOST_TOKENS}")
    return value
