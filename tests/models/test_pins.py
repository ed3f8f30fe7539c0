"""Retention: how long a pin holds, who makes room and in which order, and who gives way to a running request."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from scripted import NEXT_TURN, STRANGER, TURN, Keep, play

from simcore.models.decision_points import Admission, Extend, Unpin
from simcore.models.facts import Admitted, PinDropped, Woken

# --- pins -----------------------------------------------------------------------------------------------------------


def test_a_pin_holds_its_blocks_until_the_very_time_and_its_end_wakes_an_idle_replica() -> None:
    keep = Keep(until=6.6, programs={0})
    requests = play([TURN, STRANGER], keep)
    assert requests["admitted"].tolist() == [0.0, 6.6]
    assert keep.dropped()[0] == (6.6, 0, "expired")
    assert ("review", 6.6, [0]) in keep.asked


def test_a_pin_without_end_and_without_room_leaves_the_stranger_unfinished_with_a_reason() -> None:
    requests = play([TURN, STRANGER], Keep(until=inf))
    assert requests["status"].tolist() == ["finished", "unfinished"]
    assert "no event left" in requests["reason"][1]


def test_a_busy_replica_lets_an_expired_pin_go_at_its_next_boundary() -> None:
    keep = Keep(until=2.5, programs={0})
    requests = play([TURN, {"at": 1.0, "prompt": 3, "output": 3, "program": 2}, STRANGER | {"prompt": 8}], keep)
    assert keep.dropped() == [(3.0, 0, "expired")]
    assert requests["admitted"].tolist() == [0.0, 1.0, 3.0]


def test_a_pin_is_consumed_when_the_next_turn_is_admitted() -> None:
    keep = Keep(until=100.0, programs={0})
    requests = play([TURN, NEXT_TURN], keep)
    assert keep.dropped()[0] == (3.0, 0, "consumed")
    assert requests["cached_tokens"].tolist() == [0, 8]
    assert [fact.had_pin for fact in keep.heard if isinstance(fact, Admitted)] == [False, True]


def test_a_pin_consumed_at_turn_end_outlives_the_next_turn() -> None:
    keep = Keep(until=100.0, consumed="turn_end")
    play([TURN, NEXT_TURN], keep)
    assert keep.dropped() == [(5.0, 0, "consumed"), (100.0, 0, "expired")]  # the second is the next turn's own pin


def test_the_pin_of_a_programs_last_turn_goes_when_the_client_ends_the_program() -> None:
    keep = Keep(until=100.0)
    requests = play([TURN, STRANGER | {"at": 0.5}], keep, ends_known=True)
    assert keep.dropped()[0] == (1.0, 0, "program_ended")
    assert requests["admitted"].tolist() == [0.0, 1.0]


def test_a_batch_started_when_a_program_ends_takes_its_full_time() -> None:
    """The end of a program lets the blocked stranger in: the next batch must not be taken for done at once."""
    keep = Keep(until=100.0)
    requests = play([TURN, STRANGER | {"at": 0.5, "output": 3, "prompt": 10}], keep, ends_known=True)
    assert requests["first_token"].tolist() == [1.0, 2.0] and requests["ended"].tolist() == [1.0, 4.0]


def test_room_is_made_in_the_order_given_and_no_further_than_needed() -> None:
    turns = [{"at": 0.0, "prompt": 8, "output": 1, "program": p} for p in range(3)]
    keep = Keep(until=50.0, room=lambda room: [2, 0, 1], programs={0, 1, 2})
    requests = play([*turns, {"at": 2.0, "prompt": 15, "output": 1, "program": 3}], keep, blocks=7)
    assert keep.asked[0] == ("admission", 2.0, 3, 3, [0, 1, 2])  # 4 blocks needed, 1 free
    assert keep.dropped() == [(2.0, 2, "room"), (2.0, 0, "room"), (50.0, 1, "expired")]
    assert requests["admitted"][3] == 2.0


def test_room_for_a_head_is_asked_with_the_pin_it_will_reuse_not_counted_as_free() -> None:
    keep = Keep(until=50.0, room=lambda room: [1], programs={0, 1})
    other = {"at": 0.0, "prompt": 5, "output": 1, "program": 1}
    requests = play([TURN, other, NEXT_TURN | {"prompt": 13, "ids": [0, 1]}], keep, blocks=4)
    assert keep.asked[0] == ("admission", 3.0, 2, 2, [0, 1])  # 4 blocks, 2 of them pinned hits, none free
    assert requests["admitted"].tolist() == [0.0, 0.0, 3.0] and requests["cached_tokens"][2] == 8


def test_review_extends_and_unpins() -> None:
    def review(pins: Any, now: float) -> list[Any]:
        return [Extend(pin.program, now + 2.0) for pin in pins] if now < 5 else []

    keep = Keep(until=4.0, review=review, programs={0})
    requests = play([TURN, STRANGER], keep)
    assert [asked for asked in keep.asked if asked[0] == "review"] == [("review", 4.0, [0]), ("review", 6.0, [0])]
    assert requests["admitted"][1] == 6.0


def test_review_sees_all_pins_at_a_wakeup() -> None:
    keep = Keep(until=50.0, wake=3.5, review=lambda pins, now: [Unpin(p.program) for p in pins], programs={0})
    requests = play([TURN, STRANGER], keep)
    assert Woken(3.5) in keep.heard and keep.dropped() == [(3.5, 0, "expired")]
    assert requests["admitted"][1] == 3.5


def test_a_wakeup_at_the_time_of_an_expiry_is_not_lost() -> None:
    keep = Keep(until=3.5, wake=3.5, programs={0})
    play([TURN, STRANGER], keep)
    assert Woken(3.5) in keep.heard and keep.dropped() == [(3.5, 0, "expired")]


def test_a_parallel_turn_that_ends_later_replaces_the_pin_of_its_program() -> None:
    keep = Keep(until=9.0)
    play([TURN, TURN | {"ids": [5, 6], "turn": 1, "output": 2}], keep, blocks=8)
    assert keep.dropped() == [(2.0, 0, "consumed"), (9.0, 0, "expired")]


class PinnedFirst(Admission):
    """Programs with a pin first, then the shortest; moves waiters when a pin drops."""

    observes = (PinDropped,)

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}

    def key(self, turn: Any, now: float) -> tuple:
        self.ids[turn.id] = turn.program
        return (not turn.pinned, turn.context_tokens)

    def rekey(self, fact: Any) -> list[int]:
        return [id for id, program in self.ids.items() if program == fact.program and id >= 2]


def test_a_new_head_is_looked_at_when_dropped_pins_were_not_enough_for_the_old_one() -> None:
    """Request 2 (program 0, pinned, so first) needs 6 blocks: dropping its own pin does not give them while program 1
    keeps 2. Unpinned it falls behind request 3, which fits: 3 must start at once and not wait for an event."""
    rows = [
        {"at": 0.0, "prompt": 8, "output": 1, "program": 0}, {"at": 0.0, "prompt": 8, "output": 1, "program": 1},
        {"at": 2.0, "prompt": 23, "output": 1, "program": 0, "turn": 1},
        {"at": 2.0, "prompt": 7, "output": 1, "program": 3},
    ]
    keep = Keep(lambda turn: 20.0 if turn.index == 0 else inf, programs={0, 1},
                room=lambda room: [0] if room.head.pinned else [])
    requests = play(rows, keep, blocks=6, admission=PinnedFirst)
    assert requests["admitted"].tolist() == [0.0, 0.0, 20.0, 2.0]


# --- room for a running request: pins or rows first -----------------------------------------------------------------

PINNED = {"at": 0.0, "prompt": 4, "output": 1, "program": 0}  # one block, pinned from t=1 on
GROWING = {"at": 0.0, "prompt": 3, "output": 6, "program": 1}  # one block until t=2, then two
NEWEST = {"at": 1.0, "prompt": 3, "output": 2, "program": 2}  # one block, for two steps


@pytest.mark.parametrize(
    ("order", "preempted", "asked", "dropped", "ended"),
    [("pins_first", 0, [("decode", 2.0, 1, 1, [0])], (2.0, 0, "room"), 3.0),
     # The newest has one of its two tokens when it is preempted at t=2; it comes back at t=6, when the other has ended.
     ("rows_first", 1, [], (50.0, 0, "expired"), 7.0)],
)
def test_room_order_says_whether_pins_or_running_requests_give_way(
    order: str, preempted: int, asked: list[Any], dropped: tuple[float, int, str], ended: float,
) -> None:
    keep = Keep(until=50.0, room=lambda room: [0] if room.cause == "decode" else [], programs={0})
    requests = play([PINNED, GROWING, NEWEST], keep, blocks=3, settings={"room_order": order})
    assert [a for a in keep.asked if a[0] == "decode"] == asked
    assert requests["preemptions"].tolist() == [0, 0, preempted]
    assert keep.dropped() == [dropped]
    assert requests["ended"].tolist() == [1.0, 6.0, ended]


@pytest.mark.parametrize("order", ["pins_first", "rows_first"])
def test_a_request_that_runs_alone_gets_the_room_of_pins_in_either_order(order: str) -> None:
    keep = Keep(until=50.0, room=lambda room: [0], programs={0})
    requests = play([PINNED, GROWING], keep, blocks=2, settings={"room_order": order})
    assert requests["preemptions"].tolist() == [0, 0] and keep.dropped() == [(2.0, 0, "room")]


def test_a_request_alone_that_gets_no_room_waits_for_the_pin_to_expire() -> None:
    keep = Keep(until=7.5, programs={0})
    requests = play([PINNED, GROWING], keep, blocks=2)
    assert requests["preemptions"].tolist() == [0, 1]
    assert requests["ended"].tolist() == [1.0, 7.5 + 4]  # two tokens before, four after
