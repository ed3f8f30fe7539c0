"""The built-in routers by hand, and that routers cannot change the world which they meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from serving_runs import run, tables, workload

from simcore.policies.replica_routing.least_loaded import LeastLoaded
from simcore.policies.replica_routing.prefix_aware import PrefixAware
from simcore.policies.replica_routing.round_robin import RoundRobin
from simcore.policies.replica_routing.session_affinity import SessionAffinity


def routed(rows: list[dict[str, Any]], router: Any, replicas: int = 3, **options: Any) -> list[int]:
    return run(workload(rows), replicas=replicas, router=router, **options).requests["replica"].tolist()


def at(time: float, prompt: int = 4, output: int = 1, **more: Any) -> dict[str, Any]:
    return {"at": time, "prompt": prompt, "output": output, **more}


def test_round_robin_takes_turns_whatever_the_load() -> None:
    assert routed([at(0.0, output=9), at(0.0), at(0.0), at(0.0), at(5.0)], RoundRobin) == [0, 1, 2, 0, 1]


def test_least_loaded_counts_requests_that_have_not_ended() -> None:
    # At 0.5 all have one request, and 0 was chosen longest ago. At 4.5 only the long one on 0 is left: 1, then 2; then
    # all have one again, and 0 was chosen longest ago.
    rows = [at(0.0, output=9), at(0.0), at(0.0), at(0.5), at(4.5), at(4.5), at(4.5)]
    assert routed(rows, LeastLoaded) == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_by_tokens_prefers_many_short_to_one_long() -> None:
    rows = [at(0.0, 40), at(0.0, 4), at(0.0, 4), at(0.0, 4)]
    assert routed(rows, lambda: LeastLoaded("tokens"), replicas=2) == [0, 1, 1, 1]
    assert routed(rows, LeastLoaded, replicas=2) == [0, 1, 0, 1]


def test_an_idle_cluster_is_used_evenly() -> None:
    assert routed([at(10.0 * k) for k in range(7)], LeastLoaded) == [0, 1, 2, 0, 1, 2, 0]


def shared(time: float, group: int, blocks: int, own: int) -> dict[str, Any]:
    """A prompt that starts with `blocks` blocks of a group and goes on with `own` tokens of its own."""
    return at(time, 4 * blocks + own, ids=[100 * group + j for j in range(blocks)], known=4 * blocks)


def test_prefix_aware_goes_where_the_prefix_is() -> None:
    rows = [shared(0.0, 1, 4, 4), shared(10.0, 2, 4, 4), shared(20.0, 1, 4, 4), shared(30.0, 2, 4, 4), shared(40.0, 3, 4, 4)]
    assert routed(rows, PrefixAware) == [0, 1, 0, 1, 2]
    hits = run(workload(rows), replicas=3, router=PrefixAware).requests["cached_tokens"]
    assert hits.tolist() == [0, 0, 16, 16, 0]


@pytest.mark.parametrize(("own", "expected"), [(36, 0), (37, 1)])
def test_a_prefix_below_a_tenth_of_the_prompt_does_not_attract(own: int, expected: int) -> None:
    """4 of 40 tokens are a tenth; 4 of 41 are less."""
    assert routed([shared(0.0, 1, 1, 4), shared(10.0, 1, 1, own)], PrefixAware, replicas=2) == [0, expected]


def test_among_equal_prefixes_the_least_loaded_is_chosen() -> None:
    rows = [shared(0.0, 1, 4, 4), shared(0.0, 1, 4, 4), shared(9.0, 1, 4, 4), shared(9.0, 1, 4, 4), shared(9.0, 2, 4, 4)]
    assert routed(rows, PrefixAware) == [0, 1, 0, 1, 2]  # nothing is cached at 0, both replicas hold it at 9


def test_sessions_stay_where_they_began() -> None:
    rows = [at(0.0, program=0), at(1.0, program=1), at(9.0, program=1, turn=1), at(9.0, program=1, turn=2),
            at(20.0, program=0, turn=1), at(30.0, program=2)]
    assert routed(rows, SessionAffinity) == [0, 1, 1, 1, 0, 2]


@pytest.mark.parametrize("wrong", [lambda: LeastLoaded("load"), lambda: PrefixAware(0.0), lambda: PrefixAware(1.5)])
def test_a_wrong_parameter_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="allowed"):
        wrong()


ROUTERS = {"round": RoundRobin, "load": LeastLoaded, "prefix": PrefixAware, "session": SessionAffinity}


def test_two_policies_meet_the_same_world() -> None:
    """Open arrivals, lengths, priorities, think times and a policy's own draws do not depend on who routes."""
    rows = [at(0.4 * k, 5 + k % 7, 1 + k % 4, program=k, priority=k % 3) for k in range(20)]
    rows += [{"after": [k], "gap": 0.3 * (k % 3), "prompt": 9, "output": 2, "program": k, "turn": 1} for k in range(20)]

    worlds = {}
    for name, router in ROUTERS.items():
        drawn: list[float] = []

        class Drawing(router):  # type: ignore[valid-type, misc]
            def start(self, site: Any, rng: np.random.Generator, drawn: list[float] = drawn) -> None:
                drawn += rng.random(3).tolist()

        result = run(workload(rows), replicas=3, router=Drawing, cost=tables(0.3, 0.01), seed=7)
        requests = result.requests
        parent_end = requests["ended"].to_numpy()[:20]
        gap = (requests["arrival"].to_numpy()[20:] - parent_end).round(9).tolist()
        fixed = requests[["program", "turn", "priority", "input_tokens", "output_tokens", "generated_tokens", "status"]]
        worlds[name] = (fixed.to_csv(), requests["arrival"].tolist()[:20], gap, drawn)
        assert (requests["status"] == "finished").all()
    assert all(world == worlds["round"] for world in worlds.values())
