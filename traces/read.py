"""Reading a trace by shipped name or by path, in whichever known format it is."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from simcore.errors import TraceError
from simcore.traces.azure import COLUMNS, read_azure
from simcore.traces.burstgpt import COLUMNS as BURSTGPT_COLUMNS
from simcore.traces.burstgpt import read_burstgpt
from simcore.traces.coding_agents import read_coding_agents
from simcore.traces.dynamo import read_dynamo
from simcore.traces.files import lines
from simcore.traces.gateway import INPUTS, PROMPTS, read_gateway
from simcore.traces.gateway import TIMES as GATEWAY_TIMES
from simcore.traces.llmservingsim import read_llmservingsim
from simcore.traces.lmcache_agents import COLUMNS as LMCACHE_COLUMNS
from simcore.traces.lmcache_agents import read_lmcache_agents
from simcore.traces.mooncake import read_mooncake
from simcore.traces.native import CSV_REQUIRED, HEADER, read_csv, read_jsonl
from simcore.traces.otel import read_otel
from simcore.traces.servegen import COLUMNS as SERVEGEN_COLUMNS
from simcore.traces.servegen import read_servegen
from simcore.traces.sharegpt import read_sharegpt
from simcore.traces.tau_bench import COLUMNS as TAU_BENCH_COLUMNS
from simcore.traces.tau_bench import read_tau_bench
from simcore.traces.tracelab import read_tracelab
from simcore.traces.vidur import COLUMNS as VIDUR_COLUMNS
from simcore.traces.vidur import read_vidur
from simcore.traces.weka import read_weka
from simcore.traces.workload import Source, Workload

FORMATS: dict[str, Callable[..., Workload]] = {
    "mooncake": read_mooncake, "azure": read_azure, "csv": read_csv, "jsonl": read_jsonl,
    "coding-agents": read_coding_agents, "llmservingsim": read_llmservingsim, "lmcache-agents": read_lmcache_agents,
    "tau-bench": read_tau_bench, "tracelab": read_tracelab, "gateway": read_gateway, "otel": read_otel,
    "dynamo": read_dynamo, "weka": read_weka, "burstgpt": read_burstgpt, "vidur": read_vidur, "sharegpt": read_sharegpt,
    "servegen": read_servegen,
}
FOLDERS = ("weka", "servegen")  # formats that may be a folder of files
TEXTS = ("gateway", "otel", "sharegpt")  # formats that hold text, which no reader keeps
_TABLES = {  # CSV by its header
    "azure": COLUMNS, "lmcache-agents": LMCACHE_COLUMNS, "tau-bench": TAU_BENCH_COLUMNS, "burstgpt": BURSTGPT_COLUMNS,
    "vidur": VIDUR_COLUMNS, "servegen": SERVEGEN_COLUMNS,
}
_OBJECTS = (  # (format, keys that its JSON objects have together), the first that fits
    ("coding-agents", ("block_size", "requests")),
    ("llmservingsim", ("arrival_time_ns", "sub_requests")),
    ("llmservingsim", ("arrival_time_ns", "input_toks")),
    ("tracelab", ("round_index", "timing_events")),
    ("mooncake", ("schema", "hash_id_scope")),  # Dynamo's agentic rows with a header; its reader says what it reads
    ("dynamo", ("schema", "event_type")),
    ("otel", ("resourceSpans",)),
    ("sharegpt", ("conversations",)),
    ("gateway", ("standard_logging_object",)),
    ("gateway", ("standard_logging_payload",)),
)
_GATEWAY = ({key.split(".")[0] for key in GATEWAY_TIMES}, {key.split(".")[0] for key in (*INPUTS, *PROMPTS)} | set(INPUTS))
_HEAD = 1 << 16  # characters of a JSON document that are looked at
SHIPPED: dict[str, tuple[str, str, Source]] = {  # name -> file in data/, format, where it comes from
    "mooncake-conversation": (
        "mooncake_conversation.jsonl.gz", "mooncake",
        Source(
            "mooncake-conversation", "Apache-2.0",
            "github.com/kvcache-ai/Mooncake, commit 3b5a594133958449a1feaf1c9e0fc1b553e34a28, FAST25-release/traces/"
            "conversation_trace.jsonl, rows before 40 minutes",
        ),
    ),
    "coding-agents": (
        "coding_agents.jsonl.gz", "coding-agents",
        Source(
            "coding-agents", "Apache-2.0",
            "github.com/callanjfox/kv-cache-tester, commit 94f6046dfd9c0c8bc0cdb24a5aa6579bac8669bf, traces/, 467 of 739 "
            "sessions",
        ),
    ),
}


def read(path_or_name: str | Path, format: str | None = None, *, skip_bad: bool = False, **options: object) -> Workload:
    """The workload in a shipped trace (by name) or in a file, plain or gzip.

    `format` is one of `FORMATS`; None decides by the first line. `options` are those of the format's reader (`options_of`).
    Raises TraceError when the name is unknown, the format cannot be told, it has no such option, or a row is refused; with
    `skip_bad` refused rows are left out and listed in `skipped`.
    """
    if format is not None and format not in FORMATS:
        raise TraceError("format", found=format, allowed=", ".join(FORMATS))
    if str(path_or_name) in SHIPPED:
        file, shipped_format, source = SHIPPED[str(path_or_name)]
        reader = _reader(format or shipped_format, options)
        with resources.as_file(resources.files("simcore.traces") / "data" / file) as path:
            return reader(path, source=source, skip_bad=skip_bad, **options)
    if not Path(path_or_name).is_file() and not (format in FOLDERS and Path(path_or_name).is_dir()):
        raise TraceError(
            "trace", found=str(path_or_name),
            allowed=f"a shipped trace ({', '.join(SHIPPED)}) or the path of a file",
        )
    return _reader(format or detect(path_or_name), options)(path_or_name, skip_bad=skip_bad, **options)


def options_of(format: str) -> tuple[str, ...]:
    """The options that a format's reader has of its own."""
    return tuple(name for name, parameter in inspect.signature(FORMATS[format]).parameters.items()
                 if parameter.kind is parameter.KEYWORD_ONLY and name not in ("source", "skip_bad"))


