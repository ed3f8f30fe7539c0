"""What holds in every run of a split cluster, whatever arrives and whatever the policies decide."""

from __future__ import annotations

from collections import Counter
from math import inf, isnan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_runs import BLOCK_BYTES, Witness
from split_runs import INFINITE, run
from test_invariants import TICK, below, deployments, same, workloads

from simcore.models.decision_points import ReplicaRouting
from simcore.models.serving import RunResult
from simcore.traces.workload import Workload


class RandomPairs(ReplicaRouting):
    """Any pair, or any prefill replica alone; now and then in numpy's integers."""

    def start(self, site: Any, rng: Any) -> None:
        self.rng, self.split = rng, site.prefill_replicas

    def route(self, turn: Any, replicas: Any, now: float) -> Any:
        assert [r.role for r in replicas] == ["prefill"] * self.split + ["decode"] * (len(replicas) - self.split)
        first = self.rng.integers(self.split)
        second = self.rng.integers(self.split, len(replicas))
        return (int(first), second) if self.rng.random() < 0.5 else first


@st.composite
def split_deployments(draw: st.DrawFn) -> dict[str, Any]:
    how = draw(deployments())
    how["settings"] = {k: v for k, v in how["settings"].items() if not k.startswith("kv_")}
    for key in ("replicas", "link", "latency", "lmcache_chunk"):
        how.pop(key, None)
    how |= {
        "prefill": draw(st.sampled_from([1, 2])), "decode": draw(st.sampled_from([1, 2, 3])),
        "push": draw(st.sampled_from([0.9, 4.0, 32.0, INFINITE])), "push_latency": draw(st.sampled_from([0.0, TICK, 0.01])),
    }
    if draw(st.booleans()):
        how["router"] = RandomPairs
    return how


def check_run(work: Workload, how: dict[str, Any], result: RunResult, seen: Witness) -> None:
    requests, limit, prefill = result.requests, how["max_model_len"], how["prefill"]
    transfers = result.tables["transfers"]
    assert requests["request"].tolist() == list(range(len(work)))
    pushed_to = dict(zip(transfers["request"], transfers["replica"], strict=True))
    assert len(pushed_to) == len(transfers), "a prompt was pushed twice"
    for row in requests.itertuples():
        i = row.request
        total = min(int(work.total_tokens[i]), limit)
        budget = how["settings"]["max_num_batched_tokens"] if not how["settings"]["enable_chunked_prefill"] else inf
        fits = work.input_tokens[i] < limit and -(-(total - 1) // 4) <= how["blocks"] and total - 1 <= budget
        waits = [requests["status"][k] for k in work.waits(i)]
        expected = "cancelled" if set(waits) - {"finished"} else "finished" if fits else "refused"
        assert row.status == expected and (row.reason == "") == (row.status == "finished")
        if row.status != "cancelled":
            gap = max((requests["ended"][k] for k in work.waits(i)), default=work.arrival[i]) + work.gap[i]
            assert row.arrival == gap and 0 <= row.prefill_replica < prefill
        if row.status != "finished":
            assert row.generated_tokens == row.loaded_tokens == 0 and isnan(row.first_token) and isnan(row.prefill_ended)
            continue
        times = result.token_times(i)
        assert row.generated_tokens == total - work.input_tokens[i] == len(times)
        assert row.arrival <= row.admitted < row.prefill_ended < row.first_token == times[0] and times[-1] == row.ended
        assert prefill <= row.replica < prefill + how["decode"]
        assert row.first_token - row.prefill_ended >= row.reload_time - 1e-9
        assert 0 <= row.cached_tokens <= row.input_tokens - 1 and row.cached_tokens % 4 == 0
        assert 0 <= row.service <= row.ended - row.admitted - row.reload_time + 1e-9
        assert (i in pushed_to) == (row.reload_time > 0) or how["push"] == INFINITE
        if i in pushed_to:
            assert pushed_to[i] == row.replica and row.input_tokens - 1 >= row.loaded_tokens >= 0
        if not row.preemptions and i in pushed_to:  # (the books are those of the decode stay)
            assert seen.computed[i] == total - row.input_tokens
    assert result.steps["tokens"].sum() == result.summary["computed_tokens"]
    assert (result.decisions["time"].diff().dropna() >= 0).all()
    for replica, scheduler, ends in zip(seen.replicas, seen.schedulers, result.step_ends, strict=True):
        assert replica.outstanding == 0 and scheduler.idle and not scheduler.handed
        scheduler.check()
        assert (np.diff(ends) > 0).all() and len(ends) == scheduler.steps
        held = sum(len(pin.blocks) for pin in scheduler.pins.values())
        assert scheduler.pool.num_free >= scheduler.pool.usable - held
        assert scheduler.pins or scheduler.pool.num_free == scheduler.pool.usable, "a block is held after the run"
    check_pushes(how, result)


def check_pushes(how: dict[str, Any], result: RunResult) -> None:
    """Every push takes at least its time on idle links, and those into one replica together no less than one by one."""
    transfers = result.tables["transfers"]
    alone = transfers["bytes"] / (how["push"] * BLOCK_BYTES) + how["push_latency"]
    assert (transfers["direction"] == "push").all() and (transfers["seconds"] >= alone * (1 - 1e-9) - 1e-9).all()
    summary = result.summary
    assert (summary["pushes"], summary["bytes_pushed"]) == (len(transfers), transfers["bytes"].sum())
    if len(transfers):
        assert summary["mean_push_time"] == pytest.approx(transfers["seconds"].mean())
    for _, into in transfers.groupby("replica"):
        span = into["time"].max() - (into["time"] - into["seconds"]).min()
        assert span >= into["bytes"].sum() / (how["push"] * BLOCK_BYTES) - 1e-9


def explore(examples: int) -> Counter[str]:
    met: Counter[str] = Counter()

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(workloads(), split_deployments(), st.booleans())
    def one(work: Workload, how: dict[str, Any], again: bool) -> None:
        seen = Witness()
        result = run(work, witness=seen, **how)
        check_run(work, how, result, seen)
        if again:
            same(result, run(work, **how))
        met.update(seen.counts)
        met.update(result.requests["status"].tolist())
        met["runs"] += 1
        met["prefill hits"] += int((result.requests["cached_tokens"] > 0).sum())
        loaded = result.requests["loaded_tokens"]
        met["short pushes"] += int(((loaded < result.requests["input_tokens"] - 1) & (loaded > 0)).sum())

    one()
    return met


# Far below what is met.
MINIMA = {
    "finished": 900, "refused": 200, "cancelled": 400, "preemptions": 60, "loads after hits": 150,
    "loads at once": 800, "blocked loads": 250, "ready and held back": 250, "prefill hits": 200, "short pushes": 150,
    "blocked while idle": 400, "pins expired": 300, "pins room": 100,
}


def test_invariants_hold_where_prefill_and_decode_are_separate() -> None:
    met = explore(250)
    print(dict(met))
    assert below(met, MINIMA) == {}, dict(met)


@pytest.mark.study
def test_invariants_hold_in_many_split_runs() -> None:
    assert below(explore(3000), {name: 9 * least for name, least in MINIMA.items()}) == {}
