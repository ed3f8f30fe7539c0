"""Generated agent programs against what the paper reports, and against recorded loops of other agents."""

from __future__ import annotations

import csv
import gzip

import numpy as np
import pytest
from shared_data import shared_file

from simcore.errors import TraceError
from simcore.traces.agent_generator import agent_workloads, generate_agents
from simcore.traces.info import best_cached_tokens
from simcore.traces.tool_times import Empirical
from simcore.traces.workload import Workload

PROGRAMS = {"swe-bench": 2000, "bfcl": 2000, "openhands": 300}


@pytest.fixture(scope="module")
def drawn() -> dict[str, Workload]:
    return {name: generate_agents(name, programs, rate=1.0, seed=1) for name, programs in PROGRAMS.items()}


def turns_of(w: Workload) -> np.ndarray:
    return np.bincount(w.program)


def tokens_of(w: Workload) -> np.ndarray:
    """Prompt and output of each program's last turn."""
    return np.array([w.total_tokens[w.program == p].max() for p in range(w.n_programs)])


def eta(turns: np.ndarray) -> float:
    """Memoryfulness: minus the correlation of turns done and turns to come."""
    done = np.concatenate([np.arange(1, n + 1) for n in turns])
    to_come = np.concatenate([n - np.arange(1, n + 1) for n in turns])
    return float(-np.corrcoef(done, to_come)[0, 1])


