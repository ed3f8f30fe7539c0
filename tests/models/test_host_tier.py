"""Offload to host memory, by hand: blocks of 4 tokens, a step takes 1 s, the link moves one block a second each way."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
from scripted import EVERYTHING, NEXT_TURN, STRANGER, TURN, Keep
from serving_runs import BLOCK_BYTES, run, workload
from test_invariants import same

from simcore.errors import ConfigError, PolicyError
from simcore.models import replica as replica_module
from simcore.models.decision_points import Admission, Release, Retention, Swap
from simcore.models.engine import EngineSettings
from simcore.models.facts import Admitted, FlowEnded
from simcore.models.host_tier import HostTier, host_tier
from simcore.models.serving import Deployment, RunResult
from simcore.policies.retention.lru import Lru
from simcore.policies.retention.none import None_

COLUMNS = ["admitted", "cached_tokens", "loaded_tokens", "reload_time", "ended"]


def play(
    rows: list[dict[str, Any]], *, size: float | None = 100.0, backend: str = "native", blocks: int = 20,
    retention: Any = None_, settings: dict[str, Any] | None = None, **options: Any,
) -> RunResult:
    """The run on both paths, which must agree; `size` of the tier in blocks."""
    columns = {key: options.pop(key) for key in ("ends_known",) if key in options}
    engine = {"kv_offloading_size": size, "kv_offloading_backend": backend} | (settings or {})
    how = {"settings": engine, "blocks": blocks, "retention": retention} | options
    result = run(workload(rows, **columns), **how)
    planned = run(workload(rows, **columns), path="planned", **how)
    assert planned.speed["path"] == "planned"
    same(result, planned)
    return result


def row(result: RunResult, i: int) -> tuple[float, ...]:
    return tuple(result.requests[COLUMNS].iloc[i])


def copies(result: RunResult) -> list[tuple[Any, ...]]:
    """(end, direction, request, blocks, seconds) of each copy."""
    table = result.tables["transfers"]
    return [(time, direction, request, size / BLOCK_BYTES, seconds) for time, _, direction, request, size, seconds
            in table.itertuples(index=False)]


# --- stores and loads in time ---------------------------------------------------------------------------------------


def test_a_load_takes_bytes_over_bandwidth_and_the_request_runs_when_it_has_arrived() -> None:
    """The turn ends at 1; its 2 blocks are written by 3, when the next turn comes: it loads them by 5, computes its other 4
    tokens, and has its two tokens at 6 and 7."""
    result = play([TURN, NEXT_TURN])
    assert row(result, 1) == (5.0, 8, 8, 2.0, 7.0)
    assert copies(result) == [
        (3.0, "to_host", 0, 2, 2.0), (5.0, "from_host", 1, 2, 2.0), (8.0, "to_host", 1, 1, 1.0)]  # only the third is new
    summary = result.summary
    assert summary["host_hit_rate"] == 8 / 20 == summary["prefix_cache_hit_rate"]
    assert (summary["bytes_to_host"], summary["bytes_from_host"]) == (3 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert summary["host_evictions"] == summary["host_chunks_not_stored"] == 0


def test_latency_is_added_to_every_copy() -> None:
    result = play([TURN, NEXT_TURN | {"gap": 3.0}], latency=0.25)
    assert row(result, 1) == (6.25, 8, 8, 2.25, 8.25)


def test_without_a_tier_nothing_of_it_is_seen() -> None:
    result = play([TURN, NEXT_TURN], size=None)
    assert row(result, 1) == (3.0, 0, 0, 0.0, 5.0)
    assert "transfers" not in result.tables and not any("host" in key for key in result.summary)


def test_a_chunk_cannot_be_read_before_it_is_written() -> None:
    result = play([TURN, NEXT_TURN | {"gap": 1.5}])
    assert row(result, 1) == (2.5, 0, 0, 0.0, 4.5)
    assert [copy[1] for copy in copies(result)] == ["to_host", "to_host"]  # the second of the one block that is new


def test_two_loads_share_the_link() -> None:
    turns = [TURN, TURN | {"program": 1, "ids": [10, 11]}]
    again = [{"at": 10.0, "prompt": 12, "output": 1, "program": p, "turn": 1, "ids": [10 * p, 10 * p + 1]} for p in (0, 1)]
    result = play([*turns, *again], latency=0.5)
    assert row(result, 2) == (14.5, 8, 8, 4.5, 15.5) and row(result, 3) == (14.5, 8, 8, 4.5, 15.5)


def test_a_store_and_a_load_do_not_share() -> None:
    other = {"at": 4.0, "prompt": 8, "output": 1, "program": 7, "ids": [70, 71]}  # stored from 5 to 7
    result = play([TURN, other, NEXT_TURN | {"gap": 4.0}])
    assert sorted(copies(result)[1:3]) == [(7.0, "from_host", 2, 2, 2.0), (7.0, "to_host", 1, 2, 2.0)]


def test_what_the_gpu_has_lost_is_loaded() -> None:
    """The stranger takes the whole pool of 4 blocks at 2 and ends at 3."""
    rows = [TURN, STRANGER, NEXT_TURN | {"gap": 4.0}]
    assert row(play(rows, blocks=4, retention=Lru), 2)[:4] == (7.0, 8, 8, 2.0)
    assert row(play(rows, blocks=4, retention=Lru, size=None), 2)[:4] == (5.0, 0, 0, 0.0)


def test_hits_of_the_gpu_come_first_and_only_the_rest_is_loaded() -> None:
    """Here the stranger needs 3 of the 4 blocks: two that were never used and the turn's second (tail first)."""
    rows = [TURN, STRANGER | {"prompt": 12}, NEXT_TURN | {"gap": 4.0}]
    result = play(rows, blocks=4, retention=Lru)
    assert row(result, 2)[:4] == (6.0, 8, 4, 1.0)
    assert play(rows, blocks=4, retention=Lru, size=None).requests["cached_tokens"][2] == 4


