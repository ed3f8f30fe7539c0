"""Tables of the docs that a command puts there, between two marks of the page."""

from __future__ import annotations

from pathlib import Path

from simcore.errors import ConfigError
from simcore.files import write_whole


def marks(name: str) -> tuple[str, str]:
    """The lines between which a page keeps what `name` writes."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def read_page(path: Path, name: str) -> str:
    """The page's text. Raises ConfigError where it lacks the marks."""
    begin, end = marks(name)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if not (begin in text and end in text):
        raise ConfigError("--page", found=str(path), allowed=f"a file with the lines {begin} and {end}")
    return text


def fill_page(path: Path, name: str, page: str, text: str) -> None:
    """Write the page with `text` (whole lines) between its marks."""
    begin, end = marks(name)
    before, rest = page.split(begin, 1)
    write_whole(path, f"{before}{begin}\n{text}{end}{rest.split(end, 1)[1]}")
