"""What holds in every run, whatever arrives and whatever the policies decide: random workloads, pools and policies."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from math import inf, isnan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_runs import BLOCK_BYTES, Witness, run, tables, workload

from simcore.models.decision_points import Admission, Extend, Pin, Release, Retention, Swap, Unpin
from simcore.models.facts import Admitted, FlowEnded, Preempted, TurnArrived, TurnEnded, Woken
from simcore.models.serving import RunResult
from simcore.policies.admission.fcfs import Fcfs
from simcore.policies.admission.priority import Priority
from simcore.policies.admission.shortest_first import ShortestFirst
from simcore.policies.replica_routing.least_loaded import LeastLoaded
from simcore.policies.replica_routing.prefix_aware import PrefixAware
from simcore.policies.replica_routing.round_robin import RoundRobin
from simcore.policies.replica_routing.session_affinity import SessionAffinity
from simcore.policies.retention.lru import Lru
from simcore.policies.retention.none import None_
from simcore.traces.workload import Workload

TICK = 0.25  # arrivals, gaps, step times and pins fall on this grid, so that many things happen at one instant


class Rounds(Admission):
    """Quanta of three tokens: who has generated least goes first."""

    def key(self, turn: Any, now: float) -> tuple:
        return (turn.generated // 3, turn.arrival)

    def limit(self, running: Any) -> int:
        return 3


class LeastToCompute(Admission):
    """Who has least to compute goes first: what the pool or the host holds counts as done."""

    def key(self, turn: Any, now: float) -> tuple:
        return (turn.context_tokens - turn.cached_tokens - turn.lower_tier_tokens, turn.arrival)


class Waking(Admission):
    """Wakes every half second, and at every copy that ends, and moves the newest waiter to the front or back."""

    observes = (Woken, TurnArrived, Preempted, Admitted, TurnEnded, FlowEnded)

    def __init__(self) -> None:
        self.waiting: dict[int, None] = {}  # in the order in which they came
        self.place: dict[int, int] = {}

    def observe(self, fact: Any) -> None:
        if isinstance(fact, (TurnArrived, Preempted)):
            self.waiting[fact.request] = None
        elif isinstance(fact, (Admitted, TurnEnded)):
            self.waiting.pop(fact.request, None)

    def key(self, turn: Any, now: float) -> tuple:
        return (self.place.get(turn.id, 0), turn.arrival)

    def rekey(self, fact: Any) -> list[int]:
        if not isinstance(fact, (Woken, FlowEnded)) or not self.waiting:
            return []
        newest = list(self.waiting)[-1]
        self.place[newest] = (self.place.get(newest, 0) + 2) % 3 - 1
        return [newest, next(iter(self.waiting))]  # the oldest keeps its key

    def next_wakeup(self, now: float) -> float:
        return (now // 0.5 + 1) * 0.5


class RandomPins(Retention):
    """Any legal answer, drawn from the policy's own stream."""

    observes = (Admitted, TurnEnded, FlowEnded)

    def __init__(self, generous: bool) -> None:
        self.generous = generous  # gives room when asked; otherwise no pin lasts for ever

    def start(self, site: Any, rng: Any) -> None:
        self.rng = rng
        self.swaps = site.reload_seconds(1) is not None

    def at_turn_end(self, turn: Any, engine: Any) -> Any:
        if self.swaps and (self.rng.random() < 0.2 or turn.lower_tier_tokens > 20 or engine.to_host_bytes > 2e10):
            return Swap("host")
        if self.rng.random() < 0.3:
            return Release(("lru", "first", "never")[self.rng.integers(3)])
        times = [TICK, 1.0, 3.0, 20.0] + ([inf] if self.generous else [])
        consumed = ("admission", "turn_end")[self.rng.integers(2)]
        return Pin(engine.now + times[self.rng.integers(len(times))], consumed)

    def review(self, pins: Any, engine: Any) -> Any:
        for pin in pins:
            draw = self.rng.random()
            if draw < 0.2:
                yield Unpin(pin.program)
            elif draw < 0.5:
                yield Extend(pin.program, engine.now + 1.0)

    def next_wakeup(self, now: float) -> float:
        return (now // 2.5 + 1) * 2.5

    def make_room(self, room: Any, pins: Any, engine: Any) -> list[int]:
        assert room.blocks > 0 and pins
        if not self.generous and self.rng.random() < 0.5:
            return []
        return [int(p) for p in self.rng.permutation([pin.program for pin in pins])]


ADMISSIONS = {
    "fcfs": Fcfs, "priority": Priority, "prompt": lambda: ShortestFirst("prompt", patience=2.0),
    "uncached": lambda: ShortestFirst("uncached"), "total": lambda: ShortestFirst("total"), "rounds": Rounds,
    "waking": Waking, "least to compute": LeastToCompute,
}
RETENTIONS = {"lru": Lru, "none": None_, "generous": lambda: RandomPins(True), "stubborn": lambda: RandomPins(False)}
ROUTERS = {
    "round": RoundRobin, "requests": LeastLoaded, "tokens": lambda: LeastLoaded("tokens"), "prefix": PrefixAware,
    "session": SessionAffinity,
}


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Sessions of up to four turns (each prompt repeats the last turn whole), some behind a prefix shared by a group;
    parallel turns that a later one waits for; lone requests; arrivals on a grid; now and then one that cannot fit."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows: list[dict[str, Any]] = []
    block = int(random.choice([2, 4, 8]))
    at = 0.0
    for program in range(draw(st.integers(1, 9))):
        at += float(random.choice([0, 0, 0, 1, 2, 8])) * TICK
        shared = int(random.choice([0, 0, 1, 2, 3])) * 8 // block  # trace blocks of the group's prefix
        ids = [1000 * int(random.integers(2)) + j for j in range(shared)]
        context = shared * block
        own = 10_000 * (program + 1)
        before: list[int] = []
        priority = int(random.integers(3))
        for turn in range(int(random.integers(1, 5))):
            prompt = context + int(random.choice([1, 2, 4, 7, 8, 16, 17, 30] if random.random() < 0.97 else [200]))
            output = int(random.choice([1, 1, 2, 5, 8, 12, 20, 30]))
            known = int(random.choice([prompt, prompt + output]))
            blocks = -(-known // block)
            row = {"prompt": prompt, "output": output, "program": program, "turn": turn, "priority": priority,
                   "known": known, "ids": [*ids[:blocks], *range(own + len(ids), own + blocks)]}
            row |= {"after": before, "gap": float(random.choice([0, 0, 1, 4])) * TICK} if before else {"at": at}
            rows.append(row)
            context = prompt + output
            before = [len(rows) - 1]
            if known < context:
                own += 1000  # the next prompt holds tokens that this turn's ids do not name: no block in common beyond
                ids = ids[: shared]
        if len(before) and random.random() < 0.3:  # two parallel turns, and one that waits for both
            for turn, after in ((8, before), (8, before), (9, [len(rows), len(rows) + 1])):
                rows.append({"prompt": 9, "output": 3, "program": program, "turn": turn, "after": after, "gap": TICK})
    order = sorted(range(len(rows)), key=lambda i: (rows[i].get("at", -1.0), i))  # stable: dependents stay behind
    order = [i for i in order if "at" in rows[i]] + [i for i in range(len(rows)) if "at" not in rows[i]]
    new = {old: k for k, old in enumerate(order)}
    rows = [rows[i] | ({"after": [new[j] for j in rows[i]["after"]]} if "after" in rows[i] else {}) for i in order]
    return workload(rows, block_tokens=block, ends_known=bool(random.integers(2)))


@st.composite
def deployments(draw: st.DrawFn, planned: bool = False, tier: bool = False) -> dict[str, Any]:
    """`planned`: only what the planned path takes. `tier`: always a host tier, and pools that seldom hold what it holds."""
    version = draw(st.sampled_from(["0.19.0", "0.24.0", "0.33.0"]))
    engine: dict[str, Any] = {
        "version": version,
        "max_num_seqs": draw(st.sampled_from([1, 2, 4, 8])),
        "max_num_batched_tokens": draw(st.sampled_from([4, 16, 64])),
        "enable_prefix_caching": tier or draw(st.sampled_from([True, True, True, False])),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "async_scheduling": not planned and not tier and draw(st.booleans()),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 3])),
        "enable_chunked_prefill": draw(st.sampled_from([True, True, True, False])),
        "room_order": draw(st.sampled_from(["pins_first", "rows_first"])),
    }
    if version != "0.19.0":
        engine["watermark"] = draw(st.sampled_from([0.0, 0.1]))
        engine["prefill_schedule_interval"] = 0 if planned else draw(st.sampled_from([0, 3]))
    window = draw(st.sampled_from([0, 0, 6]))
    how = {
        "settings": engine, "blocks": draw(st.sampled_from([12, 16, 24, 60])),
        "replicas": draw(st.sampled_from([1, 1, 1, 2] if tier else [1, 2, 3])),
        "max_model_len": draw(st.sampled_from([60, 1000])), "step_overhead": draw(st.sampled_from([0.0, TICK, 0.3])),
        "cost": tables(TICK, draw(st.sampled_from([0.0, 1 / 64, 0.003])), per_window_token=0.0007 if window else 0.0),
        "window": window,
        "admission": ADMISSIONS[draw(st.sampled_from(sorted(ADMISSIONS)))],
        "retention": RETENTIONS[draw(st.sampled_from((["none"] * 3 if tier else []) + sorted(RETENTIONS)))],
        "router": ROUTERS[draw(st.sampled_from(sorted(ROUTERS)))],
    }
    if engine["enable_prefix_caching"] and not engine["async_scheduling"]:
        blocks = [4.0, 15.5, 40.0, 200.0] if tier else [None, None, 4.0, 40.0]
        engine["kv_offloading_size"] = draw(st.sampled_from(blocks))
        engine["kv_offloading_backend"] = draw(st.sampled_from(["native", "lmcache"]))
        how["link"] = draw(st.sampled_from([0.9, 4.0, 32.0, 1e6]))
        how["latency"] = draw(st.sampled_from([0.0, TICK, 0.01]))
        how["lmcache_chunk"] = draw(st.sampled_from([8, 16]))
    return how