def test_at_most_all_but_one_token_is_loaded() -> None:
    again = {"at": 5.0, "prompt": 8, "output": 1, "program": 1, "ids": [0, 1]}
    result = play([TURN, again])
    assert row(result, 1) == (6.0, 4, 4, 1.0, 7.0)  # of two blocks the first: the second holds the last known token


# --- who waits for whom ---------------------------------------------------------------------------------------------


def test_a_load_blocks_nobody_and_takes_no_place_among_the_running() -> None:
    """Who loads from 5 to 7 is passed by the two behind it, one after the other (one may run); it is ready at 7, and starts
    when the place is free again."""
    behind = [{"at": 5.0, "prompt": 3, "output": output, "program": p} for p, output in ((2, 1), (3, 3), (4, 1))]
    result = play([TURN, NEXT_TURN | {"gap": 4.0}, *behind], settings={"max_num_seqs": 1})
    assert result.requests["admitted"].tolist() == [0.0, 9.0, 5.0, 6.0, 11.0]
    assert row(result, 1) == (9.0, 8, 8, 2.0, 11.0)  # before the last one, which came earlier to its turn in the queue


def test_a_load_begins_only_if_there_are_blocks_for_all_known_tokens() -> None:
    """3 of 4 blocks are held until 9; the next turn needs 3 at once, though its first step would need fewer."""
    holds = {"at": 3.0, "prompt": 11, "output": 2, "program": 5}  # 3 blocks, from 3 to 5
    rows = [TURN, holds, NEXT_TURN | {"gap": 3.0, "prompt": 9}]
    for reserve in (True, False):
        result = play(rows, blocks=4, settings={"scheduler_reserve_full_isl": reserve})
        assert row(result, 2)[:4] == (7.0, 8, 8, 2.0)  # the load begins at 5


