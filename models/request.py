"""The live state of one request: what the trace says, where the scheduler has taken it, and how it ended."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from simcore.traces.workload import Workload

NEVER = 1 << 62  # a token count that is not reached


class Following(NamedTuple):
    """The program's next turn, as the trace has it: its tool, and when it comes: `gap` seconds after this turn's end, or,
    where arrivals are recorded, at `arrival` (NaN otherwise)."""

    tool: str | None
    gap: float
    arrival: float


class Request:
    """One request. Token counts: `known` = prompt + delivered output, `computed` = tokens whose KV is (or is being)
    written, `in_flight` = output tokens that batches now in execution will deliver."""

    __slots__ = (
        "admitted", "arrival", "blind", "blocks", "cached_all", "cached_first", "capacity", "chunked", "computed", "ended",
        "first_token", "following", "had_pin", "id", "in_flight", "input_tokens", "is_last", "keys", "known", "last_known",
        "load_began", "load_seconds", "loaded_tokens", "next_hash", "oracle", "output_tokens",
        "preempted", "preemptions", "priority", "program", "program_arrival", "quantum", "queue_entry",
        "queued_since", "reason", "reload_time", "replica", "resumed", "running_since", "scheduler", "service", "state",
        "steps_start", "steps_stop", "token_steps", "tool", "total", "turn",
    )

    # Of the present load from a lower tier; set when it begins.
    had_pin: bool  # the program was pinned
    load_began: float  # s

    def __init__(
        self, id: int, input_tokens: int, output_tokens: int, keys: Any, arrival: float = 0.0, priority: int = 0,
        program: int | None = None, program_arrival: float | None = None, turn: int = 0, tool: str | None = None,
        is_last: bool = True, last_known: bool = False, following: Following | None = None,
    ) -> None:
        # The trace. `keys`: identities of the full engine blocks over prompt and output (Workload.block_keys).
        self.id = id
        self.input_tokens = input_tokens
        self.output_tokens = output_tokens
        self.total = input_tokens + output_tokens  # where it ends; the scheduler lowers it to max_model_len
        self.keys = keys
        self.arrival = arrival  # s, at the cluster
        self.priority = priority
        self.program = id if program is None else program
        self.program_arrival = arrival if program_arrival is None else program_arrival
        self.turn = turn
        self.tool = tool
        self.is_last = is_last
        self.last_known = last_known  # the client says which turn is a program's last
        self.following = following
        # The scheduler.
        self.scheduler: Any = None
        self.state = "new"  # new, waiting, (loading, ready,) running, then finished / refused / aborted / cancelled
        self.known = input_tokens
        self.computed = 0
        self.in_flight = 0
        self.blocks: list[int] = []
        self.capacity = 0  # tokens that fit in `blocks`
        self.next_hash = NEVER  # token count at which the next block is full and gets its key
        self.chunked = False  # the last step left part of the known tokens uncomputed
        self.preempted = False  # waits because it was preempted
        self.quantum: int | None = None  # tokens left until admission's `limit` is asked again
        self.queue_entry: list[Any] | None = None
        # The record. Times in s.
        self.replica = -1
        self.queued_since = nan  # start of the present wait
        self.admitted = nan  # first admission
        self.resumed = nan  # latest admission
        self.running_since = nan
        self.service = 0.0  # time in the running list, up to `running_since`
        self.ended = nan
        self.first_token = nan
        self.cached_first = 0  # tokens reused at first admission
        self.cached_all = 0  # the same over all admissions
        self.loaded_tokens = 0  # of those, loaded from a lower tier
        self.load_seconds = 0.0  # how long the load before the present (or last) stay in the running list took
        self.reload_time = 0.0  # s, of all loads
        self.preemptions = 0
        self.reason = ""
        # Steps of the replica that delivered a token, as half-open runs: closed ones in `token_steps` (start, stop,
        # start, stop ...), the open one beside it. Token times follow from the replica's step ends.
        self.token_steps: list[int] = []
        self.steps_start = -1
        self.steps_stop = -1
        # What policies see; made on first use (views.py), kept because making one costs more than reading it.
        self.blind: Any = None
        self.oracle: Any = None

    no_keys: Any = ()

    @staticmethod
    def keys_of(workload: Workload, i: int, block_size: int) -> Any:
        """The keys of request i in the form that this path reads fastest."""
        return workload.block_keys(i, block_size).tolist()

    @property
    def generated(self) -> int:
        return self.known - self.input_tokens

    def delivered(self, step: int) -> None:
        """Note that the replica's step number `step` delivered a token."""
        if step == self.steps_stop:
            self.steps_stop = step + 1
        else:
            if self.steps_stop >= 0:
                self.token_steps += (self.steps_start, self.steps_stop)
            self.steps_start = step
            self.steps_stop = step + 1

    def step_runs(self) -> list[int]:
        """All runs of token steps: [start, stop, start, stop, ...]."""
        return [*self.token_steps, self.steps_start, self.steps_stop] if self.steps_stop >= 0 else []

    def forget_work(self) -> None:
        """Drop what only a living request needs (a long run keeps millions of ended ones)."""
        self.keys = self.blocks = []
        self.blind = self.oracle = self.scheduler = self.queue_entry = None
