"""The flags of one server, from its command, its log, or both: sorted by what they mean, and read as vLLM reads them."""

from __future__ import annotations

import json as json_text
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simcore.errors import ConfigError
from simcore.experiments.vllm_command import Command
from simcore.experiments.vllm_log import Log

VERSIONS = ("0.19.0", "0.24.0", "0.33.0")  # of EngineSettings.version
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_ENVIRONMENT_HARMLESS = re.compile(
    r"CUDA_(VISIBLE_DEVICES|DEVICE_ORDER)|HIP_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|NVIDIA_.*|HF_.*|HUGGING_?FACE.*|TRANSFORMERS_.*"
    r"|VLLM_(LOG|LOGGING|API_KEY|HOST_IP|PORT|RPC|USAGE|NO_USAGE|DO_NOT|CONFIG|CACHE|ASSETS|ENGINE_READY|EXECUTE_MODEL|MEDIA"
    r"|IMAGE|VIDEO|AUDIO|MAX_AUDIO|MAX_IMAGE|HTTP|SERVER|CONFIGURE|PLUGINS|WORKER|DEBUG|TRACE|LOOPBACK|USE_MODELSCOPE).*"
    r"|VLLM_ALLOW_LONG_MAX_MODEL_LEN|LMCACHE_.*|PYTHON.*|PATH|LD_.*|HOME|TZ|LANG|LC_.*|.*PROXY|.*_proxy|RAY_.*|PYTORCH_.*")


@dataclass(frozen=True)
class Line:
    """A key of the study (dotted), its value, and where the value came from."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True)
class Choices:
    """What the command line of simcore adds to the server's."""

    gpu: str | None = None
    model_config: Path | None = None
    version: str | None = None
    trace: str | None = None
    rate: float = 1.0
    requests: int = 500
    replicas: int = 1
    skip_unknown: bool = False
    folder: Path = Path()  # of the study


class Server:
    """The flags of one server, by name, and everything that was noted on the way."""

    def __init__(self, command: Command | None, log: Log | None, choices: Choices) -> None:
        self.log, self.choices = log, choices
        self.command = command or Command()
        if command is not None and log is not None:
            _check_same_start(command, log)
        self.given = {item.flag.name: item for item in [*(log.given if log else []), *self.command.given,
                                                        *(log.resolved if log else [])]}
        self.matters: list[str] = []
        self.harmless: dict[str, list[str]] = {}
        self.unknown = [*self.command.unknown, *(log.unknown if log else [])]
        self._sort()
        said = choices.version or (log.version if log else None) or self.command.version
        self.version, self.version_says, self._release = *_supported(said, self.matters), said
        if log is not None:
            self.matters += log.notes
            if log.old_engine:
                self.matters.append(f"{log.path.name}: the engine before V1; the scheduler here is V1's")

    def _sort(self) -> None:
        """Note the flags that are not mapped."""
        for item in self.given.values():
            flag, text = item.flag, _shown(item.value)
            off = item.value is False or (flag.inert is not None and text == flag.inert)
            if flag.effect == "harmless" or (flag.effect == "matters" and off):
                why = flag.why if flag.effect == "harmless" else "switched off, or as by default"
                self.harmless.setdefault(why, []).append(f"--{flag.name}")
            elif flag.effect == "matters":
                shown = "" if item.value is True else f" {text}"
                self.matters.append(f"--{flag.name}{shown}: {flag.why}")
        for name, value in self.command.environment.items():
            if name == "VLLM_USE_V1" and value == "0":
                self.matters.append("VLLM_USE_V1=0: the engine before V1; the scheduler here is V1's")
            elif _ENVIRONMENT_HARMLESS.fullmatch(name) or name == "VLLM_USE_V1":
                self.harmless.setdefault("environment", []).append(name)
            elif name.startswith(("VLLM_", "NCCL_", "FLASHINFER_", "TORCH")):
                self.matters.append(f"{name}: not looked at; kernels and links are those of the cost model")
            else:
                self.harmless.setdefault("environment that vLLM does not read, as far as is known here", []).append(name)

    def older_than(self, *release: int) -> bool:
        """Whether the server is known to be older than a release, e.g. 0, 14."""
        numbers = re.match(r"v?(\d+)\.(\d+)", self._release or "")
        return numbers is not None and (int(numbers[1]), int(numbers[2])) < release

    def text(self, name: str) -> tuple[str | None, str]:
        """The value as text (None where it was not given, or given as None) and where it was given."""
        item = self.given.get(name)
        if item is None or item.value is None or str(item.value).lower() == "none":
            return None, ""
        text = str(item.value)
        if "$" in text:
            raise ConfigError(item.where, name, found=text, why="holds a variable of the shell", allowed="its value")
        return text, item.where

    def number(self, name: str, read: Callable[[str], Any]) -> tuple[Any, str]:
        text, where = self.text(name)
        if text is None:
            return None, ""
        try:
            return read(text), where
        except ValueError as error:
            raise ConfigError(where, name, found=text, allowed=str(error)) from None

    def switch(self, name: str) -> tuple[bool | None, str]:
        item = self.given.get(name)
        if item is None or item.value is None:
            return None, ""
        if not isinstance(item.value, bool):
            raise ConfigError(item.where, name, found=item.value, allowed="true or false")
        shown = item.where if item.value or not item.where.startswith("-") else f"{item.where} (off)"
        return item.value, shown

    def mapping(self, name: str) -> tuple[dict[str, Any], str]:
        item = self.given.get(name)
        if item is None or item.value is None:
            return {}, ""
        value = item.value
        if isinstance(value, str):
            try:
                value = json_text.loads(value)
            except ValueError:
                value = None
        if not isinstance(value, dict):
            raise ConfigError(item.where, name, found=item.value, allowed='a JSON mapping, e.g. \'{"key": "value"}\'')
        return value, item.where


