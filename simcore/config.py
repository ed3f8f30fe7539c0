"""YAML files validated by pydantic models; every error names file and line, key, what was found and what is allowed."""

from __future__ import annotations

import copy
import re
import types
import typing
from collections.abc import Sequence
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
        return float(match.group(1)) * _UNITS[match.group(2)] if match else float(value)
    except (TypeError, ValueError):
        raise ValueError("a duration such as 3s, 500ms, 20min, 1h, or a number of seconds") from None


Seconds = Annotated[float, BeforeValidator(parse_seconds)]


class _UniqueKeys(yaml.SafeLoader):
    """The safe loader, but a key that stands twice is an error, not a silent loss."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
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
        try:
            root = yaml.compose(text, _UniqueKeys)
            data = yaml.load(text, _UniqueKeys)
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            raise ConfigError(f"{path}{line}", why=f"is not valid YAML: {error.problem or error}") from None
        if not isinstance(data, dict):
            raise ConfigError(str(path), found=data, allowed="a mapping of keys to values")
        self.data: dict[str, Any] = data
        self.lines: dict[tuple[str, ...], int] = {}
        self.overridden: dict[tuple[str, ...], str] = {}
        _note_lines(root, (), self.lines)

    def override(self, settings: Sequence[str], option: str = "--set") -> None:
        """Lay `key.path=value` settings over the data; the value is read as YAML. ConfigError if one has no `=`."""
        for setting in settings:
            key, sign, text = setting.partition("=")
            if not sign or not key.strip():
                raise ConfigError(f"{option} {setting}", allowed="key.path=value, e.g. cluster.replicas=8")
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ConfigError(f"{option} {setting}", why=f"the value is not valid YAML: {error}") from None
            self.put(key.strip(), value, f"{option} {setting}")

    def put(self, key: str, value: Any, where: str) -> None:
        """Set one dotted key; mappings on the way are made."""
        path = tuple(key.split("."))
        place: Any = self.data
        for part in path[:-1]:
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
            if not isinstance(place, dict):
                raise ConfigError(where, key, found=place, why=f"{part} is not a mapping, so nothing can be set inside it")
        place[path[-1]] = value
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
            return model.model_validate(self.data)
        except ValidationError as error:
            first = min(error.errors(), key=lambda e: (e["type"] != "extra_forbidden", len(e["loc"])))
            path = tuple(str(part) for part in first["loc"] if not _is_branch(part, first["loc"], self.data))
            raise ConfigError(self.where(path), ".".join(path), **_explain(first, path, model)) from None


def _explain(error: Any, path: tuple[str, ...], model: type[BaseModel]) -> dict[str, Any]:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return {"why": "unknown key", "allowed": ", ".join(_fields_at(model, path[:-1]))}
    if kind == "missing":
        return {"why": "is missing"}
    if kind == "literal_error":
        return {"found": error["input"], "allowed": context.get("expected", "")}
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if isinstance(error["input"], dict):
        return {"why": message}
    return {"found": error["input"], "allowed": message}


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


def _is_branch(part: Any, loc: tuple[Any, ...], data: Any) -> bool:
    """Whether a part of pydantic's location names a branch of a union rather than a key of the data."""
    for step in loc[: loc.index(part)]:
        inside_list = isinstance(data, list) and isinstance(step, int) and step < len(data)
        if inside_list or (isinstance(data, dict) and step in data):
            data = data[step]
    named_type = isinstance(part, str) and ("[" in part or part in ("str", "int", "float"))
    return named_type or not isinstance(data, (dict, list))


def _note_lines(node: Any, path: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            lines[(*path, str(key.value))] = key.start_mark.line + 1
            _note_lines(value, (*path, str(key.value)), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, str(index))] = value.start_mark.line + 1
            _note_lines(value, (*path, str(index)), lines)
