"""What policies hear and see: facts in order and only for who asks, views that cannot be written, the future for oracles."""

from __future__ import annotations

from math import isnan
from typing import Any

import pytest
from scripted import NEXT_TURN, TURN, Keep, play
from serving_runs import run, workload

from simcore.models import facts
from simcore.models.decision_points import Admission, Pin, ReplicaRouting, Retention
from simcore.models.facts import Admitted, PinDropped, Preempted, ProgramEnded, ProgramStarted, TurnArrived, TurnEnded

# --- facts ----------------------------------------------------------------------------------------------------------


def test_facts_are_told_in_order() -> None:
    keep = Keep(until=100.0, programs={0})
    rows = [TURN | {"tool": -1}, NEXT_TURN | {"tool": 0}]
    play(rows, keep, ends_known=True, tools=("grep",))
    told = [(type(f).__name__, f.now, getattr(f, "request", None)) for f in keep.heard]
    assert told == [
        ("ProgramStarted", 0.0, None), ("TurnArrived", 0.0, 0), ("Admitted", 0.0, 0), ("TurnEnded", 1.0, 0),
        ("TurnArrived", 3.0, 1), ("PinDropped", 3.0, None), ("Admitted", 3.0, 1), ("TurnEnded", 5.0, 1),
        ("PinDropped", 5.0, None), ("ProgramEnded", 5.0, None),
    ]
    first, second = (f for f in keep.heard if isinstance(f, TurnArrived))
    assert isnan(first.gap) and first.tool is None
    assert second.gap == 2.0 and second.tool == "grep"
    assert [f.service for f in keep.heard if isinstance(f, TurnEnded)] == [1.0, 2.0]
    assert [(f.wait, f.had_pin, f.cached_tokens, f.resumed) for f in keep.heard if isinstance(f, Admitted)] == [
        (0.0, False, 0, False), (0.0, True, 8, False)]
    assert [f.cause for f in keep.heard if isinstance(f, PinDropped)] == ["consumed", "program_ended"]


def test_the_end_of_a_program_is_told_only_if_clients_say_it() -> None:
    keep = Keep(programs=set())
    play([TURN, NEXT_TURN], keep)
    assert not any(isinstance(f, ProgramEnded) for f in keep.heard)
    assert sum(isinstance(f, ProgramStarted) for f in keep.heard) == 1


def test_the_gap_of_an_open_turn_is_unknown_while_another_turn_of_its_program_runs() -> None:
    keep = Keep(programs=set())
    open_turns = [TURN | {"at": at, "turn": turn, "output": 3} for turn, at in enumerate((0.0, 4.0, 5.0, 12.0))]
    play(open_turns, keep, blocks=20)
    gaps = [f.gap for f in keep.heard if isinstance(f, TurnArrived)]
    assert isnan(gaps[0]) and gaps[1] == 1.0 and isnan(gaps[2]) and gaps[3] == 4.0  # ends at 3, 7, 8


def test_a_preemption_is_told_before_the_key_is_taken_anew() -> None:
    order: list[str] = []

    class Listening(Admission):
        observes = (Preempted, Admitted)

        def observe(self, fact: Any) -> None:
            order.append(f"{type(fact).__name__} {fact.request}{' again' if getattr(fact, 'resumed', False) else ''}")

        def key(self, turn: Any, now: float) -> tuple:
            order.append(f"key {turn.id}{' preempted' if turn.preempted else ''}")
            return (turn.arrival,)

    rows = [{"at": 0.0, "prompt": 4, "output": 3}, {"at": 0.0, "prompt": 4, "output": 3}]
    run(workload(rows), blocks=3, admission=Listening)
    assert order == ["key 0", "key 1", "Admitted 0", "Admitted 1", "Preempted 1", "key 1 preempted", "Admitted 1 again"]


def test_who_does_not_ask_hears_nothing_and_one_object_in_two_roles_hears_once() -> None:
    class Deaf(Keep):
        observes = ()

    deaf = Deaf(programs=set())
    play([TURN, NEXT_TURN], deaf)
    assert deaf.heard == []

    class Both(Admission, Keep):
        observes = (TurnEnded, ProgramStarted)

    both: list[Both] = []
    run(workload([TURN, NEXT_TURN]), admission=lambda: both.append(Both(programs=set())) or both[0], retention=None)  # type: ignore
    assert [type(f) for f in both[0].heard] == [ProgramStarted, TurnEnded, TurnEnded]


def test_facts_are_frozen() -> None:
    for kind in vars(facts).values():
        if isinstance(kind, type) and issubclass(kind, facts.Fact) and kind is not facts.Fact:
            assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


# --- views ----------------------------------------------------------------------------------------------------------


def properties(view: Any) -> list[str]:
    return [name for kind in type(view).__mro__ for name, value in vars(kind).items() if isinstance(value, property)]


def test_views_cannot_be_written_and_can_all_be_read() -> None:
    seen: dict[str, int] = {}

    def prod(*views: Any) -> None:
        for view in views:
            names = properties(view)
            seen[type(view).__name__] = len(names)
            for name in names:
                value = getattr(view, name)
                assert value == value, f"{type(view).__name__}.{name} is NaN"
                with pytest.raises(AttributeError):
                    setattr(view, name, 0)
            with pytest.raises(AttributeError):
                view.notes = 1

    class Prod(Admission, Retention):
        def accept(self, turn: Any, engine: Any) -> None:
            prod(turn, engine)

        def key(self, turn: Any, now: float) -> tuple:
            prod(turn)
            return (turn.arrival,)

        def victim(self, running: Any, blocks: int, engine: Any) -> Any:
            prod(*running, engine)
            return running[-1]

        def at_turn_end(self, turn: Any, engine: Any) -> Any:
            prod(turn, engine)
            return Pin(engine.now + 5.0)

        def make_room(self, room: Any, pins: Any, engine: Any) -> list[int]:
            prod(room.head, engine, *pins)
            return [pin.program for pin in pins]

    class Route(ReplicaRouting):
        def route(self, turn: Any, replicas: Any, now: float) -> int:
            prod(turn, *replicas)
            assert replicas[0].cached_tokens(turn) % 4 == 0 and replicas[0].as_of == now == replicas[0].now
            return 0

    rows = [{"at": float(i // 2), "prompt": 6, "output": 4, "ids": [0]} for i in range(8)]
    result = run(workload(rows), blocks=6, admission=Prod, retention=None, router=Route)
    assert (result.requests["status"] == "finished").all()
    assert set(seen) == {"Running", "Engine", "Pinned", "ReplicaView"} and min(seen.values()) >= 7


@pytest.mark.parametrize("oracle", [False, True])
@pytest.mark.parametrize("ends_known", [False, True])
def test_only_an_oracle_sees_the_future(oracle: bool, ends_known: bool) -> None:
    seen: list[Any] = []

    class Look(Admission):
        def key(self, turn: Any, now: float) -> tuple:
            seen.append((turn.remaining, turn.is_last))
            return (turn.arrival,)

    Look.oracle = oracle
    result = run(workload([TURN | {"output": 5}, NEXT_TURN], ends_known=ends_known), admission=Look)
    known = oracle or ends_known
    assert seen == [(5 if oracle else None, False if known else None), (2 if oracle else None, True if known else None)]
    assert result.oracles == (("Look",) if oracle else ())
