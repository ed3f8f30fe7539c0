"""The house: which folder may import which, how deep and how long things are, and what a start costs."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Arrows point down only: a folder may import those that it names here, and itself.
BELOW = {
    "simcore": set(),
    "traces": {"simcore"},
    "models": {"traces", "simcore"},
    "policies": {"models", "traces", "simcore"},
    "kernels": {"models", "traces", "simcore"},
    "ramulator_bridge": {"models", "traces", "simcore"},
    "experiments": {"policies", "kernels", "ramulator_bridge", "models", "traces", "simcore"},
}
HOUSE = [folder for folder in BELOW if (ROOT / folder).is_dir()]
CODE = sorted(path for folder in HOUSE for path in (ROOT / folder).rglob("*.py"))
WRITTEN = sorted(
    path for pattern in ("*", *(f"{folder}/**/*" for folder in [*HOUSE, "tests", "docs"])) for path in ROOT.glob(pattern)
    if path.suffix in {".py", ".md", ".yaml", ".toml"}
)
HEAVY = {"pandas", "numba", "matplotlib", "scipy", "pyarrow", "torch", "triton"}


def relative(path):
    return str(path.relative_to(ROOT))


def imported(path):
    """(line, dotted name) of every import of a file, at its top, under TYPE_CHECKING or within a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def folder_of(name):
    """The folder of the house that a dotted name lives in; None for other packages."""
    parts = name.split(".")
    if parts[0] != "simcore":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in BELOW else "simcore"


@pytest.mark.parametrize("folder", HOUSE)
def test_imports_point_down_only(folder):
    wrong = [
        f"{relative(path)}:{line} imports {name}"
        for path in CODE if path.is_relative_to(ROOT / folder)
        for line, name in imported(path)
        if folder_of(name) not in {None, folder} | BELOW[folder]
    ]
    assert not wrong


def test_our_folders_are_named_under_their_roof():
    """`import models` would be the user's own, or nothing at all, once the package is installed."""
    wrong = [f"{relative(path)}:{line} imports {name}" for path in CODE for line, name in imported(path)
             if name.split(".")[0] in set(BELOW) - {"simcore"}]
    assert not wrong


def test_the_core_knows_nothing_about_llms():
    words = {"token", "tokens", "prompt", "prompts", "prefill", "decode", "kv", "llm", "gpu", "gpus", "replica", "vllm"}
    wrong = [f"{relative(path)}: {sorted(words & words_in_names(path))}"
             for path in CODE if path.is_relative_to(ROOT / "simcore") and words & words_in_names(path)]
    assert not wrong


def words_in_names(path):
    """The words of the names that a file defines or reads."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names |= {getattr(node, field, None) for field in ("id", "arg", "name")}
    return {word.lower() for name in names if isinstance(name, str) for word in name.split("_")}


def test_the_packages_of_pyproject_are_those_of_the_tree():
    folders = {"simcore": "simcore"} | {f"simcore.{folder}": folder for folder in HOUSE if folder != "simcore"}
    in_tree = {
        ".".join([name, *path.parent.relative_to(ROOT / folder).parts])
        for name, folder in folders.items() for path in (ROOT / folder).rglob("*.py")
    }
    setuptools = PYPROJECT["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == sorted(in_tree)
    assert setuptools["package-dir"] == folders
    without_init = [name for name in in_tree if not (folder_path(name, folders) / "__init__.py").is_file()]
    assert not without_init


def folder_path(package, folders):
    top = max((name for name in folders if f"{package}.".startswith(f"{name}.")), key=len)
    return ROOT.joinpath(folders[top], *package[len(top):].strip(".").split("."))


def test_every_file_that_is_shipped_beside_code_is_listed():
    """Data files that the patterns of package-data miss would work here and be missing from the wheel."""
    folders = PYPROJECT["tool"]["setuptools"]["package-dir"]
    listed = {path for package, patterns in PYPROJECT["tool"]["setuptools"]["package-data"].items()
              for pattern in patterns for path in folder_path(package, folders).glob(pattern)}
    present = {path for folder in HOUSE for path in (ROOT / folder).rglob("*")
               if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts}
    assert sorted(map(relative, present - listed)) == []


def test_no_folder_of_code_is_deeper_than_two():
    deep = [relative(path) for path in [*CODE, *(ROOT / "tests").rglob("*.py")] if len(path.relative_to(ROOT).parts) > 3]
    assert not deep


def test_no_file_is_longer_than_a_reader_can_hold():
    lengths = {relative(path): len(path.read_text().splitlines()) for path in WRITTEN if path.suffix == ".py"}
    assert {name: length for name, length in lengths.items() if length > 500} == {}


def test_nothing_is_left_for_later():
    words = ["TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error"]  # in two parts: this file is read as well
    wrong = [f"{relative(path)}: {word}" for path in WRITTEN for word in words if word in path.read_text(encoding="utf-8")]
    assert not wrong


def test_every_module_says_what_it_is():
    silent = [relative(path) for path in CODE if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert not silent


@pytest.mark.parametrize("module", ["simcore", *(
    f"simcore.{path.stem}" for path in CODE if path.parent == ROOT / "simcore" and path.stem != "__init__")])
def test_the_core_starts_without_heavy_imports(module, tmp_path):
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert HEAVY.isdisjoint(ran.stdout.split())


def test_the_licence_is_apache_2():
    first = (ROOT / "LICENSE").read_text().split()
    assert first[:6] == ["Apache", "License", "Version", "2.0,", "January", "2004"]
    assert PYPROJECT["project"]["license"] == "Apache-2.0"
    assert "LICENSE" in PYPROJECT["project"]["license-files"]