def test_a_head_that_only_lacks_budget_begins_to_load_as_soon_as_it_can() -> None:
    """Without chunked prefill the head's 15 tokens do not fit beside two decodes in a step of 16. Its first 12 are written
    from 1 to 4; then it loads them, which needs no budget, and runs at 7."""
    rows = [{"at": 0.0, "prompt": 12, "output": 1, "program": 0, "ids": [0, 1, 2]},
            *({"at": 0.0, "prompt": 3, "output": 14, "program": p} for p in (1, 2)),
            {"at": 2.0, "prompt": 15, "output": 2, "program": 3, "ids": [0, 1, 2]}]
    result = play(rows, settings={"enable_chunked_prefill": False, "max_num_batched_tokens": 16})
    assert row(result, 3) == (7.0, 12, 12, 3.0, 9.0)


def test_a_run_cut_while_a_load_is_under_way_lists_it_as_unfinished() -> None:
    result = play([TURN, NEXT_TURN], horizon=4.5)
    assert result.requests["status"].tolist() == ["finished", "unfinished"]
    assert result.requests["admitted"].isna().tolist() == [False, True]
    assert result.summary["bytes_from_host"] == 0.0 and len(result.tables["transfers"]) == 1


def test_a_long_load_is_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "_PATIENCE", 1)  # a hundred decisions without a token

    class Waking(Admission):
        def next_wakeup(self, now: float) -> float:
            return now + 1.0

    result = play([TURN, NEXT_TURN | {"gap": 3000.0}], link=1e-3, admission=Waking)
    assert row(result, 1)[3] == 2000.0 and result.summary["completed"] == 2


# --- chunks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "stored"), [("native", 3), ("lmcache", 4)])
def test_what_is_stored_of_a_turn(backend: str, stored: int) -> None:
    """13 + 4 tokens, of which 16 have KV: three full blocks of the prompt, or two chunks of 8 tokens, output included."""
    result = play([{"at": 0.0, "prompt": 13, "output": 4}], backend=backend)
    assert [copy[3] for copy in copies(result)] == [stored]


def test_a_chunk_that_is_not_full_is_not_stored() -> None:
    assert copies(play([{"at": 0.0, "prompt": 12, "output": 4}], backend="lmcache"))[0][3] == 2  # 15 tokens with KV
    assert copies(play([{"at": 0.0, "prompt": 7, "output": 1}], backend="lmcache")) == []


def test_a_chunk_is_moved_whole_though_the_gpu_has_a_part_of_it() -> None:
    """As above, the GPU keeps the first block; the chunk holds two."""
    rows = [TURN, STRANGER | {"prompt": 12}, NEXT_TURN | {"gap": 4.0}]
    result = play(rows, backend="lmcache", blocks=4, retention=Lru)
    assert row(result, 2)[:4] == (7.0, 8, 4, 2.0)


def test_the_next_turn_finds_outputs_that_lmcache_stored() -> None:
    """8 + 9 tokens, ids for all: 16 have KV. Native offers the prompt's 2 blocks, LMCache 4."""
    first = {"at": 0.0, "prompt": 8, "output": 9, "program": 0, "ids": [0, 1, 2, 3, 4]}
    second = {"after": [0], "gap": 9.0, "prompt": 20, "output": 1, "program": 0, "turn": 1, "ids": [0, 1, 2, 3, 4]}
    assert play([first, second]).requests["loaded_tokens"][1] == 8
    assert play([first, second], backend="lmcache").requests["loaded_tokens"][1] == 16


# --- a full tier ----------------------------------------------------------------------------------------------------


def test_a_full_tier_evicts_what_was_used_least_recently_but_not_what_is_being_loaded() -> None:
    """Room for two blocks. At 5 two of program 1's three blocks take the place of the turn's two; the third is left out.
    From 8 to 10 these two are loaded, so that the two of the request that ends at 9 find no place; nor does, at 11, the
    third block of the one that loaded."""
    other = {"at": 4.0, "prompt": 12, "output": 1, "program": 1, "ids": [10, 11, 12]}
    again = {"at": 8.0, "prompt": 12, "output": 1, "program": 2, "ids": [10, 11, 12]}
    late = {"at": 8.0, "prompt": 9, "output": 1, "program": 3, "ids": [0, 1]}
    result = play([TURN, other, again, late], size=2.0)
    assert result.requests["loaded_tokens"].tolist() == [0, 0, 8, 0]
    assert result.requests["ended"].tolist() == [1.0, 5.0, 11.0, 9.0]
    assert result.summary["host_evictions"] == 2 and result.summary["host_chunks_not_stored"] == 1 + 2 + 1
    assert [copy[1:4] for copy in copies(result)] == [("to_host", 0, 2), ("to_host", 1, 2), ("from_host", 2, 2)]


