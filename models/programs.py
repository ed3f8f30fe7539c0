"""The table of programs: when each came and ended, where its time went, and what it reused of its own work.

**Where the time went.** `queueing`, `prefill`, `decode`, `reload` and `tool` are seconds along the critical path and sum to
the JCT (all NaN unless every turn finished). The path is walked back from the turn that ended last:

- The predecessor of a turn that waits for turns of its program is the one of them that ended last. That of any other turn
  (a recorded arrival, a start by a worker) is the turn of its program that ended last at or before its arrival.
- `tool` is the time from the predecessor's end to the arrival: tools, their slots, people, think time, other programs.
  Without a predecessor it is the time since the program's first arrival. So where turns overlap on a recorded clock, what
  ran beside the path does not count: the client, not the overlapping turn, set the time of the arrival.
- Within a turn `reload` is its `reload_time` (loading KV from a lower tier; 0 without such a column), at most what it spent
  outside the running list; `queueing` is the rest of that: the first wait, and the waits after preemptions.
- `prefill` is the first admission to the first token (of a preempted turn: at most its service), `decode` the rest of its
  service; after a preemption that includes recomputing. A wait between the first admission and the first token counts
  as prefill as far as the service goes, since the requests table does not tell them apart. Where prefill and decode are
  separate, `prefill` ends at `prefill_ended`, the push is `reload`, and waits for room on the decode replica are queueing.

Equal ends: the later row ended last.

**What was reused.** `ideal_reuse_tokens` are the prompt tokens of admitted turns that turns of the same program admitted
before them also held (prompt and delivered output), as far as the trace identifies them; `reused_tokens` those of them that
were found cached at first admission, `recomputed_tokens` the others. An engine reuses whole blocks and always computes a
prompt's last token, so that even one that forgets nothing falls short of the ideal by up to a block a turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from simcore.models.metrics import distribution
from simcore.traces.identity import Numbering
from simcore.traces.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("queueing", "prefill", "decode", "tool", "reload")


def programs_table(requests: pd.DataFrame, workload: Workload, run_usd: float | None = None) -> pd.DataFrame:
    """One row a program (see the module). `requests`: the table with metrics, row = request of `workload`. `run_usd`: what
    the run cost; then `usd` is each program's part of it, by its seconds of service. Token columns are sums over turns.

    Raises ValueError if the table and the workload differ in length.
    """
    import pandas as pd

    if len(requests) != len(workload):
        raise ValueError(f"{len(requests)} requests in the table, {len(workload)} in the workload")
    turns = _Turns(requests, workload)
    finished = turns.sum("finished")
    arrival, ended = turns.over(np.fmin, turns.column("arrival")), turns.over(np.fmax, turns.column("ended"))
    jct = np.where(finished == turns.count, ended - arrival, np.nan)
    table = {
        "program": turns.program[turns.starts], "arrival": arrival, "ended": ended, "jct": jct, "turns": turns.count,
        "finished_turns": finished,
    }
    for name, column in (
        ("input_tokens", "input_tokens"), ("output_tokens", "generated_tokens"), ("cached_tokens", "cached_tokens"),
        ("queue_time", "queue_time"), ("preemptions", "preemptions"),
    ):
        table[name] = turns.sum(column)
    table |= {name: np.where(np.isnan(jct), np.nan, turns.add(part)) for name, part in _path_parts(turns, arrival).items()}
    ideal = ideal_reuse(requests, workload)[turns.order]
    reused = np.minimum(ideal, turns.column("cached_tokens"))
    table |= {
        "recomputed_tokens": turns.add(ideal - reused), "reused_tokens": turns.add(reused),
        "ideal_reuse_tokens": turns.add(ideal),
    }
    if run_usd is not None:
        service = turns.sum("service")
        total = service.sum()
        table["usd"] = run_usd * service / total if total > 0 else np.full(len(service), np.nan)
    return pd.DataFrame(table)


def program_summary(programs: pd.DataFrame) -> dict[str, Any]:
    """What a summary says of programs, where some have more than one turn: JCT (ms) of those that finished, the means of its
    parts (ms), tokens reused and recomputed."""
    if not (programs["turns"] > 1).any():
        return {}
    jct = programs["jct"].to_numpy()
    out: dict[str, Any] = {"programs": len(programs), "programs_completed": int((~np.isnan(jct)).sum())}
    spread = distribution(jct)
    out["median_jct_ms"] = spread["p50"] * 1e3
    out |= {f"{statistic}_jct_ms": value * 1e3 for statistic, value in spread.items()}
    out |= {f"mean_jct_{part}_ms": float(programs[part].mean()) * 1e3 for part in PARTS}
    return out | {name: int(programs[name].sum()) for name in ("recomputed_tokens", "reused_tokens", "ideal_reuse_tokens")}


class _Turns:
    """The requests by program, within a program by end (unended last), then row. A place is an index into that order;
    `starts`, int64[programs], are the first places of the programs, `count` their numbers of turns; `alone`: each has one,
    and nothing need be added up."""

    def __init__(self, requests: pd.DataFrame, workload: Workload) -> None:
        self._requests = requests
        self.workload = workload
        n = len(workload)
        self.alone = n == workload.n_programs and np.bincount(workload.program, minlength=1).max() <= 1
        by_end = (requests["ended"].to_numpy(), workload.program)
        self.order = np.argsort(workload.program, kind="stable") if self.alone else np.lexsort(by_end)
        self.program = workload.program[self.order]
        self.starts = np.flatnonzero(np.concatenate(([True], self.program[1:] != self.program[:-1]))) if n else self.order
        self.count = np.diff(np.append(self.starts, n))

    def column(self, name: str) -> np.ndarray:
        """[n], a column of the requests in this order; "finished" is their status as 0 or 1."""
        if name == "finished":
            return (self._requests["status"] == "finished").to_numpy(dtype=bool).astype(np.int64)[self.order]
        return self._requests[name].to_numpy()[self.order]

    def over(self, how: np.ufunc, values: np.ndarray) -> np.ndarray:
        """[programs], values given in this order, reduced over each program's turns."""
        return values if self.alone else how.reduceat(values, self.starts)

    def add(self, values: np.ndarray) -> np.ndarray:
        """[programs], sums of values given in this order; NaN adds nothing."""
        return self.over(np.add, np.where(np.isnan(values), 0.0, values) if values.dtype.kind == "f" else values)

    def sum(self, name: str) -> np.ndarray:
        return self.add(self.column(name))

    def reload(self) -> np.ndarray | float:
        return self.column("reload_time") if "reload_time" in self._requests else 0.0

    def prefill_ended(self) -> np.ndarray | None:
        """When the prefill replica was done (s); None where replicas do both."""
        return self.column("prefill_ended") if "prefill_ended" in self._requests else None


