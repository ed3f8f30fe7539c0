"""Text files, plain or gzip: reading line by line with line numbers, writing whole or not at all."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from simcore.errors import TraceError

_GZIP = b"\x1f\x8b"


def lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, text) of a UTF-8 file; gzip is told by its first bytes, not by its name.

    Raises TraceError with file and line when the file cannot be opened, is torn or is not text.
    """
    number = 0
    try:
        with open(path, "rb") as raw:
            opener = gzip.open if raw.read(2) == _GZIP else open
        with opener(path, "rt", encoding="utf-8-sig", newline="") as stream:
            for line in stream:
                number += 1
                yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise TraceError(f"{path}:{number + 1}", why=f"the file is torn or not text ({error})") from None
    except OSError as error:
        raise TraceError(str(path), why=f"cannot be read ({error.strerror or error})") from None


def json_rows(path: str | Path) -> Iterator[tuple[str, dict[str, object] | TraceError]]:
    """("file:line", object) for each line of a JSONL file that is not blank; a bad line comes as its TraceError."""
    for number, line in lines(path):
        text = line.strip()
        if text:
            where = f"{path}:{number}"
            yield where, json_object(where, text)


def json_documents(path: str | Path) -> Iterator[tuple[str, dict[str, object] | TraceError]]:
    """("file:line", object) for each object of a file that is JSONL, one JSON object, or one JSON array of objects.

    A bad line comes as its TraceError; what follows a bad place in one document cannot be told and is not read.
    """
    first = next((line.strip() for _, line in lines(path) if line.strip()), "")
    if first.startswith("{") and isinstance(json_object("", first), dict):
        yield from json_rows(path)
        return
    text = "".join(line for _, line in lines(path))
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    at = len(text) - len(text.lstrip())
    array = text[at : at + 1] == "["
    at, line, seen = at + array, 1, 0
    while True:
        while text[at : at + 1].isspace():
            at += 1
        if (array and text[at : at + 1] == "]") or (not array and at == len(text)):
            return
        line, seen = line + text.count("\n", seen, at), at
        where = f"{path}:{line}"
        try:
            row, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            yield where, TraceError(where, why=f"not a whole JSON object ({error})")
            return
        yield where, row if isinstance(row, dict) else TraceError(where, found=row, allowed="a JSON object")
        while text[at : at + 1].isspace():
            at += 1
        at += text[at : at + 1] == ","


def json_object(where: str, text: str) -> dict[str, object] | TraceError:
    """The object in one JSON line, or the TraceError that says why there is none."""
    try:
        row = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # ValueError: torn JSON, a repeated key, an integer without end
        return TraceError(where, why=f"not a whole JSON object ({error})", found=text)
    return row if isinstance(row, dict) else TraceError(where, found=row, allowed="a JSON object")


def csv_rows(path: str | Path) -> Iterator[tuple[str, list[str] | TraceError]]:
    """("file:line", cells) for each row of a CSV file that is not blank, the header first."""
    reader = csv.reader((line for _, line in lines(path)), strict=True)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"{path}:{reader.line_num}", TraceError(f"{path}:{reader.line_num}", why=f"not a CSV row ({error})")
            continue
        if cells:
            yield f"{path}:{reader.line_num}", cells


def csv_table(path: str | Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str] | TraceError]]:
    """("file:line", {column: text}) for each row of a CSV file with just these columns; a bad row comes as its TraceError.

    Raises TraceError for another header.
    """
    rows = csv_rows(path)
    where, header = next(rows, (str(path), []))
    if isinstance(header, TraceError):
        raise header
    if sorted(header) != sorted(columns):
        raise TraceError(where, "header", found=header, allowed=",".join(columns))
    for where, cells in rows:
        if not isinstance(cells, TraceError) and len(cells) != len(header):
            cells = TraceError(where, why="cells", found=len(cells), allowed=f"{len(header)}: {','.join(header)}")
        yield where, cells if isinstance(cells, TraceError) else dict(zip(header, cells, strict=True))


@contextmanager
def replacing(path: str | Path) -> Iterator[TextIO]:
    """A text stream whose content takes the place of `path` when the block ends well; otherwise nothing changes.

    A name that ends in .gz is compressed, without a time stamp, so that equal content is equal bytes.
    """
    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "wb") as raw:
            packed = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if target.suffix == ".gz" else None
            with io.TextIOWrapper(packed or raw, encoding="utf-8", newline="") as stream:
                yield stream
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError("a key stands twice")
    return row
