"""A window of a run as Chrome trace-event JSON, for ui.perfetto.dev or chrome://tracing.

Times are whole microseconds of simulated time. Of each replica: its steps as slices, counters (requests running and waiting,
free KV blocks, tokens a step), requests as async slices with their phases, preemptions and refusals as instants. Of programs
with several turns: turns and what ran between them as slices, joined by flows (turn, tool, next turn). What reaches over an
end of the window is cut there; its own times stand in its arguments.

A step's slice is the device's work, known where the steps table has the step (`sample_every: 0` samples every one); of
others the start is inferred: the end of the step before, or the latest admission since. Waits after a preemption are within
`decode`: the requests table does not tell when they were. What runs between turns includes waits for a slot of the tool.

Format: Trace Event Format (Google, 2016), JSON object form; phases M, X, C, b, e, i, s, t, f.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simcore.errors import ConfigError
from simcore.files import write_whole
from simcore.models.serving import RunResult
from simcore.traces.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_WINDOW = 60.0  # s
MOST_EVENTS = 250_000
MOST_PROGRAMS = 200  # tracks of programs, the first to be seen in the window
_PER_STEP, _PER_SAMPLE, _PER_REQUEST = 1, 3, 15  # events at most
_STEPS, _MARKS = 1, 2  # threads of a replica


@dataclass(frozen=True)
class Timeline:
    """What was written. `end` is before the end asked for where the window held too much; `notes`: what was left out."""

    path: Path
    start: float
    end: float
    events: int
    notes: tuple[str, ...]


def write_timeline(
    path: Path, result: RunResult, workload: Workload, start: float | None = None, end: float | None = None, *,
    most_events: int = MOST_EVENTS,
) -> Timeline:
    """Write the window [start, end) in simulated seconds. `start` None = the first arrival, `end` None = DEFAULT_WINDOW
    later. A window of more than about `most_events` is cut short, which the result and the file say.

    Raises ConfigError for a window without an event and for one that is none.
    """
    begin, stop, notes = _window(result, start, end, most_events)
    trace = _Trace(result, workload, begin, stop)
    events = trace.build()
    if not any(event["ph"] != "M" for event in events):
        raise ConfigError("window", found=f"{begin:g} .. {stop:g} s", why="nothing happens in it",
                          allowed=_span(result))
    notes += trace.notes
    value = {
        "traceEvents": events, "displayTimeUnit": "ms",
        "otherData": {"simulated_window_s": [begin, stop], "notes": notes, "source": "simcore"},
    }
    lines = ",\n".join(json.dumps(event, separators=(",", ":"), sort_keys=True, allow_nan=False) for event in events)
    head = json.dumps({key: of for key, of in value.items() if key != "traceEvents"}, sort_keys=True)
    write_whole(Path(path), f'{head[:-1]}, "traceEvents": [\n{lines}\n]}}\n')
    return Timeline(Path(path), begin, stop, len(events), tuple(notes))


def run_timeline(
    study: Path, settings: Sequence[str], arm: str | None, seed: int | None, start: str | None, end: str | None,
    out: Path | None,
) -> Timeline:
    """Play an arm of a study up to the end of the window with every step sampled, and write its timeline to `out` (None =
    out/<study name>-timeline.json). `start`, `end`: durations as in studies, from the start of simulated time. Raises
    ConfigError."""
    from simcore.config import parse_seconds
    from simcore.experiments.compare import check
    from simcore.experiments.run import Job, play
    from simcore.experiments.study import Arm, read_study

    def seconds(option: str, text: str | None) -> float | None:
        try:
            return None if text is None else parse_seconds(text)
        except ValueError as error:
            raise ConfigError(option, found=text, allowed=str(error)) from None

    begin, stop = seconds("--start", start), seconds("--end", end)
    file = read_study(study, settings)
    arms = {a.label: a for a in file.arms}
    if arm is not None and arm not in arms:
        raise ConfigError(f"--arm {arm}", allowed=", ".join(arms))
    chosen = arms[arm] if arm is not None else Arm(file.study.name, file.study)
    seed = chosen.study.seeds[0] if seed is None else seed
    (workload,) = check(file, [chosen], seed)
    if stop is None:
        known = workload.arrival[~np.isnan(workload.arrival)]
        first = begin if begin is not None else float(known.min()) if len(known) else 0.0
        stop = first + DEFAULT_WINDOW
    if begin is not None and not stop > begin:
        raise ConfigError("--end", found=f"{stop:g} s", allowed=f"a time after --start, {begin:g} s")
    horizon = min(chosen.study.horizon, stop) if stop > 0 else chosen.study.horizon
    played = chosen.study.model_copy(update={"sample_every": 0.0, "horizon": horizon, "window": "all"})
    result = play(Job(played, file.folder, seed), None, workload)
    return write_timeline(out or Path("out") / f"{file.study.name}-timeline.json", result, workload, begin, stop)


def _window(
    result: RunResult, start: float | None, end: float | None, most_events: int
) -> tuple[float, float, list[str]]:
    """The window that is written: the one asked for, or as much of it from its start on as `most_events` hold."""
    came = result.requests["arrival"].dropna()
    begin = float(start) if start is not None else float(came.min()) if len(came) else 0.0
    stop = float(end) if end is not None else begin + DEFAULT_WINDOW
    if not (isfinite(begin) and isfinite(stop) and 0 <= begin < stop):
        raise ConfigError("window", found=f"{begin:g} .. {stop:g} s", allowed="0 <= start < end, in simulated seconds")
    times, weights = [], []
    for replica, ends in enumerate(result.step_ends):
        times.append(ends[(ends > begin) & (ends <= stop)])
        weights.append(np.full(len(times[-1]), _PER_STEP))
        rows = result.steps.loc[result.steps["replica"] == replica, "time"].to_numpy()
        times.append(rows[(rows >= begin) & (rows < stop)])
        weights.append(np.full(len(times[-1]), _PER_SAMPLE))
    requests = result.requests
    arrival, ended = requests["arrival"].to_numpy(), requests["ended"].fillna(inf).to_numpy()
    inside = (arrival < stop) & (ended > begin)
    times.append(np.maximum(arrival[inside], begin))
    weights.append(np.full(len(times[-1]), _PER_REQUEST))
    at, weight = np.concatenate(times), np.concatenate(weights)
    order = np.argsort(at, kind="stable")
    total = np.cumsum(weight[order])
    if not len(total) or total[-1] <= most_events:
        return begin, stop, []
    cut = float(at[order][int(np.searchsorted(total, most_events, side="right"))])
    if not cut > begin:
        raise ConfigError("window", found=f"{begin:g} .. {stop:g} s", why=f"more than {most_events:,} events at its start",
                          allowed="another start, or a higher limit")
    return begin, cut, [f"The window ends at {cut:.6f} s instead of {stop:.6f} s: it would hold more than {most_events:,} "
                        "events."]


def _span(result: RunResult) -> str:
    ends = [float(ends[-1]) for ends in result.step_ends if len(ends)]
    came = result.requests["arrival"].dropna()
    if not ends or not len(came):
        return "none: nothing happened in this run"
    return f"a window within {float(came.min()):.6g} .. {max(ends):.6g} s"


class _Trace:
    """The events of one window."""

    def __init__(self, result: RunResult, workload: Workload, start: float, end: float) -> None:
        self.result, self.workload = result, workload
        self.start, self.end = start, end
        self.notes: list[str] = []
        self._events: list[dict[str, Any]] = []
        self._named: list[dict[str, Any]] = []
        requests = result.requests
        ended = requests["ended"].to_numpy()
        self._rows = requests.to_dict("list")
        self._arrival = requests["arrival"].to_numpy(copy=True)  # s; inf = what it waited for has ended, but not its pause
        self.seen = np.flatnonzero((self._arrival < end) & ~(ended <= start))
        for i in np.flatnonzero(np.isnan(self._arrival) & (requests["status"] == "unfinished").to_numpy()).tolist():
            waits = workload.waits(i)
            if len(waits) and not np.isnan(ended[waits]).any():
                self._arrival[i] = inf

    def build(self) -> list[dict[str, Any]]:
        """All events: names first, then by time; at one time async ends come before starts, and a slice before what binds to
        it."""
        for replica in range(len(self.result.step_ends)):
            self._name(replica + 1, f"replica {replica}", {_STEPS: "steps", _MARKS: "preemptions, refusals"})
            self._steps(replica)
            self._counters(replica)
        self._requests()
        self._marks()
        self._programs()
        rank = {"e": 0, "X": 1, "b": 2}
        self._events.sort(key=lambda event: (event["ts"], rank.get(event["ph"], 3)))
        return self._named + self._events

    def _name(self, pid: int, process: str, threads: dict[int, str]) -> None:
        self._named.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": process}})
        self._named.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0,
                            "args": {"sort_index": pid}})
        for tid, name in threads.items():
            self._named.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}})

    def _slice(self, pid: int, tid: int, name: str, category: str, start: int, stop: int, args: dict[str, Any]) -> None:
        self._events.append({"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start,
                             "dur": stop - start, "args": args})

    def _cut(self, time: float) -> float:
        return min(max(time, self.start), self.end)

    # --- replicas -----------------------------------------------------------------------------------------------------

    def _steps(self, replica: int) -> None:
        ends = np.asarray(self.result.step_ends[replica])
        rows = self.result.steps
        rows = rows[rows["replica"] == replica]
        known = dict(zip(rows["time"].tolist(), rows[["seconds", "tokens", "sequences", "step"]].itertuples(
            index=False, name=None), strict=True))
        requests = self.result.requests
        admitted = np.sort(requests.loc[requests["replica"] == replica, "admitted"].dropna().to_numpy())
        first = int(np.searchsorted(ends, self.start, side="right"))
        inferred, before = 0, 0
        for k in range(first, len(ends)):
            end = float(ends[k])
            begun = float(ends[k - 1]) if k else -inf
            args: dict[str, Any] = {"step": k}
            if end in known:
                seconds, tokens, sequences, _ = known[end]
                begun = max(begun, end - seconds)
                args |= {"tokens": int(tokens), "sequences": int(sequences), "device_us": _us(seconds)}
            else:
                latest = int(np.searchsorted(admitted, end, side="left")) - 1
                begun = max(begun, float(admitted[latest]) if latest >= 0 else begun)
                inferred += 1
                args["start"] = "inferred"
            if begun >= self.end:
                break
            begun = begun if isfinite(begun) else end
            start, stop = max(_us(self._cut(begun)), before), _us(self._cut(end))
            before = stop
            self._slice(replica + 1, _STEPS, "step", "step", start, max(start, stop), args)
        if inferred:
            self.notes.append(f"replica {replica}: the start of {inferred:,} steps is inferred; the steps table does not "
                              "have them (sample_every: 0 samples every step).")

    def _counters(self, replica: int) -> None:
        rows = self.result.steps
        rows = rows[(rows["replica"] == replica) & (rows["time"] >= self.start) & (rows["time"] < self.end)]
        columns = rows[["time", "running", "waiting", "free_blocks", "tokens"]]
        for time, running, waiting, free, tokens in columns.itertuples(index=False, name=None):
            for name, args in (
                ("requests", {"running": int(running), "waiting": int(waiting)}), ("free KV blocks", {"blocks": int(free)}),
                ("tokens a step", {"tokens": int(tokens)}),
            ):
                self._events.append({"ph": "C", "name": name, "cat": "counter", "pid": replica + 1, "tid": 0,
                                     "ts": _us(time), "args": args})

    def _requests(self) -> None:
        """Async slices: the request around its phases, all of one id, so that each nests in it."""
        rows = self._rows
        unrouted = 0
        for i in self.seen.tolist():
            replica = rows["replica"][i]
            if replica < 0:
                unrouted += 1
                continue
            arrival, ended = rows["arrival"][i], rows["ended"][i]
            marks = [("queue", arrival), ("prefill", rows["admitted"][i]), ("decode", rows["first_token"][i])]
            marks = [(name, time) for name, time in marks if time == time]
            last = ended if ended == ended else self.end
            args = {
                "request": i, "program": rows["program"][i], "turn": rows["turn"][i], "status": rows["status"][i],
                "input_tokens": rows["input_tokens"][i], "output_tokens": rows["output_tokens"][i],
                "cached_tokens": rows["cached_tokens"][i], "preemptions": rows["preemptions"][i],
                "arrival_us": _us(arrival), **({"ended_us": _us(ended)} if ended == ended else {}),
            }
            nested: list[tuple[str, int, int]] = []
            for (name, time), (_, until) in zip(marks, [*marks[1:], ("", last)], strict=True):
                a, b = _us(self._cut(time)), _us(self._cut(until))
                if time < self.end and until > self.start and b > a:
                    nested.append((name, a, b))
            self._async(replica + 1, i, "request", _us(self._cut(arrival)), _us(self._cut(last)), nested, args)
        if unrouted:
            self.notes.append(f"{unrouted:,} requests of the window were never routed and are left out.")

    def _async(
        self, pid: int, id: int, name: str, start: int, stop: int, nested: Sequence[tuple[str, int, int]],
        args: dict[str, Any],
    ) -> None:
        common = {"cat": "request", "id": str(id), "pid": pid, "tid": 0}
        stop = max(stop, start + 1)  # a slice without length would end before it starts, in the order of events
        self._events.append({"ph": "b", "name": name, "ts": start, "args": args, **common})
        for inner, a, b in nested:
            self._events.append({"ph": "b", "name": inner, "ts": a, "args": {}, **common})
            self._events.append({"ph": "e", "name": inner, "ts": b, "args": {}, **common})
        self._events.append({"ph": "e", "name": name, "ts": stop, "args": {}, **common})

    def _marks(self) -> None:
        """Preemptions, yields and refusals."""
        log: pd.DataFrame = self.result.decisions
        words = {"victim": "preempted", "limit": "yields", "refuse": "refused"}
        rows = log[log["kind"].isin(list(words)) & (log["time"] >= self.start) & (log["time"] < self.end)]
        for time, kind, replica, request, answer in rows[["time", "kind", "replica", "request", "answer"]].itertuples(
                index=False, name=None):
            if replica >= 0:
                self._events.append({
                    "ph": "i", "s": "t", "name": words[kind], "cat": "decision", "pid": int(replica) + 1, "tid": _MARKS,
                    "ts": _us(time), "args": {"request": int(request), "answer": str(answer)}})

    # --- programs -----------------------------------------------------------------------------------------------------

    def _programs(self) -> None:
        """Programs of several turns, those of the window that came first; a track for each, more where turns overlap."""
        w = self.workload
        turns = np.bincount(w.program, minlength=w.n_programs)
        arrival = self._arrival
        seen = self.seen[np.argsort(arrival[self.seen], kind="stable")]
        programs = list(dict.fromkeys(p for p in w.program[seen].tolist() if turns[p] > 1))
        if len(programs) > MOST_PROGRAMS:
            self.notes.append(f"Tracks of the first {MOST_PROGRAMS} of {len(programs):,} programs of the window.")
        of_program: dict[int, list[int]] = {p: [] for p in programs[:MOST_PROGRAMS]}
        for i in np.argsort(arrival, kind="stable").tolist():
            if int(w.program[i]) in of_program and arrival[i] == arrival[i]:
                of_program[int(w.program[i])].append(i)
        pid = len(self.result.step_ends) + 1
        names: dict[int, str] = {}
        tid = 0
        for program, own in of_program.items():
            lanes: list[int] = []  # when each track is free
            place: dict[int, tuple[int, int, int]] = {}  # turn, or -1 - turn for what ran before it: track, start, stop
            for i in own:
                if self._rows["ended"][i] <= self.start:
                    continue
                before = self._before(i, own)
                self._pause(i, before, pid, tid, lanes, place)
                if arrival[i] < self.end:
                    self._turn(i, pid, tid, lanes, place)
                    self._arrow(i, before, pid, place)
            names |= {tid + k: f"program {program}" + (f", beside {k}" if k else "") for k in range(len(lanes))}
            tid += len(lanes)
        if names:
            self._name(pid, "programs", names)

    def _before(self, i: int, own: Sequence[int]) -> int | None:
        """The turn whose end let turn i come: the last to end of those it waits for, else of those that had ended."""
        ended = self._rows["ended"]
        waits = [int(j) for j in self.workload.waits(i)]
        candidates = [j for j in own if j != i and ended[j] <= self._arrival[i] and (j in waits or not waits)]
        return max(candidates, key=lambda j: (ended[j], j)) if candidates else None

    def _turn(self, i: int, pid: int, tid: int, lanes: list[int], place: dict[int, tuple[int, int, int]]) -> None:
        rows = self._rows
        ended = rows["ended"][i]
        start = _us(self._cut(rows["arrival"][i]))
        stop = max(_us(self._cut(ended if ended == ended else self.end)), start + 1)
        track = tid + _lane(lanes, start, stop)
        place[i] = (track, start, stop)
        self._slice(pid, track, f"turn {rows['turn'][i]}", "turn", start, stop, {
            "request": i, "replica": rows["replica"][i], "status": rows["status"][i]})

    def _pause(self, i: int, before: int | None, pid: int, tid: int, lanes: list[int],
               place: dict[int, tuple[int, int, int]]) -> None:
        """What ran between the turn before and turn i, as far as it lies in the window."""
        if before is None:
            return
        start, stop = (_us(self._cut(t)) for t in (self._rows["ended"][before], self._arrival[i]))
        if before in place:
            start = max(start, place[before][2])
        if stop > start:
            track = tid + _lane(lanes, start, stop)
            place[-1 - i] = (track, start, stop)
            self._slice(pid, track, self._tool(i), "tool", start, stop, {"next_request": i})

    def _tool(self, i: int) -> str:
        w = self.workload
        called = list(dict.fromkeys(w.tools[tool] for tool, _ in w.calls(i)))
        if not called and w.tool[i] >= 0:
            called = [w.tools[int(w.tool[i])]]
        return ", ".join(called) or "pause"

    def _arrow(self, i: int, before: int | None, pid: int, place: dict[int, tuple[int, int, int]]) -> None:
        """A flow from the turn before over the tool to turn i, if its start lies in the window too."""
        if before is None or before not in place or self._rows["ended"][before] < self.start:
            return
        common = {"name": "next turn", "cat": "program", "id": str(i), "pid": pid}
        track, _, stop = place[before]
        self._events.append({"ph": "s", "tid": track, "ts": stop - 1, **common})  # within the slice: at its end it is closed
        if -1 - i in place:
            track, start, _ = place[-1 - i]
            self._events.append({"ph": "t", "tid": track, "ts": start, **common})
        track, start, _ = place[i]
        self._events.append({"ph": "f", "bp": "e", "tid": track, "ts": start, **common})


def _lane(lanes: list[int], start: int, stop: int) -> int:
    """The first track that is free at `start`; it is taken until `stop`."""
    for k, free in enumerate(lanes):
        if free <= start:
            lanes[k] = stop
            return k
    lanes.append(stop)
    return len(lanes) - 1


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
