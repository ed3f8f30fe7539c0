"""A server for tests: a command, a log or both, and the study that comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from simcore.experiments.from_vllm import Choices, Written, convert


def made(command: str | None, log: Path | None = None, **choices: Any) -> Written:
    return convert(command, log, Choices(**{"gpu": "h100-sxm", **choices}))


def values(written: Written) -> dict[str, Any]:
    """The study's keys, read back from its text."""
    data = yaml.safe_load(written.text)
    assert {line.key: line.value for line in written.lines} == {
        f"{head}.{key}": value for head in ("model", "cluster", "engine", "policies") for key, value in data[head].items()}
    return {line.key: line.value for line in written.lines}