def _path_parts(turns: _Turns, program_arrival: np.ndarray) -> dict[str, np.ndarray]:
    """float64[n] each, in the order of `turns`: the parts of the critical path that fall to each turn, 0 off the path."""
    arrival, ended = turns.column("arrival"), turns.column("ended")
    before = _predecessors(turns, arrival, ended)
    has_none = before < 0
    left = np.where(has_none, np.repeat(program_arrival, turns.count), ended[before])
    parts = {**_turn_parts(turns, arrival, ended), "tool": arrival - left}
    off = ~_on_path(before, turns.starts + turns.count - 1)
    for values in parts.values():
        values[off] = 0.0
    return {name: parts[name] for name in PARTS}


def _turn_parts(turns: _Turns, arrival: np.ndarray, ended: np.ndarray) -> dict[str, np.ndarray]:
    """How each turn spent the time from its arrival to its end (s); they sum to it."""
    admitted, first_token = turns.column("admitted"), turns.column("first_token")
    prefilled = turns.prefill_ended()
    interrupted = turns.column("preemptions") > 0  # it was not in service all the time
    if prefilled is not None:
        interrupted[:] = True
    service = np.where(interrupted, turns.column("service"), ended - admitted)
    waited = (admitted - arrival) + (ended - admitted - service)
    reload = np.minimum(turns.reload(), waited)
    prefill = np.minimum((first_token if prefilled is None else prefilled) - admitted, service)
    decode = np.where(interrupted, service - prefill, ended - first_token)
    return {"queueing": waited - reload, "prefill": prefill, "decode": decode, "reload": reload}


