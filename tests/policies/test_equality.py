"""Every policy for agents over random closed loops: both paths agree to the last bit, and every request comes to an end."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_runs import Witness, run, tables, workload

from simcore.models.serving import RunResult
from simcore.policies.admission.autellix import Autellix
from simcore.policies.admission.fcfs import Fcfs
from simcore.policies.admission.program_fcfs import ProgramFcfs
from simcore.policies.replica_routing.round_robin import RoundRobin
from simcore.policies.replica_routing.session_affinity import SessionAffinity
from simcore.policies.retention.clairvoyant import Clairvoyant
from simcore.policies.retention.continuum import Continuum
from simcore.policies.retention.continuum_released import ContinuumReleased
from simcore.policies.retention.infercept import Infercept
from simcore.policies.retention.lru import Lru
from simcore.policies.retention.preserve_until_return import PreserveUntilReturn
from simcore.policies.retention.static_ttl import StaticTtl
from simcore.traces.workload import Workload

TICK = 0.25  # arrivals, gaps and step times fall on this grid, so that many things happen at one instant

# (admission, retention); None = the admission object serves both. Parameters are small, so that short runs reach all rules.
POLICIES: dict[str, tuple[Any, Any]] = {
    "program-fcfs": (ProgramFcfs, Lru),
    "autellix": (lambda: Autellix(queues=3, quantum=1.0, beta=2.0, token_seconds=TICK, least_tokens=2), Lru),
    "static-ttl": (ProgramFcfs, lambda: StaticTtl(1.5)),
    "static-ttl-unnamed": (Fcfs, lambda: StaticTtl(6.0, "deadlock", tools_only=False)),
    "preserve-until-return": (Fcfs, PreserveUntilReturn),
    "infercept": (ProgramFcfs, lambda: Infercept(cadence=0.7)),
    "continuum": (lambda: Continuum(history=2, t_window=3), None),
    "continuum-lnB": (
        lambda: Continuum(5, ttl_default="lnB", yields="deadlock", spare_waiting=True, tools_only=False), None),
    "continuum-released": (lambda: ContinuumReleased(1.0), None),
    "clairvoyant": (Clairvoyant, None),
    "clairvoyant-deadlock": (lambda: Clairvoyant(yields="deadlock"), None),
}


@st.composite
def agents(draw: st.DrawFn) -> Workload:
    """Programs of up to five turns; each prompt repeats the last turn whole, or (now and then) only its first half, so that
    a pin is of little use. Tools are fast, slow or not named; some programs have two turns that run side by side."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows: list[dict[str, Any]] = []
    programs = draw(st.integers(2, 10))
    at = np.cumsum(random.choice([0, 0, 1, 2, 6], programs)) * TICK
    rows = [{"at": float(at[p]), "program": p, "turn": 0} | _first(random, p) for p in range(programs)]
    last = list(range(programs))
    for turn in range(1, 6):
        for p in range(programs):
            if random.random() < 0.75 and last[p] >= 0:
                gap, tool = [(0.0, 0), (TICK, 0), (2 * TICK, 0), (2.0, 1), (9.0, 1), (TICK, -1)][random.integers(6)]
                rows.append({"after": [last[p]], "gap": gap, "tool": tool, "program": p, "turn": turn}
                            | _next(random, rows[last[p]], p, turn))
                if random.random() < 0.1:  # the same again beside it, which nobody waits for
                    rows.append(rows[-1] | {"turn": turn + 10})
                last[p] = len(rows) - 1
            else:
                last[p] = -1
    return workload(rows, tools=("fast", "slow"), ends_known=bool(random.integers(2)))


