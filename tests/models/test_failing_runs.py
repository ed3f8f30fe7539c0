"""What holds in every run in which clients give up and replicas die: random workloads, pools, policies and failures."""

from __future__ import annotations

from collections import Counter
from math import inf, isnan
from typing import Any

import numpy as np
import pandas as pd
import pytest
from failing_runs import event, run
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_runs import Witness
from serving_runs import run as run_without
from test_invariants import TICK, below, deployments, same, workloads

from simcore.errors import ConfigError
from simcore.models.failures import Clients, Event, Failures
from simcore.models.serving import RunResult
from simcore.traces.workload import Workload


@st.composite
def failures(draw: st.DrawFn, replicas: int, patient: bool = False) -> dict[str, Any]:
    """Clients, events and a delay of views on the grid of all else, so that much happens at one instant. `patient`: at most
    one event, and later turns come, too."""
    limit = st.sampled_from([None, 4.0, 8.0, 12.0] if patient else [None, 0.5, 1.0, 2.0, 5.0, 20.0])
    clients = draw(st.none() | st.builds(
        Clients, timeout=limit, ttft_timeout=limit, retries=st.sampled_from([0, 1, 3]),
        backoff=st.sampled_from([0.0, TICK, 1.0])))
    at, replica = st.integers(0, 40).map(lambda n: n * TICK), st.integers(0, replicas - 1)
    span = st.sampled_from([TICK, 1.0, 3.3])
    one = st.one_of(
        st.builds(lambda t, r, s: event(at=t, kill=r, lasts=s), at, replica, span | st.none()),
        st.builds(lambda t, r, s: event(at=t, kill=r, lasts=s), at, replica, span),
        st.builds(lambda t, r, s: event(at=t, drain=r, lasts=s), at, replica, span),
        st.builds(lambda t, s: event(at=t, rolling_restart={"down": s}), at, span))
    events: list[Event] = []
    for another in draw(st.lists(one, max_size=1 if patient else 4)):
        try:
            Failures(events=[*events, another]).check(replicas)
        except ConfigError:
            continue  # it overlaps with one before
        events.append(another)
    return {"clients": clients, "events": events, "view_delay": draw(st.sampled_from([0.0, 0.0, 1.0]))}


def check_run(
    work: Workload, how: dict[str, Any], fails: dict[str, Any], result: RunResult, seen: Witness, wasted: Counter[int]
) -> None:
    requests, clients = result.requests, fails["clients"] or Clients()
    assert requests["request"].tolist() == list(range(len(work)))
    for row in requests.itertuples():
        waits = [requests["status"][k] for k in work.waits(row.request)]
        assert (row.status == "cancelled") == bool(set(waits) - {"finished"})
        assert (row.reason == "") == (row.status == "finished")
        assert (row.attempts == 0) == (row.status == "cancelled") and row.attempts <= clients.retries + 1
        times = result.token_times(row.request)
        assert row.generated_tokens == len(times) and (np.diff(times) > 0).all()
        if row.status == "finished":
            total = min(int(work.total_tokens[row.request]), how["max_model_len"])
            assert row.generated_tokens == total - row.input_tokens
            assert row.arrival <= row.admitted < row.first_token == times[0] and times[-1] == row.ended
            if row.attempts == 1:
                assert row.e2e < (clients.timeout or inf) and row.ttft < (clients.ttft_timeout or inf)
        elif row.status in ("timed_out", "failed"):
            if row.reason != "no replica was up when the run ended":
                assert row.attempts == clients.retries + 1
            assert (times < row.ended).all(), "a token after the abort"
            assert (row.status == "timed_out") == ("timeout" in row.reason)
        else:
            assert row.status in ("refused", "cancelled")
        assert isnan(row.service) or 0 <= row.service <= row.ended - row.arrival + 1e-9 or row.status == "cancelled"
    finished = set(requests.index[requests["status"] == "finished"])
    all_tokens = sum(seen.computed.values()) + sum(wasted.values())
    useful = sum(tokens for i, tokens in seen.computed.items() if i in finished)
    assert result.summary["computed_tokens"] == all_tokens
    assert result.summary["aborted_tokens"] == all_tokens - useful
    counts = requests["status"].value_counts()
    assert result.summary["failed"] == len(work) - len(finished) == sum(
        result.summary[key] for key in ("refused", "cancelled", "unfinished", "timed_out", "killed"))
    assert result.summary["timed_out"] == counts.get("timed_out", 0)
    assert (result.decisions["time"].diff().dropna() >= 0).all()
    assert len(result.summary["availability"]) == how["replicas"]
    assert all(isnan(share) or -1e-9 <= share <= 1 for share in result.summary["availability"])
    for replica, ends in zip(seen.replicas, result.step_ends, strict=True):
        scheduler = replica.scheduler
        assert replica.outstanding == 0 and scheduler.idle and not scheduler.orphans
        scheduler.check()
        assert (np.diff(ends) > 0).all() and len(ends) == scheduler.steps
        held = sum(len(pin.blocks) for pin in scheduler.pins.values())
        assert scheduler.pool.num_free >= scheduler.pool.usable - held
        assert scheduler.tier is None or scheduler.tier.to_host_bytes == scheduler.tier.from_host_bytes == 0


