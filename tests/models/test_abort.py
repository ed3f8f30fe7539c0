"""`Scheduler.abort`, state by state: what leaves at once, what stays findable, what a batch in execution still does."""

from __future__ import annotations

from typing import Any

from simcore.models.batch import StartLoad
from simcore.models.engine import EngineSettings
from simcore.models.host_tier import HostTier
from simcore.models.request import Request
from simcore.models.scheduler import Scheduler
from simcore.policies.admission.fcfs import Fcfs
from simcore.policies.retention.lru import Lru


def scheduler(tier: HostTier | None = None, blocks: int = 10, **settings: Any) -> Scheduler:
    engine = EngineSettings(**{"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8} | settings)
    return Scheduler(engine, blocks + 1, Fcfs(), Lru(), tier=tier)


def request(id: int, prompt: int, output: int = 4, base: int | None = None) -> Request:
    total = -(-(prompt + output) // 4)
    return Request(id, prompt, output, [100 * (id if base is None else base) + k for k in range(total)])


def test_a_waiting_request_leaves_the_queue_and_the_others_keep_their_order() -> None:
    s = scheduler(max_num_seqs=1)
    requests = [request(i, 4) for i in range(4)]
    for r in requests:
        s.add(r, 0.0)
    batch = s.schedule(0.0)
    s.abort(requests[2], 0.5)
    s.check()
    assert s.queue.in_order() == [requests[1], requests[3]] and requests[2].state == "aborted"
    assert batch.requests == [requests[0]] and s.num_waiting == 2


def test_blocks_of_a_running_request_are_free_at_once_behind_the_others_and_findable() -> None:
    """9 tokens: 2 full blocks and a started one. The full ones go to the end of the free list, tail first; the one without a
    hash to its front (0.33.0). What is computed for it brings no token."""
    s = scheduler()
    gone = request(0, 9)
    s.add(gone, 0.0)
    batch = s.schedule(0.0)
    held = list(gone.blocks)
    assert len(held) == 3 and s.pool.num_free == 7
    s.abort(gone, 0.5)
    s.check()
    assert list(s.pool.free) == [held[2], *range(4, 11), held[1], held[0]]
    assert [s.pool.key[b] for b in held] == [0, 1, None]
    outcomes = s.complete(batch, 1.0)
    assert outcomes.tokens == 0 and not outcomes.finished and gone.known == 9 and gone.service == 0.5
    assert s.idle
    twin = request(1, 9, base=0)
    s.add(twin, 1.0)
    assert s.cached_tokens(twin) == 8


def test_a_block_that_another_request_holds_stays_held() -> None:
    s = scheduler()
    one, two = request(0, 8), request(1, 8, base=0)
    s.add(one, 0.0)
    s.complete(s.schedule(0.0), 1.0)
    s.add(two, 1.0)
    s.schedule(1.0)
    shared = two.blocks[0]
    assert s.pool.references[shared] == 2
    s.abort(one, 1.5)
    s.check()
    assert s.pool.references[shared] == 1 and s.running == [two]


def test_both_batches_in_flight_are_thrown_away() -> None:
    s = scheduler(async_scheduling=True)
    gone, other = request(0, 4), request(1, 4)
    s.add(gone, 0.0)
    s.add(other, 0.0)
    first, second = s.schedule(0.0), s.schedule(0.0)
    assert gone.in_flight == 2
    s.abort(gone, 0.5)
    assert [s.complete(batch, t).tokens for batch, t in ((first, 1.0), (second, 2.0))] == [1, 1]
    assert (gone.known, other.known) == (4, 6)
    s.check()


def test_a_preempted_request_whose_token_is_in_flight_can_be_aborted() -> None:
    s = scheduler(blocks=4, async_scheduling=True)
    one, two = request(0, 7, 6), request(1, 7, 6)
    s.add(one, 0.0)
    s.add(two, 0.0)
    batches = [s.schedule(0.0), s.schedule(0.0)]
    s.complete(batches.pop(0), 1.0)
    batches.append(s.schedule(1.0))
    assert two.state == "waiting" and two.in_flight == 1
    s.abort(two, 1.5)
    for batch in batches:
        s.complete(batch, 2.0)
        s.check()
    assert two.known == 8 and not s.queue


def loading() -> tuple[Scheduler, Request, StartLoad]:
    """A request whose first block is on the GPU and whose second is on its way from the host."""
    tier = HostTier(8, 1, 4, 1.0, outputs=False)
    s = scheduler(tier)
    tier.stored(tier.reserve([0, 1], 8))
    s.pool.register(1, 0)
    waiter = request(0, 11)
    s.add(waiter, 0.0)
    effects = s.schedule(0.0).effects
    assert waiter.state == "loading" and len(waiter.blocks) == 3
    (load,) = [effect for effect in effects if isinstance(effect, StartLoad)]
    return s, waiter, load


def test_what_loads_gives_its_blocks_back_when_its_copy_has_arrived() -> None:
    s, waiter, load = loading()
    s.abort(waiter, 0.5)
    s.check()
    assert s.idle and s.pool.num_free == 7 and waiter.blocks == []
    s.copied(load, 1.0, 1.0)
    s.check()
    assert s.pool.num_free == 10 and not s.orphans and s.tier is not None and s.tier.from_host_bytes == 0
    assert s.pool.match([0, 1], 2) == [1]  # as in vLLM, what was loaded for nobody is not made findable


def test_the_same_request_may_load_again_while_its_first_copy_is_under_way() -> None:
    s, waiter, load = loading()
    s.abort(waiter, 0.5)
    again = request(0, 11)
    s.add(again, 0.5)
    (second,) = [effect for effect in s.schedule(0.5).effects if isinstance(effect, StartLoad)]
    s.check()
    s.copied(load, 1.0, 1.0)
    s.check()
    assert again.state == "loading"
    s.copied(second, 1.0, 1.5)
    assert again.state == "ready"
    s.abort(again, 2.0)
    s.check()
    assert s.idle and s.pool.num_free == 10 and len(s.pool.match([0, 1], 2)) == 2
