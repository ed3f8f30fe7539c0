"""Replicas behind a router: requests arrive, are routed, end; programs start and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any

import numpy as np

from simcore.errors import PolicyError
from simcore.models.decision_points import Policy, ReplicaRouting
from simcore.models.facts import Fact, ProgramEnded, ProgramStarted, Woken
from simcore.models.policy_desk import view_of
from simcore.models.replica import Replica
from simcore.models.request import Request
from simcore.models.views import ReplicaView
from simcore.recorder import Recorder, Table
from simcore.simulation import ARRIVAL, TIMER, TOOL_RETURN, Simulation
from simcore.traces.workload import Workload

REQUEST_COLUMNS = {
    "request": "int64", "program": "int64", "turn": "int64", "replica": "int64", "status": "string", "reason": "string",
    "priority": "int64", "input_tokens": "int64", "output_tokens": "int64", "generated_tokens": "int64",
    "cached_tokens": "int64", "cached_tokens_all": "int64", "preemptions": "int64", "arrival": "float64",
    "admitted": "float64", "first_token": "float64", "ended": "float64", "service": "float64",
}


class Cluster:
    """Plays a workload against replicas. Every request ends as finished, refused, cancelled or unfinished."""

    def __init__(
        self, sim: Simulation, workload: Workload, replicas: Sequence[Replica], router: ReplicaRouting, recorder: Recorder,
        *, block_size: int, request_type: type[Request] = Request,
        log: Callable[[float, str, int, int, str], None] | None = None, progress: Callable[[float], None] | None = None,
    ) -> None:
        self.sim = sim
        self.workload = workload
        self.replicas = replicas
        self.router = router
        self.live: dict[int, Request] = {}  # requests that have arrived and not ended
        self.ended = 0
        self.token_steps: dict[int, list[int]] = {}  # request -> runs of its replica's steps that brought its tokens
        self._table: Table = recorder.table("requests", REQUEST_COLUMNS)
        self._block_size = block_size  # 0 = nobody asks for the identity of blocks (no prefix caching)
        self._request_type = request_type
        self._log = log
        self._progress = progress
        for replica in replicas:
            replica.on_end, replica.look_ahead = self.request_ended, self.look_ahead
        self._views = [ReplicaView(replica) for replica in replicas]
        self._names = [f"replica {replica.id}" for replica in replicas]
        self._program_arrival: dict[int, float] = {}
        self._program_last_end: dict[int, float] = {}
        self._program_live: dict[int, int] = {}  # turns that have arrived and not ended
        self._program_left = np.bincount(workload.program, minlength=workload.n_programs).tolist()
        self._columns = _Columns(workload)
        self._unmet = list(self._columns.waits)  # requests that each one still waits for
        self._dependents = _dependents(workload)
        self._open = [i for i in range(len(workload)) if not self._unmet[i]]
        self._next_open = 0
        heard = [kind for p in (router, *(p for r in replicas for p in (r.scheduler.admission, r.scheduler.retention)))
                 for kind in p.observes]
        self._tells_starts, self._tells_ends = ProgramStarted in heard, ProgramEnded in heard
        self._router_wakes = type(router).next_wakeup is not Policy.next_wakeup

    def look_ahead(self) -> float:
        """When the next arrivals, as many as there are replicas, will have come (s); inf = no more than those are known."""
        k = self._next_open + len(self.replicas) - 2
        return self._columns.arrival[self._open[k]] if k < len(self._open) else inf

    def start(self) -> None:
        """Schedule the first arrival; the rest follow one by one, so that the event queue stays short."""
        self._schedule_arrival()
        self._ask_router_wakeup()

    def close(self, *, stuck: bool) -> None:
        """List what has not ended: at the horizon, or (`stuck`) because no event is left that could move it."""
        reason = "no event left that could let it proceed" if stuck else "still in the system at the horizon"
        for request in list(self.live.values()):
            self._record(request, "unfinished", reason)
        if self.ended < len(self.workload):
            recorded = {row[0] for row in self._table.rows}
            for i in range(len(self.workload)):
                if i not in recorded:
                    self._record(self._request(i, nan), "unfinished", "had not arrived when the run ended")
        self._table.rows.sort(key=lambda row: row[0])

    def let_go(self) -> None:
        """Undo the ties from the replicas back to here, so that the memory of a run is free as soon as it is over."""
        for replica in self.replicas:
            del replica.on_end, replica.look_ahead
        self._views = []

    # --- arrivals -----------------------------------------------------------------------------------------------------

    def _schedule_arrival(self) -> None:
        if self._next_open < len(self._open):
            i = self._open[self._next_open]
            self._next_open += 1
            self.sim.at(self._columns.arrival[i], self._open_arrival, ARRIVAL, id=i, args=(i,))

    def _open_arrival(self, i: int) -> None:
        self._schedule_arrival()
        self._arrive(i)

    def _arrive(self, i: int) -> None:
        now = self.sim.now
        request = self._request(i, now)
        self.live[i] = request
        if request.program not in self._program_arrival:
            self._program_arrival[request.program] = now
            if self._tells_starts:
                self._tell(ProgramStarted(now, request.program))
        request.program_arrival = self._program_arrival[request.program]
        gap = self._gap(request)
        self._program_live[request.program] = self._program_live.get(request.program, 0) + 1
        answer = self.router.route(view_of(request, self.router), self._views, now)
        if type(answer) is not int or not 0 <= answer < len(self.replicas):
            answer = self._checked(answer, now)
        replica = self.replicas[answer]
        replica.outstanding += 1
        if self._log is not None:
            self._log(now, "replica_routing", replica.id, i, self._names[answer])
        if self.router.decision_seconds:
            self.sim.at(now + self.router.decision_seconds, replica.submit, ARRIVAL, id=i, args=(request, gap))
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
        if not self._columns.waits[i]:
            return nan if self._program_live.get(program) else self.sim.now - self._program_last_end.get(program, nan)
        return float(self.workload.gap[i])

    def _request(self, i: int, now: float) -> Request:
        w, columns = self.workload, self._columns
        kind = self._request_type
        keys: Any = kind.keys_of(w, i, self._block_size) if self._block_size and now == now else kind.no_keys
        tool = columns.tool[i]
        return kind(
            i, columns.input_tokens[i], columns.output_tokens[i], keys, now, columns.priority[i], columns.program[i], now,
            columns.turn[i], w.tools[tool] if tool >= 0 else None, columns.is_last[i], w.ends_known,
        )

    # --- ends ---------------------------------------------------------------------------------------------------------

    def request_ended(self, request: Request) -> None:
        """A replica says that a request has finished or was refused."""
        self.replicas[request.replica].outstanding -= 1
        del self.live[request.id]
        self._program_live[request.program] -= 1
        self._record(request, request.state, request.reason)

    def _record(self, request: Request, status: str, reason: str) -> None:
        now = self.sim.now
        self.ended += 1
        runs = request.step_runs()
        if runs:
            self.token_steps[request.id] = runs
            request.first_token = self.replicas[request.replica].step_end(runs[0])
        self._table.append((
            request.id, request.program, request.turn, request.replica, status, reason, request.priority,
            request.input_tokens, request.output_tokens, request.generated, request.cached_first, request.cached_all,
            request.preemptions, request.arrival, request.admitted, request.first_token,
            request.ended if status != "unfinished" else nan, request.service,
        ))
        if status == "unfinished":
            return
        self._program_last_end[request.program] = now
        self._program_left[request.program] -= 1
        program_over = self.workload.ends_known and not self._program_left[request.program]
        if status == "finished":
            for i in self._dependents.get(request.id, ()):
                self._unmet[i] -= 1
                if not self._unmet[i]:
                    at = now + float(self.workload.gap[i])
                    self.sim.at(at, self._arrive, TOOL_RETURN, id=i, args=(i,))
        elif status == "refused":
            self._cancel_dependents(request.id)
        if program_over:
            for replica in self.replicas:
                replica.end_program(request.program)
            if self._tells_ends:
                self._tell(ProgramEnded(now, request.program))
        if self._progress is not None:
            self._progress(self.ended / len(self.workload))
        request.forget_work()

    def _cancel_dependents(self, refused: int) -> None:
        """Cancel all that waits for it, directly or not (a loop: a session may have more turns than Python has frames)."""
        gone = [(refused, "refused")]
        while gone:
            k, status = gone.pop()
            for i in self._dependents.get(k, ()):
                if self._unmet[i] >= 0:
                    self._unmet[i] = -1
                    request = self._request(i, nan)
                    request.ended = self.sim.now
                    self._record(request, "cancelled", f"waits for request {k}, which was {status}")
                    gone.append((i, "cancelled"))

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


def _last_of_program(workload: Workload) -> np.ndarray:
    """bool[n]: whether no later turn of the same program follows."""
    last = np.full(workload.n_programs, -1, dtype=np.int64)
    np.maximum.at(last, workload.program, workload.turn)
    return workload.turn == last[workload.program] if len(workload) else np.zeros(0, dtype=bool)


def _dependents(workload: Workload) -> dict[int, list[int]]:
    """request -> requests that wait for it."""
    out: dict[int, list[int]] = {}
    waiter = np.repeat(np.arange(len(workload)), np.diff(workload.wait_offsets))
    for i, k in zip(waiter.tolist(), workload.wait_for.tolist(), strict=True):
        out.setdefault(k, []).append(i)
    return out
