"""Policies by name: built in, a user's by path, another package's by entry point; never the wrong one in silence."""

import sys
from pathlib import Path

import pytest

import simcore.models
from simcore.errors import ConfigError
from simcore.lookup import class_name, construct, find_class, kinds, names
from simcore.models.decision_points import KINDS, Admission, Retention
from simcore.policies.admission.shortest_first import ShortestFirst
from simcore.policies.retention.none import None_

BUILT_IN = [(kind, name) for kind in kinds() for name in names(kind)]


@pytest.fixture(autouse=True)
def modules_as_before():
    """A user's modules must not reach the next test."""
    path, modules = list(sys.path), dict(sys.modules)
    yield
    assert sys.path == path
    assert sys.modules["simcore.models"] is simcore.models
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]


def write(folder, **files):
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


HOLD = "from simcore.models.decision_points import Retention\nclass Hold(Retention):\n    pass\n"


@pytest.mark.parametrize(("kind", "name"), BUILT_IN)
def test_every_built_in_is_found_by_hyphen_and_by_underscore(kind, name):
    found = find_class(kind, name, KINDS[kind])
    assert found is find_class(kind, name.replace("-", "_"), KINDS[kind])
    assert found.__module__ == f"simcore.policies.{kind}.{name.replace('-', '_')}"
    assert found.__name__ == class_name(name)
    assert "_" not in name


def test_every_decision_point_has_a_folder_and_every_file_there_is_a_policy():
    assert set(kinds()) == set(KINDS)
    root = Path(simcore.policies.__path__[0])
    files = {(path.parent.name, path.stem.replace("_", "-")) for path in root.glob("*/[!_]*.py")}
    assert files == set(BUILT_IN)


def test_a_word_of_python_gets_an_underscore():
    assert class_name("round-robin") == class_name("round_robin") == "RoundRobin"
    assert (class_name("none"), class_name("lru"), class_name("true")) == ("None_", "Lru", "True_")
    assert find_class("retention", "none", Retention) is None_


@pytest.mark.parametrize("name", ["lur", "", "Lru", "__init__", "none.None_", "l r u", "admission.fcfs"])
def test_an_unknown_name_lists_what_exists(name):
    with pytest.raises(ConfigError) as caught:
        find_class("retention", name, Retention)
    assert caught.value.where == "policies.retention"
    assert caught.value.allowed == ", ".join([*names("retention"), "package.module:Class", "or file.py:Class"])


def test_a_class_that_serves_another_decision_point_is_refused(tmp_path):
    write(tmp_path, mine=HOLD + "number = 3\n")
    for name in ("simcore.policies.retention.lru:Lru", "mine.py:Hold", "mine.py:number"):
        with pytest.raises(ConfigError, match=r"does not serve this decision point.*derived from .*\.Admission"):
            find_class("admission", name, Admission, tmp_path)


def test_a_file_outside_the_tree_with_folders_named_like_ours(tmp_path):
    """Its `models` and `traces` are its own, its `simcore.py` is ignored, and ours are what they were."""
    write(tmp_path, **{
        "models/__init__": "", "models/cost": "PRICE = 3\n", "traces": "LENGTH = 4\n", "simcore": "raise RuntimeError\n",
        "policies/__init__": "", "policies/beside": "WIDTH = 5\n",
        "policies/hold": "import models.cost, traces\nimport simcore.models.facts\n" + HOLD
        + "    price = models.cost.PRICE\n    length = traces.LENGTH\n",
        "policies/wide": "from models.cost import PRICE\nfrom beside import WIDTH\n" + HOLD + "    width = PRICE * WIDTH\n",
    })
    for name in ("policies.hold:Hold", "policies/hold.py:Hold"):
        found = find_class("retention", name, Retention, tmp_path)
        assert (found.price, found.length) == (3, 4)
        assert issubclass(found, Retention)
    assert find_class("retention", "policies/wide.py:Hold", Retention, tmp_path).width == 15
    assert Path(simcore.models.__file__).parent != tmp_path / "models"
    assert Path(sys.modules["models"].__file__).is_relative_to(tmp_path)


