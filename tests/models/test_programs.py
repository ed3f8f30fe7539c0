"""The programs table on cases worked by hand, on real runs, and against slow definitions."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_runs import run, tables, workload

from simcore.models.programs import PARTS, ideal_reuse, programs_table
from simcore.traces.workload import Workload


def requests_of(work: Workload, turns: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The requests table that a run would give. A turn: `arrival`, `admitted`, `first`, `ended`; `held_up` (s between two
    stays in the running list: then it was preempted), `cached`, `generated` (default: all), `status`, `reload_time`."""
    columns: dict[str, list[Any]] = {}
    for i, turn in enumerate(turns):
        finished = turn.get("status", "finished") == "finished"
        arrival, admitted, ended = (turn.get(name, nan) for name in ("arrival", "admitted", "ended"))
        row = {
            "request": i, "program": work.program[i], "turn": work.turn[i], "status": turn.get("status", "finished"),
            "input_tokens": work.input_tokens[i], "generated_tokens": turn.get(
                "generated", work.output_tokens[i] if finished else 0),
            "cached_tokens": turn.get("cached", 0), "preemptions": int("held_up" in turn), "arrival": arrival,
            "admitted": admitted, "first_token": turn.get("first", nan), "ended": ended, "queue_time": admitted - arrival,
            "service": ended - admitted - turn.get("held_up", 0.0) if finished else 0.0,
        } | ({"reload_time": turn["reload_time"]} if "reload_time" in turn else {})
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return pd.DataFrame(columns).astype({"status": "string"})


def parts(table: pd.DataFrame, program: int = 0) -> list[float]:
    """[queueing, prefill, decode, tool, reload]"""
    return table.loc[program, list(PARTS)].tolist()


def test_closed_loop_with_a_tool_and_a_preemption() -> None:
    """Turn 0: 1-8. The tool runs 3 s and waits 1 s for its slot. Turn 1: 12-30; 2 s in the queue, first token 4 s later,
    preempted for 5 s while it decodes."""
    work = workload([
        {"at": 1.0, "prompt": 100, "output": 4, "program": 0},
        {"after": [0], "gap": 3.0, "prompt": 200, "output": 8, "program": 0, "turn": 1},
    ])
    requests = requests_of(work, [
        {"arrival": 1.0, "admitted": 2.0, "first": 5.0, "ended": 8.0},
        {"arrival": 12.0, "admitted": 14.0, "first": 18.0, "ended": 30.0, "held_up": 5.0, "cached": 96},
    ])
    table = programs_table(requests, work)
    assert parts(table) == [1.0 + 2.0 + 5.0, 3.0 + 4.0, 3.0 + 7.0, 4.0, 0.0]
    first = table.iloc[0]
    assert (first["arrival"], first["ended"], first["jct"], first["turns"], first["finished_turns"]) == (1, 30, 29, 2, 2)
    assert (first["input_tokens"], first["output_tokens"], first["cached_tokens"]) == (300, 12, 96)
    assert (first["queue_time"], first["preemptions"]) == (3.0, 1)
    assert "usd" not in table


def test_a_preemption_before_the_first_token_leaves_the_prefill_at_most_the_service() -> None:
    work = workload([{"at": 0.0, "prompt": 100, "output": 1}])
    requests = requests_of(work, [{"arrival": 0.0, "admitted": 1.0, "first": 9.0, "ended": 9.0, "held_up": 6.0}])
    assert parts(programs_table(requests, work)) == [1.0 + 6.0, 2.0, 0.0, 0.0, 0.0]


def test_reload_is_taken_out_of_the_wait() -> None:
    work = workload([{"at": 0.0, "prompt": 9, "output": 1}, {"after": [0], "prompt": 9, "output": 1, "program": 0}])
    requests = requests_of(work, [
        {"arrival": 0.0, "admitted": 3.0, "first": 4.0, "ended": 4.0, "reload_time": 2.5},
        {"arrival": 4.0, "admitted": 5.0, "first": 7.0, "ended": 7.0, "reload_time": 1.5},
    ])
    assert parts(programs_table(requests, work)) == [0.5, 3.0, 0.0, 0.0, 2.5 + 1.0]


