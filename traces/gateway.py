"""Logs of gateways that speak OpenAI's API, JSONL: LiteLLM's standard payload and spend logs, Envoy AI Gateway's access log.

Formats: docs.litellm.ai/docs/proxy/logging_spec (`startTime`, `endTime`, `completionStartTime`, `prompt_tokens`,
`completion_tokens`, `messages`, `response`, `metadata`); Envoy's access log is what its owner lets it write, here AI
Gateway's own fields (`start_time`, `duration` in ms, `response_code`, `gen_ai.usage.input_tokens`, `session.id`); and any
log that holds a request body or its `messages`, `usage` and a time. A dot leads into an object. Other keys are not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from simcore.errors import TraceError
from simcore.traces import rows as strict
from simcore.traces import times
from simcore.traces.calls import check_clock, counts_note, listed
from simcore.traces.files import json_rows
from simcore.traces.prompts import Texts, parsed, texts_of
from simcore.traces.text_log import TextLog
from simcore.traces.workload import Source, Workload

TIMES = ("startTime", "start_time", "request_time", "created_at", "timestamp", "@timestamp", "time", "response.created")
_ENDS = ("endTime", "end_time", "response_time_at", "completed_at")
_FIRSTS = ("completionStartTime", "completion_start_time", "first_token_time")
_IN_MS = ("duration_ms", "latency_ms", "response_time_ms", "total_time_ms", "duration")
_IN_S = ("response_time", "duration_s", "latency_s")
_FIRST_IN_MS = ("ttft_ms", "time_to_first_token_ms", "gen_ai.server.time_to_first_token_ms")
INPUTS = ("usage.prompt_tokens", "usage.input_tokens", "response.usage.prompt_tokens", "response.usage.input_tokens",
          "prompt_tokens", "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm_input_token", "input_tokens")
OUTPUTS = ("usage.completion_tokens", "usage.output_tokens", "response.usage.completion_tokens",
           "response.usage.output_tokens", "completion_tokens", "gen_ai.usage.output_tokens",
           "gen_ai.usage.completion_tokens", "llm_output_token", "output_tokens")
_CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")  # Anthropic's API counts them beside input_tokens
PROMPTS = ("messages", "request.messages", "request_body", "request.body", "body", "request", "input", "prompt",
           "proxy_server_request.body")
_SESSIONS = ("session_id", "session.id", "gen_ai.conversation.id", "conversation_id", "litellm_session_id",
             "metadata.session_id", "metadata.requester_metadata.session_id", "trace_id")
_STATUS = ("response_code", "status_code", "http_status", "responseCode")
_WRAPPERS = ("standard_logging_object", "standard_logging_payload", "kwargs.standard_logging_object", "payload", "event",
             "log")
_GENERATE = ("completion", "responses", "messages", "generate_content", "chat", "converse")  # in a LiteLLM call_type
_NO: tuple[object, ...] = (None, "", "-", {}, [])


def read_gateway(
    path: str | Path, *, clock: str = "closed-loop", block_tokens: int = 16, model: str | None = None,
    salt: str | None = None, source: Source | None = None, skip_bad: bool = False,
) -> Workload:
    """The requests of a gateway's log (plain or gzip).

    Text is counted and compared on this machine, by digests under `salt` (a random one where none is given) that are
    dropped; what is left of it are counts and numbered block ids, which a salt does not change. `clock`: see
    traces/calls.py; calls without a session whose prompt begins with the whole prompt and output of another are taken to be
    its next turn. `model`: only calls of this model. Left out and counted: failed calls, answers from the gateway's own
    cache, calls that generate no text. Raises TraceError with file, line and key for rows without a time, or without counts
    and text; with `skip_bad` such rows are listed in `skipped`.
    """
    check_clock(path, clock, block_tokens)
    reading, bad = _Reading(model, TextLog(block_tokens, salt)), strict.BadRows(skip_bad)
    for where, row in json_rows(path):
        try:
            if isinstance(row, TraceError):
                raise row
            reading.add(where, row)
        except TraceError as error:
            bad.refuse(without_text(error))
    return reading.workload(path, source or Source(Path(path).name), clock, tuple(bad.listed))


def without_text(error: TraceError) -> TraceError:
    """The error without what was found, unless that is a number: errors are listed in what is written."""
    number = error.found if isinstance(error.found, int | float) else None
    return TraceError(error.where, error.key, found=number, allowed=error.allowed, why=error.why)


class _Reading:
    def __init__(self, model: str | None, log: TextLog) -> None:
        self.model, self.log = model, log
        self.models: Counter[str] = Counter()

    def add(self, where: str, row: Mapping[str, object]) -> None:
        row = _unwrapped(row)
        model = str(_first(row, ("model", "gen_ai.request.model", "request.model", "model_group")) or "")
        self.models[model] += 1
        if self.model is not None and self.model not in (model, _first(row, ("model_group", "gen_ai.response.model"))):
            self.log.counts["calls of other models"] += 1
            return
        reason = _left_out(row)
        if reason:
            self.log.counts[reason] += 1
            return
        start = next((at for key in TIMES if (at := times.nanoseconds(_get(row, key))) is not None), None)
        if start is None:
            raise TraceError(where, TIMES[0], why="no time", allowed=f"a date or an epoch in one of {', '.join(TIMES)}")
        session = next((s for key in _SESSIONS if isinstance(s := _get(row, key), str | int) and s not in _NO), None)
        self.log.add(where, start, _end(row, start), session, _texts(row), _tokens(where, row, INPUTS),
                     _tokens(where, row, OUTPUTS), _first_token(row, start))

    def workload(self, path: str | Path, source: Source, clock: str, skipped: tuple[str, ...]) -> Workload:
        calls = self.log.calls
        if not calls:
            found = listed(self.log.counts) or "no requests"
            allowed = "at least one row" + (f" of {', '.join(sorted(self.models))}" if self.model is not None else "")
            raise TraceError(str(path), found=found, allowed=allowed)
        said = f"gateway log: {len(calls):,} calls of {sum(map(bool, self.models)):,} models"
        notes = (said, *counts_note(self.log.counts))
        return self.log.workload(replace(source, notes=(*source.notes, *notes)), clock, skipped)


def _end(row: Mapping[str, object], start: int) -> int | None:
    for key in _ENDS:
        at = times.nanoseconds(_get(row, key))
        if at is not None:
            return max(at, start)
    in_s = _IN_S[1:] if _get(row, "stream") is True else _IN_S  # LiteLLM's response_time of a stream is to its first token
    spans = [times.milliseconds(_get(row, key)) for key in _IN_MS] + [times.seconds(_get(row, key)) for key in in_s]
    return next((start + span for span in spans if span is not None), None)


def _first_token(row: Mapping[str, object], start: int) -> int | None:
    for key in _FIRSTS:
        at = times.nanoseconds(_get(row, key))
        if at is not None and at >= start:
            return at
    spans = [times.milliseconds(_get(row, key)) for key in _FIRST_IN_MS]
    return next((start + span for span in spans if span is not None), None)


def _texts(row: Mapping[str, object]) -> Texts:
    prompt: object = None
    tools: object = _first(row, ("tools", "request.tools", "model_parameters.tools", "optional_params.tools"))
    for key in PROMPTS:
        value = parsed(_get(row, key))
        if isinstance(value, dict):  # a request's body
            tools = tools or value.get("tools")
            head = [{"role": "system", "content": value[key]} for key in ("system", "instructions") if value.get(key)]
            value = value.get("messages") or value.get("input") or value.get("prompt")
            value = [*head, *(value if isinstance(value, list) else [value])] if value and head else value
        if value not in _NO:
            prompt = value
            break
    return texts_of(prompt, _answer(row), tools)


def _answer(row: Mapping[str, object]) -> object:
    """The output's messages, of a response in any of the APIs' forms."""
    value = parsed(_first(row, ("response", "response_body", "response.body", "output", "completion", "choices")))
    if isinstance(value, dict):
        value = next((value[key] for key in ("choices", "output", "content", "message") if value.get(key)), None)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        first = value[0]
        if "message" in first or ("text" in first and "type" not in first):  # the first of several choices is continued
            return first.get("message") or first.get("text")
        if str(first.get("type", "")) in ("text", "tool_use", "thinking"):  # Anthropic's content blocks make one message
            return {"role": "assistant", "content": value}
    return value


def _left_out(row: Mapping[str, object]) -> str | None:
    status = str(_first(row, ("status", "status_fields.llm_api_status")) or "").lower()
    code = str(_first(row, _STATUS) or "200")
    if status in ("failure", "failed", "error") or (code.isdigit() and int(code) not in range(200, 300)) or code == "0":
        return "failed calls"
    if str(_get(row, "cache_hit")).lower() == "true":
        return "answers from the gateway's cache"
    kind = str(_get(row, "call_type") or "").lower()
    asked = str(_first(row, ("x-envoy-origin-path", "path", "gen_ai.operation.name")) or "").split("?")[0]
    if (kind and not any(word in kind for word in _GENERATE)) or "embeddings" in asked or "rerank" in asked:
        return "calls that generate no text"
    return None


def _tokens(where: str, row: Mapping[str, object], keys: tuple[str, ...]) -> int | None:
    """A count; with Anthropic's cached tokens where its API counts them apart."""
    for key in keys:
        value = _get(row, key)
        if value in _NO:
            continue
        if isinstance(value, str):
            value = strict.cell(value)
        count = strict.whole(where, {key: value}, key, most=strict.MOST_TOKENS)
        if key.endswith("usage.input_tokens"):
            beside = [_get(row, f"{key.removesuffix('input_tokens')}{name}") for name in _CACHED]
            count += sum(value for value in beside if type(value) is int and value > 0)
        return strict.whole(where, {key: count}, key, most=strict.MOST_TOKENS)
    return None


def _unwrapped(row: Mapping[str, object]) -> Mapping[str, object]:
    """The log entry in the envelope of a logger."""
    for key in _WRAPPERS:
        inner = parsed(_get(row, key))
        if isinstance(inner, dict) and any(_get(inner, k) not in _NO for k in (*INPUTS, *PROMPTS)):
            return {**{k: v for k, v in row.items() if k in TIMES}, **inner}
    return row


def _first(row: Mapping[str, object], keys: tuple[str, ...]) -> object:
    return next((value for key in keys if (value := _get(row, key)) not in _NO), None)


def _get(row: object, key: str) -> object:
    """row[key], or what the key's dots lead to."""
    if not isinstance(row, Mapping):
        return None
    if key in row:
        return row[key]
    head, dot, rest = key.partition(".")
    while dot:
        if head in row and (value := _get(row[head], rest)) is not None:
            return value
        more, dot, rest = rest.partition(".")
        head = f"{head}.{more}"
    return None
