"""A log or trace in any known format into our own JSONL, and what was understood on the way."""

from __future__ import annotations

from pathlib import Path

from simcore.errors import TraceError
from simcore.traces.native import write_jsonl
from simcore.traces.read import SHIPPED, TEXTS, detect, read
from simcore.traces.workload import Workload


def import_trace(
    source: str | Path, target: str | Path, format: str | None = None, *, salt: str | None = None, skip_bad: bool = False,
    **options: object,
) -> Workload:
    """Read `source` (a file; of some formats a folder) and write it to `target`, .jsonl or .jsonl.gz, whole or not at all.

    `format` None: by the file's head. `options`: those of the format's reader. `salt`: of the digests by which texts are
    compared; random where none is given. They are dropped, and the ids that are written do not depend on it. Returns the
    workload, whose notes say what was understood and what was missing. Raises TraceError.
    """
    target = Path(target)
    if Path(target.name.removesuffix(".gz")).suffix != ".jsonl":
        raise TraceError("target", found=str(target), allowed="a file ending in .jsonl or .jsonl.gz")
    if Path(source).exists() and target.exists() and Path(source).samefile(target):
        raise TraceError("target", found=str(target), why="is the source", allowed="another file")
    if format is None and Path(source).is_dir():
        raise TraceError("format", why="not given for a folder", found=str(source), allowed="weka, servegen")
    if format is None:
        format = SHIPPED[str(source)][1] if str(source) in SHIPPED else detect(source)
    if salt is not None:
        if format not in TEXTS:
            raise TraceError("salt", found="one", why=f"{format} holds no text", allowed=f"for {', '.join(TEXTS)}")
        options["salt"] = salt
    workload = read(source, format, skip_bad=skip_bad, **options)
    write_jsonl(workload, target)
    return workload
