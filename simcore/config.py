"""YAML files validated by pydantic models; every error names file and line, key, what was found and what is allowed."""

from __future__ import annotations

import copy
import re
import types
import typing
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ValidationError

from simcore.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_seconds(value: Any) -> float:
    """`3s`, `500ms`, `20min`, `1h`, or a number of seconds. Raises ValueError for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*(us|ms|s|min|h)\s*", str(value))
    try:
        return float(match.group(1)) * _UNITS[match.group(2)] if match else float(str(value))
    except ValueError:
        raise ValueError("a duration such as 3s, 500ms, 20min, 1h, or a number of seconds") from None


Seconds = Annotated[float, BeforeValidator(parse_seconds)]


class _UniqueKeys(yaml.SafeLoader):
    """The safe loader, but a key that stands twice is an error, not a silent loss, and a date is text."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key is a list or a mapping", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class Document:
    """A YAML mapping with the line of every key, and overrides laid over it."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            text = self.path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(str(path), why=f"cannot be read ({error.strerror})") from None
        except UnicodeDecodeError:
            raise ConfigError(str(path), why="is not UTF-8 text") from None
        self.lines: dict[tuple[str, ...], int] = {}
        self.overridden: dict[tuple[str, ...], str] = {}
        try:
            _note_lines(yaml.compose(text, _UniqueKeys), (), self.lines)
            data = yaml.load(text, _UniqueKeys)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            line, why = _yaml_problem(error, text)
            raise ConfigError(f"{path}{line}", why=f"is not valid YAML: {why}") from None
        if not isinstance(data, dict):
            raise ConfigError(str(path), found=data, allowed="a mapping of keys to values")
        self.data: dict[str, Any] = data

    def override(self, settings: Sequence[str], option: str = "--set") -> None:
        """Lay `key.path=value` settings over the data; the value is read as YAML. ConfigError if one has no `=`."""
        for setting in settings:
            key, sign, text = setting.partition("=")
            if not sign or not key.strip():
                raise ConfigError(f"{option} {setting}", allowed="key.path=value, e.g. cluster.replicas=8")
            self.put(key.strip(), parse_value(text, f"{option} {setting}"), f"{option} {setting}")

    def put(self, key: str, value: Any, where: str) -> None:
        """Set one dotted key; mappings on the way are made."""
        path = tuple(key.split("."))
        place: Any = self.data
        for n, part in enumerate(path[:-1], 1):
            if place.get(part) is None:
                place[part] = {}
                self.overridden[path[:n]] = where
            place = place[part]
            if not isinstance(place, dict):
                raise ConfigError(where, key, found=place, why=f"{part} is not a mapping, so nothing can be set inside it")
        place[path[-1]] = value
        for noted in (self.lines, self.overridden):  # what stood below is gone
            for old in [old for old in noted if old[: len(path)] == path]:
                del noted[old]
        self.overridden[path] = where

    def copy(self) -> Document:
        return copy.deepcopy(self)

    def where(self, path: tuple[str, ...]) -> str:
        """`file:line` of the key, or of the nearest key around it, or the override that set it."""
        for n in range(len(path), -1, -1):
            if path[:n] in self.overridden:
                return self.overridden[path[:n]]
            if path[:n] in self.lines and n:
                return f"{self.path}:{self.lines[path[:n]]}"
        return str(self.path)

    def validate(self, model: type[Model]) -> Model:
        """The data as `model`. Raises ConfigError for the first thing that is wrong."""
        try:
            valid = model.model_validate(self.data)
        except ValidationError as error:
            found = [(*_path(e, self.data), e) for e in error.errors()]
            # Of a union's branches, the one that goes deepest into the data is the one that was meant.
            paths = {path for path, _, _ in found}
            deepest = [item for item in found if not any(p[: len(item[0])] == item[0] != p for p in paths)]
            path, value, first = min(deepest, key=lambda item: item[2]["type"] != "extra_forbidden")
            same = [e for p, _, e in deepest if p == path]
            raise ConfigError(self.where(path), ".".join(path), **_explain(first, same, path, value, model)) from None
        truth = _truth_for_number(self.data, valid, ())
        if truth is not None:
            raise ConfigError(self.where(truth), ".".join(truth), why="true or false (YAML reads yes and on as true)",
                              allowed="a number")
        return valid


def parse_value(text: str, where: str) -> Any:
    """The value of an option, read as YAML. ConfigError, in one line, if it is none."""
    try:
        return yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(where, why=f"the value is not valid YAML: {_yaml_problem(error, text)[1]}") from None


def _yaml_problem(error: Exception, text: str) -> tuple[str, str]:
    """`:line` and what is wrong there, in one line."""
    if isinstance(error, yaml.MarkedYAMLError):
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        return line, " ".join(str(error.problem or error).split())
    if isinstance(error, yaml.reader.ReaderError):
        return f":{text.count(chr(10), 0, error.position) + 1}", str(error.reason)
    if isinstance(error, RecursionError):
        return "", "a value contains itself, or is nested too deeply"
    return "", " ".join(str(error).split())


def _path(error: Any, data: Any) -> tuple[tuple[str, ...], Any]:
    """The keys of an error's location, and what stands there; pydantic puts the names of a union's branches between."""
    path: list[str] = []
    for n, part in enumerate(error["loc"], 1):
        inside_list = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if inside_list or (isinstance(data, dict) and part in data):
            data = data[part]
            path.append(str(part))
        elif n == len(error["loc"]) and error["type"] == "missing":
            path.append(str(part))
    return tuple(path), data


def _truth_for_number(data: Any, valid: Any, path: tuple[str, ...]) -> tuple[str, ...] | None:
    """Where true or false was taken for 1 or 0, which pydantic allows."""
    if isinstance(data, bool):
        return None if isinstance(valid, bool) else path
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(data, dict) and isinstance(valid, BaseModel):
        pairs = [(key, value, getattr(valid, key)) for key, value in data.items()]
    elif isinstance(data, list) and isinstance(valid, list):
        pairs = list(zip(range(len(data)), data, valid, strict=True))
    return next((found for k, d, v in pairs if (found := _truth_for_number(d, v, (*path, str(k)))) is not None), None)


def _explain(error: Any, same: list[Any], path: tuple[str, ...], value: Any, model: type[BaseModel]) -> dict[str, Any]:
    """What was found and what is allowed; `same` are the errors of all branches of a union at this place."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return {"why": "unknown key", "allowed": ", ".join(_fields_at(model, path[:-1]))}
    if kind == "missing":
        return {"why": "is missing"}
    if kind == "literal_error" and len(same) == 1:
        return {"found": value, "allowed": context.get("expected", "")}
    if kind == "value_error" and isinstance(value, dict):
        return {"why": error["msg"].removeprefix("Value error, ")}
    return {"found": value, "allowed": ", or ".join(dict.fromkeys(_message(e) for e in same))}


def _message(error: Any) -> str:
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping of keys to values", message)


def _fields_at(model: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    """Names of the fields that may stand at this place of the model."""
    options: list[type[BaseModel]] = [model]
    for part in path:
        found = [m for o in options if part in o.model_fields for m in _models_in(o.model_fields[part].annotation)]
        options = found or options
    return sorted({name for option in options for name in option.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (typing.Union, types.UnionType, Annotated, list, dict, tuple):
        return [m for part in get_args(annotation) for m in _models_in(part)]
    return []


def _note_lines(node: Any, path: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            lines[(*path, str(key.value))] = key.start_mark.line + 1
            _note_lines(value, (*path, str(key.value)), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, str(index))] = value.start_mark.line + 1
            _note_lines(value, (*path, str(index)), lines)