def without_extras(result: RunResult) -> RunResult:
    """As it would be without the keys, if nothing has failed."""
    result.tables["requests"] = result.requests.drop(columns="attempts")
    for key in ("timed_out", "killed", "retried", "attempts", "availability", "aborted_tokens"):
        del result.summary[key]
    return result


def explore(examples: int, tier: bool = False) -> Counter[str]:
    """Run `examples` random cases and return what they met."""
    met: Counter[str] = Counter()

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(workloads(), deployments(tier=tier), st.data(), st.booleans())
    def one(work: Workload, how: dict[str, Any], data: st.DataObject, again: bool) -> None:
        fails = data.draw(failures(how["replicas"], patient=tier))
        if tier:
            how = how | {"link": min(how["link"], 2.0)}
        if not any(fails.values()):
            return
        seen, wasted = Witness(), Counter[int]()
        result = run(work, witness=seen, wasted=wasted, **how, **fails)
        check_run(work, how, fails, result, seen, wasted)
        if again:
            same(result, run(work, **how, **fails))
        met.update(seen.counts)
        met["runs"] += 1
        met.update(result.requests["status"].tolist())
        met["retried and finished"] += int(
            ((result.requests["attempts"] > 1) & (result.requests["status"] == "finished")).sum())
        events = result.decisions[result.decisions["kind"] == "event"]["answer"]
        met.update(events.str.split().str[0].tolist())
        met["waited for a replica"] += int(result.requests["reason"].str.startswith("no replica").sum())

    one()
    return met


MINIMA = {
    "finished": 600, "timed_out": 150, "failed": 50, "cancelled": 200, "retried and finished": 40, "killed": 60,
    "drains": 80, "down": 80, "up": 100, "aborted waiting": 70, "aborted running": 200, "thrown away": 150,
    "preemptions": 50, "not": 20, "waited for a replica": 2,
}
TIER_MINIMA = {"aborted loading": 15, "aborted ready": 1, "loads": 50, "stores": 150, "killed": 12, "up": 12}


def test_invariants_hold_when_things_fail() -> None:
    met = explore(250)
    print(dict(met))
    assert below(met, MINIMA) == {}, dict(met)


def test_invariants_hold_when_things_fail_with_a_host_tier() -> None:
    met = explore(150, tier=True)
    print(dict(met))
    assert below(met, TIER_MINIMA) == {}, dict(met)


@pytest.mark.study
def test_invariants_hold_in_many_runs_in_which_things_fail() -> None:
    assert below(explore(3000), {name: 9 * least for name, least in MINIMA.items()}) == {}
    assert below(explore(3000, tier=True), {name: 11 * least for name, least in TIER_MINIMA.items()}) == {}


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(workloads(), deployments(), st.booleans())
def test_failures_that_never_come_change_nothing(work: Workload, how: dict[str, Any], late: bool) -> None:
    """To the last bit; the events lie after the last end, and no limit is reached."""
    fails: dict[str, Any] = {"clients": Clients(timeout=1e6, ttft_timeout=1e6, retries=3)}
    if late:
        fails["events"] = [event(at=1e6, kill=0), event(at=2e6, rolling_restart={"down": 1.0})]
    same(run_without(work, **how), without_extras(run(work, **how, **fails)))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(workloads(), deployments(), st.integers(0, 30), st.booleans())
def test_nothing_changes_before_the_first_event(work: Workload, how: dict[str, Any], tick: int, drain: bool) -> None:
    at = tick * TICK
    what = event(at=at, drain=0, lasts=1.0) if drain else event(at=at, kill=how["replicas"] - 1, lasts=1.0)
    with_it, plain = run(work, events=[what], **how), run_without(work, **how)
    for name in ("decisions", "steps"):
        one, two = (table[table["time"] < at].reset_index(drop=True) for table in (plain.tables[name], with_it.tables[name]))
        pd.testing.assert_frame_equal(one, two, check_exact=True)
    ended = plain.requests["ended"] < at
    columns = plain.requests.columns.drop("reason")
    done = ended & (plain.requests["status"] == "finished")
    pd.testing.assert_frame_equal(plain.requests.loc[done, columns], with_it.requests.loc[done, columns], check_exact=True)
    for i in np.flatnonzero(~done):
        early = [times[times < at] for times in (plain.token_times(i), with_it.token_times(i))]
        if with_it.requests["attempts"][i] == 1:
            np.testing.assert_array_equal(*early)


def test_the_strategy_refuses_few_events() -> None:
    """Else the runs above would have none."""
    counts: list[int] = []

    @settings(max_examples=50, deadline=None, derandomize=True, database=None)
    @given(failures(2))
    def one(fails: dict[str, Any]) -> None:
        counts.append(len(fails["events"]))

    one()
    assert sum(counts) > 40
