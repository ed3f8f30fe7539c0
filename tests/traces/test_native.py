import gzip
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from token_worlds import any_workloads

from simcore.errors import TraceError
from simcore.traces.native import read_csv, read_jsonl, write_csv, write_jsonl
from simcore.traces.workload import Source, Workload, build

LENGTHS = '"input_tokens": 5, "output_tokens": 2'
IDENTITY = ("known_tokens", "block_tokens", "run_offsets", "run_first", "run_last")
shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def assert_equal(found: Workload, expected: Workload, skip: tuple[str, ...] = ()) -> None:
    for column in fields(Workload):
        if column.name in skip:
            continue
        a, b = getattr(found, column.name), getattr(expected, column.name)
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype, column.name
            assert np.array_equal(a, b, equal_nan=b.dtype.kind == "f"), column.name
        else:
            assert a == b, column.name


@shared_folder
@given(any_workloads())
def test_jsonl_round_trip_is_exact(tmp_path: Path, workload: Workload) -> None:
    for name in ("w.jsonl", "w.jsonl.gz"):
        write_jsonl(workload, tmp_path / name)
        assert_equal(read_jsonl(tmp_path / name), workload)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w.jsonl", "w.jsonl.gz"]


@shared_folder
@given(any_workloads())
def test_csv_round_trip_is_exact_but_for_identity_workers_and_tool_numbers(tmp_path: Path, workload: Workload) -> None:
    calls = [workload.calls(i) for i in range(len(workload))]
    called = {tool for row in calls for tool, _ in row}
    plain = build(
        arrival=workload.arrival, input_tokens=workload.input_tokens, output_tokens=workload.output_tokens,
        source=workload.source, priority=workload.priority, program=workload.program, turn=workload.turn,
        gap=workload.gap, waits=[workload.waits(i).tolist() for i in range(len(workload))], calls=calls,
        tools=tuple(f"a:{k}" if k in called else t if t.strip() else f"blank{t!r}" for k, t in enumerate(workload.tools)),
        tool=workload.tool, workers=workload.workers,
    )
    if workload.workers:
        with pytest.raises(TraceError, match="workers: CSV does not tell who starts a program: allowed: write_jsonl"):
            write_csv(plain, tmp_path / "w.csv")
        return
    write_csv(plain, tmp_path / "w.csv")
    found = read_csv(tmp_path / "w.csv")
    assert_equal(found, plain, skip=("source", "tools", "tool", "call_tool"))
    names = [plain.tools[t] if t >= 0 else None for t in plain.tool]
    assert [found.tools[t] if t >= 0 else None for t in found.tool] == names
    assert [found.tools[t] for t in found.call_tool] == [plain.tools[t] for t in plain.call_tool]


