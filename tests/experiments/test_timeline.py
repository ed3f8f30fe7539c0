"""The timeline: held against the Trace Event Format, and against the tables that it is drawn from."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
import serving_runs as runs
import small_studies as small
from hypothesis import given, settings
from hypothesis import strategies as st
from test_agent_studies import STUDY

from simcore.errors import ConfigError
from simcore.experiments.timeline import run_timeline, write_timeline

# What each phase must have beside ph, pid, ts and name (Trace Event Format, 2016).
FIELDS = {
    "M": {"args"}, "X": {"tid", "dur", "cat"}, "C": {"args"}, "b": {"id", "cat"}, "e": {"id", "cat"}, "i": {"tid", "s"},
    "s": {"tid", "id", "cat"}, "t": {"tid", "id", "cat"}, "f": {"tid", "id", "cat", "bp"},
}


def check_trace(text):
    """The events of a file, or an AssertionError that says what a reader of the format would not take."""
    value = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert set(value) == {"traceEvents", "displayTimeUnit", "otherData"} and value["displayTimeUnit"] in ("ms", "ns")
    events = value["traceEvents"]
    named, open_, slices = set(), defaultdict(list), defaultdict(list)
    flows = defaultdict(list)
    last = -1
    for k, event in enumerate(events):
        phase = event["ph"]
        assert {"name", "pid", "ts"} | FIELDS[phase] <= set(event), event
        assert all(type(event[key]) is int for key in ("pid", "ts", "tid", "dur") if key in event), event
        assert event["ts"] >= 0 and event.get("dur", 0) >= 0 and isinstance(event["name"], str) and event["name"]
        if phase == "M":
            assert last == -1, "names come first"
            key = "sort_index" if event["name"] == "process_sort_index" else "name"
            assert event["name"] in ("process_name", "thread_name", "process_sort_index") and key in event["args"]
            named.add((event["pid"], event["tid"] if event["name"] == "thread_name" else None))
            continue
        assert event["ts"] >= last, "time goes back"
        last = event["ts"]
        assert (event["pid"], None) in named, "a process without a name"
        if phase in "Xistf":
            assert (event["pid"], event["tid"]) in named, "a thread without a name"
        if phase == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif phase == "C":
            assert event["args"] and all(type(v) in (int, float) for v in event["args"].values())
        elif phase == "i":
            assert event["s"] in ("g", "p", "t")
        elif phase == "b":
            open_[event["pid"], event["cat"], event["id"]].append(event["name"])
        elif phase == "e":
            assert open_[event["pid"], event["cat"], event["id"]].pop() == event["name"], "async slices are not nested"
        else:
            flows[event["cat"], event["name"], event["id"]].append((k, phase, event))
    assert not any(open_.values()), "an async slice is never closed"
    for spans in slices.values():
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), "slices of a thread overlap"
    for parts in flows.values():
        phases = "".join(phase for _, phase, _ in parts)
        assert phases in ("sf", "stf"), f"a flow of {phases}"
        for _, phase, event in parts:
            bound = [s for s in slices[event["pid"], event["tid"]] if s[0] <= event["ts"] < max(s[1], s[0] + 1)]
            assert bound, f"flow {event['id']} ({phase}) binds to no slice"
            assert phase != "f" or event["bp"] == "e"
    return value


def by_phase(value, phase, **fields):
    return [e for e in value["traceEvents"] if e["ph"] == phase and all(e.get(k) == v for k, v in fields.items())]


AGENTS = [
    {"at": 0.0, "prompt": 8, "output": 3, "program": 0, "turn": 0},
    {"after": [0], "gap": 2.5, "prompt": 12, "output": 2, "program": 0, "turn": 1, "tool": 0},
    {"after": [0], "gap": 4.0, "prompt": 12, "output": 4, "program": 0, "turn": 2},
    {"at": 1.5, "prompt": 5, "output": 4, "program": 1},
    {"after": [1, 2], "gap": 0.0, "prompt": 16, "output": 1, "program": 0, "turn": 3},
]


@pytest.fixture(scope="module")
def agents():
    """Five requests by hand: a program whose second and third turn run side by side, and one of a single turn. A step takes
    a second."""
    work = runs.workload(AGENTS, tools=("grep",))
    return runs.run(work), work


def test_a_run_by_hand(agents, tmp_path):
    result, work = agents
    said = write_timeline(tmp_path / "t.json", result, work, 0.0, 60.0)
    value = check_trace((tmp_path / "t.json").read_text())
    assert said.notes == () and (said.start, said.end, said.events) == (0.0, 60.0, len(value["traceEvents"]))
    steps = by_phase(value, "X", cat="step")
    assert [e["ts"] + e["dur"] for e in steps] == [round(t * 1e6) for t in result.step_ends[0]]
    assert all(e["dur"] == 1_000_000 and e["args"]["device_us"] == 1_000_000 for e in steps)
    assert sum(e["args"]["tokens"] for e in steps) == result.summary["computed_tokens"]
    rows = result.requests
    turns = {e["args"]["request"]: e for e in by_phase(value, "X", cat="turn")}
    assert set(turns) == {0, 1, 2, 4}  # the program of one turn is among the requests only
    for i, e in turns.items():
        assert (e["ts"], e["ts"] + e["dur"]) == (round(rows["arrival"][i] * 1e6), round(rows["ended"][i] * 1e6))
    assert turns[1]["tid"] != turns[2]["tid"]
    tools = {e["args"]["next_request"]: e for e in by_phase(value, "X", cat="tool")}
    assert {i: (e["name"], e["dur"]) for i, e in tools.items()} == {1: ("grep", 2_500_000), 2: ("pause", 4_000_000)}
    flows = Counter(e["id"] for e in value["traceEvents"] if e["ph"] in "stf")
    assert flows == {"1": 3, "2": 3, "4": 2}
    last = max((1, 2), key=lambda i: rows["ended"][i])
    start = next(e for e in by_phase(value, "s") if e["id"] == "4")
    assert (start["tid"], start["ts"]) == (turns[last]["tid"], turns[last]["ts"] + turns[last]["dur"] - 1)
    outer = by_phase(value, "b", name="request")
    assert sorted(e["args"]["request"] for e in outer) == [0, 1, 2, 3, 4]
    spent = Counter()
    for kind, sign in (("e", 1), ("b", -1)):
        for e in by_phase(value, kind, pid=1):
            spent[e["id"], e["name"]] += sign * e["ts"]
    for i in range(5):
        assert spent[str(i), "request"] == round(rows["e2e"][i] * 1e6)
        assert sum(spent[str(i), part] for part in ("queue", "prefill", "decode")) == spent[str(i), "request"]


def test_without_its_steps_the_starts_are_inferred_and_the_same(agents, tmp_path):
    result, work = agents
    write_timeline(tmp_path / "full.json", result, work, 0.0, 60.0)
    sampled = runs.run(work, sample_every=1e9)
    said = write_timeline(tmp_path / "sampled.json", sampled, work, 0.0, 60.0)
    full, inferred = (by_phase(check_trace((tmp_path / f"{name}.json").read_text()), "X", cat="step")
                      for name in ("full", "sampled"))
    assert [(e["ts"], e["dur"]) for e in full] == [(e["ts"], e["dur"]) for e in inferred]
    assert "inferred" in said.notes[0] and inferred[-1]["args"]["start"] == "inferred"


@given(st.floats(0, 20), st.floats(0.001, 12))
@settings(max_examples=60)
def test_any_window_is_a_trace(agents, tmp_path_factory, start, length):
    result, work = agents
    path = tmp_path_factory.mktemp("w") / "t.json"
    try:
        write_timeline(path, result, work, start, start + length)
    except ConfigError as error:
        assert "nothing happens in it" in str(error)
        ended = result.requests["ended"].max()
        assert start >= ended
        return
    value = check_trace(path.read_text())
    low, high = round(start * 1e6), round((start + length) * 1e6)
    assert all(low <= e["ts"] <= high + 1 and e["ts"] + e.get("dur", 0) <= high + 1
               for e in value["traceEvents"] if e["ph"] != "M")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    path = tmp_path_factory.mktemp("agents") / "study.yaml"
    path.write_text(STUDY)
    return path


def test_a_study_of_agents(study, tmp_path):
    out = tmp_path / "t.json"
    said = run_timeline(study, ["seeds=[1]"], "continuum", None, "5s", "45s", out)
    value = check_trace(out.read_text())
    assert (said.start, said.end, said.notes) == (5.0, 45.0, ())
    kinds = Counter(e["ph"] for e in value["traceEvents"])
    assert min(kinds[phase] for phase in "XCbestf") > 5
    assert {"search", "fetch_url"} & {e["name"] for e in by_phase(value, "X", cat="tool")}
    again = tmp_path / "again.json"
    run_timeline(study, ["seeds=[1]"], "continuum", 1, "5s", "45s", again)
    assert again.read_bytes() == out.read_bytes()
    counted = [e["args"] for e in by_phase(value, "C", name="requests")]
    assert len(counted) == len(by_phase(value, "C", name="free KV blocks")) and max(c["running"] for c in counted) >= 1


def test_preemptions_and_refusals_are_marked(tmp_path):
    many = [{"at": 0.0, "prompt": 16, "output": 30} for _ in range(3)]
    work = runs.workload([*many, {"at": 1.0, "prompt": 900, "output": 1}])
    result = runs.run(work, blocks=20)
    assert result.summary["preemptions"] > 0 and result.summary["refused"] == 1
    write_timeline(tmp_path / "t.json", result, work, 0.0, 500.0)
    marks = by_phase(check_trace((tmp_path / "t.json").read_text()), "i")
    assert Counter(e["name"] for e in marks) == {"preempted": result.summary["preemptions"], "refused": 1}


def test_both_paths_give_one_timeline(tmp_path):
    file = small.small_file(tmp_path)
    from simcore.experiments.run import build_deployment, build_policies, build_workload
    from simcore.models.serving import serve

    study = file.arms[0].study
    work = build_workload(study.workload, tmp_path, 1)
    for path in ("planned", "step-by-step"):
        deployment, policies = build_deployment(study)[0], build_policies(study, tmp_path)
        result = serve(work, deployment, policies, seed=1, sample_every=0.0, path=path)
        write_timeline(tmp_path / f"{path}.json", result, work)
    texts = [(tmp_path / f"{path}.json").read_text() for path in ("planned", "step-by-step")]
    assert texts[0] == texts[1]
    pids = {e["pid"] for e in check_trace(texts[0])["traceEvents"]}
    assert pids == {1, 2}  # two replicas, no program of several turns


def test_a_window_of_too_much_is_cut_and_says_so(study, tmp_path):
    out = tmp_path / "t.json"
    file = small.small_file(tmp_path)
    from simcore.experiments.run import Job, build_workload, play

    chosen = file.arms[0].study.model_copy(update={"sample_every": 0.0})
    work = build_workload(chosen.workload, tmp_path, 1)
    result = play(Job(chosen, tmp_path, 1))
    said = write_timeline(out, result, work, 0.0, 60.0, most_events=900)
    value = check_trace(out.read_text())
    assert said.end < 60 and said.events < 1100 and "instead of 60.000000 s" in said.notes[0]
    assert value["otherData"]["simulated_window_s"] == [0.0, said.end] and value["otherData"]["notes"] == list(said.notes)
    with pytest.raises(ConfigError, match="more than 2 events at its start"):
        write_timeline(out, result, work, float(result.requests["arrival"].min()), 60.0, most_events=2)
    assert json.loads(out.read_text())  # what was there stays whole


@pytest.mark.parametrize(("start", "end"), [(5.0, 5.0), (6.0, 5.0), (-1.0, 5.0), (0.0, float("inf")), (float("nan"), 5.0)])
def test_a_window_that_is_none_is_refused(agents, tmp_path, start, end):
    result, work = agents
    with pytest.raises(ConfigError, match="0 <= start < end"):
        write_timeline(tmp_path / "t.json", result, work, start, end)
    assert not list(tmp_path.iterdir())


def test_an_empty_window_is_refused(agents, study, tmp_path):
    result, work = agents
    with pytest.raises(ConfigError, match=r"nothing happens in it.*allowed: a window within 0 \.\. "):
        write_timeline(tmp_path / "t.json", result, work, 1000.0, 1060.0)
    for arguments, message in (
        (("lru", None, "20s", "10s"), "a time after --start"), (("none", None, None, None), "allowed: lru"),
        (("lru", None, "soon", None), "--start"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_timeline(study, [], *arguments, tmp_path / "t.json")
    assert not list(tmp_path.iterdir())


def test_the_default_window_is_a_minute_from_the_first_arrival(agents, tmp_path):
    result, work = agents
    said = write_timeline(tmp_path / "t.json", result, work)
    assert (said.start, said.end) == (0.0, 60.0)


@pytest.mark.parametrize("broken", [
    lambda events: events[-1].update(ts=0.5), lambda events: events.append({"ph": "X", "name": "x", "pid": 9, "ts": 10**9}),
    lambda events: events.remove(next(e for e in events if e["ph"] == "f")), lambda events: events[-1].update(ts=0),
    lambda events: events.remove(next(e for e in events if e["ph"] == "e")),
])
def test_the_validator_sees_what_is_wrong(agents, tmp_path, broken):
    result, work = agents
    write_timeline(tmp_path / "t.json", result, work)
    value = json.loads((tmp_path / "t.json").read_text())
    broken(value["traceEvents"])
    with pytest.raises((AssertionError, KeyError)):
        check_trace(json.dumps(value))


def test_times_are_those_of_the_tables(study, tmp_path):
    """A tool that is under way at the end of the window reaches to it."""
    run_timeline(study, ["seeds=[1]"], "lru", None, "0s", "8s", tmp_path / "t.json")
    value = check_trace((tmp_path / "t.json").read_text())
    ends = [e["ts"] + e["dur"] for e in by_phase(value, "X", cat="tool")]
    assert max(ends) == 8_000_000 and np.count_nonzero(np.array(ends) == 8_000_000) >= 1
