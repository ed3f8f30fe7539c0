"""OpenTelemetry spans of calls to models (GenAI semantic conventions), as OTLP JSON: an export, or one a line.

Formats: opentelemetry.io/docs/specs/otlp (JSON encoding; `resourceSpans`), opentelemetry.io/docs/specs/semconv/gen-ai; of
older instrumentations `gen_ai.usage.prompt_tokens`, `gen_ai.prompt.0.content` and the message events. Others are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from simcore.errors import TraceError
from simcore.traces import rows as strict
from simcore.traces.calls import ToolSpan, check_clock, counts_note, listed
from simcore.traces.files import json_documents
from simcore.traces.gateway import without_text
from simcore.traces.prompts import Texts, parsed, texts_of
from simcore.traces.text_log import TextLog
from simcore.traces.workload import Source, Workload

_INPUTS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.usage.prompt_tokens", "llm.token_count.prompt")
_OUTPUTS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.usage.completion_tokens",
            "llm.token_count.completion")
_SESSIONS = ("gen_ai.conversation.id", "session.id")
_GENERATE = ("chat", "text_completion", "generate_content", "completion")
_TOOL = "execute_tool"
_PROMPT_EVENTS = ("gen_ai.system.message", "gen_ai.user.message", "gen_ai.assistant.message", "gen_ai.tool.message")
_MOST_NS = 1 << 63


def read_otel(
    path: str | Path, *, clock: str = "closed-loop", block_tokens: int = 16, model: str | None = None,
    salt: str | None = None, source: Source | None = None, skip_bad: bool = False,
) -> Workload:
    """The model calls of an OTLP JSON file (plain or gzip): spans that generate text; a conversation, or else a trace, is a
    session, and its `execute_tool` spans are the tools between its calls.

    Text, `clock`, `model` and `salt` are as in `read_gateway`; names of tools are kept. Left out and counted: failed calls
    and other operations. Raises TraceError with file, line and key for spans without a time, or without counts and text.
    """
    check_clock(path, clock, block_tokens)
    reading, bad = _Reading(model, TextLog(block_tokens, salt)), strict.BadRows(skip_bad)
    for where, row in json_documents(path):
        try:
            if isinstance(row, TraceError):
                raise row
            # Children come before their parents, exporters batch: in order of time a prompt meets what it begins with.
            spans = sorted(_spans(where, row), key=lambda span: _order(span[1]))
        except TraceError as error:
            bad.refuse(without_text(error))
            continue
        for at, span in spans:
            try:
                reading.add(at, span)
            except TraceError as error:
                bad.refuse(without_text(error))
    log = reading.log
    if not log.calls:
        found = listed(log.counts) or "no spans of model calls"
        raise TraceError(str(path), found=found, allowed="at least one span of a model call")
    source = source or Source(Path(path).name)
    notes = (f"OpenTelemetry: {len(log.calls):,} spans of model calls, {len(reading.tools):,} of tools",
             *counts_note(log.counts))
    return log.workload(replace(source, notes=(*source.notes, *notes)), clock, tuple(bad.listed), reading.tools)


class _Reading:
    def __init__(self, model: str | None, log: TextLog) -> None:
        self.model, self.log = model, log
        self.tools: list[ToolSpan] = []

    def add(self, where: str, span: dict[str, object]) -> None:
        values = _attributes(span.get("attributes"))
        operation = values.get("gen_ai.operation.name")
        generates = operation in _GENERATE or (operation is None and any(key in values for key in (*_INPUTS, *_OUTPUTS)))
        if not generates and operation != _TOOL:
            if operation is not None:
                self.log.counts["spans of other operations"] += 1
            return
        start, end = (_time(where, span, key) for key in ("startTimeUnixNano", "endTimeUnixNano"))
        if start is None:
            raise TraceError(where, "startTimeUnixNano", why="no time", allowed="nanoseconds since 1970")
        end = None if end is None or end < start else end
        session = next((values[key] for key in _SESSIONS if isinstance(values.get(key), str)), span.get("traceId"))
        session = session if isinstance(session, str) else None
        if operation == _TOOL:
            if end is not None:
                name = values.get("gen_ai.tool.name")
                self.tools.append(ToolSpan(session, name if isinstance(name, str) and name else "tool", start, end))
            return
        status = span.get("status")
        if isinstance(status, dict) and status.get("code") in (2, "STATUS_CODE_ERROR"):
            self.log.counts["failed calls"] += 1
            return
        if self.model is not None and self.model not in (
            values.get("gen_ai.request.model"), values.get("gen_ai.response.model")
        ):
            self.log.counts["calls of other models"] += 1
            return
        first = values.get("gen_ai.response.time_to_first_chunk")
        self.log.add(where, start, end, session, _texts(span, values), _count(where, values, _INPUTS),
                     _count(where, values, _OUTPUTS),
                     start + int(first * 1e9) if isinstance(first, float | int) and 0 <= first < 1e9 else None)


def _spans(where: str, row: dict[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    resources = row.get("resourceSpans", row.get("resource_spans"))
    if resources is None and ("spanId" in row or "traceId" in row):
        resources = [{"scopeSpans": [{"spans": [row]}]}]
    if resources is None and any(key in row for key in ("resourceMetrics", "resourceLogs")):
        return  # the collector writes all signals to one file
    number = 0
    for resource in _objects(where, "resourceSpans", resources):
        scopes = resource.get("scopeSpans", resource.get("instrumentationLibrarySpans", []))
        for scope in _objects(where, "scopeSpans", scopes):
            for span in _objects(where, "spans", scope.get("spans", [])):
                yield f"{where}: spans[{number}]", span
                number += 1


def _order(span: dict[str, object]) -> int:
    value = span.get("startTimeUnixNano")
    value = strict.cell(value) if isinstance(value, str) else value
    return value if isinstance(value, int) else 0


def _objects(where: str, key: str, value: object) -> list[dict[str, object]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise TraceError(where, key, why="not a list of objects", allowed="OTLP JSON: resourceSpans, scopeSpans, spans")
    return value


def _attributes(pairs: object) -> dict[str, object]:
    """{key: value} of OTLP's list of pairs, or of a plain object."""
    if isinstance(pairs, dict):
        return {str(key): value for key, value in pairs.items()}
    out: dict[str, object] = {}
    for pair in pairs if isinstance(pairs, list) else ():
        if isinstance(pair, dict) and isinstance(pair.get("key"), str):
            out[pair["key"]] = _value(pair.get("value"))
    return out