def tier(capacity: int, chunk_blocks: int = 1) -> HostTier:
    return HostTier(capacity, chunk_blocks, 4, 10.0, outputs=True)


def put(t: HostTier, keys: list[int], tokens: int) -> list[int]:
    chunks = t.reserve(keys, tokens)
    t.stored(chunks)
    t.check()
    return chunks


def test_a_chunk_being_loaded_is_not_evicted() -> None:
    t = tier(3)
    assert put(t, [1, 2, 3], 12) == [1, 2, 3]
    t.load([1])
    t.load([1])
    assert t.from_host_bytes == 20.0
    assert put(t, [7, 8, 9], 12) == [7, 8] and t.not_stored == 1 and t.evictions == 2
    t.loaded([1])
    assert t.reserve([4, 5, 6], 12) == [4, 5]  # still held once
    t.stored([4, 5])
    t.loaded([1])
    t.check()
    assert t.reserve([7, 8, 9], 12) == [7, 8, 9] and t.from_host_bytes == 0.0


def test_places_being_written_are_taken_and_cannot_be_read_or_evicted() -> None:
    t = tier(3)
    assert t.reserve([1, 2], 8) == [1, 2]
    assert (t.used, t.reserved, t.to_host_bytes) == (0, 2, 20.0)
    assert t.find([1, 2, 3], 0, 12) == ([], 0) and t.find([1, 2, 3], 0, 12, writing=True) == ([1, 2], 2)
    assert t.reserve([1, 2], 8) == []  # on its way already
    assert t.reserve([5, 6], 8) == [5] and t.not_stored == 1
    t.check()
    t.stored([1, 2])
    assert t.find([1, 2, 3], 0, 12) == ([1, 2], 2) and t.reserved == 1


def test_tails_go_first_and_a_turn_does_not_evict_its_own_head() -> None:
    t = tier(4)
    put(t, [1, 2, 3], 12)
    put(t, [9], 4)
    assert put(t, [1, 2, 3, 4], 16) == [4] and t.find([9], 0, 5) == ([], 0)
    assert put(t, [7, 8], 8) == [7, 8]
    assert t.find([1, 2, 3, 4], 0, 17)[0] == [1]  # 4 was written last; before that, 3 was the tail, and 2 stood before it
    assert put(t, [7, 8, 5, 6, 0], 20) == [5, 6] and t.not_stored == 1


def test_a_run_of_chunks_starts_where_the_gpus_hits_end_and_has_no_gap() -> None:
    t = tier(9, chunk_blocks=2)
    keys = list(range(100, 110))
    assert put(t, keys, 40) == [101, 103, 105, 107, 109]
    assert t.find(keys, 0, 41) == ([101, 103, 105, 107, 109], 10)
    assert t.find(keys, 3, 41) == ([103, 105, 107, 109], 7)
    assert t.find(keys, 0, 40) == ([101, 103, 105, 107, 109], 9)  # the last block holds the last known token
    assert t.find(keys, 9, 40) == ([], 0)
    assert t.find(keys, 4, 31) == ([105], 2)  # 7 known blocks: the fourth chunk is not whole
    other = [*keys[:4], 204, 205, *keys[6:]]
    assert t.find(other, 0, 41) == ([101, 103], 4)


# --- pins, policies, facts ------------------------------------------------------------------------------------------

SHARED = [  # program 0 pins two blocks; program 1, with the same prefix, stores three and keeps none on the GPU
    TURN, {"at": 2.0, "prompt": 12, "output": 1, "program": 1, "ids": [0, 1, 2]},
    NEXT_TURN | {"gap": 7.0, "prompt": 16, "ids": [0, 1, 2, 3]},
]


