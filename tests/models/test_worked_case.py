"""Two requests in a pool of five blocks of four tokens, followed block by block by hand.

A: prompt 8, output 6. B: prompt 9, output 6; its first 4 tokens are A's. Both arrive at 0; a step takes 1 s.

step  what happens                                                               A's blocks  B's blocks  free list
 0    A computes 8 tokens (blocks 1, 2 full: findable). B hits block 1 and       1 2         1 3 4       5
      computes 5 (block 3 full). Both get a token at t=1.
 1    A's 9th token takes block 5. B's 10th fits block 4.                        1 2 5       1 3 4       -
 2    10th, 11th.                                                                1 2 5       1 3 4       -
 3    11th, 12th: B's block 4 is full.                                           1 2 5       1 3 4       -
 4    A's 12th: block 5 is full. B's 13th needs a block, none is free: the       1 2 5       -           4 3
      newest running request, B itself, is preempted; its blocks go back tail
      first, block 1 stays with A. B has 4 tokens (t=1..4). Nobody is admitted.
 5    A's 13th takes block 4, which loses B's third key (eviction 1). B would    1 2 5 4     -           3
      hit 1 and 3, but needs 4 blocks: 2 new and block 3 from a list of 1.
      A's 6th token comes at t=6: A ends. Block 4 is not full: to the front;
      5, 2, 1 to the tail: 4 3 5 2 1.
 6    B hits 1 and 3 (8 tokens), takes 4 and 5 (5 loses A's key: eviction 2)     -           1 3 4 5     2
      and computes 5 tokens, its 13th among them; block 4 is full. Token at 7.
 7    14th. Token at t=8: B ends; 5 is not full: 5 2 4 3 1.                      -           -           5 2 4 3 1
"""

from __future__ import annotations

from serving_runs import Witness, run, workload

from simcore.models.engine import EngineSettings
from simcore.models.request import Request
from simcore.models.scheduler import Scheduler
from simcore.policies.admission.fcfs import Fcfs
from simcore.policies.retention.lru import Lru

STEPS = [  # tokens of (A, B), blocks of A, blocks of B and free list after the decision
    ({0: 8, 1: 5}, [1, 2], [1, 3, 4], [5]),
    ({0: 1, 1: 1}, [1, 2, 5], [1, 3, 4], []),
    ({0: 1, 1: 1}, [1, 2, 5], [1, 3, 4], []),
    ({0: 1, 1: 1}, [1, 2, 5], [1, 3, 4], []),
    ({0: 1}, [1, 2, 5], [], [4, 3]),
    ({0: 1}, [1, 2, 5, 4], [], [3]),
    ({1: 5}, [], [1, 3, 4, 5], [2]),
    ({1: 1}, [], [1, 3, 4, 5], [2]),
]


def test_every_block_of_every_step() -> None:
    scheduler = Scheduler(EngineSettings(block_size=4, max_num_batched_tokens=64), 6, Fcfs(), Lru())
    a = Request(0, 8, 6, keys=[100, 101, 102])
    b = Request(1, 9, 6, keys=[100, 201, 202])
    scheduler.add(a, 0.0)
    scheduler.add(b, 0.0)
    free_after_end = {5: [4, 3, 5, 2, 1], 7: [5, 2, 4, 3, 1]}
    for step, (tokens, blocks_a, blocks_b, free) in enumerate(STEPS):
        batch = scheduler.schedule(float(step))
        assert {r.id: n for r, n in zip(batch.requests, batch.counts, strict=True)} == tokens
        assert (a.blocks, b.blocks, list(scheduler.pool.free)) == (blocks_a, blocks_b, free)
        assert [r.id for r in batch.preempted] == ([1] if step == 4 else [])
        outcomes = scheduler.complete(batch, float(step + 1))
        assert [r.id for r in outcomes.finished] == {5: [0], 7: [1]}.get(step, [])
        assert list(scheduler.pool.free) == free_after_end.get(step, free)
        scheduler.check()
    assert (scheduler.preemptions, scheduler.pool.evictions) == (1, 2)
    assert (a.cached_first, b.cached_first, b.cached_all) == (0, 4, 12)


def test_the_same_case_as_a_run_with_its_times() -> None:
    rows = [{"at": 0.0, "prompt": 8, "output": 6, "ids": [0, 1]}, {"at": 0.0, "prompt": 9, "output": 6, "ids": [0]}]
    seen = Witness()
    result = run(workload(rows), blocks=5, witness=seen)
    a, b = result.requests.to_dict("records")
    assert result.token_times(0).tolist() == [1, 2, 3, 4, 5, 6]
    assert result.token_times(1).tolist() == [1, 2, 3, 4, 7, 8]
    assert result.itls(1).tolist() == [1, 1, 1, 3, 1]
    assert (a["ttft"], a["tpot"], a["e2e"], a["service"], a["preemptions"], a["cached_tokens"]) == (1, 1, 6, 6, 0, 0)
    assert (b["ttft"], b["tpot"], b["e2e"], b["service"], b["preemptions"], b["cached_tokens"]) == (1, 7 / 5, 8, 6, 1, 4)
    assert b["cached_tokens_all"] == 12
    assert result.steps["tokens"].tolist() == [13, 2, 2, 2, 1, 1, 5, 1]
    assert result.steps["free_blocks"].tolist() == [1, 0, 0, 0, 2, 5, 1, 5]  # at step ends, what ended given back
    summary = result.summary
    assert (summary["computed_tokens"], summary["steps"], summary["duration"], summary["preemptions"]) == (27, 8, 8.0, 1)
    assert summary["prefix_cache_hit_rate"] == 4 / 17
    assert summary["utilization"] == 1.0
    assert list(seen.schedulers[0].pool.free) == [5, 2, 4, 3, 1]
