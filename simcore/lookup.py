"""Finding a policy by its name: built-in by convention, a user's by path or entry point. Nothing is registered by hand."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import keyword
import pkgutil
import sys
import zlib
from pathlib import Path
from typing import Any

from simcore.errors import ConfigError

ROOT = "simcore.policies"
ENTRY_POINTS = "simcore.policies"


def class_name(name: str) -> str:
    """`round-robin` -> `RoundRobin`; a word of Python's gets an underscore (`none` -> `None_`)."""
    camel = "".join(part[:1].upper() + part[1:] for part in name.replace("-", "_").split("_"))
    return camel + "_" if keyword.iskeyword(camel) else camel


def find_class(kind: str, name: str, base: type, folder: Path | None = None) -> type:
    """The policy class that `name` means for a decision point `kind`.

    `name` is a built-in (`round-robin` -> simcore.policies.<kind>.round_robin:RoundRobin; one that stands under another
    kind and serves this one too is found as well), `package.module:Class`,
    `file.py:Class` (both looked up in `folder`, the study's, first), or an entry point of the group `simcore.policies`
    called `<kind>.<name>`. Raises ConfigError naming what exists; ConfigError if the class does not serve `kind`.
    """
    if ":" in name:
        found = _from_path(kind, name, folder)
    else:
        found = _built_in(kind, name) or _entry_point(kind, name) or _serves_this_too(kind, name, base)
    if found is None:
        raise ConfigError(f"policies.{kind}", found=name,
                          allowed=", ".join(names(kind)) + ", package.module:Class, or file.py:Class")
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise ConfigError(f"policies.{kind}", found=name, why=f"{found!r} does not serve this decision point",
                          allowed=f"a class derived from {base.__module__}.{base.__name__}")
    return found


def construct(found: type, where: str, parameters: dict[str, Any]) -> Any:
    """An instance of a policy class; a parameter that it does not have, or refuses, is a ConfigError naming it."""
    signature = inspect.signature(found)
    try:
        signature.bind(**parameters)
    except TypeError as error:
        known = ", ".join(signature.parameters) or "no parameters"
        raise ConfigError(where, found=parameters, why=str(error), allowed=known) from None
    try:
        return found(**parameters)
    except (TypeError, ValueError) as error:
        raise ConfigError(where, why=f"{found.__name__}: {error}") from None


def names(kind: str) -> list[str]:
    """The built-in policies of a decision point, and those that installed packages add."""
    package = importlib.import_module(f"{ROOT}.{kind}")
    built_in = [m.name.replace("_", "-") for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]
    added = [e.name.split(".", 1)[1] for e in importlib.metadata.entry_points(group=ENTRY_POINTS)
             if e.name.startswith(kind + ".")]
    return sorted(built_in) + sorted(added)


def kinds() -> list[str]:
    """The decision points that have a folder of policies."""
    package = importlib.import_module(ROOT)
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.ispkg)


def _built_in(kind: str, name: str) -> Any:
    module = f"{ROOT}.{kind}.{name.replace('-', '_')}"
    try:
        spec = importlib.util.find_spec(module) if name.replace("-", "_").isidentifier() else None
    except ModuleNotFoundError:
        return None
    return getattr(importlib.import_module(module), class_name(name), None) if spec else None


def _serves_this_too(kind: str, name: str, base: type) -> Any:
    """A built-in of another decision point that serves this one as well."""
    for other in kinds():
        found = _built_in(other, name) if other != kind else None
        if inspect.isclass(found) and issubclass(found, base):
            return found
    return None


def _entry_point(kind: str, name: str) -> Any:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=f"{kind}.{name}"):
        try:
            return entry.load()
        except Exception as error:  # another package's module may fail in any way while it is imported
            raise ConfigError(f"policies.{kind}", found=name,
                              why=f"cannot import {entry.value}: {type(error).__name__}: {error}") from error
    return None


def _from_path(kind: str, name: str, folder: Path | None) -> Any:
    module_name, _, attribute = name.rpartition(":")
    where = f"policies.{kind}"
    folder = folder or Path.cwd()
    is_file = module_name.endswith(".py")
    if is_file and not (folder / module_name).is_file():
        raise ConfigError(where, found=name, why=f"no such file in {folder}")
    try:
        module = _load_file(folder, folder / module_name) if is_file else _import_with(folder, module_name)
    except Exception as error:  # the user's module may fail in any way while it is imported; say where and how
        raise ConfigError(where, found=name, why=f"cannot import {module_name}: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        classes = [n for n, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__]
        raise ConfigError(where, found=name, why=f"{module_name} has no {attribute}", allowed=", ".join(classes))
    return getattr(module, attribute)


def _import_with(folder: Path, module_name: str) -> Any:
    """Import with the study's folder first on the path for this one import, so that its own `models/` is its own."""
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    finally:
        sys.path.remove(str(folder))
    parts = folder.joinpath(*module_name.split("."))
    for own in (parts.with_suffix(".py"), parts / "__init__.py"):
        if own.is_file() and not own.samefile(module.__file__ or folder):  # Python keeps one module a name
            raise ImportError(f"a module of this name was imported before, from {module.__file__}; use file.py:Class")
    return module


def _load_file(folder: Path, path: Path) -> Any:
    """Run a file as a module of its own name; it can import what lies beside it and in the study's folder."""
    name = f"simcore_user_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    added = [str(path.parent.resolve()), str(folder.resolve())]
    sys.path[:0] = added
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        for entry in added:
            sys.path.remove(entry)
    return module
