"""ShareGPT conversations: a JSON array (or JSONL) of {id, conversations: [{from, value}]}. Text only: the rule counts.

Format: that of the data sets which serving benchmarks read, e.g. ShareGPT_V3_unfiltered_cleaned_split.json; `messages` with
`role` and `content` are read alike.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from simcore.errors import TraceError
from simcore.traces import rows as strict
from simcore.traces.contexts import Context, columns
from simcore.traces.files import json_documents
from simcore.traces.gateway import without_text
from simcore.traces.prompts import RULE, PromptTree, Texts
from simcore.traces.sessions import counted
from simcore.traces.workload import Source, Workload, build

_MODEL = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")


def read_sharegpt(
    path: str | Path, *, block_tokens: int = 16, context: int = 131072, salt: str | None = None,
    source: Source | None = None, skip_bad: bool = False,
) -> Workload:
    """The conversations of a file (plain or gzip), a program each, whose turns wait for one another without a pause (the
    data have no times); all start at t=0: `start_programs` or `with_workers` spreads them.

    A turn is all that was said before an answer of the model, and that answer. Text is as in `read_gateway`. Conversations
    without an answer are left out, turns of more than `context` tokens end theirs; both are counted. Raises TraceError with
    file and line for what is no conversation; with `skip_bad` it is listed in `skipped`.
    """
    for key, value in (("block_tokens", block_tokens), ("context", context)):
        if type(value) is not int or value < 1:
            raise TraceError(str(path), key, found=value, allowed="a whole number, at least 1")
    tree, bad, counts = PromptTree(block_tokens, salt), strict.BadRows(skip_bad), Counter[str]()
    turns: list[tuple[int, int, int, Context]] = []  # (program, input, output, context)
    programs = 0
    for where, row in json_documents(path):
        try:
            if isinstance(row, TraceError):
                raise row
            said = _said(where, row)
        except TraceError as error:
            bad.refuse(without_text(error))
            continue
        counts["conversations"] += 1
        own = 0
        for k, (by_model, message) in enumerate(said):
            if by_model and k:
                texts = Texts(tuple(text for _, text in said[:k]), (message,))
                placed, inputs, outputs = tree.add(texts, None, None)
                if inputs + outputs > context:
                    counts["cut"] += 1
                    break
                turns.append((programs, inputs, outputs, placed.context))
                own += 1
        programs += own > 0
        counts["silent"] += own == 0
    if not turns:
        raise TraceError(str(path), found="no answer of a model", allowed="at least one conversation with one")
    columns_of = list(zip(*turns, strict=True))
    numbers = np.array(columns_of[0])
    turn = counted(numbers)
    known, runs = columns(columns_of[3])
    source = source or Source(Path(path).name)
    notes = (
        f"ShareGPT: {programs:,} of {counts['conversations']:,} conversations, {len(turns):,} turns, closed loop without "
        f"pauses, all starting at t=0; {counts['silent']:,} without an answer left out, {counts['cut']:,} end at "
        f"{context:,} tokens",
        f"texts counted on this machine: {RULE}; compared by salted digests, which were dropped; block ids are numbered",
    )
    return build(
        arrival=np.where(turn == 0, 0.0, np.nan), input_tokens=np.array(columns_of[1]),
        output_tokens=np.array(columns_of[2]),
        source=replace(source, notes=(*source.notes, *notes)), block_tokens=block_tokens, known_tokens=known, runs=runs,
        program=numbers, turn=turn, waits=[[row - 1] if k else [] for row, k in enumerate(turn.tolist())],
        skipped=tuple(bad.listed),
    )


def _said(where: str, row: dict[str, object]) -> list[tuple[bool, str]]:
    """(is it the model's, text with its role) for each message."""
    key = "conversations" if "conversations" in row else "conversation" if "conversation" in row else "messages"
    messages = row.get(key)
    if not isinstance(messages, list):
        raise TraceError(where, key, why="missing", allowed="conversations: a list of {from, value}")
    out = []
    for k, message in enumerate(messages):
        at = f"{key}[{k}]"
        if not isinstance(message, dict):
            raise TraceError(where, at, why="not an object", allowed="{from, value}")
        role, text = message.get("from", message.get("role")), message.get("value", message.get("content"))
        if not isinstance(role, str) or not isinstance(text, str):
            raise TraceError(where, at, why="no text", allowed="{from, value}, two strings")
        if text:
            out.append((role.lower() in _MODEL, f"{role}\n{text}\n"))
    return out