def test_sub_agents_side_by_side() -> None:
    """0 calls 1 and 2; 3 waits for both. The path is 0, 2, 3; what 1 did beside it does not count."""
    own = {"prompt": 10, "output": 2, "program": 0}
    work = workload([
        {"at": 0.0, **own}, {"after": [0], "gap": 1.0, "turn": 1, **own}, {"after": [0], "gap": 2.0, "turn": 2, **own},
        {"after": [1, 2], "gap": 0.5, "turn": 3, **own},
    ])
    requests = requests_of(work, [
        {"arrival": 0.0, "admitted": 0.0, "first": 1.0, "ended": 4.0},
        {"arrival": 5.0, "admitted": 9.0, "first": 9.5, "ended": 10.0},
        {"arrival": 6.0, "admitted": 6.25, "first": 8.0, "ended": 16.0},
        {"arrival": 16.5, "admitted": 17.5, "first": 18.0, "ended": 20.0},
    ])
    table = programs_table(requests, work)
    assert parts(table) == [0.25 + 1.0, 1.0 + 1.75 + 0.5, 3.0 + 8.0 + 2.0, 2.0 + 0.5, 0.0]
    assert table["queue_time"][0] == 0.0 + 4.0 + 0.25 + 1.0  # the sum over all turns


def test_recorded_clock_where_turns_overlap() -> None:
    """1 arrives while 0 runs; 2 after the end of 0 and during 1. The path is 0, 2."""
    own = {"prompt": 10, "output": 2, "program": 0}
    work = workload([{"at": 2.0, **own}, {"at": 3.0, "turn": 1, **own}, {"at": 6.0, "turn": 2, **own}])
    requests = requests_of(work, [
        {"arrival": 2.0, "admitted": 2.0, "first": 4.0, "ended": 5.0},
        {"arrival": 3.0, "admitted": 4.0, "first": 6.0, "ended": 9.0},
        {"arrival": 6.0, "admitted": 8.0, "first": 11.0, "ended": 15.0},
    ])
    assert parts(programs_table(requests, work)) == [2.0, 2.0 + 3.0, 1.0 + 4.0, 1.0, 0.0]
    # Without the third turn the path is 1 alone: nothing had ended before it came, 1 s after the program.
    assert parts(programs_table(requests[:2], work.take(np.arange(2)))) == [1.0, 2.0, 3.0, 1.0, 0.0]


def test_a_turn_that_arrives_at_the_very_end_of_another_follows_it() -> None:
    own = {"prompt": 10, "output": 2, "program": 0}
    work = workload([{"at": 0.0, **own}, {"at": 5.0, "turn": 1, **own}, {"at": 5.0, "turn": 2, **own}])
    moment = {"arrival": 5.0, "admitted": 5.0, "first": 5.0, "ended": 5.0}  # two turns that take no time: no circle
    requests = requests_of(work, [{"arrival": 0.0, "admitted": 1.0, "first": 2.0, "ended": 5.0}, moment, moment])
    assert parts(programs_table(requests, work)) == [1.0, 1.0, 3.0, 0.0, 0.0]


def test_a_wait_for_another_program_is_tool_time() -> None:
    work = workload([
        {"at": 0.0, "prompt": 9, "output": 1, "program": 0}, {"at": 1.0, "prompt": 9, "output": 1, "program": 1},
        {"after": [0, 1], "gap": 1.0, "prompt": 9, "output": 1, "program": 0, "turn": 1},
    ])
    requests = requests_of(work, [
        {"arrival": 0.0, "admitted": 0.0, "first": 2.0, "ended": 2.0},
        {"arrival": 1.0, "admitted": 2.0, "first": 7.0, "ended": 7.0},
        {"arrival": 8.0, "admitted": 8.0, "first": 9.0, "ended": 9.0},
    ])
    table = programs_table(requests, work)
    assert parts(table) == [0.0, 3.0, 0.0, 6.0, 0.0] and parts(table, 1) == [1.0, 5.0, 0.0, 0.0, 0.0]