def _first(random: np.random.Generator, program: int) -> dict[str, Any]:
    prompt, output = int(random.choice([3, 8, 17, 30])), int(random.choice([1, 4, 9, 20]))
    return {"prompt": prompt, "output": output, "ids": [1000 * (program + 1) + j for j in range(-(-(prompt + output) // 4))]}


def _next(random: np.random.Generator, before: dict[str, Any], program: int, turn: int) -> dict[str, Any]:
    context = before["prompt"] + before["output"]
    prompt, output = context + int(random.choice([1, 3, 9])), int(random.choice([1, 4, 9, 20]))
    shared = context // 4 if random.random() < 0.8 else context // 8
    ids = before["ids"][:shared]
    own = 100_000 * turn + 1000 * (program + 1)
    return {"prompt": prompt, "output": output, "ids": [*ids, *range(own + len(ids), own + -(-(prompt + output) // 4))]}


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    version = draw(st.sampled_from(["0.19.0", "0.33.0"]))
    return {
        "settings": {
            "version": version, "max_num_seqs": draw(st.sampled_from([1, 2, 4, 8])),
            "max_num_batched_tokens": draw(st.sampled_from([8, 64])),
            "scheduler_reserve_full_isl": draw(st.booleans()),
            "room_order": draw(st.sampled_from(["pins_first", "rows_first"])),
            "kv_offloading_size": draw(st.sampled_from([None, None, 20.0, 200.0])),  # blocks
            "kv_offloading_backend": draw(st.sampled_from(["native", "lmcache"])),
        },
        "link": draw(st.sampled_from([1.0, 32.0])),
        "blocks": draw(st.sampled_from([14, 18, 24, 32, 60])), "replicas": draw(st.sampled_from([1, 1, 2])),
        "router": draw(st.sampled_from([RoundRobin, SessionAffinity])),
        "step_overhead": draw(st.sampled_from([0.0, 0.03])),
        "cost": tables(TICK, draw(st.sampled_from([0.0, 1 / 64, 0.003]))),
        "horizon": draw(st.sampled_from([inf, inf, inf, 9.1])),
    }


def same(a: RunResult, b: RunResult) -> None:
    assert all(np.array_equal(x, y) for x, y in zip(a.step_ends, b.step_ends, strict=True)), "step ends differ"
    assert a.token_steps == b.token_steps
    for name in a.tables:
        pd.testing.assert_frame_equal(a.tables[name], b.tables[name], check_exact=True)
    assert str(a.summary) == str(b.summary)


def explore(name: str, examples: int) -> Counter[str]:
    """Run `examples` random cases on both paths and return what they met."""
    met: Counter[str] = Counter()
    admission, retention = POLICIES[name]

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(agents(), engines())
    def one(work: Workload, how: dict[str, Any]) -> None:
        seen = Witness()
        how = how | {"admission": admission, "retention": retention}
        plain = run(work, witness=seen, **how)
        planned = run(work, path="planned", **how)
        assert planned.speed["path"] == "planned", planned.speed["why_not_planned"]
        same(plain, planned)
        if how["horizon"] == inf:
            assert not (plain.requests["status"] == "unfinished").any(), "a pin blocks the replica for ever"
        met.update(seen.counts)
        met["hits"] += int((plain.requests["cached_tokens"] > 0).sum())

    one()
    return met


PINS = {"pins consumed": 20, "pins room": 10}
MINIMA: dict[str, dict[str, int]] = {
    "program-fcfs": {"preemptions": 10}, "autellix": {"yields": 5, "preemptions": 10},
    "static-ttl": PINS | {"pins expired": 20}, "static-ttl-unnamed": PINS | {"pins expired": 5},
    "preserve-until-return": PINS, "infercept": {"pins consumed": 20, "pins expired": 10},
    "continuum": PINS | {"pins expired": 5}, "continuum-lnB": PINS, "clairvoyant": PINS,
    "clairvoyant-deadlock": PINS,
    "continuum-released": {"pins consumed": 20, "pins expired": 20},
}


@pytest.mark.parametrize("name", POLICIES)
def test_both_paths_are_equal(name: str) -> None:
    met = explore(name, 30)
    print(name, dict(met))
    assert {what: met[what] for what, least in MINIMA[name].items() if met[what] < least} == {}, dict(met)


@pytest.mark.study
@pytest.mark.parametrize("name", POLICIES)
def test_both_paths_are_equal_in_many_runs(name: str) -> None:
    met = explore(name, 800)
    print(name, dict(met))
    assert all(met[what] >= 10 * least for what, least in MINIMA[name].items()), dict(met)
