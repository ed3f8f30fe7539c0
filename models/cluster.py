"""Replicas behind a router: requests arrive, are routed, end; programs start and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any

import numpy as np

from simcore.errors import PolicyError
from simcore.models.decision_points import Policy, ReplicaRouting
from simcore.models.facts import Fact, ProgramEnded, ProgramStarted, TurnArrived, Woken
from simcore.models.planned_replica import Shared
from simcore.models.policy_desk import view_of
from simcore.models.replica import Replica
from simcore.models.request import Following, Request
from simcore.models.tools import Tools
from simcore.models.views import ReplicaView
from simcore.recorder import Recorder, Table
from simcore.simulation import ARRIVAL, TIMER, Simulation
from simcore.traces.workload import Workload

REQUEST_COLUMNS = {
    "request": "int64", "program": "int64", "turn": "int64", "replica": "int64", "status": "string", "reason": "string",
    "priority": "int64", "input_tokens": "int64", "output_tokens": "int64", "generated_tokens": "int64",
    "cached_tokens": "int64", "cached_tokens_all": "int64", "preemptions": "int64", "arrival": "float64",
    "admitted": "float64", "first_token": "float64", "ended": "float64", "service": "float64", "loaded_tokens": "int64",
    "reload_time": "float64",
}

_HOW_IT_ENDED = {"refused": "was refused", "timed_out": "timed out", "failed": "failed"}
PACK_EVERY = 16_384  # ended requests between two packings of the tables


class Cluster:
    """Plays a workload against replicas. Every request ends as finished, refused, cancelled or unfinished (under failures
    also as timed out or failed: failing_cluster.py)."""

    def __init__(
        self, sim: Simulation, workload: Workload, replicas: Sequence[Replica], router: ReplicaRouting, recorder: Recorder,
        *, block_size: int, tools: Tools | None = None, request_type: type[Request] = Request, shared: Shared | None = None,
        log: Callable[[tuple], None] | None = None, progress: Callable[[float], None] | None = None,
    ) -> None:
        self.sim = sim
        self.workload = workload
        self.replicas = replicas
        self.tools = tools or Tools(sim, None, workload.tools)
        self.router = router
        self.live: dict[int, Request] = {}  # requests that have arrived and not ended
        self.ended = 0
        self.token_steps: dict[int, list[int]] = {}  # request -> runs of its replica's steps that brought its tokens
        self._recorder = recorder
        self._table: Table = recorder.table("requests", REQUEST_COLUMNS, order=("request",))
        self._recorded = bytearray(len(workload))
        self._shared = shared
        self._block_size = block_size  # 0 = nobody asks for the identity of blocks (no prefix caching)
        self._request_type = request_type
        self._log = log
        self._progress = progress
        for replica in replicas:
            replica.on_end = self.request_ended
        self._views = [ReplicaView(replica) for replica in replicas]
        self._names = [f"replica {replica.id}" for replica in replicas]
        self._program_arrival: list[float | None] = [None] * workload.n_programs
        self._program_last_end: dict[int, float] = {}
        self._called: dict[int, float] = {}  # turns under way whose gap is not the trace's, and when it began
        self._program_live: dict[int, int] = {}  # turns that have arrived and not ended
        self._program_left = np.bincount(workload.program, minlength=workload.n_programs).tolist()
        self._counts_turns = workload.ends_known or workload.workers > 0
        self._columns = _Columns(workload)
        self._unmet = list(self._columns.waits)  # requests that each one still waits for
        self._dependents = _dependents(workload)
        by_worker = workload.by_worker
        self._open = np.flatnonzero(~by_worker & (np.diff(workload.wait_offsets) == 0)).tolist()
        self._of_workers = set(workload.program[by_worker].tolist())
        self._for_workers = iter(np.flatnonzero(by_worker).tolist())  # first turns of programs that wait for a worker
        self._next_open = 0
        heard = [kind for p in (router, *(p for r in replicas for p in (r.scheduler.admission, r.scheduler.retention)))
                 for kind in p.observes]
        self._tells_starts, self._tells_ends = ProgramStarted in heard, ProgramEnded in heard
        self._tells_arrivals = TurnArrived in heard
        self._router_wakes = type(router).next_wakeup is not Policy.next_wakeup

    def start(self) -> None:
        """Schedule the first arrival; the rest follow one by one, so that the event queue stays short."""
        self._schedule_arrival()
        for _ in range(self.workload.workers):
            self._start_program()
        self._ask_router_wakeup()

    def close(self, *, stuck: bool) -> None:
        """List what has not ended: at the horizon, or (`stuck`) because no event is left that could move it."""
        reason = "no event left that could let it proceed" if stuck else "still in the system at the horizon"
        for request in list(self.live.values()):
            if request.state == "running":
                request.service += self.sim.now - request.running_since
            self._record(request, "unfinished", reason)
        if self.ended < len(self.workload):
            for i in np.flatnonzero(np.frombuffer(self._recorded, dtype=np.int8) == 0).tolist():
                self._record(self._request(i, nan), "unfinished", "had not arrived when the run ended")

    def let_go(self) -> None:
        """Undo the ties from the replicas back to here, so that the memory of a run is free as soon as it is over."""
        for replica in self.replicas:
            del replica.on_end
        self._views = []

    # --- arrivals -----------------------------------------------------------------------------------------------------

    def _schedule_arrival(self) -> None:
        k = self._next_open
        if k < len(self._open):
            self._next_open = k + 1
            i = self._open[k]
            if self._shared is not None:
                ahead = k + len(self.replicas) - 1
                self._shared.arrivals_until = self._columns.arrival[self._open[ahead]] if ahead < len(self._open) else inf
            self.sim.at(self._columns.arrival[i], self._open_arrival, ARRIVAL, id=i, args=(i,))
        elif self._shared is not None:
            self._shared.arrivals_until = inf

    def _start_program(self) -> None:
        """A worker is free: the next program that none has taken starts now."""
        i = next(self._for_workers, None)
        if i is not None:
            self.sim.at(self.sim.now, self._arrive, ARRIVAL, id=i, args=(i,))

    def _open_arrival(self, i: int) -> None:
        self._schedule_arrival()
        self._arrive(i)

    def _arrive(self, i: int) -> None:
        now = self.sim._now
        request = self.live[i] = self._request(i, now)
        program = request.program
        began = self._program_arrival[program]
        if began is None:
            self._program_arrival[program] = now
            if self._tells_starts:
                self._tell(ProgramStarted(now, program))
        else:
            request.program_arrival = began
        gap = nan
        if self._tells_arrivals:
            gap = self._gap(request)
            self._program_live[program] = self._program_live.get(program, 0) + 1
        self._send(request, gap, now)

    def _send(self, request: Request, gap: float, now: float) -> None:
        """Route the request, and hand it to its replica."""
        router, i = self.router, request.id
        answer = router.route(view_of(request, router), self._views, now)
        if type(answer) is not int or not 0 <= answer < len(self.replicas):
            answer = self._checked(answer, now)
        replica = self.replicas[answer]
        replica.outstanding += 1
        if self._log is not None:
            self._log((now, "replica_routing", answer, i, self._names[answer]))
        if router.decision_seconds:
            self.sim.at(now + router.decision_seconds, replica.submit, ARRIVAL, id=i, args=(request, gap))
        else:
            replica.submit(request, gap)

    def _checked(self, answer: Any, now: float) -> int:
        if isinstance(answer, tuple):
            raise PolicyError(self.router, now, f"route answered {answer!r}; prefill and decode are not separate here")
        if isinstance(answer, bool) or not isinstance(answer, np.integer) or not 0 <= answer < len(self.replicas):
            raise PolicyError(self.router, now, f"route answered {answer!r}; allowed: 0 .. {len(self.replicas) - 1}")
        return int(answer)

    def _gap(self, request: Request) -> float:
        """Seconds since the previous turn ended: what the trace says, else by the clock; NaN if a turn still runs."""
        i, program = request.id, request.program
        if i in self._called:  # side by side, or after a wait for a slot
            return self.sim.now - self._called.pop(i)
        if self._columns.waits[i]:
            calls, after = self._columns.calls[i]
            return calls[0][1] + after if calls else after
        return nan if self._program_live.get(program) else self.sim.now - self._program_last_end.get(program, nan)

    def _request(self, i: int, now: float) -> Request:
        w, columns = self.workload, self._columns
        kind = self._request_type
        keys: Any = kind.keys_of(w, i, self._block_size) if self._block_size and now == now else kind.no_keys
        tool = columns.tool[i]
        return kind(
            i, columns.input_tokens[i], columns.output_tokens[i], keys, now, columns.priority[i], columns.program[i], now,
            columns.turn[i], w.tools[tool] if tool >= 0 else None, columns.is_last[i], w.ends_known, columns.following[i],
        )

    # --- ends ---------------------------------------------------------------------------------------------------------

    def request_ended(self, request: Request) -> None:
        """A replica says that a request has finished or was refused."""
        self.replicas[request.replica].outstanding -= 1
        del self.live[request.id]
        if self._tells_arrivals:
            self._program_live[request.program] -= 1
            self._program_last_end[request.program] = self.sim._now
        self._record(request, request.state, request.reason)

    def _record(self, request: Request, status: str, reason: str) -> None:
        now = self.sim._now
        self.ended += 1
        self._recorded[request.id] = 1
        if not self.ended % PACK_EVERY:
            self._recorder.pack()
        runs = request.step_runs()
        if runs:
            self.token_steps[request.id] = runs
            request.first_token = self.replicas[request.replica].step_end(runs[0])
        self._table.append((
            request.id, request.program, request.turn, request.replica, status, reason, request.priority,
            request.input_tokens, request.output_tokens, request.generated, request.cached_first, request.cached_all,
            request.preemptions, request.arrival, request.admitted, request.first_token,
            request.ended if status != "unfinished" else nan, request.service, request.loaded_tokens, request.reload_time,
        ))
        if status == "unfinished":
            return
        if status == "finished" and now - request.program_arrival >= self.workload.time_limit:
            self._cancel_dependents(request.id, f"its program is older than {self.workload.time_limit:g} s")
        elif status == "finished":
            for i in self._dependents.get(request.id, ()):
                self._unmet[i] -= 1
                if not self._unmet[i]:
                    calls, after = self._columns.calls[i]
                    self.tools.call(i, calls, after, self._arrive, (i,))
                    if len(calls) > 1 or (calls and self.tools.limited):
                        self._called[i] = now
        elif status != "cancelled":
            self._cancel_dependents(request.id, status=status)
        if self._counts_turns:
            self._turn_is_over(request.program, now)
        if self._progress is not None:
            self._progress(self.ended / len(self.workload))
        request.forget_work()

    def _turn_is_over(self, program: int, now: float) -> None:
        """After a program's last turn its worker is free, and the engine may hear that it is over."""
        self._program_left[program] -= 1
        if self._program_left[program]:
            return
        if program in self._of_workers:
            self._start_program()
        if not self.workload.ends_known:
            return
        for replica in self.replicas:
            replica.end_program(program)
        if self._tells_ends:
            self._tell(ProgramEnded(now, program))

    def _cancel_dependents(self, first: int, why: str = "", status: str = "refused") -> None:
        """Cancel all that waits for it, directly or not (a loop: a session may have more turns than Python has frames)."""
        gone = [(first, _HOW_IT_ENDED[status])]
        while gone:
            k, how = gone.pop()
            for i in self._dependents.get(k, ()):
                if self._unmet[i] >= 0:
                    self._unmet[i] = -1
                    request = self._request(i, nan)
                    request.ended = self.sim.now
                    self._record(request, "cancelled", why or f"waits for request {k}, which {how}")
                    gone.append((i, "was cancelled"))

    # --- policies -----------------------------------------------------------------------------------------------------

    def _tell(self, fact: Fact) -> None:
        if type(fact) in self.router.observes:
            self.router.observe(fact)
        for replica in self.replicas:
            replica.hear(fact)

    def _ask_router_wakeup(self) -> None:
        if self._router_wakes and self.ended < len(self.workload):
            if self.sim.peek() == inf:
                return  # nothing else will happen: a router alone moves no request
            time = self.router.next_wakeup(self.sim.now)
            if not time > self.sim.now:
                raise PolicyError(self.router, self.sim.now, f"next_wakeup answered {time!r}; allowed: after now, or inf")
            if time < inf:
                self.sim.at(time, self._wake_router, TIMER)

    def _wake_router(self) -> None:
        if Woken in self.router.observes:
            self.router.observe(Woken(self.sim.now))
        self._ask_router_wakeup()


