"""Workloads that no study can name: generated programs with what they write scaled, and a third party's replay.

The trajectories behind the runs on real engines are not public: README.md says what was measured and what assumed.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path

import numpy as np

from simcore.randomness import generator
from simcore.traces.agent_generator import agent_workloads, generate_agents
from simcore.traces.agent_programs import AgentTurn, Program, build_programs
from simcore.traces.workload import Source, Workload

CHARS_PER_TOKEN = 4.8  # measured: 705 characters a round in the trajectories, 146.8 tokens a request in the run
LONGEST = 120_000  # tokens of a program: the model's context, with room to write
REPLAY_PREFIX = 1000  # assumed: tokens of the system prompt, as in agent_workloads.yaml


def scaled_agents(
    name: str, programs: int, *, seed: int, workers: int = 0, rate: float | None = None, outputs: float = 1.0,
    inputs: float = 1.0, spread: float = 0.0, time_limit: float = inf,
) -> Workload:
    """The generator's programs with what each turn writes multiplied by `outputs` and what its tool returns by `inputs`; the
    first prompt, turns and tool times stay.

    `spread`: each program's factors are multiplied by a lognormal draw of mean 1 and this sigma. A program that would grow
    beyond LONGEST tokens is scaled down to it.
    """
    w = generate_agents(name, programs, rate=rate, workers=workers, seed=seed)
    prefix = agent_workloads()[name].prefix_tokens
    z = generator(seed, "continuum/spread").standard_normal(programs)
    start = np.zeros(programs)
    made = []
    for p in range(programs):
        rows = np.flatnonzero(w.program == p)
        rows = rows[np.argsort(w.turn[rows])]
        start[p] = w.arrival[rows[0]]
        added = w.input_tokens[rows] - np.concatenate(([prefix], w.total_tokens[rows][:-1]))
        written = w.output_tokens[rows]
        grown = float(written.sum() * outputs + added[1:].sum() * inputs)
        factor = min(float(np.exp(spread * z[p] - spread**2 / 2)), (LONGEST - prefix - float(added[0])) / grown)
        new = [int(added[0]), *(max(1, round(float(x) * inputs * factor)) for x in added[1:])]
        turns = []
        for n, o, row in zip(new, written, rows.tolist(), strict=True):
            calls = tuple((w.tools[tool], seconds) for tool, seconds in w.calls(row))
            turns.append(AgentTurn(n, max(1, round(float(o) * outputs * factor)), calls=calls))
        made.append(Program(tuple(turns), agent=name, prefix_tokens=prefix, start=None if workers else float(start[p])))
    source = w.source.noted(f"outputs x {outputs:.4g}, tool results x {inputs:.4g}, spread of programs {spread:.3g}")
    built = build_programs(made, source, workers=workers, ends_known=True, tools=list(w.tools))
    return replace(built, time_limit=time_limit)


@cache
def _table(name: str) -> list[dict[str, str]]:
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def replayed_agents(
    programs: int, *, workers: int, seed: int, returned: float = 1.0, chars_per_token: float = CHARS_PER_TOKEN,
    time_limit: float = inf,
) -> Workload:
    """Programs like those of the third-party replay: rounds drawn from its histogram, and what a round writes, its tool
    returns (times `returned`) and how long that takes from the turns of five of its trajectories."""
    random = generator(seed, "continuum/replay")
    bins = _table("replay_rounds.csv")
    count = np.array([int(row["jobs"]) for row in bins])
    low = np.array([float(row["from"]) for row in bins])
    width = low[1] - low[0]
    turns = [row for row in _table("replay_turns.csv") if row["kind"] == "turn"]
    tasks = [int(row["written_chars"]) for row in _table("replay_turns.csv") if row["kind"] == "task"]
    made = []
    for _ in range(programs):
        b = random.choice(len(bins), p=count / count.sum())
        rounds = max(2, round(float(low[b] + width * random.random())))
        drawn = random.integers(len(turns), size=rounds)
        task = max(1, round(tasks[int(random.integers(len(tasks)))] / chars_per_token))
        chain = [AgentTurn(task, _tokens(turns[drawn[0]]["written_chars"], chars_per_token))]
        for before, now in zip(drawn[:-1].tolist(), drawn[1:].tolist(), strict=True):
            called = turns[before]
            new = _tokens(called["returned_chars"], chars_per_token / returned)
            written = _tokens(turns[now]["written_chars"], chars_per_token)
            chain.append(AgentTurn(new, written, calls=((called["tool"], float(called["seconds"])),)))
        made.append(Program(tuple(chain), agent="swe-agent", prefix_tokens=REPLAY_PREFIX, start=None))
    notes = (f"{programs} programs: rounds from a histogram of 300, turns of 5 trajectories, {chars_per_token:g} characters "
             f"a token, tool results x {returned:g}, seed {seed}",)
    built = build_programs(made, Source("swe-smith-replay", "Apache-2.0", notes=notes), workers=workers, ends_known=True)
    return replace(built, time_limit=time_limit)


def _tokens(chars: str, chars_per_token: float) -> int:
    return max(1, round(int(chars) / chars_per_token))
