"""Output that is written whole or not at all."""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simcore.errors import BadInput


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when the block ends well.

    An existing result folder (one with our marker) is replaced at that moment; anything else that stands at `target`
    is never touched: BadInput. A killed run leaves only a hidden `.<name>.partial-*` folder, removed by the next one.
    """
    target = Path(target).absolute()
    _refuse_foreign(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    for stale in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        if not _alive(stale.name.rpartition(".partial-")[2].partition("-")[0]):
            shutil.rmtree(stale, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-{os.getpid()}-", dir=target.parent))
    partial.chmod(0o755)
    try:
        yield partial
        (partial / MARKER).write_text("A result folder of simcore; it may be replaced by the next run.\n")
        _refuse_foreign(target)  # again: somebody may have put it there during the run
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-{os.getpid()}-", dir=target.parent))
            os.replace(target, old / "old")
            os.replace(partial, target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _alive(pid: str) -> bool:
    """Whether another process of this number runs: its partial folder is work in progress, not a leftover."""
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _refuse_foreign(target: Path) -> None:
    if target.exists() and not (target / MARKER).is_file() and not (target.is_dir() and not any(target.iterdir())):
        raise BadInput(str(target), why="exists and is not a result of simcore; nothing was written",
                       allowed="a new folder, an empty one, or an earlier result")


def write_whole(path: Path, text: str) -> None:
    """Write a file through a temporary one in the same folder, so that no reader ever sees half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def to_json(value: Any) -> str:
    """JSON with sorted keys and null for what is not a number, so that equal results are equal bytes."""
    return json.dumps(_plain(value), indent=2, sort_keys=True, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return _plain(value.tolist())
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


MARKER = ".simcore-result"
