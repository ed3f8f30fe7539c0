"""What README and docs say runs: code blocks, commands, quoted output, links and paths."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from simcore.experiments.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("simcore", "traces", "models", "policies", "kernels", "experiments", "tests", "docs")
_BLOCK = re.compile(r"(?:^<!-- file: (?P<file>\S+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.M)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int  # of the first line of `text`
    file: str | None  # the file that the block is


def blocks(page: Path) -> list[Block]:
    source = page.read_text(encoding="utf-8")
    return [
        Block(m["language"], m["text"], source.count("\n", 0, m.start("text")) + 1, m["file"])
        for m in _BLOCK.finditer(source)
    ]


def run_python(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the page's python blocks in one namespace; a failure points at the line of the page."""
    monkeypatch.chdir(folder)
    space: dict[str, Any] = {"__name__": "docs"}
    for block in blocks(page):
        if block.language == "python" and block.file is None:
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), space)


def run(command: list[str], folder: Path) -> str:
    """What a command prints, with this interpreter's folder first on the path; it must end well."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = os.environ | {"PATH": path, "PYTHONUTF8": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_quoted(quote: str, output: str) -> None:
    """Every line of a quoted output was printed, in this order; `...` stands for lines left out."""
    rest = iter(output.splitlines())
    for line in quote.splitlines():
        assert line == "..." or any(line.rstrip() == printed.rstrip() for printed in rest), f"not printed: {line}"


def test_the_walkthrough_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_python(ROOT / "docs" / "walkthrough.md", tmp_path, monkeypatch)


def test_the_first_policy_does_what_the_page_shows(tmp_path: Path) -> None:
    """In a process of its own: the page's folder `models` must not meet other tests."""
    page = blocks(ROOT / "docs" / "your-first-policy.md")
    for block in page:
        if block.file is not None:
            (tmp_path / block.file).parent.mkdir(exist_ok=True)
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    commands = [block for block in page if block.language == "sh"]
    printed = {block.line: run(["bash", "-euc", block.text], tmp_path) for block in commands}
    scripts = [block for block in page if block.language == "python" and block.file is None]
    mark = "--- line"
    script = "".join(f"print('\\n{mark}', {block.line})\n{block.text}" for block in scripts)
    parts = re.split(rf"^{mark} (\d+)$", run([sys.executable, "-c", script], tmp_path), flags=re.MULTILINE)
    printed |= {int(line): text for line, text in zip(parts[1::2], parts[2::2], strict=True)}
    quotes = 0
    for before, block in pairwise(page):
        if block.language == "text":
            assert_quoted(block.text, printed[before.line])
            quotes += 1
    assert (len(commands), len(scripts), quotes) == (4, 3, 4)


def test_the_python_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    run_python(ROOT / "README.md", ROOT, monkeypatch)


def test_the_result_in_the_readme_is_what_its_command_prints(tmp_path: Path) -> None:
    page = blocks(ROOT / "README.md")
    shown = [(a, b) for a, b in pairwise(page) if (a.language, b.language) == ("sh", "text")]
    assert len(shown) == 1
    command, quote = shown[0]
    assert_quoted(quote.text, run([*shlex.split(joined(command.text)), "--out", str(tmp_path / "out")], ROOT))


def joined(text: str) -> str:
    """Lines that a backslash continues, in one."""
    return text.replace("\\\n", " ")


def command_lines(page: Path) -> Iterator[list[str]]:
    for block in blocks(page):
        if block.language == "sh":
            for line in joined(block.text).splitlines():
                words = shlex.split(line, comments=True)
                if words and words[0] == "simcore":
                    yield words[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_is_understood(page: Path) -> None:
    """Parsed, not run: what a page names must exist. Every command must have its help."""
    for words in command_lines(page):
        command: Any = typer.main.get_command(app)
        names: list[str] = []
        while hasattr(command, "commands"):
            assert words[0] in command.commands, words
            command, words = command.commands[words[0]], words[1:]
            names.append(command.name)
        command.make_context(command.name, words).close()
        assert "Usage" in CliRunner().invoke(app, [*names, "--help"]).output


def test_the_readme_names_every_command() -> None:
    group: Any = typer.main.get_command(app)
    groups = {name: command.commands for name, command in group.commands.items() if hasattr(command, "commands")}
    named = {" ".join(words[:2]) if words[0] in groups else words[0] for words in command_lines(ROOT / "README.md")}
    inner = [f"{name} {command}" for name, commands in groups.items() for command in commands]
    assert named == {*group.commands, *inner} - {*groups}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_path_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), target
    prose = _BLOCK.sub("", text)
    for name in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`", prose):
        assert (ROOT / name).exists(), name


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_quote_that_was_not_printed_is_noticed() -> None:
    assert_quoted("a\n...\nc\n", "a\nb\nc\n")
    for quote in ("a\nd\n", "c\na\n"):
        with pytest.raises(AssertionError, match="not printed"):
            assert_quoted(quote, "a\nb\nc\n")