def slow_share(seconds: np.ndarray) -> float:
    """Share of the time that the slowest tenth of the calls takes."""
    ordered = np.sort(seconds)
    return float(ordered[-len(ordered) // 10 :].sum() / ordered.sum())


# Table 2 of the paper (BFCL's tokens times 0.4), within what 2,000 programs leave open: two standard errors, and cut-offs.
# Memoryfulness follows from the spread of the turns; the output is inferred.
PAPER = [
    ("swe-bench", (10.9, 2.1), (70_126, 19_732), (0.925, 3.55), 18_000, 0.82),
    ("bfcl", (6.3, 2.3), (37_302, 27_475), (1.923, 2.133), 4_700, 0.59),
]


@pytest.mark.parametrize(("name", "turns", "tokens", "tool", "output", "memory"), PAPER)
def test_means_and_spreads_of_the_paper(drawn, name, turns, tokens, tool, output, memory) -> None:
    w = drawn[name]
    assert turns_of(w).mean() == pytest.approx(turns[0], rel=0.02)
    assert turns_of(w).std() == pytest.approx(turns[1], rel=0.05)
    assert tokens_of(w).mean() == pytest.approx(tokens[0], rel=0.03)
    assert tokens_of(w).std() == pytest.approx(tokens[1], rel=0.08)
    assert w.call_seconds.mean() == pytest.approx(tool[0], rel=0.05)
    assert w.call_seconds.std() == pytest.approx(tool[1], rel=0.05)
    mix = agent_workloads()[name].tools
    assert (mix.mean, mix.sd) == (pytest.approx(tool[0], rel=0.001), pytest.approx(tool[1], rel=0.001))
    assert np.bincount(w.program, w.output_tokens).mean() == pytest.approx(output, rel=0.05)
    assert eta(turns_of(w)) == pytest.approx(memory, abs=0.03)


def test_the_98_recorded_cd_calls() -> None:
    _, cd = agent_workloads()["swe-bench"].tools.tools["cd"]
    assert isinstance(cd, Empirical)
    assert len(cd.seconds) == 98
    assert np.median(cd.seconds) == pytest.approx(0.032, abs=0.002)
    assert (np.array(cd.seconds) < 0.25).sum() == 87
    assert np.sort(cd.seconds)[-10:].sum() / np.sum(cd.seconds) == pytest.approx(0.941, abs=0.03)
    _, fetch = agent_workloads()["bfcl"].tools.tools["fetch_url"]
    assert len(fetch.seconds) == 664
    assert slow_share(np.array(fetch.seconds)) == pytest.approx(0.525, abs=0.03)


def test_programs_are_chains_that_grow_under_one_prefix(drawn) -> None:
    w = drawn["swe-bench"].take(np.flatnonzero(drawn["swe-bench"].program < 40))
    depends = np.diff(w.wait_offsets) > 0
    assert (np.diff(w.call_offsets) == depends).all()
    assert (w.gap == 0).all()
    assert w.ends_known
    assert np.array_equal(w.known_tokens, w.total_tokens)
    later = np.flatnonzero(depends)
    assert (w.input_tokens[later] > w.total_tokens[later - 1]).all()
    reused = w.total_tokens[later - 1] // 16 * 16
    assert np.array_equal(best_cached_tokens(w, 16)[later], reused)
    assert (best_cached_tokens(w, 16)[~depends][1:] == 992).all()  # of the 1,000 tokens that all programs share


def test_a_program_depends_on_seed_and_number_alone(drawn) -> None:
    few, many = generate_agents("bfcl", 5, rate=9.0, seed=1), drawn["bfcl"]
    assert np.array_equal(few.input_tokens, many.input_tokens[: len(few)])
    assert np.array_equal(few.call_seconds, many.call_seconds[: len(few.call_seconds)])
    assert not np.array_equal(generate_agents("bfcl", 5, rate=9.0, seed=2).input_tokens, few.input_tokens)
    served = generate_agents("bfcl", 5, workers=2, seed=1)
    assert served.by_worker.sum() == 5
    assert np.array_equal(served.input_tokens, few.input_tokens)


def test_more_turns_and_the_same_tokens(drawn) -> None:
    """Figure 14: 10.9, 20.8, 30.8, 40.7, 50.6 turns."""
    few = drawn["swe-bench"].take(np.flatnonzero(drawn["swe-bench"].program < 200))
    for multiplier, turns in ((2, 20.8), (5, 50.6)):
        w = generate_agents("swe-bench", 200, rate=1.0, seed=1, turn_multiplier=multiplier)
        assert turns_of(w).mean() == pytest.approx(turns, rel=0.03)
        assert np.array_equal(tokens_of(w), tokens_of(few))
    assert (turns_of(generate_agents("swe-bench", 20, rate=1.0, seed=1, turn_multiplier=0.01)) == 2).all()


def test_every_number_names_its_source(drawn) -> None:
    for name, kind in agent_workloads().items():
        assert all(kind.sources.values())
        assert all(any(f"{key}: {text}" == note for note in drawn[name].source.notes) for key, text in kind.sources.items())


@pytest.mark.parametrize(("options", "message"), [
    ({"name": "swe"}, "agents: name: found 'swe': allowed: swe-bench, bfcl, openhands"),
    ({"programs": 0}, "agents.bfcl: programs: found 0"),
    ({"rate": None}, "rate, workers: found (None, 0): allowed: one of the two"),
    ({"workers": 2}, "rate, workers: found (1.0, 2): allowed: one of the two"),
    ({"rate": -1.0}, "bfcl: rate: found -1.0"),
    ({"rate": None, "workers": -2}, "bfcl: workers: found -2"),
    ({"turn_multiplier": 0}, "turn_multiplier: found 0: allowed: a finite number above 0"),
    ({"block_tokens": 0}, "block_tokens: found 0"),
])
def test_refusals(options: dict, message: str) -> None:
    with pytest.raises(TraceError) as refused:
        generate_agents(**{"name": "bfcl", "programs": 3, "rate": 1.0, "seed": 1, **options})
    assert message in str(refused.value)


def test_shapes_of_recorded_coding_agents(drawn) -> None:
    """108 recorded runs of other agents, read where they lie: turns, prefix reuse and how uneven tool times are."""
    with gzip.open(shared_file("agent_loops_swe_rebench/llm_steps.csv.gz"), "rt") as stream:
        steps = [row for row in csv.DictReader(stream) if row["chain"] == "main"]
    with gzip.open(shared_file("agent_loops_swe_rebench/tool_calls.csv.gz"), "rt") as stream:
        seconds = np.array([float(row["duration_s"]) for row in csv.DictReader(stream)])
    turns = np.unique([row["run_id"] for row in steps], return_counts=True)[1]
    w = drawn["openhands"]
    assert 0.5 < turns_of(w).mean() / turns.mean() < 1.5
    assert abs(eta(turns) - eta(turns_of(w))) < 0.25  # turn counts are heavy-tailed: little memory
    assert abs(slow_share(seconds) - slow_share(w.call_seconds)) < 0.2
    asked = [(int(row["cache_read_input_tokens"]), int(row["input_tokens"]) + int(row["cache_creation_input_tokens"]))
             for row in steps if row["run_id"].startswith("haiku")]
    cached, fresh = np.array(asked).sum(axis=0)
    few = w.take(np.flatnonzero(w.program < 50))
    assert abs(cached / (cached + fresh) - best_cached_tokens(few, 16).sum() / few.input_tokens.sum()) < 0.05