def _predecessors(turns: _Turns, arrival: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """int64[n], place of each turn's predecessor on the critical path, -1 = none; always an earlier place."""
    n, w = len(arrival), turns.workload
    before = np.full(n, -1, dtype=np.int64)
    if turns.alone:
        return before
    place = np.empty(n, dtype=np.int64)
    place[turns.order] = np.arange(n)
    waiter = np.repeat(np.arange(n), np.diff(w.wait_offsets))
    own = w.program[waiter] == w.program[w.wait_for]
    later, earlier = place[waiter[own]], place[w.wait_for[own]]
    come = earlier < later  # not so of a turn that was cancelled while one that it waits for still ran
    np.maximum.at(before, later[come], earlier[come])  # a later place = ended later
    free = np.flatnonzero(before < 0)
    first = np.repeat(turns.starts, turns.count)[free]
    after = _bisect(first, free, lambda at, k: ended[at] <= arrival[free[k]])
    before[free] = np.where(after > first, after - 1, -1)
    return before


def _on_path(before: np.ndarray, last: np.ndarray) -> np.ndarray:
    """bool[n]: which places are reached from `last` by steps to the predecessor, in steps of 1, 2, 4, ... at once."""
    n = len(before)
    reached = np.zeros(n + 1, dtype=bool)  # place n stands for the end of every path
    reached[last] = True
    jump = np.append(np.where(before < 0, n, before), n)
    while (jump < n).any():
        reached[jump[reached]] = True
        jump = jump[jump]
    return reached[:n]


def ideal_reuse(requests: pd.DataFrame, workload: Workload) -> np.ndarray:
    """int64[n], tokens: leading prompt tokens of each admitted request that requests of its program admitted before it
    (at one time: rows before it) held, too; 0 for requests that were not admitted."""
    w = workload
    admitted = requests["admitted"].to_numpy()
    shared = np.zeros(len(w), dtype=np.int64)
    rows = np.flatnonzero(~np.isnan(admitted) & (w.known_tokens > 0))
    rows = rows[np.bincount(w.program[rows])[w.program[rows]] > 1]
    if not len(rows):
        return shared
    rows = rows[np.argsort(admitted[rows], kind="stable")]  # from here on a request is its rank in this order
    held = np.minimum(w.known_tokens, w.input_tokens + requests["generated_tokens"].to_numpy())[rows]
    owner, offset, key, size = _token_runs(w, rows, held)
    points, a, b = _places(key, key + size)
    earliest = _earliest(a, b, owner, len(points))
    # Ids are prefix identities: along a request the earliest holder of its tokens only grows. So the last run whose start
    # somebody held before is the one in which what is shared ends.
    mine = np.bincount(owner[earliest[a] < owner], minlength=len(rows))
    some = np.flatnonzero(mine)
    run = np.searchsorted(owner, some) + mine[some] - 1
    stop = _bisect(a[run], b[run], lambda at, k: earliest[at] < some[k])
    found = offset[run] + points[stop] - key[run]
    shared[rows[some]] = np.minimum(found, w.input_tokens[rows[some]])
    return shared


def _token_runs(w: Workload, rows: np.ndarray, held: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The runs of the first `held` tokens of the requests `rows`: (index into rows, tokens of the request before the run,
    key of its first token, its tokens), int64[runs] each. Equal keys mean the same token of the same program."""
    counts = np.diff(w.run_offsets)[rows]
    ends = np.cumsum(counts)
    owner = np.repeat(np.arange(len(rows)), counts)
    index = np.arange(len(owner)) + np.repeat(w.run_offsets[:-1][rows] - (ends - counts), counts)
    first, last = w.run_first[index], w.run_last[index]
    length = (last - first + 1) * w.block_tokens
    total = np.cumsum(length) - length
    offset = total - total[ends - counts][owner]
    size = np.minimum(length, held[owner] - offset)
    number = Numbering(first, last)  # small numbers: beside a program's they must fit in 63 bits
    key = w.program[rows][owner] * (number.size * w.block_tokens + 1) + number(first) * w.block_tokens
    kept = size > 0  # a request cut short did not come to its last runs
    return owner[kept], offset[kept], key[kept], size[kept]


def _places(first: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(the distinct ends of the half-open intervals, ascending; places of `first` among them; places of `stop`)."""
    import pandas as pd

    code, points = pd.factorize(np.concatenate((first, stop)))  # turns of a program repeat each other's: few are distinct
    order = np.argsort(points)
    place = np.empty(len(points), dtype=np.int64)
    place[order] = np.arange(len(points))
    return points[order], place[code[: len(first)]], place[code[len(first) :]]


def _earliest(a: np.ndarray, b: np.ndarray, owner: np.ndarray, size: int) -> np.ndarray:
    """int64[size]: at each place the smallest owner of an interval [a, b) that holds it. An interval is laid down as two of
    length 2^k, the largest that fits, and each level is pushed down to the one of half the length."""
    level = np.frexp(b - a)[1] - 1  # floor(log2), exact
    out = np.full(size, len(owner), dtype=np.int64)
    for k in range(int(level.max()), -1, -1):
        half = 1 << k
        if half < size:
            out[half:] = np.minimum(out[half:], out[:-half])
        chosen = level == k
        np.minimum.at(out, a[chosen], owner[chosen])
        np.minimum.at(out, b[chosen] - half, owner[chosen])
    return out


def _bisect(low: np.ndarray, high: np.ndarray, holds: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """The first place of each [low, high) at which `holds(places, numbers of the intervals)` is false; high if none.
    It must hold up to some place and not after it."""
    low, high = low.copy(), high.copy()
    while len(k := np.flatnonzero(low < high)):
        middle = (low[k] + high[k]) // 2
        good = holds(middle, k)
        low[k[good]] = middle[good] + 1
        high[k[~good]] = middle[~good]
    return low
