"""Times as logs write them, in whole nanoseconds: ISO 8601 texts, and numbers whose unit their size tells."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9})\d*)?\s*(Z|UTC|[+-]\d\d:?\d\d)?", re.ASCII)
_NUMBER = re.compile(r"\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
# (below this, a number since 1970 is in units of so many ns); seconds reach 1e11 in the year 5138
_UNITS = ((Decimal("1e11"), 10**9), (Decimal("1e14"), 10**6), (Decimal("1e17"), 10**3), (Decimal("1e20"), 1))


def nanoseconds(value: object) -> int | None:
    """ns since the log's own zero (1970 for dates and epochs); None for what is no time.

    A date without a zone is UTC. A number is in seconds, or in ms, us or ns since 1970 where its size says so.
    """
    if isinstance(value, str):
        text = value.strip()
        match = _ISO.fullmatch(text)
        if match:
            return _of_date(*match.groups())
        if not _NUMBER.fullmatch(text) or len(text) > 40:
            return None
        value = text
    elif type(value) not in (int, float):
        return None
    number = _decimal(str(value))
    unit = None if number is None else next((unit for limit, unit in _UNITS if 0 <= number < limit), None)
    return None if number is None or unit is None else int(number * unit)


def milliseconds(value: object) -> int | None:
    """ns of a duration in ms, given as a number or as its text; None for what is none."""
    return _scaled(value, 10**6)


def seconds(value: object) -> int | None:
    """ns of a duration in s, given as a number or as its text; None for what is none."""
    return _scaled(value, 10**9)


def _scaled(value: object, unit: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    text = str(value).strip()
    number = _decimal(text) if _NUMBER.fullmatch(text) and len(text) <= 40 else None
    return int(number * unit) if number is not None and 0 <= number < Decimal(2) ** 62 / unit else None


def _decimal(text: str) -> Decimal | None:
    """A finite number, or None."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _of_date(day: str, clock: str, fraction: str | None, zone: str | None) -> int | None:
    zone = "+00:00" if zone in (None, "Z", "UTC") else zone
    try:
        since = datetime.fromisoformat(f"{day}T{clock}{zone}") - _EPOCH
    except ValueError:
        return None
    return (since.days * 86400 + since.seconds) * 10**9 + int((fraction or "0").ljust(9, "0"))
