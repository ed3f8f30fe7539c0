"""Reads a vLLM start-up log: the KV size that the profiling run found, the flags as the server took them, the version."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simcore.errors import ConfigError
from simcore.experiments.vllm_command import Given
from simcore.experiments.vllm_flags import find, nearest

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ARGS = re.compile(r"non-default args: (\{.*\})")
_ENGINE = re.compile(r"Initializing an? (V1 )?LLM engine \(v([^)]+)\) with config: (.*)")
_NUMBERS = {  # what a line says, by name
    "kv_tokens": re.compile(r"\b\w+ KV cache size: ([\d,]+) tokens"),
    "blocks": re.compile(r"# (?:GPU|CUDA|cuda|gpu) blocks: ([\d,]+)|\bnum_gpu_blocks\b\W{1,6}(?:is\W{1,3})?([\d,]+)"),
    "longest": re.compile(r"Maximum concurrency for ([\d,]+) tokens per request"),
    "model_len": re.compile(r"Using max model len ([\d,]+)"),
    "batched": re.compile(r"[Cc]hunked prefill is enabled with max_num_batched_tokens=([\d,]+)"),
}
_OVERRIDE = re.compile(r"Overriding num_gpu_blocks=\d+ with num_gpu_blocks_override=(\d+)")
_ASYNC = re.compile(r"Asynchronous scheduling is (enabled|disabled)")
_SERVER = re.compile(r"vLLM API server version v?(\S+)")
# What the log of a server may print of its GPU (the MoE configuration file it looks for, a pasted nvidia-smi), and presets.
_GPUS = {
    "h100-sxm": r"H100[ _]80GB[ _]HBM3|H100[ _]SXM", "h200-sxm": r"NVIDIA[ _]H200(?![ _]NVL)", "b200-sxm": r"NVIDIA[ _]B200",
    "a100-80gb-sxm": r"A100-SXM4?-80GB", "l40s": r"NVIDIA[ _]L40S", "rtx-4090": r"GeForce[ _]RTX[ _]4090(?![ _]?D)",
    "rtx-pro-6000-server": r"RTX[ _]PRO[ _]6000[ _]Blackwell[ _]Server", "mi300x": r"AMD[ _]Instinct[ _]MI300X",
}  # fmt: skip
# Keys of the engine's configuration, as it prints it, and the flag that each belongs to.
_CONFIG = {
    "model": "model", "dtype": "dtype", "max_seq_len": "max-model-len", "tensor_parallel_size": "tensor-parallel-size",
    "pipeline_parallel_size": "pipeline-parallel-size",
    "quantization": "quantization", "kv_cache_dtype": "kv-cache-dtype", "enforce_eager": "enforce-eager",
    "enable_prefix_caching": "enable-prefix-caching", "enable_chunked_prefill": "enable-chunked-prefill",
    "speculative_config": "speculative-config",
}  # fmt: skip


@dataclass
class Log:
    """What a log says of the last start in it. Numbers are None where no line says them."""

    path: Path
    given: list[Given] = field(default_factory=list)  # non-default args
    resolved: list[Given] = field(default_factory=list)  # what vLLM made of them
    unknown: list[str] = field(default_factory=list)
    version: str | None = None
    gpu: str | None = None
    old_engine: bool = False  # an engine before V1
    kv_tokens: int | None = None
    blocks: int | None = None
    overridden: bool = False  # num_gpu_blocks_override
    longest: int | None = None  # max_model_len in force
    lines: dict[str, int] = field(default_factory=dict)  # where each was found
    notes: list[str] = field(default_factory=list)

    def where(self, name: str) -> str:
        return f"{self.path.name}:{self.lines[name]}" if name in self.lines else self.path.name


def looks_like_log(text: str) -> bool:
    """Whether a text is a log rather than a command."""
    return any(pattern.search(text) for pattern in (_ARGS, _ENGINE, _SERVER, _NUMBERS["kv_tokens"], _NUMBERS["blocks"]))


def read_log(path: Path, *, skip_unknown: bool = False) -> Log:
    """The last start in a log. Raises ConfigError where the file cannot be read, says nothing of a server, or names a flag
    that is not known."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(str(path), why=f"cannot be read ({error.strerror})") from None
    log = Log(path)
    args: tuple[int, str] | None = None
    starts = 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = _COLOURS.sub("", raw)
        if match := _SERVER.search(line):
            log.version = match[1]
        if match := _ARGS.search(line):
            args = (number, match[1])
        if match := _ENGINE.search(line):
            starts += 1
            if starts > 1:  # what an earlier start found no longer holds
                log.kv_tokens = log.blocks = log.longest = None
                log.overridden, log.resolved = False, []
            log.version, log.old_engine = match[2], match[1] is None
            _resolve(log, match[3], number)
        _read_numbers(log, line, number)
        for name, pattern in _GPUS.items():
            if log.gpu is None and re.search(pattern, line):
                log.gpu, log.lines["gpu"] = name, number
    if args:
        _note_args(log, *args, skip_unknown=skip_unknown)
    if not args and not starts and log.kv_tokens is None and log.blocks is None:
        raise ConfigError(str(path), why="says nothing of a vLLM server", allowed="a log with vLLM's start-up lines "
                          "(non-default args, Initializing a V1 LLM engine, GPU KV cache size)")
    if starts > 1:
        log.notes.append(f"{path.name} holds {starts} starts; the last one counts")
    return log