class KeepFirst(Keep):
    observes = (*EVERYTHING, FlowEnded)

    def at_turn_end(self, turn: Any, engine: Any) -> Any:
        answer = super().at_turn_end(turn, engine)
        return Release("never") if isinstance(answer, Release) else answer


@pytest.mark.parametrize("consumed", ["admission", "turn_end"])
def test_a_pin_is_consumed_when_its_programs_load_begins(consumed: str) -> None:
    """At 8 the next turn hits the two pinned blocks and loads the third until 9, when it starts: it has waited for no time.
    """
    made: list[KeepFirst] = []

    def keep() -> KeepFirst:
        made.append(KeepFirst(until=100.0, consumed=consumed, programs={0}))
        return made[-1]

    result = play(SHARED, retention=keep)
    assert row(result, 2) == (9.0, 12, 4, 1.0, 11.0)
    for kept in made:
        assert kept.dropped()[0] == ((8.0 if consumed == "admission" else 11.0), 0, "consumed")
        heard = [fact for fact in kept.heard if isinstance(fact, Admitted)]
        assert [(f.now, f.wait, f.had_pin, f.cached_tokens) for f in heard] == [
            (0.0, 0.0, False, 0), (2.0, 0.0, False, 8), (9.0, 0.0, True, 12)]


def test_a_pinned_turn_is_stored_as_well() -> None:
    """The pin expires at 20, the stranger takes the pool, and the host still has the blocks."""
    rows = [TURN, STRANGER | {"at": 5.0}, NEXT_TURN | {"gap": 30.0}]
    result = play(rows, blocks=4, retention=lambda: Keep(until=lambda turn: 20.0 if turn.index == 0 else inf, programs={0}))
    assert row(result, 1)[0] == 20.0 and row(result, 2)[:4] == (33.0, 8, 8, 2.0)


def test_the_end_of_a_copy_is_told() -> None:
    for path in ("planned", "step-by-step"):
        keep = KeepFirst(programs=set())
        run(workload([TURN, NEXT_TURN]), settings={"kv_offloading_size": 100.0}, retention=lambda keep=keep: keep, path=path)
        assert [fact for fact in keep.heard if isinstance(fact, FlowEnded)] == [
            FlowEnded(3.0, 0, "to_host", 2 * BLOCK_BYTES, 2.0), FlowEnded(5.0, 0, "from_host", 2 * BLOCK_BYTES, 2.0),
            FlowEnded(8.0, 0, "to_host", 1 * BLOCK_BYTES, 1.0)]


class Looking(Retention):
    """Notes what it sees of the tier at each turn's end."""

    def start(self, site: Any, rng: Any) -> None:
        self.site = site
        self.seen: list[tuple[Any, ...]] = []

    def at_turn_end(self, turn: Any, engine: Any) -> Any:
        self.seen.append((engine.now, turn.lower_tier_tokens, engine.to_host_bytes, engine.from_host_bytes))
        return Release("never")


def test_at_a_turns_end_its_copy_counts_already() -> None:
    """Another turn, too short to be stored, ends at 5, while the next one loads from 4 to 6.5; that ends at 8.5."""
    looking = Looking()
    rows = [TURN, {"at": 4.0, "prompt": 3, "output": 1, "program": 9}, NEXT_TURN | {"gap": 3.0}]
    run(workload(rows), settings={"kv_offloading_size": 100.0}, retention=lambda: looking, latency=0.5)
    assert looking.seen == [(1.0, 8, 2 * BLOCK_BYTES, 0.0), (5.0, 0, 0.0, 2 * BLOCK_BYTES), (8.5, 12, 1 * BLOCK_BYTES, 0.0)]
    assert looking.site.reload_seconds(6) == 1.5 + 0.5


