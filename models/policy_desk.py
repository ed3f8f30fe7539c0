"""Where a scheduler asks its policies: admission and retention, the queue, the pins, the facts told and the log.

It holds every answer to the rules (an illegal one raises PolicyError) and carries it out on the scheduler's own state.
What runs in which step is scheduler.py's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simcore.errors import PolicyError
from simcore.models.decision_points import Admission, Extend, Pin, Policy, Refuse, Release, Retention, Room, Swap, Unpin
from simcore.models.facts import Admitted, Fact, Listeners, PinDropped, Preempted, TurnArrived, TurnEnded, Woken
from simcore.models.request import Request
from simcore.models.views import Engine, Pinned, Running, Turn
from simcore.models.waiting_queue import WaitingQueue

Log = Callable[[tuple[float, str, int, int, str]], None]  # (now, decision point, replica, request or program, answer)


@dataclass(slots=True)
class PinnedBlocks:
    """A pin: the blocks of an ended turn, kept by retention."""

    desk: PolicyDesk
    request: Request
    blocks: list[int]
    tokens: int
    since: float
    until: float
    consumed: str


class PolicyDesk:
    """Base of a scheduler. A method that a policy does not override is not asked (its default is carried out at once) and
    costs no `decision_seconds`."""

    pool: Any  # a BlockPool, or one with the same interface
    running: list[Request]

    def __init__(
        self, admission: Admission, retention: Retention, listeners: Listeners | None = None, log: Log | None = None,
        replica: int = 0,
    ) -> None:
        self.admission = admission
        self.retention = retention
        self.queue = WaitingQueue(count_programs=type(retention).at_turn_end is not Retention.at_turn_end)
        self.pins: dict[int, PinnedBlocks] = {}  # by program
        self.loading: dict[int, Request] = {}  # by id: out of the queue, their KV on its way from a lower tier
        self.ready: deque[Request] = deque()  # loaded, and not yet running; first in, first out
        self.now = 0.0
        self.engine = Engine(self)  # type: ignore[arg-type]
        self._listeners = listeners or Listeners()
        self._log = log
        self._replica = replica
        self._decision_seconds = 0.0
        heard = self._listeners.wants
        self._hears_arrived, self._hears_admitted, self._hears_ended = heard(TurnArrived), heard(Admitted), heard(TurnEnded)
        self._hears_preempted, self._hears_dropped = heard(Preempted), heard(PinDropped)
        self._asks_accept = type(admission).accept is not Admission.accept
        self._asks_key = type(admission).key is not Admission.key
        self._asks_victim = type(admission).victim is not Admission.victim
        self._asks_limit = type(admission).limit is not Admission.limit
        self._asks_turn_end = type(retention).at_turn_end is not Retention.at_turn_end
        self._asks_review = type(retention).review is not Retention.review
        self._asks_room = type(retention).make_room is not Retention.make_room
        if retention.room_when not in ("blocked", "idle"):
            raise PolicyError(retention, 0.0, f"room_when is {retention.room_when!r}; allowed: blocked, idle")
        self._room_when_idle = retention.room_when == "idle"

    # --- admission ---------------------------------------------------------------------------------------------------

    def refusal(self, request: Request, now: float) -> str:
        """Why admission will not accept the request ("" = it does). The scheduler itself refuses nothing: a request that
        can never fit would block the queue for ever, as in vLLM; Replica checks that before."""
        if not self._asks_accept:
            return ""
        self.now = now
        request.scheduler = self
        answer = self.admission.accept(view_of(request, self.admission), self.engine)
        self._charge(self.admission)
        if answer is None:
            return ""
        if not isinstance(answer, Refuse):
            raise PolicyError(self.admission, now, f"accept answered {answer!r}; allowed: None or Refuse(reason)")
        return answer.reason or "refused by policy"

    def _enqueue(self, request: Request) -> None:
        request.queued_since = self.now
        request.state = "waiting"
        self.queue.push(request, self._key(request) if self._asks_key else (request.arrival,))

    def _key(self, request: Request) -> tuple:
        if not self._asks_key:
            return (request.arrival,)
        key = self.admission.key(view_of(request, self.admission), self.now)
        self._charge(self.admission)
        if not isinstance(key, tuple) or any(part != part for part in key):  # NaN has no place in an order
            raise PolicyError(self.admission, self.now, f"key answered {key!r}; allowed: a tuple without NaN")
        return key

    def _victim(self, need: int) -> Request:
        admission = self.admission
        if not self._asks_victim:
            victim = self.running[-1]
        else:
            views = [view_of(request, admission) for request in self.running]
            answer = admission.victim(views, need - self.pool.num_free, self.engine)
            victim = getattr(answer, "_request", None)  # type: ignore[assignment]
            if not isinstance(answer, Turn) or victim not in self.running:
                raise PolicyError(admission, self.now, f"victim answered {answer!r}; allowed: one of the running requests")
            self._charge(admission)
        self._note("victim", victim.id, "preempt")
        return victim

    def _ask_quantum(self, request: Request) -> None:
        limit = self.admission.limit(view_of(request, self.admission))
        if limit is not None and limit < 1:
            raise PolicyError(self.admission, self.now, f"limit answered {limit!r}; allowed: None or at least 1 token")
        request.quantum = limit
        self._charge(self.admission)

    # --- retention ---------------------------------------------------------------------------------------------------

    def _end_turn(self, request: Request) -> None:
        now = self.now
        if request.state == "running":
            request.service += now - request.running_since
        request.state = "finished"
        if self.pins:
            self._consume_at_end(request)
        if self._hears_ended:
            self._tell(TurnEnded(now, request.id, request.program, request.service))
        if not self._asks_turn_end or not request.blocks:
            self._give_back(request, "lru")
            self._note("retention", request.id, "lru")
            request.blocks = []
            return
        answer: Any = self.retention.at_turn_end(view_of(request, self.retention), self.engine)
        self._charge(self.retention)
        if isinstance(answer, Release):
            if answer.reuse not in ("lru", "first", "never"):
                raise PolicyError(self.retention, now, f"at_turn_end answered {answer!r}; allowed: lru, first, never")
            self._give_back(request, answer.reuse)
            self._note("retention", request.id, answer.reuse)
        elif isinstance(answer, Pin):
            self._pin(request, answer)
        elif isinstance(answer, Swap):
            self._swap(request, answer)
        else:
            raise PolicyError(self.retention, now, f"at_turn_end answered {answer!r}; allowed: Release, Pin, Swap")
        request.blocks = []

    def _consume_at_end(self, request: Request) -> None:
        pin = self.pins.get(request.program)
        if pin is not None and pin.consumed == "turn_end":
            self._drop_pin(request.program, "consumed")

    def _give_back(self, request: Request, reuse: str = "lru") -> None:
        self.pool.give_back(request.blocks, reuse)

    def _swap(self, request: Request, answer: Swap) -> None:
        raise PolicyError(self.retention, self.now, f"at_turn_end answered {answer!r}; this engine has no lower tier")

    def _pin(self, request: Request, answer: Pin) -> None:
        now, program = self.now, request.program
        if not answer.until > now or answer.consumed not in ("admission", "turn_end"):
            raise PolicyError(self.retention, now, f"at_turn_end answered {answer!r}; allowed: a time after now")
        if not request.blocks:
            raise PolicyError(self.retention, now, f"pins turn {request.id}, whose blocks are already free")
        if program in self.pins:  # a program's parallel turns: the later one's pin stands
            self._drop_pin(program, "consumed")
        tokens = request.computed - request.in_flight
        self.pins[program] = PinnedBlocks(self, request, request.blocks, tokens, now, answer.until, answer.consumed)
        self._note("retention", request.id, f"pin until {answer.until!r}")

    def _expire_pins(self) -> None:
        expired = [pin for pin in self.pins.values() if pin.until <= self.now]
        if not expired:
            return
        self._review(expired)
        for pin in expired:
            if pin.until <= self.now and self.pins.get(pin.request.program) is pin:
                self._drop_pin(pin.request.program, "expired")

    def _review(self, pins: list[PinnedBlocks]) -> None:
        """Ask retention about these pins and do what it answers."""
        if not self._asks_review:
            return
        answers = self.retention.review([Pinned(pin) for pin in pins], self.engine)
        self._charge(self.retention)
        for answer in answers:
            if not isinstance(answer, (Unpin, Extend)):
                raise PolicyError(self.retention, self.now, f"review answered {answer!r}; allowed: Unpin, Extend")
            if answer.program not in self.pins:
                raise PolicyError(self.retention, self.now, f"review answered {answer!r}; that program has no pin")
            if isinstance(answer, Unpin):
                self._drop_pin(answer.program, "expired")
            elif answer.until > self.now:
                self.pins[answer.program].until = answer.until
                self._note("retention", answer.program, f"extend until {answer.until!r}")
            else:
                raise PolicyError(self.retention, self.now, f"review answered {answer!r}; allowed: a time after now")

    def _make_room(self, need: int, cause: Any, head: Request) -> bool:
        """Let retention drop pins until `need` blocks are free; returns whether they are."""
        pool = self.pool
        asks = self._asks_room and not (cause == "admission" and self._room_when_idle and self.running)
        if asks and self.pins and need > pool.num_free:
            pins = [Pinned(pin) for pin in self.pins.values()]
            room = Room(need - pool.num_free, cause, view_of(head, self.retention))
            self._charge(self.retention)
            for program in self.retention.make_room(room, pins, self.engine):
                if need <= pool.num_free:
                    break
                if program not in self.pins:
                    raise PolicyError(self.retention, self.now, f"make_room named program {program!r}, which has no pin")
                self._drop_pin(program, "room")
        return need <= pool.num_free

    def _drop_pin(self, program: int, cause: str) -> None:
        pin = self.pins.pop(program)
        self.pool.give_back(pin.blocks)
        self._note("unpin", program, cause)
        if self._hears_dropped:
            self._tell(PinDropped(self.now, program, cause))

    def _consume_pin(self, request: Request) -> bool:
        """The request is admitted; returns whether its program had a pin."""
        pin = self.pins.get(request.program)
        if pin is not None and pin.consumed == "admission":
            self._drop_pin(request.program, "consumed")
        return pin is not None

    def end_program(self, program: int, now: float) -> bool:
        """The client says that no further turn will come: the program's pin is dropped; returns whether it had one."""
        if program not in self.pins:
            return False
        self.now = now
        self._drop_pin(program, "program_ended")
        return True

    # --- facts and the log -------------------------------------------------------------------------------------------

    def wake(self, policy: Policy, now: float) -> None:
        """A policy's `next_wakeup` has come."""
        self.now = now
        fact = Woken(now)
        if Woken in policy.observes:
            policy.observe(fact)
        if policy is self.admission:
            self._rekey(fact)
        if policy is self.retention and self.pins:
            self._review(list(self.pins.values()))

    def hear(self, fact: Fact) -> None:
        """A fact from outside the replica: told to this replica's own policies."""
        self.now = fact.now
        for policy in dict.fromkeys((self.admission, self.retention)):
            if type(fact) in policy.observes:
                policy.observe(fact)
        self._rekey(fact)

    def _tell(self, fact: Fact) -> None:
        """A fact of this replica: told to all who listen, a router included."""
        self._listeners.tell(fact)
        self._rekey(fact)

    def _rekey(self, fact: Fact) -> None:
        """Let admission move the waiters whose key the fact has changed."""
        if type(fact) in self.admission.observes:
            for id in tuple(self.admission.rekey(fact)):
                request = next((r for r in self.queue.in_order() if r.id == id), None)
                if request is None:
                    if id in self.loading or any(r.id == id for r in self.ready):
                        continue  # admitted, though nobody is told before it runs: its place is no longer asked for
                    raise PolicyError(self.admission, self.now, f"rekey named request {id!r}, which does not wait")
                self.queue.remove(request)
                self.queue.push(request, self._key(request))

    def _charge(self, policy: Policy) -> None:
        self._decision_seconds += policy.decision_seconds

    def _note(self, kind: str, id: int, answer: str) -> None:
        if self._log is not None:
            self._log((self.now, kind, self._replica, id, answer))


def view_of(request: Request, policy: Policy) -> Running:
    """The request as this policy may see it. One view object serves a request for life, in and out of the running list."""
    if policy.oracle:
        if request.oracle is None:
            request.oracle = Running(request, oracle=True)
        return request.oracle
    if request.blind is None:
        request.blind = Running(request)
    return request.blind