def test_one_file_is_one_module_for_all_kinds_that_it_serves(tmp_path):
    """Continuum is queue order and retention over one memory."""
    write(tmp_path, both="from simcore.models.decision_points import *\nclass Both(Admission, Retention):\n    pass\n")
    first = find_class("admission", "both.py:Both", Admission, tmp_path)
    assert find_class("retention", str(tmp_path / "both.py") + ":Both", Retention) is first


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path):
    one, two = write(tmp_path / "one", hold=HOLD), write(tmp_path / "two", hold=HOLD)
    found = [find_class("retention", "hold.py:Hold", Retention, folder) for folder in (one, two)]
    assert found[0] is not found[1]
    assert [Path(sys.modules[cls.__module__].__file__).parent for cls in found] == [one, two]


def test_a_second_module_of_one_name_is_refused_and_not_mistaken_for_the_first(tmp_path):
    one, two = write(tmp_path / "one", hold=HOLD), write(tmp_path / "two", hold=HOLD)
    assert find_class("retention", "hold:Hold", Retention, one) is find_class("retention", "hold:Hold", Retention, one)
    with pytest.raises(ConfigError, match=r"imported before, from .*one/hold\.py; use file\.py:Class"):
        find_class("retention", "hold:Hold", Retention, two)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("broken.py:Hold", "cannot import broken.py: ZeroDivisionError: division by zero"),
        ("broken:Hold", "cannot import broken: ZeroDivisionError: division by zero"),
        ("syntax.py:Hold", "cannot import syntax.py: SyntaxError"),
        ("opens.py:Hold", r"cannot import opens.py: FileNotFoundError: .*table\.csv"),
        ("nowhere.py:Hold", "no such file in "),
        ("nowhere.at.all:Hold", "cannot import nowhere.at.all: ModuleNotFoundError: No module named 'nowhere'"),
        (":Hold", "cannot import : ValueError"),
        ("hold.py:Held", "hold.py has no Held.*allowed: Hold$"),
        ("hold:", "hold has no .*allowed: Hold$"),
    ],
)
def test_what_cannot_be_imported_says_where_and_why(tmp_path, name, why):
    write(tmp_path, broken="1 / 0\n", syntax="class\n", opens="open('table.csv')\n", hold=HOLD)
    for _ in range(2):  # a failed import leaves nothing behind that would pass the second time
        with pytest.raises(ConfigError, match=why) as caught:
            find_class("retention", name, Retention, tmp_path)
        assert caught.value.where == "policies.retention"
        assert caught.value.found == name


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """An installed package that offers two policies, one of which cannot be imported."""
    info = tmp_path / "lottery-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lottery\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[simcore.policies]\nretention.keep-all = lottery_policies:Hold\nretention.broken = lottery_broken:Hold\n"
        "admission.keep-all = lottery_policies:Hold\n")
    write(tmp_path, lottery_policies=HOLD, lottery_broken="1 / 0\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        yield


def test_an_entry_point_of_an_installed_package(plugin):
    assert find_class("retention", "keep-all", Retention).__module__ == "lottery_policies"
    assert {"lru", "none"} < set(names("retention")[:-2]) and names("retention")[-2:] == ["broken", "keep-all"]
    with pytest.raises(ConfigError, match="does not serve"):
        find_class("admission", "keep-all", Admission)
    with pytest.raises(ConfigError, match="cannot import lottery_broken:Hold: ZeroDivisionError"):
        find_class("retention", "broken", Retention)
    with pytest.raises(ConfigError) as caught:
        find_class("retention", "keep", Retention)
    assert "keep-all" in caught.value.allowed


def test_parameters_reach_the_constructor():
    policy = construct(ShortestFirst, "policies.admission", {"by": "total"})
    assert (policy.by, policy.oracle) == ("total", True)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"bye": "total"}, "policies.admission: got an unexpected keyword argument 'bye': .*allowed: by, patience"),
        ({"by": "size"}, "policies.admission: ShortestFirst: by = 'size'; allowed: prompt"),
        ({"patience": "long"}, "policies.admission: ShortestFirst: '>' not supported"),
    ],
)
def test_parameters_that_are_unknown_or_refused(parameters, message):
    with pytest.raises(ConfigError, match=message):
        construct(ShortestFirst, "policies.admission", parameters)


def test_a_policy_without_parameters_takes_none():
    with pytest.raises(ConfigError, match="allowed: no parameters"):
        construct(None_, "policies.retention", {"ttl": 3})
    assert isinstance(construct(None_, "policies.retention", {}), None_)
