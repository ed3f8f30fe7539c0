"""The pages about a job run as they stand: each command, and what the page quotes of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_docs import ROOT, assert_quoted, blocks, joined, run


@pytest.mark.parametrize("name", ["choose-a-router", "is-more-dram-worth-it"])
def test_commands_of_the_page_run_and_print_what_it_quotes(name: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    printed = ""
    commands = 0
    for block in blocks(ROOT / "docs" / f"{name}.md"):
        if block.language == "sh":
            printed = run(["bash", "-euc", joined(block.text)], tmp_path)
            commands += 1
        elif block.language == "text":
            assert_quoted(block.text, printed)
    assert commands