def _check_same_start(command: Command, log: Log) -> None:
    """Refuse a log that was written under other flags: its KV size would be that of another server."""
    if not log.given:
        return
    logged = {item.flag.name: item for item in log.given}
    for item in {item.flag.name: item for item in command.given}.values():
        name = item.flag.name
        if item.flag.effect != "mapped" or name in ("model", "hf-overrides", "kv-transfer-config", "rope-scaling"):
            continue
        other = logged.get(name)
        if other is not None and _plain(other.value) != _plain(item.value):
            raise ConfigError(other.where, name, found=other.value, why="the log is of a server with other flags",
                              allowed=f"{item.value}, as the command has it; or the log alone, and --set for what changes")


def _plain(value: Any) -> Any:
    try:
        return whole(str(value))
    except ValueError:
        return str(value)


def whole(text: str) -> int:
    """An integer as vLLM reads it: 32k = 32,000, 32K = 32,768, 25.6k, 1M. Raises ValueError saying so."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)([kKmMgGtT])\s*", text)
    if match and match[2].islower():
        return int(float(match[1]) * _DECIMAL[match[2]])
    if match and "." not in match[1]:
        return int(match[1]) * 2 ** (10 * ("KMGT".index(match[2]) + 1))
    if not re.fullmatch(r"\s*-?\d+\s*", text):
        raise ValueError("an integer, also as 32k (32,000), 32K (32,768) or 1M")
    return int(text)


def positive(text: str) -> int:
    value = whole(text)
    if value < 1:
        raise ValueError("an integer of at least 1, also as 32k (32,000), 32K (32,768) or 1M")
    return value


def length(text: str) -> int:
    """max_model_len: auto is -1."""
    return -1 if text.strip().lower() in ("auto", "-1") else positive(text)


def real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def _shown(value: Any, most: int = 80) -> str:
    text = json_text.dumps(value, default=str) if isinstance(value, (dict, list)) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."


def _supported(said: str | None, matters: list[str]) -> tuple[str, str]:
    """The newest supported release that is not newer than the server's, and why."""
    if said is None:
        return VERSIONS[-1], "not said: the newest that is supported (--vllm-version)"
    numbers = re.match(r"v?(\d+)\.(\d+)", said)
    if numbers is None:
        raise ConfigError("--vllm-version", found=said, allowed="a release such as 0.24.0")
    mine = (int(numbers[1]), int(numbers[2]))
    fits = [version for version in VERSIONS if tuple(int(part) for part in version.split(".")[:2]) <= mine]
    chosen = fits[-1] if fits else VERSIONS[0]
    if chosen.split(".")[:2] == [str(part) for part in mine]:
        return chosen, f"vLLM {said}"
    matters.append(f"vLLM {said}: its scheduler is taken as that of {chosen}, and so are defaults")
    return chosen, f"for vLLM {said}: the nearest earlier release that is supported" if fits else f"for vLLM {said}"
