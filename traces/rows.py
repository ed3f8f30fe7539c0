"""Strict reading of one row: which keys, which types, which range; and what happens to a row that is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from simcore.errors import TraceError

Row = Mapping[str, object]

# Longer than any context in use, and short enough that `Workload.block_keys` can number a request's own blocks.
MOST_TOKENS = (1 << 24) - 1
_LARGEST = (1 << 63) - 1
_WHOLE = re.compile(r"[+-]?[0-9]+", re.ASCII)
_REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)


@dataclass
class BadRows:
    """Refuses the first bad row, or counts and lists them all (`skip_bad`)."""

    skip: bool
    listed: list[str] = field(default_factory=list)

    def refuse(self, error: TraceError) -> None:
        if not self.skip:
            raise error
        self.listed.append(str(error))


def check_keys(where: str, row: Collection[str], required: Collection[str], optional: Collection[str] = ()) -> None:
    """TraceError for a key that is missing, or that nothing would read."""
    allowed = ", ".join([*required, *optional])
    for key in required:
        if key not in row:
            raise TraceError(where, key, why="missing", allowed=allowed)
    for key in row:
        if key not in required and key not in optional:
            raise TraceError(where, str(key), why="unknown key", allowed=allowed)


def whole(where: str, row: Row, key: str, least: int = 0, most: int = _LARGEST) -> int:
    """row[key] as an integer; 3.0, true and "3" are not integers."""
    value = row[key]
    if type(value) is not int or not least <= value <= most:
        limit = f"at least {least}" if most == _LARGEST else f"{least} to {most}"
        raise TraceError(where, key, found=value, allowed=f"a whole number, {limit}")
    return value


def tokens(where: str, row: Row, key: str) -> int:
    return whole(where, row, key, least=1, most=MOST_TOKENS)


def real(where: str, row: Row, key: str) -> float:
    """row[key] as a finite float that is not negative."""
    value = row[key]
    if type(value) is int or type(value) is float:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and number >= 0:
            return number
    raise TraceError(where, key, found=value, allowed="a finite number, at least 0")


def cell(text: str) -> int | float | str:
    """What a CSV cell holds; a text that is no plain number stays text, for the checks above to refuse."""
    text = text.strip()
    if len(text) < 400:  # int() refuses texts of thousands of digits with an error of its own
        if _WHOLE.fullmatch(text):
            return int(text)
        if _REAL.fullmatch(text):
            return float(text)
    return text
