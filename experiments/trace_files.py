"""`simcore trace import` and `simcore trace export`: logs in, traces out, and what was understood or lost on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simcore.config import parse_value
from simcore.errors import ConfigError


def run_trace_import(
    source: str, target: Path, *, format: str | None = None, settings: Sequence[str] = (), salt: str | None = None,
    block_size: int = 16, json: Path | None = None, skip_bad: bool = False,
) -> None:
    """Write `source` as our JSONL and print what it holds. `settings`: `key=value` options of the format's reader."""
    from simcore.experiments.terminal import write_json
    from simcore.traces.importing import import_trace
    from simcore.traces.info import describe, render

    workload = import_trace(source, target, format, salt=salt, skip_bad=skip_bad, **options(settings))
    info = describe(workload, block_size) | {"target": str(target)}
    if str(json) != "-":
        print(render(info))
        print(f"  written to {target}")
    write_json(json, info)


def run_trace_export(
    trace: str, target: Path, *, to: str, format: str | None = None, settings: Sequence[str] = (),
    block_tokens: int | None = None, json: Path | None = None, skip_bad: bool = False,
) -> None:
    """Write a trace in another tool's format and print what that format does not carry."""
    from simcore.experiments.terminal import write_json
    from simcore.traces.exporting import export_trace
    from simcore.traces.read import read

    done = export_trace(read(trace, format, skip_bad=skip_bad, **options(settings)), target, to, block_tokens=block_tokens)
    if str(json) != "-":
        read_with = ", ".join(f"{key}={value}" for key, value in done.read_with.items())
        print(f"{done.requests:,} requests written to {done.path}; read it with {read_with}")
        print("\n".join(f"  lost: {what}" for what in done.lost) or "  nothing lost: a run of it is a run of the original")
    write_json(json, asdict(done))


def options(settings: Sequence[str]) -> dict[str, Any]:
    """{key: value} of `key=value` settings, values read as YAML. Raises ConfigError for one without a key or `=`."""
    out: dict[str, Any] = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"--set {setting}", allowed="option=value of the format's reader, e.g. clock=recorded")
        out[key.strip()] = parse_value(text, f"--set {setting}")
    return out
