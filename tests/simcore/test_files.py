"""Output is whole or not there, whatever ends the run."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.errors import BadInput
from simcore.files import MARKER, to_json, whole_folder, write_whole


def content(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def result(target, **files):
    with whole_folder(target) as folder:
        for name, text in files.items():
            (folder / name).write_text(text)


def test_nothing_stands_at_the_target_until_all_is_written(tmp_path):
    target = tmp_path / "deep" / "out"
    with whole_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert set(content(target)) == {"a", MARKER}
    assert os.listdir(target.parent) == ["out"]


def test_an_earlier_result_is_replaced_whole(tmp_path):
    result(tmp_path / "out", a="1", b="2")
    with whole_folder(tmp_path / "out") as folder:
        assert not list(folder.iterdir())
        (folder / "c").write_text("3")
        assert set(content(tmp_path / "out")) == {"a", "b", MARKER}
    assert set(content(tmp_path / "out")) == {"c", MARKER}
    assert os.listdir(tmp_path) == ["out"]


def test_an_empty_folder_may_be_used(tmp_path):
    (tmp_path / "out").mkdir()
    result(tmp_path / "out", a="1")
    assert set(content(tmp_path / "out")) == {"a", MARKER}


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_not_ours_is_refused_and_not_touched(tmp_path, kind):
    target = tmp_path / "thesis"
    kept = target / "chapter" if kind == "folder" else target
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("years of work")
    with pytest.raises(BadInput, match=r"not a result of simcore; nothing was written.*allowed: a new folder"):
        result(target, a="1")
    assert kept.read_text() == "years of work"
    assert os.listdir(tmp_path) == ["thesis"]


def test_what_appears_at_the_target_during_the_run_is_not_touched_either(tmp_path):
    target = tmp_path / "out"
    with pytest.raises(BadInput, match="not a result of simcore"), whole_folder(target) as folder:
        (folder / "a").write_text("1")
        target.mkdir()
        (target / "notes").write_text("by hand")
    assert content(target) == {"notes": "by hand"}
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing_and_the_earlier_result(tmp_path, error):
    result(tmp_path / "out", a="1")
    for target in ("out", "new"):
        with pytest.raises(error), whole_folder(tmp_path / target) as folder:
            (folder / "half").write_text("...")
            raise error
    assert os.listdir(tmp_path) == ["out"]
    assert set(content(tmp_path / "out")) == {"a", MARKER}


def test_only_our_own_stale_partials_are_removed(tmp_path):
    for name in (".out.partial-dead", ".output.partial-x", "out.partial-x", ".run[1].partial-dead", ".run1.partial-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("...")
    result(tmp_path / "out")
    result(tmp_path / "run[1]")  # brackets mean nothing here
    assert sorted(os.listdir(tmp_path)) == [".output.partial-x", ".run1.partial-x", "out", "out.partial-x", "run[1]"]


def test_the_target_does_not_move_with_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with whole_folder("out"):
        os.chdir("elsewhere")
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "out"]


KILLED = """
import sys, time
from simcore.files import whole_folder
with whole_folder(sys.argv[1]) as folder:
    (folder / "a").write_text("half of it")
    print("writing", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("earlier", [True, False])
def test_a_killed_run_leaves_the_target_alone_and_can_be_started_again(tmp_path, earlier):
    target = tmp_path / "out"
    if earlier:
        result(target, a="first")
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(target)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert target.exists() == earlier
    assert not earlier or content(target)["a"] == "first"
    assert [name for name in os.listdir(tmp_path) if name != "out"]  # the killed run's half, hidden
    result(target, a="second")
    assert content(target)["a"] == "second"
    assert os.listdir(tmp_path) == ["out"]


def test_write_whole_replaces_a_file_or_leaves_it(tmp_path):
    path = tmp_path / "new" / "summary.json"
    write_whole(path, "one\n")
    write_whole(path, "två\n")
    assert path.read_bytes() == "två\n".encode()
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "x" * 100_000 + "\ud800")  # fails after much of it has been written
    assert path.read_bytes() == "två\n".encode()
    assert os.listdir(path.parent) == ["summary.json"]


def test_a_reader_of_the_old_file_keeps_the_old_file(tmp_path):
    path = tmp_path / "f"
    write_whole(path, "old")
    with path.open() as reader:
        write_whole(path, "new")
        assert reader.read() == "old"
    assert path.read_text() == "new"


def test_what_json_cannot_say_becomes_null_and_numpy_becomes_plain():
    value = {
        "nan": float("nan"), "inf": [float("inf"), -float("inf")], "none": None, "tuple": (1, 2.5),
        "int": np.int64(3), "float": np.float32(0.5), "double": np.float64("nan"), "bool": np.bool_(True),
        "array": np.array([[1.0, np.nan], [np.inf, 2.0]]), "empty": np.zeros(0), 7: "key", np.int64(8): "key",
    }
    assert json.loads(to_json(value)) == {
        "nan": None, "inf": [None, None], "none": None, "tuple": [1, 2.5],
        "int": 3, "float": 0.5, "double": None, "bool": True,
        "array": [[1.0, None], [None, 2.0]], "empty": [], "7": "key", "8": "key",
    }
    assert to_json(1.0).endswith("\n")


def test_what_has_no_json_is_refused():
    with pytest.raises(TypeError):
        to_json({"a": object()})


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=12,
)


@given(plain, st.randoms(use_true_random=False))
def test_equal_values_are_equal_bytes_and_come_back(value, random):
    def reordered(part):
        if isinstance(part, dict):
            return {key: reordered(part[key]) for key in random.sample(sorted(part), len(part))}
        return [reordered(item) for item in part] if isinstance(part, list) else part

    assert to_json(reordered(value)) == to_json(value)
    assert json.loads(to_json(value)) == value


def test_the_partial_of_a_living_process_is_left_alone(tmp_path):
    theirs = tmp_path / f".out.partial-{os.getppid()}-x"
    theirs.mkdir()
    with whole_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
    assert theirs.is_dir() and (tmp_path / "out" / "a").is_file()
