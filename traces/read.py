"""Reading a trace by shipped name or by path, in whichever known format it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from simcore.errors import TraceError
from simcore.traces.azure import COLUMNS, read_azure
from simcore.traces.files import lines
from simcore.traces.mooncake import read_mooncake
from simcore.traces.native import CSV_REQUIRED, HEADER, read_csv, read_jsonl
from simcore.traces.workload import Source, Workload

FORMATS: dict[str, Callable[..., Workload]] = {
    "mooncake": read_mooncake, "azure": read_azure, "csv": read_csv, "jsonl": read_jsonl,
}
SHIPPED: dict[str, tuple[str, str, Source]] = {  # name -> file in data/, format, where it comes from
    "mooncake-conversation": (
        "mooncake_conversation.jsonl.gz", "mooncake",
        Source(
            "mooncake-conversation", "Apache-2.0",
            "github.com/kvcache-ai/Mooncake, commit 3b5a594133958449a1feaf1c9e0fc1b553e34a28, FAST25-release/traces/"
            "conversation_trace.jsonl, rows before 40 minutes",
        ),
    ),
}


def read(path_or_name: str | Path, format: str | None = None, *, skip_bad: bool = False) -> Workload:
    """The workload in a shipped trace (by name) or in a file, plain or gzip.

    `format` is one of `FORMATS`; None decides by the first line. Raises TraceError when the name is unknown, the format
    cannot be told, or a row is refused; with `skip_bad` refused rows are left out and listed in `skipped`.
    """
    if format is not None and format not in FORMATS:
        raise TraceError("format", found=format, allowed=", ".join(FORMATS))
    if str(path_or_name) in SHIPPED:
        file, shipped_format, source = SHIPPED[str(path_or_name)]
        with resources.as_file(resources.files("simcore.traces") / "data" / file) as path:
            return FORMATS[format or shipped_format](path, source=source, skip_bad=skip_bad)
    if not Path(path_or_name).is_file():
        raise TraceError(
            "trace", found=str(path_or_name),
            allowed=f"a shipped trace ({', '.join(SHIPPED)}) or the path of a file",
        )
    return FORMATS[format or detect(path_or_name)](path_or_name, skip_bad=skip_bad)


def detect(path: str | Path) -> str:
    """The format of a file, by its first line that is not blank. Raises TraceError when none fits."""
    number, first = next(((k, line.strip()) for k, line in lines(path) if line.strip()), (1, ""))
    if first.startswith("{"):
        keys = _keys(first)
        if keys & {"hash_ids", "input_length", "output_length"}:
            return "mooncake"
        if keys & {HEADER, "input_tokens", "output_tokens"}:
            return "jsonl"
    else:
        columns = {name.strip().strip('"') for name in first.split(",")}
        if columns >= set(COLUMNS):
            return "azure"
        if columns & set(CSV_REQUIRED):
            return "csv"
    raise TraceError(
        f"{path}:{number}", why="the first line fits no known format", found=first,
        allowed="; ".join((
            "mooncake: a JSON object with input_length, output_length, hash_ids",
            f"azure: the columns {','.join(COLUMNS)}",
            f"csv: the columns {','.join(CSV_REQUIRED)}",
            "jsonl: a JSON object with input_tokens, output_tokens",
        )),
    )


def _keys(line: str) -> set[str]:
    """Keys of a JSON object; of a torn one, whatever words stand between quotes."""
    try:
        return set(json.loads(line))
    except ValueError:
        return set(line.split('"')[1::2])