def test_programs_that_did_not_finish() -> None:
    """Program 0 has a refused turn, 1 a turn cut by the horizon, 2 one that never came, 3 is whole."""
    own = {"prompt": 10, "output": 5}
    work = workload([
        {"at": 0.0, "program": 0, **own}, {"at": 1.0, "program": 1, **own}, {"at": 2.0, "program": 2, **own},
        {"at": 3.0, "program": 3, **own}, {"after": [0], "program": 0, "turn": 1, **own},
        {"after": [1], "program": 1, "turn": 1, **own}, {"after": [2], "program": 2, "turn": 1, **own},
    ])
    whole = {"admitted": 4.0, "first": 5.0, "ended": 6.0}
    requests = requests_of(work, [
        {"arrival": 0.0, **whole}, {"arrival": 1.0, **whole}, {"arrival": 2.0, **whole}, {"arrival": 3.0, **whole},
        {"arrival": 6.0, "ended": 6.0, "status": "refused"},
        {"arrival": 6.0, "admitted": 6.5, "first": 7.0, "generated": 2, "status": "unfinished"}, {"status": "unfinished"},
    ])
    table = programs_table(requests, work)
    assert table["finished_turns"].tolist() == [1, 1, 1, 1] and table["turns"].tolist() == [2, 2, 2, 1]
    assert table["ended"].tolist() == [6.0] * 4 and table["output_tokens"].tolist() == [5, 7, 5, 5]
    np.testing.assert_array_equal(table["jct"], [nan, nan, nan, 3.0])
    assert table[list(PARTS)].iloc[:3].isna().all(axis=None)
    assert parts(table, 3) == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert table["queue_time"].tolist() == [4.0, 3.5, 2.0, 1.0]


def test_a_turn_that_is_cancelled_while_another_that_it_waits_for_still_runs() -> None:
    """0 is refused at 0, and so 2, which waits for 0 and 1, is cancelled; 1 ends later, and so came after 2."""
    own = {"program": 0, "prompt": 10, "output": 5}
    work = workload([{"at": 0.0, **own}, {"at": 0.0, "turn": 1, **own}, {"after": [0, 1], "turn": 2, **own}])
    requests = requests_of(work, [
        {"arrival": 0.0, "ended": 0.0, "status": "refused"}, {"arrival": 0.0, "admitted": 0.0, "first": 1.0, "ended": 5.0},
        {"ended": 0.0, "status": "cancelled"},
    ])
    table = programs_table(requests, work)
    assert (table["finished_turns"][0], table["ended"][0]) == (1, 5.0) and isnan(table["jct"][0])


def test_cost_is_shared_by_service() -> None:
    work = workload([{"at": 0.0, "prompt": 9, "output": 2, "program": p} for p in (0, 1, 1)])
    turn = {"arrival": 0.0, "admitted": 1.0, "first": 2.0}
    requests = requests_of(work, [{**turn, "ended": 4.0}, {**turn, "ended": 2.0}, {**turn, "ended": 9.0, "held_up": 4.0}])
    assert programs_table(requests, work, 16.0)["usd"].tolist() == [6.0, 10.0]
    requests["service"] = 0.0
    assert programs_table(requests, work, 16.0)["usd"].isna().all()


def test_a_table_of_another_workload_is_refused() -> None:
    work = workload([{"at": 0.0, "prompt": 9, "output": 2}] * 2)
    with pytest.raises(ValueError, match="1 requests in the table, 2 in the workload"):
        programs_table(requests_of(work.take(np.arange(1)), [{}]), work)


def test_reuse() -> None:
    """Blocks of 4. Turn 1 goes on from turn 0 (18 tokens are known of it, in 5 blocks) and finds 2 blocks cached; turn 2
    branches off behind block 2; program 1 shares with program 0, which does not count; turn 3 was never admitted."""
    own = {"program": 0, "output": 4}
    work = workload([
        {"at": 0.0, "prompt": 14, "ids": [0, 1, 2, 3, 4], "known": 18, **own},
        {"at": 1.0, "prompt": 9, "output": 1, "ids": [0, 1], "program": 1},
        {"after": [0], "turn": 1, "prompt": 30, "ids": range(8), "known": 30, **own},
        {"after": [2], "turn": 2, "prompt": 20, "ids": [0, 1, 2, 20, 21], "known": 20, **own},
        {"after": [3], "turn": 3, "prompt": 20, "ids": [0, 1, 2, 20, 21], "known": 20, **own},
    ])
    requests = requests_of(work, [
        *({"arrival": t, "admitted": t, "first": t, "ended": t, "cached": c} for t, c in enumerate([0, 8, 8, 16])),
        {"status": "refused"},
    ])
    assert ideal_reuse(requests, work).tolist() == [0, 0, 18, 12, 0]
    table = programs_table(requests, work)
    assert table["ideal_reuse_tokens"].tolist() == [30, 0]
    assert table["reused_tokens"].tolist() == [8 + 12, 0]  # 4 of the last turn's 16 are another program's, or the tail's
    assert table["recomputed_tokens"].tolist() == [10, 0]


