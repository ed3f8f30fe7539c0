"""YAML documents: durations, overrides, and errors that name the line, the key, what was found and what is allowed."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator

from simcore.config import Document, Seconds, parse_seconds
from simcore.errors import ConfigError


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Spread(Strict):
    mean: Annotated[float, Field(gt=0)]
    sd: float = 0.0


class Part(Strict):
    size: Annotated[int, Field(ge=1)] = 1
    kind: Literal["a", "b"] = "a"
    flag: bool = True
    label: str | None = None


class Named(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


class Whole(Strict):
    name: str
    part: Part = Part()
    parts: list[Part] = Field(default_factory=list)
    table: dict[str, list[Any]] = Field(default_factory=dict)
    length: Annotated[int, Field(ge=1)] | Spread | list[Annotated[int, Field(ge=1)]] = 1
    policy: Named | str = "x"
    wait: Seconds = 0.0
    ids: list[int] = Field(default_factory=list)

    @model_validator(mode="after")
    def _rule(self) -> Whole:
        if self.name == "forbidden":
            raise ValueError("no whole may be called forbidden")
        return self


@pytest.fixture
def document(tmp_path):
    def write(text: str) -> Document:
        path = tmp_path / "file.yaml"
        path.write_text(text, encoding="utf-8")
        return Document(path)

    return write


def refusal(document: Document) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        document.validate(Whole)
    assert "\n" not in str(caught.value)
    return caught.value


# --- durations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3s", 3), ("500ms", 0.5), ("20min", 1200), ("1h", 3600), ("7us", 7e-6), (2, 2), (0.25, 0.25), ("4", 4),
     (" 1.5 s ", 1.5), ("1e-3", 1e-3), ("-2s", -2), ("inf", math.inf), (math.inf, math.inf)],
)
def test_durations(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["3 parsecs", "", "s", "1:30", "3m", "--3s", "1e", None, True, False, [1], {}, "3s 4"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="a duration such as 3s"):
        parse_seconds(text)


@given(st.floats(-1e9, 1e9), st.sampled_from(["us", "ms", "s", "min", "h"]))
def test_every_number_with_a_unit_is_a_duration(number, unit):
    scale = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}[unit]
    assert parse_seconds(f"{number!r}{unit}") == pytest.approx(number * scale)


# --- files that are no study ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("name: a\npart: {size: 1\n", 3, "expected ',' or '}'"),
        ("name: a\npart:\n  size: 1\n   kind: a\n", 4, "mapping values are not allowed here"),
        ("name: 'a\n", 2, "end of stream"),
        ("name: a\nwait: 1s\nname: b\n", 3, "the key 'name' stands twice"),
        ("name: a\nparts:\n- size: 1\n  size: 2\n", 4, "the key 'size' stands twice"),
        ("name: a\n? [x, y]\n: 1\n", 2, "a key is a list or a mapping"),
        ("name: a\nlabel: \x01\n", 2, "special characters are not allowed"),
        ("name: a\n--- \nname: b\n", 2, "but found another document"),
        ("name: a\nids: *other\n", 2, "undefined alias"),
        ("name: a\nids: !python/object:os.system x\n", 2, "could not determine a constructor"),
        ("name: a\n\tpart: 1\n", 2, "found character"),
    ],
)
def test_what_is_no_yaml_is_refused_with_its_line(document, text, line, reason):
    with pytest.raises(ConfigError) as caught:
        document(text)
    assert "\n" not in str(caught.value)
    assert caught.value.where.endswith(f"file.yaml:{line}")
    assert "not valid YAML" in caught.value.why and reason in caught.value.why


@pytest.mark.parametrize("text", ["ids: &a [*a]\n", "ids: !!int many\n"])
def test_yaml_that_cannot_be_a_value(document, text):
    with pytest.raises(ConfigError, match="is not valid YAML"):
        document(text)


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n- b\n", "just words", "3"])
def test_what_is_no_mapping_is_refused(document, text):
    with pytest.raises(ConfigError, match="allowed: a mapping of keys to values"):
        document(text)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read \(No such file"):
        Document(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory"):
        Document(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        Document(tmp_path / "latin.yaml")


def test_dates_stay_text_and_merge_keys_work(document):
    data = document("name: 2024-02-30\nbase: &b {size: 3, flag: false}\npart: {<<: *b, size: 4}\n").data
    assert data["name"] == "2024-02-30"
    assert data["part"] == {"size": 4, "flag": False}


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "key", "found", "allowed", "why"),
    [
        ("part: {size: 2}\n", None, "name", None, "", "is missing"),
        ("name: a\nprat: 1\n", 2, "prat", None, "ids, length, name, part, parts, policy, table, wait", "unknown key"),
        ("name: a\npart:\n  kind: b\n  sise: 1\n", 4, "part.sise", None, "flag, kind, label, size", "unknown key"),
        ("name: a\npart:\n  size: 0\n", 3, "part.size", 0, "greater than or equal to 1", ""),
        ("name: a\npart:\n  size: many\n", 3, "part.size", "many", "a valid integer", ""),
        ("name: a\npart:\n  size: 2.5\n", 3, "part.size", 2.5, "a valid integer", ""),
        ("name: a\npart:\n  size: yes\n", 3, "part.size", None, "a number", "true or false"),
        ("name: a\npart:\n  kind: c\n", 3, "part.kind", "c", "'a' or 'b'", ""),
        ("name: a\npart:\n  flag: perhaps\n", 3, "part.flag", "perhaps", "a valid boolean", ""),
        ("name: a\npart: 3\n", 2, "part", 3, "a mapping of keys to values", ""),
        ("name: a\n\nparts:\n- size: 1\n\n- size: 0\n", 6, "parts.1.size", 0, "greater than or equal to 1", ""),
        ("name: a\nparts:\n- {size: 1}\n-\n  siz: 2\n", 5, "parts.1.siz", None, "flag, kind, label, size", "unknown key"),
        ("name: a\nparts: {size: 1}\n", 2, "parts", {"size": 1}, "a valid list", ""),
        ("name: a\nids:\n- 1\n- x\n", 4, "ids.1", "x", "a valid integer", ""),
        ("name: a\nids: [1, true]\n", 2, "ids.1", None, "a number", "true or false"),
        ("name: a\nwait: soon\n", 2, "wait", "soon", "a duration such as 3s", ""),
        ("name: a\ntable:\n  key.with.dots: 3\n", 3, "table.key.with.dots", 3, "a valid list", ""),
        ("name: forbidden\n", None, "", None, "", "no whole may be called forbidden"),
        ("name: [a]\n", 1, "name", ["a"], "a valid string", ""),
        # unions: the branch that was meant
        ("name: a\nlength: 0\n", 2, "length", 0, "greater than or equal to 1, or a mapping of keys to values, or", ""),
        ("name: a\nlength: {mean: 0}\n", 2, "length.mean", 0, "greater than 0", ""),
        ("name: a\nlength:\n  mean: 3\n  ds: 1\n", 4, "length.ds", None, "mean, sd", "unknown key"),
        ("name: a\nlength: {}\n", 2, "length.mean", None, "", "is missing"),
        ("name: a\nlength:\n- 1\n- 0\n", 4, "length.1", 0, "greater than or equal to 1", ""),
        ("name: a\npolicy: {by: 1}\n", 2, "policy.name", None, "", "is missing"),
        ("name: a\npolicy: {name: 3}\n", 2, "policy.name", 3, "a valid string", ""),
        ("name: a\npolicy: 3\n", 2, "policy", 3, "a mapping of keys to values, or a valid string", ""),
    ],
)
def test_errors_name_line_key_found_and_allowed(document, text, line, key, found, allowed, why):
    error = refusal(document(text))
    assert error.where.endswith("file.yaml" + (f":{line}" if line else ""))
    assert error.key == key
    assert error.found == found
    assert error.allowed.startswith(allowed) and bool(error.allowed) == bool(allowed)
    assert error.why.startswith(why) and bool(error.why) == bool(why)
    for part in (key, repr(found) if found is not None else "", allowed, why):
        assert part in str(error)


def test_an_unknown_key_is_told_before_other_errors(document):
    assert refusal(document("part: {size: 0}\nnmae: a\n")).key == "nmae"


# --- overrides ------------------------------------------------------------------------------------------------------


def test_overrides_are_read_as_yaml_and_make_missing_mappings(document):
    d = document("name: a\n")
    d.override(["part.size=3", "part.flag=false", "ids=[1, 2]", "length={mean: 2, sd: 1}"])
    d.override(["wait=20min", "part.label=a=b", "name = c "])
    w = d.validate(Whole)
    assert (w.part.size, w.part.flag, w.ids, w.length, w.wait) == (3, False, [1, 2], Spread(mean=2, sd=1), 1200)
    assert (w.part.label, w.name) == ("a=b", "c")


def test_an_override_of_an_empty_key_makes_a_mapping(document):
    d = document("name: a\npart:\n")
    d.override(["part.size=3"])
    assert d.validate(Whole).part.size == 3


@pytest.mark.parametrize(
    ("settings", "where", "key"),
    [
        (["part.size=0"], "--set part.size=0", "part.size"),
        (["part={size: 0}"], "--set part={size: 0}", "part.size"),
        (["prat.size=1"], "--set prat.size=1", "prat"),
        (["part.size=2", "part.sise=1"], "--set part.sise=1", "part.sise"),
        (["parts=[{}, {size: 0}]"], "--set parts=[{}, {size: 0}]", "parts.1.size"),
        (["part.size=0", "part={kind: c}"], "--set part={kind: c}", "part.kind"),
        (["part={kind: c}", "part.kind=d"], "--set part.kind=d", "part.kind"),
        (["part={kind: a}", "part.kind=d"], "--set part.kind=d", "part.kind"),
        (["a..b=1"], "--set a..b=1", "a"),
    ],
)
def test_an_error_in_an_override_names_the_override(document, settings, where, key):
    d = document("name: a\npart:\n  size: 5\n  kind: a\nparts:\n- size: 1\n- size: 2\n")
    d.override(settings)
    error = refusal(d)
    assert (error.where, error.key) == (where, key)


def test_lines_stay_right_beside_an_override(document):
    d = document("name: a\npart:\n  size: 5\n  kind: c\n")
    d.override(["part.size=3"])
    assert refusal(d).where.endswith("file.yaml:4")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("part.size", "allowed: key.path=value"),
        ("=3", "allowed: key.path=value"),
        ("part.size=[1", "the value is not valid YAML"),
        ("part.size={a: 1, a: 2}", "the key 'a' stands twice"),
        ("part.size={[1]: 2}", "the value is not valid YAML"),
        ("name.x=1", "name is not a mapping, so nothing can be set inside it: found 'a'"),
        ("ids.0=1", "ids is not a mapping"),
    ],
)
def test_overrides_that_cannot_be_laid_over(document, setting, reason):
    d = document("name: a\nids: [1]\n")
    with pytest.raises(ConfigError) as caught:
        d.override([setting])
    assert str(caught.value).startswith(f"--set {setting}: ") and reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_copy_is_independent(document):
    d = document("name: a\npart: {size: 1}\n")
    other = d.copy()
    other.put("part.size", 0, "elsewhere")
    assert d.validate(Whole).part.size == 1 and d.where(("part", "size")).endswith(":2")
    assert refusal(other).where == "elsewhere"


KEYS = st.text("abcdef", min_size=1, max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("xyz ", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12,
)


@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=4), st.booleans())
def test_every_key_knows_its_line(tmp_path_factory, data, flow):
    path = tmp_path_factory.mktemp("lines") / "file.yaml"
    path.write_text(yaml.safe_dump(data, default_flow_style=flow), encoding="utf-8")
    d = Document(path)
    assert d.data == data
    rows = path.read_text(encoding="utf-8").splitlines()
    for place, line in d.lines.items():
        if not place[-1].isdigit():
            assert f"{place[-1]}:" in rows[line - 1]
    assert {place[0] for place in d.lines} == set(data)


@given(st.lists(KEYS, min_size=1, max_size=4), VALUES)
def test_put_sets_just_what_it_is_told(tmp_path_factory, keys, value):
    path = tmp_path_factory.mktemp("put") / "file.yaml"
    path.write_text("name: a\n", encoding="utf-8")
    d = Document(path)
    d.put(".".join(keys), value, "here")
    place: Any = d.data
    for key in keys:
        place = place[key]
    assert place == value and d.data["name"] == "a"
    assert d.where(tuple(keys)) == "here" and d.where(("name",)) == f"{path}:1"