class _Columns:
    """The workload's columns as lists: one element of a list costs a third of one of an array."""

    def __init__(self, workload: Workload) -> None:
        self.arrival = workload.arrival.tolist()
        self.input_tokens = workload.input_tokens.tolist()
        self.output_tokens = workload.output_tokens.tolist()
        self.priority = workload.priority.tolist()
        self.program = workload.program.tolist()
        self.turn = workload.turn.tolist()
        self.tool = workload.tool.tolist()
        self.waits = np.diff(workload.wait_offsets).tolist()
        self.is_last = _last_of_program(workload).tolist()
        self.following = _following(workload)
        self.calls = _calls(workload)


def _last_of_program(workload: Workload) -> np.ndarray:
    """bool[n]: whether no later turn of the same program follows."""
    last = np.full(workload.n_programs, -1, dtype=np.int64)
    np.maximum.at(last, workload.program, workload.turn)
    return workload.turn == last[workload.program] if len(workload) else np.zeros(0, dtype=bool)


def _calls(workload: Workload) -> dict[int, tuple[list[tuple[int, float]], float]]:
    """What runs before each turn that waits for another: its tool calls (tool, s), and the seconds after the last one."""
    out = {}
    gap, tool = workload.gap.tolist(), workload.tool.tolist()
    listed = np.diff(workload.call_offsets).tolist()
    for i in np.flatnonzero(np.diff(workload.wait_offsets)).tolist():
        if listed[i]:
            out[i] = workload.calls(i), gap[i]
        elif tool[i] >= 0:
            out[i] = [(tool[i], gap[i])], 0.0
        else:
            out[i] = [], gap[i]
    return out