def test_a_turn_cut_short_leaves_only_what_it_held() -> None:
    """Of turn 0's 40 tokens in 10 blocks the model's length let only 8 + 3 come to be."""
    own = {"program": 0, "prompt": 8, "ids": range(10)}
    work = workload([{"at": 0.0, "output": 32, **own}, {"after": [0], "turn": 1, "output": 2, **own, "prompt": 38}])
    whole = {"arrival": 0.0, "admitted": 0.0, "first": 0.0, "ended": 0.0}
    assert ideal_reuse(requests_of(work, [{**whole, "generated": 3}, whole]), work).tolist() == [0, 11]


def test_a_real_run_in_a_closed_loop() -> None:
    """Steps of 1 s, one request at a time. Program 0: 0-2, gap 3, then 5-7; program 1 comes at 1 and waits for a place
    until 2, when turn 0 is over: 2-5. Turn 1 meets an empty replica. Its prompt of 12 starts with the 8 of turn 0."""
    work = workload([
        {"at": 0.0, "prompt": 8, "output": 2, "ids": [0, 1], "program": 0},
        {"at": 1.0, "prompt": 4, "output": 3, "program": 1},
        {"after": [0], "gap": 3.0, "prompt": 12, "output": 2, "ids": [0, 1, 2], "program": 0, "turn": 1},
    ])
    result = run(work, settings={"max_num_seqs": 1}, cost=tables(1.0))
    table = programs_table(result.requests, work)
    assert parts(table) == [0.0, 2.0, 2.0, 3.0, 0.0] and parts(table, 1) == [1.0, 1.0, 2.0, 0.0, 0.0]
    assert table["jct"].tolist() == [7.0, 4.0]
    assert table["ideal_reuse_tokens"].tolist() == [8, 0] and table["reused_tokens"].tolist() == [8, 0]


def test_a_real_run_with_preemptions() -> None:
    """Three blocks for two requests of one block and a growing need: the second is preempted after its first token, waits
    4 s and goes on."""
    work = workload([{"at": 0.0, "prompt": 4, "output": 5}, {"at": 0.0, "prompt": 4, "output": 3}])
    requests = run(work, blocks=3).requests
    table = programs_table(requests, work)
    assert table["preemptions"].tolist() == [0, 1]
    assert parts(table) == [0.0, 1.0, 4.0, 0.0, 0.0]
    assert parts(table, 1) == [7.0 - requests["service"][1], 1.0, requests["service"][1] - 1.0, 0.0, 0.0]


# --- against slow definitions -------------------------------------------------------------------------------------------

SHORT = st.sampled_from([0.0, 0.1, 0.3, 1.0, 7.7])


