"""Small random worlds whose tokens are written out, so that identity can be checked by brute force."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from simcore.traces.identity import chained
from simcore.traces.workload import Source, Workload, build


@dataclass
class World:
    workload: Workload
    tokens: list[tuple]  # every token of each request, unknown ones belonging to it alone


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Rows grow from prefixes of earlier rows; contents come from a small alphabet, so equal blocks behind unequal
    prefixes occur, and so do last blocks that are only partly covered."""
    block_tokens = draw(st.integers(1, 6))
    n = draw(st.integers(1, 8))
    contents: list[list[int]] = []
    known, inputs, outputs = [], [], []
    for i in range(n):
        base = contents[draw(st.integers(0, i - 1))] if i else []
        row = base[: draw(st.integers(0, len(base)))] + draw(st.lists(st.integers(0, 2), max_size=3))
        covered = max(0, len(row) * block_tokens - draw(st.integers(0, block_tokens - 1))) if row else 0
        total = max(2, covered + draw(st.integers(0, 7)))
        inputs.append(draw(st.integers(1, total - 1)))
        outputs.append(total - inputs[-1])
        contents.append(row)
        known.append(covered)
    tokens = [
        tuple((c, k) for c in row for k in range(block_tokens))[:covered]
        + tuple((i, "own", k) for k in range(inputs[i] + outputs[i] - covered))
        for i, (row, covered) in enumerate(zip(contents, known, strict=True))
    ]
    workload = build(
        arrival=np.arange(n) / 7, input_tokens=np.array(inputs), output_tokens=np.array(outputs), source=Source("world"),
        block_tokens=block_tokens, known_tokens=np.array(known), block_ids=chained(np.array(c, dtype=int) for c in contents),
    )
    return World(workload, tokens)


@st.composite
def any_workloads(draw: st.DrawFn) -> Workload:
    """Every column filled: identity, programs, gaps, waits, tools, calls, workers, odd names, floats with all their bits."""
    world = draw(worlds()).workload
    n = len(world)
    waits = [draw(st.lists(st.integers(0, i - 1), max_size=2, unique=True)) if i else [] for i in range(n)]
    depends = np.array([bool(w) for w in waits])
    seconds = st.floats(0, 1e9, allow_nan=False)
    arrival = np.sort(np.array(draw(st.lists(seconds, min_size=n, max_size=n))))
    arrival[depends] = np.nan
    workers = draw(st.integers(0, 3))
    if workers:
        arrival[draw(st.lists(st.booleans(), min_size=n, max_size=n))] = np.nan
    gap = np.where(depends, np.array(draw(st.lists(seconds, min_size=n, max_size=n))), 0.0)
    tools = tuple(draw(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=3, unique=True)))
    calls = st.lists(st.tuples(st.integers(0, len(tools) - 1), seconds), max_size=3) if tools else st.just([])
    text = st.text(st.characters(codec="utf-8"))
    return build(
        arrival=arrival, input_tokens=world.input_tokens, output_tokens=world.output_tokens,
        source=Source(draw(text), draw(text), draw(text), tuple(draw(st.lists(text, max_size=2)))),
        block_tokens=world.block_tokens, known_tokens=world.known_tokens,
        runs=(world.run_offsets, world.run_first, world.run_last),
        priority=np.array(draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=n, max_size=n))),
        program=np.array(draw(st.permutations(range(n)))),
        turn=np.array(draw(st.lists(st.integers(0, 99), min_size=n, max_size=n))),
        gap=gap, waits=waits, tools=tools, workers=workers,
        calls=[draw(calls) if w else [] for w in waits],
        tool=np.array(draw(st.lists(st.integers(-1, len(tools) - 1), min_size=n, max_size=n))),
        skipped=tuple(draw(st.lists(text, max_size=2))),
    )
