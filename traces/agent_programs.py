"""Agent programs written as turns, and the workload that they make: what each turn adds, calls and leaves out.

A turn's prompt is the prompt and output of the turn before it plus what the turn adds. Three things break that prefix as
they do in life: a compaction replaces the context by a summary, dropped reasoning leaves out part of an output, and a
sub-agent starts a context of its own. What stays is the agent's own prefix (system prompt and tools), which all programs
of one agent share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simcore.errors import TraceError
from simcore.traces.contexts import BlockIds, Context, columns
from simcore.traces.rows import MOST_TOKENS
from simcore.traces.sessions import counted
from simcore.traces.workload import Source, Workload, build


@dataclass(frozen=True)
class AgentTurn:
    """One request of a program. Tokens are counts, times are seconds."""

    new_tokens: int  # added to the context before this turn: the task, tool results, a person's words
    output_tokens: int
    kept_output: int | None = None  # tokens of the output that later turns still hold (the rest was reasoning); None = all
    compact_to: int | None = None  # first the context becomes the agent's prefix and a summary of so many tokens
    keep_tokens: int | None = None  # or first all but so many tokens at the head of the context are cut off
    calls: tuple[tuple[str, float], ...] = ()  # (tool, s): run side by side before this turn
    gap: float = 0.0  # after the calls, or in their place: think time, the client's own work
    tool: str | None = None  # what ran before this turn; None = the first call's tool
    sub_agents: tuple[Program, ...] = ()  # run side by side before this turn's calls, from the end of the turn before it
    at: float | None = None  # recorded clock: arrival after the program's start; then nothing is waited for


@dataclass(frozen=True)
class Program:
    """A chain of turns by one agent. `prefix_tokens`: what every program of the agent begins with."""

    turns: tuple[AgentTurn, ...]
    agent: str = "agent"
    prefix_tokens: int = 0
    start: float | None = 0.0  # s; None = when a worker is free


def build_programs(
    programs: Sequence[Program], source: Source, *, block_tokens: int = 16, workers: int = 0,
    tools: Sequence[str] | None = None, ends_known: bool = False,
) -> Workload:
    """The workload of `programs`; prompts and outputs are identified.

    Turns wait for the turn before them and for the sub-agents between the two (closed loop), unless all turns of a program
    have a recorded time. Rows stand in order of arrival; a sub-agent's turns belong to the program that called it. `tools`:
    the names that may occur (None: any, numbered by first use). Raises TraceError naming program, turn and value for a tool
    that is not among them, a negative or infinite time, a count that is no count, and a pause or sub-agent before a
    program's first turn.
    """
    if type(block_tokens) is not int or block_tokens < 1:
        raise TraceError(source.name, "block_tokens", found=block_tokens, allowed="a whole number, at least 1")
    writer = _Writer(source.name, BlockIds(block_tokens), tools)
    for number, program in enumerate(programs):
        writer.add(number, program, workers)
    if not writer.rows:
        raise TraceError(source.name, found="no programs", allowed="at least one")
    return writer.workload(source, block_tokens, workers, ends_known)


@dataclass
class _Row:
    program: int
    time: float  # where the row stands, s; NaN = with the programs that workers start
    arrival: float
    input_tokens: int
    output_tokens: int
    context: Context  # over prompt and output
    waits: list[int]
    gap: float
    tool: int
    calls: list[tuple[int, float]]


class _Writer:
    """Rows as they grow, program by program; `waits` hold places in `rows` until they are sorted."""

    def __init__(self, name: str, ids: BlockIds, tools: Sequence[str] | None) -> None:
        self.name, self.ids = name, ids
        self.tools = {tool: number for number, tool in enumerate(tools or ())}
        self.more_tools = tools is None
        self.rows: list[_Row] = []
        self.prefixes: dict[str, Context] = {}

    def add(self, number: int, program: Program, workers: int) -> None:
        where = f"{self.name}: program {number}"
        recorded = _is_recorded(where, program)
        if program.start is None and (recorded or not workers):
            allowed = "a time, where turns have one" if recorded else "a time, or workers that start programs"
            raise TraceError(where, "start", why="not given", allowed=allowed)
        start = np.nan if program.start is None else _seconds(where, "start", program.start)
        self._chain(where, number, program, start, [], recorded)

    def _chain(
        self, where: str, number: int, program: Program, start: float, spawned_by: list[int], recorded: bool
    ) -> int:
        """Write a chain of turns; the place of its last row."""
        if not program.turns:
            raise TraceError(where, "turns", found="none", allowed="at least one")
        prefix = self._prefix(where, program)
        before: AgentTurn | None = None
        last = -1
        for k, turn in enumerate(program.turns):
            at = f"{where}, turn {k}"
            waits = [last] if before else list(spawned_by)
            if not waits and (turn.sub_agents or turn.gap or turn.calls):
                raise TraceError(at, why="has nothing to wait for", allowed="no gap, calls or sub_agents")
            joined = [self._chain(f"{at}, {sub.agent}", number, sub, start, waits, recorded) for sub in turn.sub_agents]
            base, kept, prompt = self._prompt(at, turn, prefix, before, last)
            context = self.ids.grow(base, kept, prompt + _count(at, "output_tokens", turn.output_tokens, 1))
            time, arrival = start, np.nan if waits else start
            gap, tool, calls = self._pause(at, turn)
            if recorded:
                arrival = time = start + _seconds(at, "at", turn.at)
                waits, joined, gap, calls = [], [], 0.0, []
            self.rows.append(
                _Row(number, time, arrival, prompt, turn.output_tokens, context, waits + joined, gap, tool, calls))
            before, last = turn, len(self.rows) - 1
        return last

    def _prefix(self, where: str, program: Program) -> Context:
        length = _count(where, "prefix_tokens", program.prefix_tokens, 0)
        known = self.prefixes.get(program.agent)
        if known is None or known.tokens < length:
            known = self.ids.grow(known, known.tokens if known else 0, length)
            known.open = False  # every program continues it with other tokens
            self.prefixes[program.agent] = known
        return known if known.tokens == length else self.ids.grow(known, length, length)

    def _prompt(
        self, where: str, turn: AgentTurn, prefix: Context, before: AgentTurn | None, last: int
    ) -> tuple[Context, int, int]:
        """(context that the prompt begins with, how many tokens of it, tokens of the prompt)."""
        base, shared = prefix, prefix.tokens
        prompt = prefix.tokens + _count(where, "new_tokens", turn.new_tokens, 0)
        cut = turn.compact_to is not None, turn.keep_tokens is not None
        if any(cut) and (before is None or all(cut)):
            raise TraceError(where, "compact_to, keep_tokens", found=(turn.compact_to, turn.keep_tokens),
                             allowed="one of the two, and none in a chain's first turn")
        if turn.compact_to is not None:
            prompt += _count(where, "compact_to", turn.compact_to, 0)
        elif before is not None:
            row = self.rows[last]
            kept = _kept_output(where, before)
            # What stays of an output that was partly reasoning stands elsewhere, so only the last prompt is a prefix then.
            base, shared = row.context, row.input_tokens + (kept if kept == row.output_tokens else 0)
            head = row.input_tokens + kept
            if turn.keep_tokens is not None:
                found = _count(where, "keep_tokens", turn.keep_tokens, 0)
                if found > head:
                    raise TraceError(where, "keep_tokens", found=found, allowed=f"at most the context before it, {head}")
                head, shared = found, min(shared, found)
            prompt = head + turn.new_tokens
        if not 1 <= prompt <= MOST_TOKENS:
            raise TraceError(where, "new_tokens", why=f"a prompt of {prompt} tokens", allowed=f"1 to {MOST_TOKENS}")
        return base, shared, prompt

    def _pause(self, where: str, turn: AgentTurn) -> tuple[float, int, list[tuple[int, float]]]:
        """(gap, tool, calls)."""
        calls = [(self._tool(where, tool), _seconds(where, f"calls: {tool}", s)) for tool, s in turn.calls]
        tool = self._tool(where, turn.tool) if turn.tool is not None else calls[0][0] if calls else -1
        return _seconds(where, "gap", turn.gap), tool, calls

    def _tool(self, where: str, name: str) -> int:
        if not isinstance(name, str) or not name or (name not in self.tools and not self.more_tools):
            raise TraceError(where, "tool", found=name, allowed=", ".join(self.tools) or "a name")
        return self.tools.setdefault(name, len(self.tools))

    def workload(self, source: Source, block_tokens: int, workers: int, ends_known: bool) -> Workload:
        order = np.argsort(np.array([row.time for row in self.rows]), kind="stable")  # NaN last, in the programs' order
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        rows = [self.rows[k] for k in order.tolist()]
        known, runs = columns(row.context for row in rows)
        program = np.array([row.program for row in rows])
        return build(
            arrival=np.array([row.arrival for row in rows]),
            input_tokens=np.array([row.input_tokens for row in rows]),
            output_tokens=np.array([row.output_tokens for row in rows]),
            source=source, block_tokens=block_tokens, known_tokens=known, runs=runs,
            program=program, turn=counted(program),
            gap=np.array([row.gap for row in rows]), tool=np.array([row.tool for row in rows]),
            waits=[sorted(place[row.waits].tolist()) for row in rows],
            calls=[row.calls for row in rows], tools=tuple(self.tools), workers=workers, ends_known=ends_known,
        )


def _is_recorded(where: str, program: Program) -> bool:
    """Whether every turn has a recorded time; TraceError when only some do."""
    given = {turn.at is not None for turn in program.turns}
    given |= {_is_recorded(where, sub) for turn in program.turns for sub in turn.sub_agents}
    if len(given) > 1:
        raise TraceError(where, "at", why="given in some turns only", allowed="in every turn or in none")
    return given == {True}


def _kept_output(where: str, turn: AgentTurn) -> int:
    """Tokens of a turn's output that the next turn still holds."""
    if turn.kept_output is None:
        return turn.output_tokens
    kept = _count(where, "kept_output", turn.kept_output, 0)
    if kept > turn.output_tokens:
        raise TraceError(where, "kept_output", found=kept, allowed=f"at most its output_tokens, {turn.output_tokens}")
    return kept


def _count(where: str, key: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= MOST_TOKENS:
        raise TraceError(where, key, found=value, allowed=f"a whole number, {least} to {MOST_TOKENS}")
    return int(value)


def _seconds(where: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 <= float(value) < np.inf:
        raise TraceError(where, key, found=value, allowed="a finite time, at least 0 s")
    return float(value)
