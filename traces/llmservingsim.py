"""LLMServingSim JSONL: flat requests, and agentic sessions whose calls follow one another (`sub_requests`).

Format: github.com/casys-kaist/LLMServingSim, workloads/README.md. Times in ns; `tool_duration_ns` runs after its call.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from simcore.errors import TraceError
from simcore.traces import rows as strict
from simcore.traces.contexts import BlockIds, Context, columns
from simcore.traces.files import json_rows
from simcore.traces.identity import chained
from simcore.traces.sessions import counted
from simcore.traces.workload import Source, Workload, build, to_runs

PROMPTS = ("as-given", "append")
_LENGTHS = ("input_toks", "output_toks")
_TOKENS = ("input_tok_ids", "output_tok_ids")
_TOOL = "tool"  # the format names none


def read_llmservingsim(
    path: str | Path, *, prompts: str = "as-given", block_tokens: int = 16, source: Source | None = None,
    skip_bad: bool = False,
) -> Workload:
    """The requests of a file (plain or gzip), a session being a program whose calls wait for one another.

    `prompts`: as-given, prompts share what their token ids share, and nothing without; or append, a call's prompt begins
    with prompt and output of the call before it, as far as it is long enough (token ids are then ignored). Raises TraceError
    with file, line, key, found and allowed; with `skip_bad` such lines are left out and listed in `skipped`.
    """
    if prompts not in PROMPTS:
        raise TraceError(str(path), "prompts", found=prompts, allowed=", ".join(PROMPTS))
    if type(block_tokens) is not int or block_tokens < 1:
        raise TraceError(str(path), "block_tokens", found=block_tokens, allowed="a whole number, at least 1")
    reading, bad = _Reading(block_tokens), strict.BadRows(skip_bad)
    for where, row in json_rows(path):
        try:
            if isinstance(row, TraceError):
                raise row
            reading.add(where, row)
        except TraceError as error:
            bad.refuse(error)
    if not reading.calls:
        raise TraceError(str(path), found="no requests", allowed="at least one row")
    return reading.workload(source or Source(Path(path).name), prompts == "append", tuple(bad.listed))


class _Reading:
    """Calls as (program, arrival s, input, output, seconds of the tool before or NaN, tokens)."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.calls: list[tuple[int, float, int, int, float, list[int]]] = []
        self.now = 0
        self.programs = self.sessions = self.after_last = 0

    def add(self, where: str, row: dict[str, object]) -> None:
        agentic = "sub_requests" in row
        strict.check_keys(where, row, ("arrival_time_ns", *(("sub_requests",) if agentic else _LENGTHS)),
                          ("session_id",) if agentic else _TOKENS)
        now = strict.whole(where, row, "arrival_time_ns")
        if now < self.now:
            raise TraceError(where, "arrival_time_ns", why="time goes backwards", found=now, allowed=f"at least {self.now}")
        calls = row["sub_requests"] if agentic else [{key: row[key] for key in row if key != "arrival_time_ns"}]
        if not isinstance(calls, list) or not calls or not all(isinstance(call, dict) for call in calls):
            raise TraceError(where, "sub_requests", found=calls, allowed="a list of at least one object")
        tool, made = float("nan"), []
        for k, call in enumerate(calls):
            strict.check_keys(f"{where}: sub_requests[{k}]" if agentic else where, call, _LENGTHS,
                              (*_TOKENS, *(("tool_duration_ns",) if agentic else ())))
            inputs, outputs = (strict.tokens(where, call, key) for key in _LENGTHS)
            made.append((self.programs, float("nan") if k else now / 1e9, inputs, outputs, tool, _tokens(where, call)))
            tool = strict.whole(where, call, "tool_duration_ns") / 1e9 if "tool_duration_ns" in call else 0.0
        self.after_last += agentic and tool > 0
        self.now = now
        self.programs += 1
        self.sessions += agentic
        self.calls += made

    def workload(self, source: Source, append: bool, skipped: tuple[str, ...]) -> Workload:
        program, arrival, inputs, outputs, tool, tokens = (list(column) for column in zip(*self.calls, strict=True))
        follows = np.isnan(np.array(arrival))
        if append:
            known, runs = columns(self._appended(follows, inputs, outputs))
            how = "prompts are taken to begin with prompt and output of the call before them, as far as they are long enough"
        else:
            known = np.array([len(row) for row in tokens])
            runs = to_runs(chained(self._blocks(tokens)))
            how = "prompts share what their token ids share" if known.any() else "no token ids: nothing is shared"
        notes = [
            f"LLMServingSim JSONL: {self.programs} rows, of which {self.sessions} are agentic sessions", how,
            *([f"{self.after_last} sessions have a tool after their last call; nothing waits for it"]
              if self.after_last else []),
        ]
        numbers = np.array(program)
        return build(
            arrival=np.array(arrival), input_tokens=np.array(inputs), output_tokens=np.array(outputs),
            source=replace(source, notes=(*source.notes, *notes)), block_tokens=self.block_tokens, known_tokens=known,
            runs=runs, program=numbers, turn=counted(numbers), tools=(_TOOL,) if self.sessions else (),
            waits=[[row - 1] if after else [] for row, after in enumerate(follows.tolist())],
            tool=np.where(follows, 0, -1),
            calls=[[(0, seconds)] if after else [] for seconds, after in zip(tool, follows.tolist(), strict=True)],
            skipped=skipped,
        )

    def _appended(self, follows: np.ndarray, inputs: list[int], outputs: list[int]) -> list[Context]:
        ids = BlockIds(self.block_tokens)
        made: list[Context] = []
        for after, prompt, output in zip(follows.tolist(), inputs, outputs, strict=True):
            base = made[-1] if after else None
            made.append(ids.grow(base, min(base.tokens, prompt) if base else 0, prompt + output))
        return made

    def _blocks(self, tokens: list[list[int]]) -> list[np.ndarray]:
        """Content ids: equal blocks of tokens have equal ids."""
        size = self.block_tokens
        number: dict[tuple[int, ...], int] = {}
        return [
            np.array([number.setdefault(tuple(row[k : k + size]), len(number)) for k in range(0, len(row), size)], np.int64)
            for row in tokens
        ]


def _tokens(where: str, call: dict[str, object]) -> list[int]:
    """Token ids of the prompt, and of the output where it has some; empty where the prompt has none."""
    out: list[int] = []
    for ids_key, length_key in zip(_TOKENS, _LENGTHS, strict=True):
        ids = call.get(ids_key)
        if ids is None or (ids == [] and not out):
            break
        if not isinstance(ids, list) or not all(type(token) is int for token in ids) or len(ids) != call[length_key]:
            raise TraceError(where, ids_key, found=ids, allowed=f"as many whole numbers as {length_key}, {call[length_key]}")
        out += ids
    return out