def test_equal_content_is_equal_bytes(tmp_path: Path) -> None:
    workload = build(arrival=np.array([0.1]), input_tokens=np.array([3]), output_tokens=np.array([1]), source=Source("here"))
    write_jsonl(workload, tmp_path / "a.gz")
    write_jsonl(workload, tmp_path / "b.gz")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text("old")
    workload = build(arrival=np.array([0.1]), input_tokens=np.array([3]), output_tokens=np.array([1]), source=Source("here"))
    monkeypatch.setattr("simcore.traces.native._rows", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_jsonl(workload, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_csv_refuses_to_lose_identity(tmp_path: Path) -> None:
    workload = build(
        arrival=np.zeros(1), input_tokens=np.array([3]), output_tokens=np.array([1]), source=Source("here"),
        known_tokens=np.array([3]), block_ids=[np.array([0])],
    )
    with pytest.raises(TraceError, match="known_tokens: CSV carries no token identity: allowed: write_jsonl"):
        write_csv(workload, tmp_path / "w.csv")
    assert not list(tmp_path.iterdir())


def test_a_carriage_return_in_a_tool_name_survives_csv(tmp_path: Path) -> None:
    workload = build(
        arrival=np.zeros(1), input_tokens=np.array([3]), output_tokens=np.array([1]), source=Source("here"),
        tools=("a\rb",), tool=np.array([0]),
    )
    write_csv(workload, tmp_path / "w.csv")
    assert read_csv(tmp_path / "w.csv").tools == ("a\rb",)


def test_csv_refuses_a_call_whose_tool_would_read_as_two(tmp_path: Path) -> None:
    workload = build(
        arrival=np.array([0, np.nan]), input_tokens=np.array([3, 3]), output_tokens=np.array([1, 1]), source=Source("here"),
        tools=("run tests",), waits=[[], [0]], calls=[[], [(0, 1.5)]],
    )
    with pytest.raises(TraceError, match="calls: found 'run tests': allowed: names without white space, or write_jsonl"):
        write_csv(workload, tmp_path / "w.csv")
    write_jsonl(workload, tmp_path / "w.jsonl")
    assert_equal(read_jsonl(tmp_path / "w.jsonl"), workload)


def test_a_row_without_arrival_is_started_by_a_worker_where_there_are_some(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(f'{{"simcore_trace": 1, "workers": 2}}\n{{{LENGTHS}}}\n{{"wait_for": [0], {LENGTHS}}}\n{{{LENGTHS}}}\n')
    workload = read_jsonl(path)
    assert workload.workers == 2
    assert workload.by_worker.tolist() == [True, False, True]
    path.write_text(f'{{"simcore_trace": 1, "workers": -1}}\n{{{LENGTHS}}}\n')
    with pytest.raises(TraceError, match=r"w\.jsonl:1: workers: found -1"):
        read_jsonl(path)


def test_calls_in_csv(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text("arrival,input_tokens,output_tokens,wait_for,calls\n0,1,1,,\n,1,1,0,a:1 b:c:2.5 a:0\n")
    workload = read_csv(path)
    assert workload.tools == ("a", "b:c")
    assert workload.calls(1) == [(0, 1.0), (1, 2.5), (0, 0.0)]
    assert workload.pause.tolist() == [0, 2.5]
    for cell in ("a", "a:", "a:x", ":1", "a:-1", "a:inf"):
        path.write_text(f"arrival,input_tokens,output_tokens,wait_for,calls\n0,1,1,,\n,1,1,0,{cell}\n")
        with pytest.raises(TraceError, match=r"w\.csv:3: calls: found"):
            read_csv(path)


def test_csv_refuses_a_tool_name_that_would_read_as_none(tmp_path: Path) -> None:
    workload = build(
        arrival=np.zeros(1), input_tokens=np.array([3]), output_tokens=np.array([1]), source=Source("here"),
        tools=(" ",), tool=np.array([0]),
    )
    with pytest.raises(TraceError, match="tools: found ' ': allowed: names that are not blank"):
        write_csv(workload, tmp_path / "w.csv")


BAD_JSONL = [  # (line 2, what the message says after file and line)
    (f'{{"arrival": 1, {LENGTHS}', "not a whole JSON object"),
    ("[1]", "found [1]: allowed: a JSON object"),
    (f'{{"arrival": 1, "arrival": 2, {LENGTHS}}}', "a key stands twice"),
    (f'{{"arrival": 1, {LENGTHS}, "colour": 3}}', "colour: unknown key: allowed: input_tokens, output_tokens, arrival"),
    ('{"arrival": 1, "input_tokens": 5}', "output_tokens: missing: allowed: input_tokens, output_tokens"),
    (f"{{{LENGTHS}}}", "arrival: found 'neither': allowed: either arrival or wait_for"),
    (f'{{"arrival": 1, "wait_for": [0], {LENGTHS}}}', "arrival: found 'both': allowed: either arrival or wait_for"),
    (f'{{"arrival": NaN, {LENGTHS}}}', "arrival: found nan: allowed: a finite number, at least 0"),
    (f'{{"arrival": 1e999, {LENGTHS}}}', "arrival: found inf: allowed: a finite number"),
    (f'{{"arrival": -1, {LENGTHS}}}', "arrival: found -1: allowed: a finite number"),
    (f'{{"arrival": "1", {LENGTHS}}}', "arrival: found '1': allowed: a finite number"),
    (f'{{"arrival": true, {LENGTHS}}}', "arrival: found True: allowed: a finite number"),
    (f'{{"arrival": 0.25, {LENGTHS}}}', "arrival: time goes backwards: found 0.25: allowed: at least 0.5"),
    ('{"arrival": 1, "input_tokens": 0, "output_tokens": 2}', "input_tokens: found 0: allowed: a whole number, 1 to"),
    ('{"arrival": 1, "input_tokens": -4, "output_tokens": 2}', "input_tokens: found -4: allowed: a whole number, 1 to"),
    ('{"arrival": 1, "input_tokens": 4.0, "output_tokens": 2}', "input_tokens: found 4.0: allowed: a whole number, 1 to"),
    ('{"arrival": 1, "input_tokens": 4, "output_tokens": true}', "output_tokens: found True: allowed: a whole number, 1 to"),
    (f'{{"arrival": 1, {LENGTHS}, "priority": "high"}}', "priority: found 'high': allowed: a whole number"),
    (f'{{"arrival": 1, {LENGTHS}, "program": 0}}', "program: given in some rows only: allowed: in every row or in none"),
    (f'{{"arrival": 1, {LENGTHS}, "gap": 2}}', "gap: found 2.0: allowed: 0 in a row that waits for none"),
    (f'{{"wait_for": [1], {LENGTHS}}}', "wait_for: found [1]: allowed: numbers of earlier rows, counted from 0"),
    (f'{{"wait_for": [-1], {LENGTHS}}}', "wait_for: found [-1]: allowed: numbers of earlier rows"),
    (f'{{"wait_for": 0, {LENGTHS}}}', "wait_for: found 0: allowed: numbers of earlier rows"),
    (f'{{"wait_for": [0], "gap": -1, {LENGTHS}}}', "gap: found -1: allowed: a finite number, at least 0"),
    (f'{{"arrival": 1, {LENGTHS}, "tool": 3}}', "tool: found 3: allowed: a name"),
    (f'{{"wait_for": [0], {LENGTHS}, "calls": 3}}', "calls: found 3: allowed: a list of [tool, seconds]"),
    (f'{{"wait_for": [0], {LENGTHS}, "calls": [["a"]]}}', "calls: found ['a']: allowed: [tool, seconds]"),
    (f'{{"wait_for": [0], {LENGTHS}, "calls": [[3, 1]]}}', "calls: found 3: allowed: a name"),
    (f'{{"wait_for": [0], {LENGTHS}, "calls": [["a", -1]]}}', "calls: found -1: allowed: a finite number, at least 0"),
    (f'{{"arrival": 1, {LENGTHS}, "calls": [["a", 1]]}}', "calls: found [['a', 1]]: allowed: none in a row that waits for"),
    (f'{{"arrival": 1, {LENGTHS}, "ids": [[0, 0]]}}', "ids: ids and known_tokens come together"),
    (f'{{"arrival": 1, {LENGTHS}, "known_tokens": 8, "ids": [[0, 0]]}}', "known_tokens: found 8: allowed: a whole"),
    (f'{{"arrival": 1, {LENGTHS}, "known_tokens": 7, "ids": [[3, 2]]}}', "ids: found [3, 2]: allowed: inclusive runs"),
    (f'{{"arrival": 1, {LENGTHS}, "known_tokens": 7, "ids": [[-1, -1]]}}', "ids: found [-1, -1]: allowed: inclusive runs"),
    (f'{{"arrival": 1, {LENGTHS}, "known_tokens": 7, "ids": ["0"]}}', "ids: found '0': allowed: inclusive runs"),
    (f'{{"arrival": 1, {LENGTHS}, "known_tokens": 7, "ids": [[0, 1]]}}', "ids: found '2 ids': allowed: 1 ids: known"),
]


@pytest.mark.parametrize(("line", "message"), BAD_JSONL)
def test_a_bad_row_is_refused_or_skipped_and_listed(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "w.jsonl"
    after = f'{{"wait_for": [1], {LENGTHS}}}\n{{"arrival": 2, {LENGTHS}}}\n{{"wait_for": [3], "gap": 0.5, {LENGTHS}}}\n'
    path.write_text(f'{{"arrival": 0.5, {LENGTHS}}}\n{line}\n{after}')
    with pytest.raises(TraceError) as refused:
        read_jsonl(path)
    assert str(refused.value).startswith(f"{path}:2: ")
    assert message in str(refused.value)
    workload = read_jsonl(path, skip_bad=True)
    assert workload.skipped[0] == str(refused.value)
    assert workload.skipped[1].startswith(f"{path}:3: wait_for: a row that it waits for was left out")
    assert len(workload.skipped) == 2
    assert len(workload) == 3
    assert workload.waits(2).tolist() == [1]  # row 3 of the file is row 1 of what stays


BAD_HEADERS = [
    ('{"simcore_trace": 2}', "simcore_trace: found 2"),
    ('{"simcore_trace": 1, "block_tokens": 0}', "block_tokens: found 0: allowed: a whole number, at least 1"),
    ('{"simcore_trace": 1, "blocks": 16}', "blocks: unknown key"),
    ('{"simcore_trace": 1, "tools": ["a", 1]}', "tools: found ['a', 1]: allowed: a list of strings"),
    ('{"simcore_trace": 1, "tools": ["a", "a"]}', "allowed: each tool once"),
    ('{"simcore_trace": 1, "source": "x"}', "source: found 'x': allowed: an object"),
    ('{"simcore_trace": 1, "source": {"name": 1}}', "source: name: found 1: allowed: a string"),
    ('{"simcore_trace": 1, "source": {}}', "source: name: missing"),
]


@pytest.mark.parametrize(("header", "message"), BAD_HEADERS)
def test_a_bad_header_is_refused_even_when_bad_rows_are_skipped(tmp_path: Path, header: str, message: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(f'{header}\n{{"arrival": 0, {LENGTHS}}}\n')
    with pytest.raises(TraceError) as refused:
        read_jsonl(path, skip_bad=True)
    assert str(refused.value).startswith(f"{path}:1: ")
    assert message in str(refused.value)


def test_a_tool_that_the_header_does_not_list(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(f'{{"simcore_trace": 1, "tools": ["bash"]}}\n{{"arrival": 0, "tool": "curl", {LENGTHS}}}\n')
    with pytest.raises(TraceError, match=":2: tool: found 'curl': allowed: bash"):
        read_jsonl(path)


def test_ids_that_are_no_prefix_identities(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    lengths = '"input_tokens": 32, "output_tokens": 1, "known_tokens": 32'
    path.write_text(f'{{"arrival": 0, {lengths}, "ids": [[0, 1]]}}\n{{"arrival": 0, {lengths}, "ids": [[2, 2], [1, 1]]}}\n')
    with pytest.raises(TraceError, match=":2: ids: an id stands behind another prefix than before"):
        read_jsonl(path)


BAD_CSV = [
    ("1,5", "cells: found 2: allowed: 3: arrival,input_tokens,output_tokens"),
    ("1,5,2,9", "cells: found 4: allowed: 3"),
    ("1,,2", "input_tokens: found '': allowed: a whole number"),
    (",5,2", "arrival: found 'neither'"),
    ("1,5.0,2", "input_tokens: found 5.0: allowed: a whole number"),
    ("1,1_0,2", "input_tokens: found '1_0'"),
    ("nan,5,2", "arrival: found 'nan': allowed: a finite number"),
    ("1,٣,2", "input_tokens: found '٣'"),
    ('1,"5,2', "not a CSV row"),
]


@pytest.mark.parametrize(("line", "message"), BAD_CSV)
def test_bad_csv(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "w.csv"
    path.write_text(f"arrival,input_tokens,output_tokens\n0,5,2\n{line}\n")
    with pytest.raises(TraceError) as refused:
        read_csv(path)
    assert str(refused.value).startswith(f"{path}:3: ")
    assert message in str(refused.value)
    skipping = read_csv(path, skip_bad=True)
    assert (len(skipping), skipping.skipped) == (1, (str(refused.value),))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("arrival,input_tokens", "output_tokens: missing"),
        ("arrival,input_tokens,output_tokens,x", "x: unknown key"),
        ("arrival,input_tokens,output_tokens,gap,gap", "a column stands twice"),
    ],
)
def test_bad_csv_header(tmp_path: Path, header: str, message: str) -> None:
    path = tmp_path / "w.csv"
    path.write_text(header + "\n")
    with pytest.raises(TraceError) as refused:
        read_csv(path)
    assert str(refused.value).startswith(f"{path}:1: ")
    assert message in str(refused.value)


def test_blank_csv_cells_are_values_not_given(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text("arrival,input_tokens,output_tokens,wait_for,gap,tool\r\n0.5,5,2,,,\r\n\r\n,6,3,0,1.5,bash\r\n")
    workload = read_csv(path)
    assert workload.tools == ("bash",)
    assert workload.tool.tolist() == [-1, 0]
    assert workload.gap.tolist() == [0, 1.5]
    assert workload.waits(1).tolist() == [0]


@pytest.mark.parametrize("content", ["", "\n\n", "arrival,input_tokens,output_tokens\n"])
def test_a_file_without_requests(tmp_path: Path, content: str) -> None:
    path = tmp_path / "w"
    path.write_text(content)
    with pytest.raises(TraceError):
        (read_csv if "," in content else read_jsonl)(path)
    with pytest.raises(TraceError):
        read_csv(path)


def test_a_torn_gzip_file_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl.gz"
    whole = gzip.compress("".join(f'{{"arrival": {k}, {LENGTHS}}}\n' for k in range(999)).encode())
    path.write_bytes(whole[:-9])
    with pytest.raises(TraceError, match=r"w.jsonl.gz:\d+: the file is torn or not text"):
        read_jsonl(path)
    path.write_bytes(b'{"arrival": "\xff"}\n')
    with pytest.raises(TraceError, match=r"w.jsonl.gz:1: the file is torn or not text"):
        read_jsonl(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_jsonl(tmp_path / "absent")


def test_sparse_programs_are_renumbered_and_turns_counted(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text("".join(f'{{"arrival": 0, "program": {p}, {LENGTHS}}}\n' for p in (10**15, 7, 10**15)))
    workload = read_jsonl(path)
    assert workload.program.tolist() == [0, 1, 0]
    assert workload.turn.tolist() == [0, 0, 1]
