"""Reads a `vllm serve` command as people write it: a shell line or script, docker run, python -m, --config file.yaml."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simcore.config import Document
from simcore.errors import ConfigError
from simcore.experiments.vllm_flags import Flag, find, nearest

_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server", "vllm.entrypoints.cli.main")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_CONTAINERS = ("docker", "podman", "nerdctl")
# Options of `docker run` that take no value; every other one takes the next word, or what stands behind `=`.
_DOCKER_SWITCHES = frozenset((
    "--detach", "--interactive", "--tty", "--rm", "--privileged", "--init", "--read-only", "--no-healthcheck", "--quiet",
    "--publish-all", "--oom-kill-disable", "--sig-proxy", "--disable-content-trust",
))  # fmt: skip
_ALLOWED = ("a command with `vllm serve MODEL ...`, `python -m vllm.entrypoints.openai.api_server ...`, or `docker run ... "
            "vllm/vllm-openai ...`; a file that holds one; or a start-up log of vLLM")


@dataclass(frozen=True)
class Given:
    """One flag with its value, and where it was given (an option, file:line, or the log)."""

    flag: Flag
    value: Any  # as text, or already a number, list, mapping or truth value; a switch: True or False
    where: str


@dataclass
class Command:
    """What was given: flags in order (of two, the later counts), environment, image tag, flags that nobody knows."""

    given: list[Given] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    version: str | None = None  # of the container image
    unknown: list[str] = field(default_factory=list)


def parse_command(text: str, where: str, *, skip_unknown: bool = False) -> Command:
    """The server that `text` starts. Raises ConfigError naming the flag: an unknown one (with the nearest known), one
    without its value, a word that belongs to nothing, no server at all."""
    command = Command()
    for words in _simple_commands(text, where):
        words = [_expand(word, command.environment) for word in words]
        if words[0] == "export":
            words = words[1:]
        while words and (match := _ASSIGNED.fullmatch(words[0])):
            command.environment[match[1]] = match[2]
            words = words[1:]
        if words and _find_server(words, command, where, skip_unknown):
            return command
    raise ConfigError(where, found=_first_words(text), why="starts no vLLM server", allowed=_ALLOWED)


def _first_words(text: str) -> str:
    """No more than the program: values of the environment and of flags may be secret."""
    words = [f"{word.split('=')[0]}=..." if _ASSIGNED.fullmatch(word) else word for word in text.split()]
    return " ".join(words[:2])


def _simple_commands(text: str, where: str) -> Iterator[list[str]]:
    """The words of each command of a script."""
    text = re.sub(r"\\\r?\n", " ", text)
    text = re.sub(r"(?m)^\s*#.*$|^\s*\$ ", "", text)
    text = re.sub(r"(?<!\S)(?:\d?>{1,2}&\d|[\d&]?>{1,2}\s*[^\s'\"]+)", " ", text)  # redirections
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace_split, lexer.commenters, lexer.whitespace = True, "", " \t\r"
    words: list[str] = []
    try:
        for word in lexer:
            if word and not set(word) - set(";&|\n"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)
    except ValueError as error:
        raise ConfigError(where, found=_first_words(text), why=f"cannot be split into words ({error})") from None
    if words:
        yield words


def _expand(word: str, known: dict[str, str]) -> str:
    """$NAME and ${NAME:-default}, where the script set NAME or a default stands there; others stay."""
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return known.get(name, default if default is not None else match[0])

    return re.sub(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))", value, word)


def _find_server(words: list[str], command: Command, where: str, skip_unknown: bool) -> bool:
    """Whether these words start a server; if so, its flags are noted."""
    names = [Path(word).name for word in words]
    for n, name in enumerate(names):
        if name in _CONTAINERS and "run" in words[n + 1 : n + 3]:
            start = words.index("run", n) + 1
            return _parse_docker(words[start:], command, where, skip_unknown)
    for n, name in enumerate(names):
        if name in ("sh", "bash", "zsh") and len(words) > n + 2 and re.fullmatch(r"-\w*c", words[n + 1]):
            inner = parse_command(words[n + 2], where, skip_unknown=skip_unknown)
            command.given, command.unknown = inner.given, inner.unknown
            command.environment |= inner.environment
            return True
        if name == "vllm" and n + 1 < len(words):
            if words[n + 1] == "serve":
                _parse_flags(words[n + 2 :], command, where, skip_unknown)
                return True
            raise ConfigError(where, found=f"vllm {words[n + 1]}", allowed="vllm serve: nothing else starts a server")
        if words[n] == "-m" and n + 1 < len(words) and words[n + 1] in _MODULES:
            rest = words[n + 2 :]
            _parse_flags(rest[1:] if rest[:1] == ["serve"] else rest, command, where, skip_unknown)
            return True
    return False


def _parse_docker(words: list[str], command: Command, where: str, skip_unknown: bool) -> bool:
    entrypoint: list[str] = []
    n = 0
    while n < len(words) and words[n].startswith("-"):
        option, sign, value = words[n].partition("=")
        joined = re.fullmatch(r"-([a-zA-Z])(.+)", words[n]) if not words[n].startswith("--") else None
        n += 1
        if joined:
            option, value, sign = f"-{joined[1]}", joined[2].removeprefix("="), "="
        cluster = re.fullmatch(r"-[ditPq]+", words[n - 1]) is not None
        if cluster or option in _DOCKER_SWITCHES:
            continue
        if not sign:
            value = words[n] if n < len(words) else ""
            n += 1
        if option in ("-e", "--env") and (match := _ASSIGNED.fullmatch(value)):
            command.environment[match[1]] = match[2]
        elif option == "--entrypoint":
            entrypoint = shlex.split(value)
    if n >= len(words):
        raise ConfigError(where, found="docker run", why="no image is named", allowed=_ALLOWED)
    image, rest = words[n], words[n + 1 :]
    tag = re.search(r":v?(\d+\.\d+\.\d+)", image)
    command.version = tag[1] if tag else None
    if _find_server([*entrypoint, *rest], command, where, skip_unknown):
        return True
    if "vllm" not in image:
        raise ConfigError(where, found=image, why="is no image of vLLM, and no server is started in it", allowed=_ALLOWED)
    _parse_flags(rest[1:] if rest[:1] == ["serve"] else rest, command, where, skip_unknown)
    return True


def _parse_flags(words: Sequence[str], command: Command, where: str, skip_unknown: bool) -> None:
    """Flags as argparse takes them. Those of a --config file come first, so that the command's own count."""
    given: list[Given] = []
    from_file: list[Given] = []
    n = 0
    while n < len(words):
        word = words[n]
        n += 1
        if not word.startswith("-") or _is_number(word):
            model = find("model")
            assert model is not None
            if any(item.flag.name == "model" for item in given):
                raise ConfigError(where, found=word, why="belongs to no flag, and the model is known already",
                                  allowed="flags and their values")
            given.append(Given(model[0], word, "the command"))
            continue
        option, sign, text = word.partition("=")
        if level := re.fullmatch(r"-O=?(\w+)", word):
            option, sign, text = "-O", "=", level[1]
        name, *path = option.lstrip("-").split(".")
        if name.replace("_", "-") == "config":
            if not sign:
                text, n = _next(words, n, option, where)
            from_file += _read_config(Path(text), command, skip_unknown)
            continue
        found = find(name)
        if found is None:
            _note_unknown(option, where, command, skip_unknown)
            if not sign and n < len(words) and not words[n].startswith("-"):
                n += 1  # its value, as far as one can tell
            continue
        flag, on = found
        value: Any = text
        if flag.takes == "switch" and not path:
            if not sign and n < len(words) and words[n].lower() in ("true", "false"):
                text, sign, n = words[n], "=", n + 1
            value = on if not sign or text.lower() == "true" else not on
        elif flag.takes == "list" and not sign:
            value = []
            while n < len(words) and (not words[n].startswith("-") or _is_number(words[n])):
                value.append(words[n])
                n += 1
        elif not sign:
            if flag.takes == "optional" and (n >= len(words) or words[n].startswith("-")):
                value = True
            else:
                value, n = _next(words, n, option, where)
        given.append(_dotted(given, flag, path, value, option) if path else Given(flag, value, option))
    command.given += from_file + given