def test_a_waiting_turn_sees_what_a_load_would_bring_beyond_its_hits() -> None:
    seen: list[tuple[float, int, int, float]] = []

    class Keys(Admission):
        def key(self, turn: Any, now: float) -> tuple:
            seen.append((now, turn.cached_tokens, turn.lower_tier_tokens, turn.wait))
            return (turn.arrival,)

    rows = [TURN, NEXT_TURN | {"gap": 1.5}]
    run(workload(rows), settings={"kv_offloading_size": 100.0}, retention=None_, admission=Keys)
    assert seen[1] == (2.5, 0, 8, 0.0)  # not yet written
    seen.clear()
    run(workload(rows), settings={"kv_offloading_size": 100.0}, retention=Lru, admission=Keys)
    assert seen[1] == (2.5, 8, 0, 0.0)
    seen.clear()
    run(workload(rows), retention=None_, admission=Keys)
    assert seen[1] == (2.5, 0, 0, 0.0)


class Swaps(Retention):
    def __init__(self, where: str = "host") -> None:
        self.where = where

    def at_turn_end(self, turn: Any, engine: Any) -> Any:
        return Swap(self.where)


def test_swap_releases_and_sees_to_a_copy_of_the_output_too() -> None:
    """12 tokens with KV: native stores two blocks by itself, and the third for the sake of the swap."""
    turn = {"at": 0.0, "prompt": 8, "output": 5}
    result = play([turn], retention=Swaps)
    assert sorted(copy[3] for copy in copies(result)) == [1, 2]
    assert [copy[3] for copy in copies(play([turn | {"prompt": 12}], backend="lmcache", retention=Swaps))] == [4]
    assert result.decisions["answer"].tolist()[-1] == "swap to host"
    with pytest.raises(PolicyError, match="allowed: Swap"):
        play([turn], retention=lambda: Swaps("ssd"))


def test_a_policy_may_name_a_loading_request_whose_place_is_no_longer_asked_for() -> None:
    class Naming(Admission):
        observes = (FlowEnded,)

        def rekey(self, fact: Any) -> list[int]:
            return [1] if fact.now == 6.0 else []

    other = {"at": 4.0, "prompt": 4, "output": 1, "program": 7, "ids": [70]}  # written from 5 to 6, beside the load
    result = play([TURN, NEXT_TURN | {"gap": 4.0}, other], admission=Naming)
    assert row(result, 1)[:4] == (7.0, 8, 8, 2.0)


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "words"), [
    ({"enable_prefix_caching": False}, "needs enable_prefix_caching"),
    ({"async_scheduling": True}, "async_scheduling"),
    ({"kv_offloading_backend": "lmcache", "block_size": 48}, "does not divide"),
    ({"kv_offloading_size": 0.0}, "greater than 0"),
    ({"kv_offloading_size": nan}, "greater than 0|finite"),
    ({"kv_offloading_size": inf}, "finite"),
])
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineSettings(**{"kv_offloading_size": 8.0} | settings)


def test_capacity_is_counted_in_whole_chunks() -> None:
    """Llama-3.1-8B: 131,072 bytes a token; 2 MiB a block of 16, 32 MiB a chunk of 256."""
    native = host_tier(EngineSettings(kv_offloading_size=1.01), 131_072)
    lmcache = host_tier(EngineSettings(kv_offloading_size=1.01, kv_offloading_backend="lmcache"), 131_072)
    assert native is not None and lmcache is not None and host_tier(EngineSettings(), 131_072) is None
    assert (native.capacity, native.chunk_blocks, native.chunk_bytes, native.outputs) == (517, 1, 2 * 2**20, False)
    assert (lmcache.capacity, lmcache.chunk_blocks, lmcache.chunk_bytes, lmcache.outputs) == (32, 16, 32 * 2**20, True)
    with pytest.raises(ConfigError, match=r"kv_offloading_size: not one chunk of 33,554,432 bytes fits: found 0.01"):
        host_tier(EngineSettings(kv_offloading_size=0.01, kv_offloading_backend="lmcache"), 131_072)


def test_a_gpu_without_a_known_link_has_no_tier() -> None:
    deployment = Deployment(EngineSettings(kv_offloading_size=1.0), 1, 100, 1000, None, kv_bytes_per_token=1.0)  # type: ignore
    with pytest.raises(ConfigError, match="host_bandwidth"):
        deployment.host_tier()