@st.composite
def played(draw: st.DrawFn) -> tuple[Workload, pd.DataFrame]:
    """A workload of a few programs, with recorded arrivals and waits of every shape, and a made-up run of it."""
    rows: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    clock = 0.0
    for i in range(draw(st.integers(1, 12))):
        row = {"program": draw(st.integers(0, 2)), "turn": i, "prompt": draw(st.integers(1, 9)), "output": 3}
        waits = draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []
        waits = [k for k in waits if turns[k].get("status") is None]
        if waits:
            row |= {"after": waits, "gap": draw(SHORT)}
            arrival = max(turns[k]["ended"] for k in waits) + row["gap"] + draw(SHORT)
        else:
            arrival = clock = clock + draw(SHORT)
            row["at"] = arrival
        admitted = arrival + draw(SHORT)
        first = admitted + draw(SHORT)
        turn = {"arrival": arrival, "admitted": admitted, "first": first, "ended": first + draw(SHORT),
                "reload_time": draw(SHORT), "cached": draw(st.integers(0, 12))}
        if draw(st.integers(0, 4)) == 0:
            turn["held_up"] = draw(st.floats(0, 1)) * (turn["ended"] - admitted)
        if draw(st.integers(0, 12)) == 0:
            turn |= {"status": draw(st.sampled_from(["refused", "unfinished", "cancelled"])), "admitted": nan, "first": nan}
            if turn["status"] == "cancelled":  # perhaps before what it waits for has ended
                turn |= {"arrival": nan, "ended": draw(st.floats(0, clock))}
        # Paths of a random tree: block b at depth d has the id of its path, so that ids are prefix identities.
        path = draw(st.lists(st.integers(0, 1), max_size=3))
        row["ids"] = [2 ** (d + 1) - 1 + int("".join(map(str, path[: d + 1])), 2) for d in range(len(path))]
        total = row["prompt"] + row["output"]
        row["ids"] = row["ids"][: -(-total // 4)]
        row["known"] = min(total, max(0, 4 * len(row["ids"]) - draw(st.integers(0, 3))))
        rows.append(row)
        turns.append(turn)
    work = workload(rows)
    return work, requests_of(work, turns)


def walked(work: Workload, requests: pd.DataFrame, program: int) -> tuple[list[int], float]:
    """(the critical path, backwards; seconds between its turns), as the module describes it."""
    rows = [i for i in range(len(work)) if work.program[i] == program]
    ended, arrival = requests["ended"].tolist(), requests["arrival"].tolist()
    path, between = [max(rows, key=lambda i: (ended[i], i))], 0.0
    while True:
        i = path[-1]
        before = [k for k in work.waits(i).tolist() if work.program[k] == program]
        before = before or [k for k in rows if ended[k] <= arrival[i] and (ended[k], k) < (ended[i], i)]
        if not before:
            return path, between + arrival[i] - min(arrival[k] for k in rows)
        path.append(max(before, key=lambda k: (ended[k], k)))
        between += arrival[i] - ended[path[-1]]


@given(played())
def test_the_parts_are_those_of_the_path_and_sum_to_the_jct(case: tuple[Workload, pd.DataFrame]) -> None:
    work, requests = case
    table = programs_table(requests, work)
    assert table["turns"].sum() == len(work)
    for row in table.to_dict("records"):
        mine = requests[requests["program"] == row["program"]]
        if (mine["status"] != "finished").any():
            assert all(isnan(row[name]) for name in ("jct", *PARTS))
            continue
        assert sum(row[name] for name in PARTS) == pytest.approx(row["jct"], rel=1e-9, abs=1e-12)
        assert min(row[name] for name in PARTS) >= -1e-12
        path, between = walked(work, requests, row["program"])
        on = requests.loc[path]
        assert row["tool"] == pytest.approx(between, abs=1e-9)
        prefill = np.minimum(on["first_token"] - on["admitted"], on["service"]).sum()
        assert row["prefill"] == pytest.approx(prefill, abs=1e-9)
        waited = (on["ended"] - on["arrival"] - on["service"]).sum()
        assert row["queueing"] + row["reload"] == pytest.approx(waited, abs=1e-9)


@given(played())
def test_reuse_against_sets_of_tokens(case: tuple[Workload, pd.DataFrame]) -> None:
    work, requests = case
    admitted = requests["admitted"].tolist()
    held: dict[int, set[tuple[int, int]]] = {}
    expected = [0] * len(work)
    for i in sorted((i for i in range(len(work)) if not isnan(admitted[i])), key=lambda i: admitted[i]):
        ids = work.ids(i)
        tokens = [(int(ids[k // work.block_tokens]), k % work.block_tokens) for k in range(work.known_tokens[i])]
        before = held.setdefault(int(work.program[i]), set())
        expected[i] = min(len([t for t in tokens if t in before]), int(work.input_tokens[i]))
        before.update(tokens[: work.input_tokens[i] + requests["generated_tokens"][i]])
    assert ideal_reuse(requests, work).tolist() == expected
    table = programs_table(requests, work)
    assert (table["reused_tokens"] + table["recomputed_tokens"] == table["ideal_reuse_tokens"]).all()
    assert (table["reused_tokens"] <= table["cached_tokens"]).all() and (table["recomputed_tokens"] >= 0).all()


def test_long_programs_against_a_trace_that_grows() -> None:
    """Six programs of forty turns, each all of the turn before and 1 .. 5 blocks more, interleaved: the ideal is the turn
    before, whole."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    expected, ids, taken = [], [np.zeros(0, dtype=np.int64)] * 6, 0
    for t in range(40):
        for p in range(6):
            more = int(rng.integers(1, 6))
            expected.append(4 * len(ids[p]))
            ids[p] = np.append(ids[p], np.arange(taken, taken + more))
            taken += more
            rows.append({"at": float(t), "program": p, "turn": t, "prompt": 4 * len(ids[p]) - 1, "output": 1, "ids": ids[p]})
    work = workload(rows)
    times = [{"arrival": k, "admitted": k, "first": k, "ended": k} for k in range(len(rows))]
    assert ideal_reuse(requests_of(work, times), work).tolist() == expected
