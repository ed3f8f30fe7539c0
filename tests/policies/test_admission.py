"""The built-in admission policies by hand: who is served first, and who is preempted."""

from __future__ import annotations

from typing import Any

import pytest
from serving_runs import run, workload

from simcore.policies.admission.fcfs import Fcfs
from simcore.policies.admission.priority import Priority
from simcore.policies.admission.shortest_first import ShortestFirst


def order(rows: list[dict[str, Any]], admission: Any, **options: Any) -> list[int]:
    """In which order requests are first admitted to a replica that runs one at a time."""
    requests = run(workload(rows), admission=admission, settings={"max_num_seqs": 1}, **options).requests
    return requests.sort_values("admitted")["request"].tolist()


def at(time: float, prompt: int = 4, output: int = 3, **more: Any) -> dict[str, Any]:
    return {"at": time, "prompt": prompt, "output": output, **more}


WAITING = [
    at(0.0, 4), at(0.5, 30, 1, priority=2), at(0.5, 20, 9, priority=1), at(0.6, 8, 8, priority=2),
    at(0.7, 6, 20, priority=1),
]


def test_first_come_first_served() -> None:
    assert order(WAITING, Fcfs) == [0, 1, 2, 3, 4]


def test_priority_then_arrival() -> None:
    assert order(WAITING, Priority) == [0, 2, 4, 1, 3]


def test_shortest_prompt_first() -> None:
    assert order(WAITING, ShortestFirst) == [0, 4, 3, 2, 1]


def test_shortest_total_first_is_an_oracle() -> None:
    assert order(WAITING, lambda: ShortestFirst("total")) == [0, 3, 4, 2, 1]  # 16, 26, 29, 31
    assert ShortestFirst("total").oracle and not ShortestFirst("prompt").oracle and not ShortestFirst("uncached").oracle


def test_shortest_uncached_first_counts_what_the_pool_holds() -> None:
    """Request 0 leaves 16 tokens in the cache: of 2's 20 tokens 4 are new, fewer than the 8 of 1."""
    rows = [at(0.0, 16, 2, ids=[0, 1, 2, 3]), at(1.5, 8, 2), at(1.5, 20, 2, ids=[0, 1, 2, 3], known=16)]
    assert order(rows, lambda: ShortestFirst("uncached")) == [0, 2, 1]
    assert order(rows, lambda: ShortestFirst("prompt")) == [0, 1, 2]


def test_patience_serves_older_windows_first() -> None:
    """Windows of 2 s: 1 (window 0) precedes the shorter 2 and 3 (window 1), among which the shorter goes first."""
    rows = [at(0.0, 4, 9), at(1.9, 30, 1), at(2.0, 20, 1), at(3.9, 5, 1)]
    assert order(rows, lambda: ShortestFirst(patience=2.0)) == [0, 1, 3, 2]
    assert order(rows, ShortestFirst) == [0, 3, 2, 1]


@pytest.mark.parametrize("wrong", [lambda: ShortestFirst("size"), lambda: ShortestFirst(patience=0.0)])  # type: ignore
def test_a_wrong_parameter_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="allowed"):
        wrong()


@pytest.mark.parametrize(("admission", "victims"), [(Fcfs, [2]), (Priority, [1])])
def test_the_victim_is_the_newest_or_the_least_important(admission: Any, victims: list[int]) -> None:
    """Four blocks, three requests of one block; at t=1 each wants a second and one block is free."""
    rows = [at(0.0, 4, 3, priority=0), at(0.0, 4, 3, priority=5), at(0.0, 3, 2, priority=1)]
    requests = run(workload(rows), blocks=4, admission=admission).requests
    assert requests["request"][requests["preemptions"] > 0].tolist() == victims
    assert (requests["status"] == "finished").all()


def test_a_more_important_arrival_never_preempts_by_itself() -> None:
    rows = [at(0.0, 4, 6, priority=9), at(1.0, 4, 2, priority=0)]
    requests = run(workload(rows), admission=Priority, settings={"max_num_seqs": 1}).requests
    assert requests["preemptions"].sum() == 0 and requests["admitted"][1] == 6.0


def test_a_preempted_request_goes_back_to_the_front_of_the_queue() -> None:
    """Blocked by memory after its preemption, 1 stays ahead of 2, which came later and would fit."""
    rows = [at(0.0, 4, 9), at(0.0, 8, 5), at(2.5, 2, 1)]
    requests = run(workload(rows), blocks=4).requests
    assert requests["preemptions"].tolist() == [0, 1, 0]
    assert requests["admitted"][2] >= requests["ended"][0]
