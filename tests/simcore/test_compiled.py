"""Compiled functions do not outlive the code that was compiled into them."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
from simcore.compiled import forget_stale
forget_stale(folder, ["inner.py", "outer.py"])
from outer import answer
print(answer())
"""


def _ask(folder: Path) -> str:
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_change_in_a_called_file_reaches_its_caller(tmp_path: Path) -> None:
    inner = "import numba\n\n@numba.njit(cache=True)\ndef number():\n    return {}\n"
    (tmp_path / "outer.py").write_text(
        "import numba\nfrom inner import number\n\n@numba.njit(cache=True)\ndef answer():\n    return number()\n")
    (tmp_path / "inner.py").write_text(inner.format(1))
    assert _ask(tmp_path) == "1"
    cached = sorted((tmp_path / "__pycache__").glob("*.nbc"))
    assert cached
    times = [file.stat().st_mtime_ns for file in cached]
    assert _ask(tmp_path) == "1" and times == [file.stat().st_mtime_ns for file in cached]  # nothing was compiled again
    (tmp_path / "inner.py").write_text(inner.format(2))
    assert _ask(tmp_path) == "2"
