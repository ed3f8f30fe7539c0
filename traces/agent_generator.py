"""Agent programs like those of a paper whose traces are not public; every number stands in agent_workloads.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import yaml

from simcore.errors import TraceError
from simcore.randomness import generator
from simcore.traces.agent_programs import AgentTurn, Program, build_programs
from simcore.traces.agents import start_programs, with_workers
from simcore.traces.tool_times import ToolMix, lognormal, tool_time
from simcore.traces.workload import Source, Workload


@dataclass(frozen=True)
class Spread:
    """A drawn count, within least .. most."""

    shape: str  # normal or lognormal
    mean: float
    sd: float
    least: int
    most: int
    with_turns: bool = False  # a program of many turns has much of this too

    def at(self, z: float) -> float:
        """The value at `z` standard deviations of a normal variable."""
        if self.shape == "normal":
            value = self.mean + self.sd * z
        else:
            body = lognormal(self.mean, self.sd)
            value = body.median * np.exp(body.sigma * z)
        return float(min(max(value, self.least), self.most))


@dataclass(frozen=True)
class AgentWorkload:
    """What programs of one kind are like. Tokens are counts."""

    agent: str
    turns: Spread
    tokens: Spread  # the last turn's prompt and output
    output_share: float  # of tokens
    prefix_tokens: int  # shared by all programs
    task_tokens: Spread
    spread: float  # sd over mean of what one turn adds
    tools: ToolMix
    sources: Mapping[str, str]  # parameter -> where it comes from


@cache
def agent_workloads() -> dict[str, AgentWorkload]:
    """The workloads of agent_workloads.yaml, by name."""
    text = (resources.files("simcore.traces") / "agent_workloads.yaml").read_text(encoding="utf-8")
    return {name: _workload(f"agent_workloads.yaml: {name}", given) for name, given in yaml.safe_load(text).items()}


def generate_agents(
    name: str, programs: int = 100, *, rate: float | None = None, workers: int = 0, seed: int, turn_multiplier: float = 1.0,
    block_tokens: int = 16,
) -> Workload:
    """`programs` agent programs of workload `name` (swe-bench, bfcl, openhands), started at `rate` a second (Poisson; 0 =
    all at t=0) or by `workers`.

    One tool call runs between two turns. A program depends on seed and number alone: more programs, or another rate, keep
    those that were there. `turn_multiplier` m makes n turns (n - 1) m + 1 while a program's tokens stay the same, as figure
    14 of Continuum does. Programs tell their last turn. Raises TraceError naming the argument.
    """
    known = agent_workloads()
    where = f"agents.{name}"
    if name not in known:
        raise TraceError("agents", "name", found=name, allowed=", ".join(known))
    if type(programs) is not int or programs < 1:
        raise TraceError(where, "programs", found=programs, allowed="a whole number, at least 1")
    if not 0 < turn_multiplier < np.inf:
        raise TraceError(where, "turn_multiplier", found=turn_multiplier, allowed="a finite number above 0")
    if (rate is None) == (not workers):
        raise TraceError(where, "rate, workers", found=(rate, workers), allowed="one of the two")
    kind = known[name]
    notes = [
        f"generated: {programs} programs like {name} of Continuum (arXiv 2511.02230 v6), seed {seed}",
        *(f"{key}: {source}" for key, source in kind.sources.items()),
    ]
    if turn_multiplier != 1:
        notes.append(f"turns multiplied by {turn_multiplier:g}; tokens per program stay the same")
    made = build_programs(
        [_program(kind, generator(seed, where, p), turn_multiplier) for p in range(programs)],
        Source(name, notes=tuple(notes)), block_tokens=block_tokens, ends_known=True, tools=list(kind.tools.tools),
    )
    return with_workers(made, workers) if rate is None else start_programs(made, rate, seed)


def _program(kind: AgentWorkload, random: np.random.Generator, turn_multiplier: float) -> Program:
    z_turns, z_tokens, z_task = random.standard_normal(3)
    turns = max(2, round((round(kind.turns.at(z_turns)) - 1) * turn_multiplier) + 1)
    total = round(kind.tokens.at(z_turns if kind.tokens.with_turns else z_tokens))
    task = round(kind.task_tokens.at(z_task))
    room = total - kind.prefix_tokens - task
    if room < 2 * turns:  # more turns than tokens: a multiplier far beyond the paper's
        total, room = kind.prefix_tokens + task + 2 * turns, 2 * turns
    output = min(max(round(total * kind.output_share), turns), room - turns + 1)
    calls = kind.tools.draw(random, turns - 1)
    outputs = _split(output, turns, kind.spread, random)
    added = _split(room - output, turns - 1, kind.spread, random)
    first = AgentTurn(task, outputs[0])
    rest = (AgentTurn(new, out, calls=(call,)) for new, out, call in zip(added, outputs[1:], calls, strict=True))
    return Program((first, *rest), agent=kind.agent, prefix_tokens=kind.prefix_tokens)


def _split(total: int, parts: int, spread: float, random: np.random.Generator) -> list[int]:
    """`total` in whole parts of at least 1, whose sizes spread as lognormal draws do."""
    weights = np.exp(lognormal(1.0, spread).sigma * random.standard_normal(parts))
    ends = np.cumsum(weights) / weights.sum() * (total - parts)
    cuts = np.rint(ends).astype(np.int64)
    cuts[-1] = total - parts
    return (np.diff(cuts, prepend=0) + 1).tolist()


def _workload(where: str, given: dict[str, Any]) -> AgentWorkload:
    counts = {key: dict(given[key]) for key in ("turns", "tokens", "task_tokens")}
    values = {key: dict(given[key]) for key in ("output_share", "prefix_tokens", "spread")}
    tools = dict(given["tools"])
    sources = {key: part.pop("source") for key, part in (*counts.items(), *values.items())}
    sources["tools"] = tools.pop("source")
    mix = {}
    for tool, part in tools.items():
        part = dict(part)
        sources[f"tool {tool}"] = part.pop("source")
        mix[tool] = (float(part.pop("share")), tool_time(f"{where}: {tool}", part))
    return AgentWorkload(
        given["agent"], Spread(**counts["turns"]), Spread(**counts["tokens"]), values["output_share"]["value"],
        values["prefix_tokens"]["value"], Spread(**counts["task_tokens"]), values["spread"]["value"], ToolMix(mix), sources,
    )