def _read_numbers(log: Log, line: str, number: int) -> None:
    if match := _OVERRIDE.search(line):
        log.blocks, log.overridden, log.lines["blocks"] = int(match[1]), True, number
        return
    for name, pattern in _NUMBERS.items():
        match = pattern.search(line)
        if match is None:
            continue
        value = int(next(group for group in match.groups() if group).replace(",", ""))
        if name in ("kv_tokens", "blocks"):
            earlier = getattr(log, name)
            if name == "blocks" and log.overridden:
                continue
            if earlier not in (None, value):
                log.notes.append(f"{log.path.name}:{number}: KV sizes differ between ranks ({earlier:,} and {value:,}): "
                                 "the smaller counts")
                value = min(value, earlier)
            setattr(log, name, value)
        elif name in ("longest", "model_len"):
            if name == "model_len" and "longest" in log.lines:
                continue
            log.longest, name = value, "longest"
        else:
            _add(log.resolved, "max-num-batched-tokens", value, f"{log.path.name}:{number}")
        log.lines[name] = number
    if match := _ASYNC.search(line):
        _add(log.resolved, "async-scheduling", match[1] == "enabled", f"{log.path.name}:{number}")


def _add(given: list[Given], name: str, value: Any, where: str) -> None:
    found = find(name)
    assert found is not None
    given.append(Given(found[0], value, where))


def _resolve(log: Log, text: str, number: int) -> None:
    """The engine's own configuration: `model='...', dtype=torch.bfloat16, max_seq_len=32768, ...`."""
    for key, value in pairs(text, "="):
        if key in _CONFIG and value not in (None, "None"):
            plain = value.removeprefix("torch.") if isinstance(value, str) else value
            _add(log.resolved, _CONFIG[key], plain, f"{log.path.name}:{number}")


def _note_args(log: Log, number: int, text: str, *, skip_unknown: bool) -> None:
    where = f"{log.path.name}:{number}"
    for key, value in pairs(text[1:-1], ":"):
        if key == "model_tag" or key == "config" or value is None:
            continue  # the same as `model`; already read by the server
        found = find(key)
        if found is None:
            if not skip_unknown:
                like = nearest(key)
                raise ConfigError(where, key, why="is no flag of vllm serve that is known here",
                                  allowed=f"its flags{f' (the nearest is {like})' if like else ''}; or --skip-unknown")
            log.unknown.append(f"--{key.replace('_', '-')}")
            continue
        flag, on = found
        if isinstance(value, bool) and flag.takes == "switch":
            value = value == on
        log.given.append(Given(flag, value, where))


def pairs(text: str, sign: str) -> list[tuple[str, Any]]:
    """`key<sign>value, ...` at the outermost level of brackets and quotes. A value that is no Python literal (an object as
    it prints itself) stays text."""
    parts: list[str] = []
    start = depth = 0
    quote = ""
    escaped = False
    for n, character in enumerate(text):
        if quote:
            if character == quote and not escaped:
                quote = ""
            escaped = character == "\\" and not escaped
        elif character in "'\"":
            quote = character
        elif character in "([{<":
            depth += 1
        elif character in ")]}>":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:n])
            start = n + 1
    parts.append(text[start:])
    found = []
    for part in parts:
        key, mark, value = part.partition(sign)
        if mark:
            found.append((str(_literal(key.strip())), _literal(value.strip())))
    return found


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