def _dotted(given: list[Given], flag: Flag, path: list[str], value: Any, option: str) -> Given:
    """`--flag.a.b 1`, laid over what earlier parts of the same flag said."""
    earlier = next((item.value for item in reversed(given) if item.flag is flag and isinstance(item.value, dict)), {})
    whole: dict[str, Any] = json.loads(json.dumps(earlier))
    place = whole
    for part in path[:-1]:
        inner = place.setdefault(part, {})
        place = inner if isinstance(inner, dict) else place
    try:
        place[path[-1].rstrip("+")] = json.loads(value)
    except (ValueError, TypeError):
        place[path[-1].rstrip("+")] = value
    return Given(flag, whole, option.split(".")[0])


def _next(words: Sequence[str], n: int, option: str, where: str) -> tuple[str, int]:
    if n >= len(words) or (words[n].startswith("-") and not _is_number(words[n])):
        found = words[n].split("=")[0] if n < len(words) else "the end of the command"
        raise ConfigError(where, option, found=found, why="has no value", allowed=f"{option} VALUE or {option}=VALUE")
    return words[n], n + 1


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-\d+(\.\d*)?", word) is not None


def _note_unknown(option: str, where: str, command: Command, skip_unknown: bool) -> None:
    if not skip_unknown:
        like = nearest(option.lstrip("-"))
        allowed = f"the flags of vllm serve{f', of which {like} is the nearest' if like else ''}; or --skip-unknown"
        raise ConfigError(where, option, why="is no flag of vllm serve that is known here", allowed=allowed)
    command.unknown.append(option)


def _read_config(path: Path, command: Command, skip_unknown: bool) -> list[Given]:
    """The flags of a --config file: long names, YAML values; a model may be among them."""
    document = Document(path)
    given = []
    for key, value in document.data.items():
        where = document.where((str(key),))
        found = find(str(key).lstrip("-"))
        if found is None:
            _note_unknown(f"--{key}", where, command, skip_unknown)
            continue
        flag, on = found
        if flag.takes == "switch":
            if not isinstance(value, bool):
                raise ConfigError(where, str(key), found=value, allowed="true or false")
            if value or flag.name == str(key).replace("_", "-"):
                given.append(Given(flag, value == on, where))
        elif value is not None:
            given.append(Given(flag, value, where))
    return given