def check_run(work: Workload, how: dict[str, Any], result: RunResult, seen: Witness) -> None:
    """The invariants over the tables; those of each step were asserted while it ran (serving_runs)."""
    requests, limit = result.requests, how["max_model_len"]
    assert requests["request"].tolist() == list(range(len(work)))
    computed = 0
    for row in requests.itertuples():
        i = row.request
        total = min(int(work.total_tokens[i]), limit)
        # Refused exactly if it can never fit (no policy here refuses), cancelled exactly if it waits for such a one.
        budget = how["settings"]["max_num_batched_tokens"] if not how["settings"]["enable_chunked_prefill"] else inf
        fits = work.input_tokens[i] < limit and -(-(total - 1) // 4) <= how["blocks"] and total - 1 <= budget
        waits = [requests["status"][k] for k in work.waits(i)]
        expected = "cancelled" if set(waits) - {"finished"} else "finished" if fits else "refused"
        assert row.status == expected and (row.reason == "") == (row.status == "finished")
        times = result.token_times(i)
        if row.status == "cancelled":
            assert isnan(row.arrival) and row.ended == max(requests["ended"][k] for k in work.waits(i))
        else:
            gap = max((requests["ended"][k] for k in work.waits(i)), default=work.arrival[i]) + work.gap[i]
            assert row.arrival == gap
        if row.status != "finished":
            assert row.generated_tokens == 0 and len(times) == 0 and isnan(row.first_token)
            continue
        assert row.generated_tokens == total - work.input_tokens[i] == len(times)
        assert row.arrival <= row.admitted < row.first_token == times[0] and times[-1] == row.ended
        assert (np.diff(times) >= 0).all()
        assert 0 <= row.cached_tokens <= row.input_tokens - 1 and row.cached_tokens % 4 == 0
        # 0: asynchronous, admitted and preempted at one instant, its only token already in flight.
        assert 0 <= row.service <= row.ended - row.admitted + 1e-9
        assert 0 <= row.loaded_tokens <= row.cached_tokens_all and row.loaded_tokens % 4 == 0
        assert (row.reload_time > 0) == (row.loaded_tokens > 0)
        assert row.reload_time <= row.ended - row.arrival - row.service + 1e-9
        if not row.preemptions:
            assert seen.computed[i] == total - 1 - row.cached_tokens and row.cached_tokens_all == row.cached_tokens
            assert row.service == pytest.approx(row.ended - row.admitted)
        computed += seen.computed[i]
    assert result.steps["tokens"].sum() == computed == result.summary["computed_tokens"]
    assert (result.decisions["time"].diff().dropna() >= 0).all()
    for replica, scheduler, ends in zip(seen.replicas, seen.schedulers, result.step_ends, strict=True):
        assert replica.outstanding == 0 and scheduler.idle
        assert (np.diff(ends) > 0).all() and len(ends) == scheduler.steps
        steps = result.steps[result.steps["replica"] == replica.id]
        assert steps["seconds"].sum() == pytest.approx(replica.busy_seconds)
        assert (steps["seconds"].to_numpy()[1:] <= np.diff(ends) + 1e-9).all(), "the device did two things at once"
        assert all(pin.until == inf for pin in scheduler.pins.values())
        held = sum(len(pin.blocks) for pin in scheduler.pins.values())
        assert scheduler.pool.num_free >= scheduler.pool.usable - held
        if not scheduler.pins:
            assert scheduler.pool.num_free == scheduler.pool.usable
        assert scheduler.tier is None or scheduler.tier.to_host_bytes == scheduler.tier.from_host_bytes == 0
    if how["settings"].get("kv_offloading_size"):
        check_transfers(how, result)


def check_transfers(how: dict[str, Any], result: RunResult) -> None:
    """Every copy takes at least its time on an idle link, and all of them no longer than one after the other."""
    for _, copies in result.tables["transfers"].groupby(["replica", "direction"]):
        alone = copies["bytes"] / (how["link"] * BLOCK_BYTES) + how["latency"]
        assert (copies["seconds"] >= alone - 1e-9).all() and (copies["seconds"] <= alone.sum() + 1e-9).all()
    moved = result.tables["transfers"].groupby("direction")["bytes"].sum()
    assert moved.get("from_host", 0.0) == result.summary["bytes_from_host"]
    assert moved.get("to_host", 0.0) == result.summary["bytes_to_host"]
    assert result.summary["bytes_from_host"] >= result.requests["loaded_tokens"].sum() / 4 * BLOCK_BYTES


def same(a: RunResult, b: RunResult) -> None:
    """Equal to the last bit, in every table, every step end and in the summary."""
    assert all(np.array_equal(x, y) for x, y in zip(a.step_ends, b.step_ends, strict=True)), "step ends differ"
    assert a.token_steps == b.token_steps
    for name in a.tables:
        pd.testing.assert_frame_equal(a.tables[name], b.tables[name], check_exact=True)
    assert str(a.summary) == str(b.summary)


def explore(examples: int, tier: bool = False) -> Counter[str]:
    """Run `examples` random cases and return what they met."""
    met: Counter[str] = Counter()

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(workloads(), deployments(tier=tier), st.booleans())
    def one(work: Workload, how: dict[str, Any], again: bool) -> None:
        seen = Witness()
        result = run(work, witness=seen, **how)
        check_run(work, how, result, seen)
        if again:
            same(result, run(work, **how))
        met.update(seen.counts)
        met["runs"] += 1
        met["requests"] += len(work)
        met["hits"] += int((result.requests["cached_tokens"] > 0).sum())
        met["evictions"] += sum(s.pool.evictions for s in seen.schedulers)
        met.update(tier_counts(seen))
        met.update(result.requests["status"].tolist())
        instants = pd.concat([result.requests["arrival"], result.requests["ended"]]).round(9)
        met["simultaneous"] += int(instants.duplicated().sum())

    one()
    return met


# Far below what is met; were a generator or a policy to lose its bite, this would say so.
MINIMA = {
    "requests": 1500, "finished": 800, "refused": 100, "cancelled": 150, "preemptions": 70, "yields": 60, "hits": 130,
    "evictions": 2000, "chunks": 2500, "pins expired": 100, "pins consumed": 35, "pins room": 35, "pins program_ended": 60,
    "blocked while idle": 4, "simultaneous": 1000,
}
TIER_MINIMA = {
    "loads": 120, "loads after hits": 20, "loads at once": 15, "loads of preempted": 20, "blocked loads": 400,
    "ready and held back": 80, "stores": 500, "tier evictions": 700, "chunks not stored": 400,
}


def tier_counts(seen: Witness) -> dict[str, int]:
    tiers = [scheduler.tier for scheduler in seen.schedulers if scheduler.tier is not None]
    return {"tier evictions": sum(t.evictions for t in tiers), "chunks not stored": sum(t.not_stored for t in tiers)}


def below(met: Counter[str], minima: dict[str, int]) -> dict[str, int]:
    return {name: met[name] for name, least in minima.items() if met[name] < least}


def test_invariants_hold_in_random_runs() -> None:
    met = explore(300)
    assert below(met, MINIMA) == {}, dict(met)


def test_invariants_hold_in_random_runs_with_a_host_tier() -> None:
    met = explore(200, tier=True)
    assert below(met, TIER_MINIMA) == {}, dict(met)


@pytest.mark.study
def test_invariants_hold_in_many_random_runs() -> None:
    met = explore(5000)
    minima = {name: 25 * least for name, least in MINIMA.items()} | {"ended while waiting": 30}
    assert below(met, minima) == {}, dict(met)


@pytest.mark.study
def test_invariants_hold_in_many_random_runs_with_a_host_tier() -> None:
    met = explore(4000, tier=True)
    assert below(met, {name: 10 * least for name, least in TIER_MINIMA.items()}) == {}, dict(met)


def test_results_do_not_depend_on_the_order_in_which_python_hashes() -> None:
    """The same run in two interpreters that hash strings differently."""
    digests = {
        subprocess.run(
            [sys.executable, __file__], check=True, capture_output=True, text=True,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1 and len(digests.pop()) > 60


def _digest_of_one_run() -> str:
    rows = [
        {"at": (i // 4) * TICK, "prompt": 10 + 7 * (i % 5), "output": 1 + i % 9, "program": i % 7, "turn": i // 7,
         "ids": [1000 * (i % 3) + j for j in range(2)]}
        for i in range(40)
    ]
    how: dict[str, Any] = {"retention": lambda: RandomPins(True), "router": PrefixAware, "cost": tables(0.1)}
    result = run(workload(rows), blocks=24, replicas=2, **how)
    text = "".join(table.to_csv() for _, table in sorted(result.tables.items())) + str(result.summary)
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    print(_digest_of_one_run())
