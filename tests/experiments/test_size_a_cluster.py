"""The page on sizing a cluster does what it shows: its file, its commands, their quoted output."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import typer.main

from simcore.experiments.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "size-a-cluster.md"
_BLOCK = re.compile(r"(?:^<!-- file: (?P<file>\S+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.M)


def test_the_page_does_what_it_shows(tmp_path):
    group = typer.main.get_command(app)
    if not {"capacity", "pareto"} <= set(getattr(group, "commands", {})):
        pytest.skip("this command line has no capacity and pareto")
    blocks = [match.groupdict() for match in _BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]
    for block in blocks:
        if block["file"]:
            (tmp_path / block["file"]).write_text(block["text"], encoding="utf-8")
    quotes = 0
    for command, quote in pairwise(blocks):
        if (command["language"], quote["language"]) != ("sh", "text"):
            continue
        words = shlex.split(command["text"])
        assert words[0] == "simcore"
        done = subprocess.run([sys.executable, "-m", "simcore.experiments.cli", *words[1:]], cwd=tmp_path, text=True,
                              capture_output=True, timeout=300, env=os.environ | {"PYTHONUTF8": "1"})
        assert done.returncode == 0, done.stderr
        rest = iter(done.stdout.splitlines())
        for line in quote["text"].splitlines():
            assert line == "..." or any(line.rstrip() == printed.rstrip() for printed in rest), f"not printed: {line}"
        quotes += 1
    assert quotes == 4
