"""N workers: a program starts when a worker is free."""

from dataclasses import replace

from serving_runs import run, tables

from simcore.traces.agent_programs import AgentTurn, Program, build_programs
from simcore.traces.workload import Source


def programs(turns: int, count: int, workers: int, output: int = 4, **each):
    of = [Program([AgentTurn(8, output, **(each if k else {})) for k in range(turns)], start=None) for _ in range(count)]
    return build_programs(of, Source("workers"), workers=workers, block_tokens=4)


def test_as_many_programs_are_under_way_as_there_are_workers():
    for path in ("planned", "step-by-step"):
        result = run(programs(3, 7, 2, gap=1.5), cost=tables(0.5), path=path)
        table = result.programs
        assert (table["finished_turns"] == 3).all()
        starts, ends = sorted(table["arrival"]), sorted(table["ended"])
        assert starts[:2] == [0.0, 0.0]
        assert starts[2:] == ends[:5]  # each other one starts when one ends
        assert result.requests["turn"].max() == 2


def test_a_program_that_is_refused_frees_its_worker():
    result = run(programs(2, 3, 1, output=4000), cost=tables(0.5), blocks=8)
    assert result.requests["status"].tolist() == ["refused", "cancelled"] * 3


def test_a_client_gives_up_at_the_end_of_the_turn_that_passes_its_limit():
    work = replace(programs(5, 1, 1, gap=1.0), time_limit=6.0)  # turns end at 2, 5, 8: 4 tokens at 0.5 s and a pause each
    for path in ("planned", "step-by-step"):
        table = run(work, cost=tables(0.5), path=path).requests
        assert table["status"].tolist() == ["finished"] * 3 + ["cancelled"] * 2
        assert table["ended"].tolist() == [2.0, 5.0, 8.0, 8.0, 8.0]
        assert table["reason"][3] == "its program is older than 6 s"