def _reader(format: str, options: dict[str, object]) -> Callable[..., Workload]:
    """The format's reader; TraceError when it does not have such options."""
    allowed = options_of(format)
    for name in options:
        if name not in allowed:
            raise TraceError("option", found=name, allowed=f"for {format}: " + (", ".join(allowed) or "none"))
    return FORMATS[format]


def detect(path: str | Path) -> str:
    """The format of a file, by its first line that is not blank, or by the head of a JSON document. Raises TraceError when
    none fits."""
    number, first = next(((k, line.strip()) for k, line in lines(path) if line.strip()), (1, ""))
    if first.startswith(("{", "[")):
        keys = _keys(first if first.startswith("{") and len(first) > 1 else _head(path))
        for format, own in _OBJECTS:
            if keys >= set(own):
                return format
        if keys & {"hash_ids", "input_length", "output_length"}:
            return "mooncake"
        times, says = _GATEWAY
        if keys & times and keys & says:
            return "gateway"
        if keys >= {"event", "timestamp"}:
            return "dynamo"  # a record in the envelope of its recorder
        if keys & {HEADER, "input_tokens", "output_tokens"}:
            return "jsonl"
    else:
        cells = [name.strip().strip('"') for name in first.split(",")]
        for format, known in _TABLES.items():
            if set(cells) >= set(known):
                return format
        if set(cells) & set(CSV_REQUIRED):
            return "csv"
        if len(cells) == len(SERVEGEN_COLUMNS) - 1 and cells[3] in ("Gamma", "Weibull", ""):
            return "servegen"  # a chunk, which has no header
    raise TraceError(
        f"{path}:{number}", why="the first line fits no known format", found=first,
        allowed="; ".join((
            "mooncake: a JSON object with input_length, output_length, hash_ids",
            *(f"{format}: the columns {','.join(known)}" for format, known in _TABLES.items()),
            f"csv: the columns {','.join(CSV_REQUIRED)}",
            "jsonl: a JSON object with input_tokens, output_tokens",
            *(f"{format}: a JSON object with {', '.join(own)}" for format, own in _OBJECTS if format != "mooncake"),
            "gateway: a JSON object with a time and usage or messages",
        )),
    )


def _head(path: str | Path) -> str:
    """The beginning of a document that spreads over lines, or of the first object in an array."""
    text = ""
    for _, line in lines(path):
        text += line
        if len(text) > _HEAD:
            break
    return text.lstrip().removeprefix("[").lstrip()


def _keys(text: str) -> set[str]:
    """Keys of the JSON object that a text begins with; of a torn one, whatever words stand between quotes."""
    try:
        found, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return set(text.split('"')[1::2])
    return set(found) if isinstance(found, dict) else set()