def _value(value: object) -> object:
    """What an OTLP AnyValue holds; 64-bit integers are texts in it."""
    if not isinstance(value, dict) or len(value) != 1:
        return value
    (kind, inner), = value.items()
    if kind == "intValue":
        return strict.cell(inner) if isinstance(inner, str) else inner
    if kind == "arrayValue":
        return [_value(item) for item in inner.get("values", [])] if isinstance(inner, dict) else []
    if kind == "kvlistValue":
        return _attributes(inner.get("values")) if isinstance(inner, dict) else {}
    return inner


def _time(where: str, span: dict[str, object], key: str) -> int | None:
    value = span.get(key)
    value = strict.cell(value) if isinstance(value, str) else value
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < _MOST_NS:
        raise TraceError(where, key, why="no time", allowed="nanoseconds since 1970")
    return value


def _count(where: str, values: dict[str, object], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        if values.get(key) is not None:
            return strict.whole(where, values, key, most=strict.MOST_TOKENS)
    return None


def _texts(span: dict[str, object], values: dict[str, object]) -> Texts:
    """Of the attributes, of the event that holds them, or of older forms."""
    events = span.get("events")
    named = [(event.get("name"), _attributes(event.get("attributes"))) for event in events if isinstance(event, dict)] \
        if isinstance(events, list) else []
    for _, inner in named:
        values = {**{k: v for k, v in inner.items() if k.startswith("gen_ai.") and k not in values}, **values}
    prompt = parsed(values.get("gen_ai.input.messages"))
    output = parsed(values.get("gen_ai.output.messages"))
    if prompt is None:
        prompt = parsed(values.get("gen_ai.prompt")) or _flattened(values, "gen_ai.prompt.")
        output = parsed(values.get("gen_ai.completion")) or _flattened(values, "gen_ai.completion.")
    if not prompt:
        prompt = [{"role": str(name).split(".")[1], **inner} for name, inner in named if name in _PROMPT_EVENTS]
        output = [parsed(inner.get("message")) for name, inner in named if name == "gen_ai.choice"][:1]
    first = [parsed(values[key]) for key in ("gen_ai.tool.definitions", "gen_ai.system_instructions") if values.get(key)]
    return texts_of(prompt or None, output, first)


def _flattened(values: dict[str, object], prefix: str) -> list[dict[str, object]]:
    """Messages of attributes such as gen_ai.prompt.0.role, gen_ai.prompt.0.content."""
    made: dict[int, dict[str, object]] = {}
    for key, value in values.items():
        number, _, name = key.removeprefix(prefix).partition(".")
        if key.startswith(prefix) and number.isdigit() and name:
            made.setdefault(int(number), {})[name] = value
    return [made[number] for number in sorted(made)]
