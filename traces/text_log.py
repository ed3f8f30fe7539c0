"""Calls that come with their text: counted and compared as they are read, then dropped. Shared by gateway logs and spans."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from simcore.errors import TraceError
from simcore.traces.calls import Call, ToolSpan, build_calls, in_order
from simcore.traces.contexts import columns
from simcore.traces.prompts import RULE, PromptTree, Texts
from simcore.traces.workload import Source, Workload


class TextLog:
    """Calls as they are read. Of their text there stay counts, numbered block ids and, until the log is read, digests."""

    def __init__(self, block_tokens: int, salt: str | None) -> None:
        self.block_tokens = block_tokens
        self.tree = PromptTree(block_tokens, salt)
        self.calls: list[Call] = []
        self.counts: Counter[str] = Counter()  # what was missing or left out
        self._follows: list[int | None] = []
        self._compared = 0

    def add(
        self, where: str, start: int, end: int | None, session: object, texts: Texts, inputs: int | None,
        outputs: int | None, first_token: int | None = None,
    ) -> None:
        """One call; counts that are None are made from its text. Raises TraceError where there is neither."""
        if inputs is None and not texts.known:
            raise TraceError(where, "usage", why="neither a count of the prompt's tokens nor its text")
        if outputs is None and not texts.output:
            raise TraceError(where, "usage", why="neither a count of the output's tokens nor its text")
        if inputs == 0:
            raise TraceError(where, "usage", why="no prompt", found=0, allowed="at least 1 token")
        for missing, what in (
            (inputs is None, "prompts counted by the rule"), (outputs is None, "outputs counted by the rule"),
            (outputs == 0, "outputs of 0 tokens, counted as 1"),
            (not texts.known, "prompts without text, which share nothing"),
            (texts.known and not texts.output, "outputs without text, which no later prompt shares"),
            (end is None, "calls without an end"), (texts.cut, "texts cut by the gateway"),
        ):
            self.counts[what] += missing
        self.counts["images and other parts, counted as one token where there is no count"] += texts.other_parts
        outputs = None if outputs is None else max(1, outputs)
        if texts.known:
            placed, inputs, outputs = self.tree.add(texts, inputs, outputs)
            context, follows = placed.context, placed.follows
            self._compared += 1
        else:
            assert inputs is not None and outputs is not None
            context, follows = self.tree.nothing(inputs, outputs), None
        self.calls.append(Call(where, start, end, inputs, outputs, session, first_token=first_token, identity=context))
        self._follows.append(follows)

    def workload(
        self, source: Source, clock: str, skipped: tuple[str, ...], tools: list[ToolSpan] | None = None
    ) -> Workload:
        continued = self._sessions()
        calls = in_order(self.calls)
        known, runs = columns(call.identity for call in calls)
        notes = [
            f"texts: {self._compared:,} prompts compared on this machine by salted digests, which were dropped; block ids "
            f"are numbered; {RULE}" if self._compared else "no texts: nothing is shared",
            *([f"{continued:,} calls without a session begin with the whole context of another: its next turn"]
              if continued else []),
        ]
        source = replace(source, notes=(*source.notes, *notes))
        return build_calls(calls, source, clock=clock, block_tokens=self.block_tokens, known_tokens=known, runs=runs,
                           tools=tools or (), skipped=skipped)

    def _sessions(self) -> int:
        """A session of one call says nothing (gateways give every call a trace id); such calls follow those that they begin
        with. How many do."""
        sizes = Counter(call.session for call in self.calls)
        for call in self.calls:
            if sizes[call.session] == 1:
                call.session = None
        continued = 0
        for call, follows in zip(self.calls, self._follows, strict=True):
            if call.session is None and follows is not None:
                before = self.calls[follows]
                if before.session is None:
                    before.session = ("call", follows)
                call.session = before.session
                continued += 1
        return continued