def _following(workload: Workload) -> list[Following | None]:
    """Each request's next turn: the first of its program that waits for it; with recorded arrivals, the next in order."""
    w = workload
    next_row = np.full(len(w), -1, dtype=np.int64)
    order = np.lexsort((w.turn, w.program))
    same = w.program[order[1:]] == w.program[order[:-1]]
    recorded = same & (np.diff(w.wait_offsets)[order[1:]] == 0)
    next_row[order[:-1][recorded]] = order[1:][recorded]
    waiter = np.repeat(np.arange(len(w)), np.diff(w.wait_offsets))
    own = w.program[waiter] == w.program[w.wait_for]
    next_row[w.wait_for[own][::-1]] = waiter[own][::-1]  # backwards, so that the first waiter stands
    out: list[Following | None] = [None] * len(w)
    for i in np.flatnonzero(next_row >= 0).tolist():
        k = int(next_row[i])
        tool = int(w.tool[k])
        longest = max((seconds for _, seconds in w.calls(k)), default=0.0)
        out[i] = Following(w.tools[tool] if tool >= 0 else None, float(w.gap[k]) + longest, float(w.arrival[k]))
    return out


def _dependents(workload: Workload) -> dict[int, list[int]]:
    """request -> requests that wait for it."""
    out: dict[int, list[int]] = {}
    waiter = np.repeat(np.arange(len(workload)), np.diff(workload.wait_offsets))
    for i, k in zip(waiter.tolist(), workload.wait_for.tolist(), strict=True):
        out.setdefault(k, []).append(i)
    return out
