"""Tables: exactly the declared types, whatever the rows."""

import pytest

from simcore.recorder import Recorder, Table

COLUMNS = {"id": "int64", "at": "float64", "why": "string", "ok": "bool", "small": "int32"}


def test_declared_types_also_without_rows():
    recorder = Recorder()
    full = recorder.table("full", COLUMNS)
    recorder.table("empty", COLUMNS)
    full.append((1, 0.5, "late", True, 7))
    full.append((2, float("nan"), "", False, 8))
    frames = recorder.frames()
    assert list(frames) == ["full", "empty"]
    assert list(frames["full"].columns) == list(frames["empty"].columns) == list(COLUMNS)
    assert frames["full"].dtypes.equals(frames["empty"].dtypes)
    assert [str(dtype) for dtype in frames["empty"].dtypes] == ["int64", "float64", "string", "bool", "int32"]
    assert (len(frames["full"]), len(frames["empty"]), len(full)) == (2, 0, 0)
    assert frames["full"]["why"].tolist() == ["late", ""]


def test_whole_numbers_in_a_float_column_stay_floats():
    table = Recorder().table("t", {"bytes": "float64"})
    table.append((3,))
    assert str(table.frame()["bytes"].dtype) == "float64"


def test_rows_of_unequal_length_and_values_of_another_type_are_refused():
    ragged = Recorder().table("t", {"a": "int64", "b": "int64"})
    ragged.append((1, 2))
    ragged.append((3,))
    with pytest.raises(ValueError, match="zip"):
        ragged.frame()
    lossy = Recorder().table("t", {"a": "int64"})
    lossy.append((0.5,))
    with pytest.raises(TypeError, match="float"):
        lossy.frame()


def test_packed_rows_stay_in_order_and_are_sorted_if_asked():
    plain, sorted_ = Table("t", COLUMNS), Table("t", COLUMNS, order=("at", "id"))
    rows = [(k, float(k % 3), f"row {k}", k % 2 == 0, k) for k in range(10)]
    for k, row in enumerate(rows):
        for table in (plain, sorted_):
            table.append(row)
            if k in (3, 4, 7):
                table.pack()
            assert len(table) == k + 1
    assert list(plain.frame().itertuples(index=False, name=None)) == rows
    frame = sorted_.frame()
    assert list(frame.itertuples(index=False, name=None)) == sorted(rows, key=lambda row: (row[1], row[0]))
    assert frame.dtypes.equals(Table("t", COLUMNS).frame().dtypes)


def test_a_name_is_taken_once():
    recorder = Recorder()
    recorder.table("steps", COLUMNS)
    with pytest.raises(ValueError, match="'steps' exists already"):
        recorder.table("steps", COLUMNS)
