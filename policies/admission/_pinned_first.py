"""The queue that Continuum's variants share: turns whose program is pinned come first, and a lost pin moves them back."""

from __future__ import annotations

from collections.abc import Iterable

from simcore.models.decision_points import Admission
from simcore.models.facts import Admitted, Fact, PinDropped, Preempted, TurnArrived, TurnEnded
from simcore.models.views import Turn


class PinnedFirst(Admission):
    """Preempted first, then pinned, then by the program's arrival (s) (arXiv 2511.02230, section 4.3). One pin a program:
    a turn that waits while a parallel turn of its program gets the pin keeps the place it has."""

    observes: tuple[type[Fact], ...] = (TurnArrived, Admitted, Preempted, TurnEnded, PinDropped)

    def __init__(self) -> None:
        self._waiters: dict[int, dict[int, None]] = {}  # program -> ids of its waiting turns, in the order they came
        self._consumed: set[int] = set()  # programs whose pin was consumed by a turn that has not been named yet

    def key(self, turn: Turn, now: float) -> tuple:
        return (not turn.preempted, not turn.pinned, turn.program_arrival)

    def observe(self, fact: Fact) -> None:
        if isinstance(fact, (TurnArrived, Preempted)):
            self._waiters.setdefault(fact.program, {})[fact.request] = None
        elif isinstance(fact, (Admitted, TurnEnded)):
            waiters = self._waiters.get(fact.program)
            if waiters is not None:
                waiters.pop(fact.request, None)
                if not waiters:
                    del self._waiters[fact.program]

    def rekey(self, fact: Fact) -> Iterable[int]:
        # That a pin was consumed is told before the turn that consumed it is known to have left the queue: the fact that
        # says so comes later (after the loading of what is in host memory, if any), and only then can the program's other
        # turns be named.
        if isinstance(fact, PinDropped):
            if fact.cause != "consumed":
                return tuple(self._waiters.get(fact.program, ()))
            self._consumed.add(fact.program)
        elif isinstance(fact, (Admitted, TurnEnded)) and fact.program in self._consumed:
            self._consumed.discard(fact.program)
            return tuple(self._waiters.get(fact.program, ()))
        return ()
