"""Workloads like a trace: fitted to it window by window, then drawn anew, in any number and at any rate.

Kept from the trace, all empirical: for each window the rate at which programs (sessions) start and the coefficient of
variation of their gaps; how many turns they have; the first prompt, what each turn adds, outputs, pauses. These are drawn
independently of one another and of the time, so what is lost is how they hang together: `resample` keeps sessions whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simcore.errors import TraceError
from simcore.randomness import generator
from simcore.traces.contexts import BlockIds, Context, columns
from simcore.traces.generate_arrivals import at_mass
from simcore.traces.rows import MOST_TOKENS
from simcore.traces.sessions import common_root, counted
from simcore.traces.workload import Source, Workload, build

_POINTS = 1001  # quantiles of a law that are kept, if it has more values


@dataclass(frozen=True)
class Fitted:
    """What was fitted. Laws are sorted values, each as likely as the others."""

    name: str
    window: float  # s
    rates: np.ndarray  # float64[windows], program starts/s
    cvs: np.ndarray  # float64[windows], of the gaps between starts that end in the window; 1 where fewer than three do
    turns: np.ndarray  # int64, turns a program
    first_input: np.ndarray  # int64, tokens of a program's first prompt
    added: np.ndarray  # int64, tokens that a later prompt has beyond the prompt and output before it; at least 1
    output: np.ndarray  # int64, tokens
    pauses: np.ndarray  # float64, s between turns
    recorded: bool  # whether pauses are times between arrivals, with the service of the turn before in them
    root_tokens: int  # that all prompts begin with
    grows: bool  # whether prompts share what was before them: the trace identifies tokens
    block_tokens: int
    licence: str = ""

    def parameters(self) -> dict[str, object]:
        """As plain numbers, for a report."""
        return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in vars(self).items()}


def fit(workload: Workload, window: float = 300.0) -> Fitted:
    """Fit a workload. Programs start at the first arrival of theirs; pauses are those of closed loops, or else the times
    between arrivals of a program. A prompt that is shorter than what was before it counts as one that adds 1 token.
    Raises TraceError when fewer than two programs start at different times, or window is not above 0."""
    w = workload
    where = w.source.name
    if not 0 < window < np.inf:
        raise TraceError(where, "window", found=window, allowed="a finite time above 0 s")
    own = np.isfinite(w.arrival)
    started = np.full(w.n_programs, np.inf)
    np.minimum.at(started, w.program[own], w.arrival[own])
    starts = np.sort(started[np.isfinite(started)])
    if len(starts) < 2 or starts[0] == starts[-1]:
        raise TraceError(where, "arrival", why="no rate to fit", found=f"{len(starts)} programs that start at one time",
                         allowed="at least two programs with arrivals; or trace and start: {rate: ...}")
    starts = starts - starts[0]
    last = float(starts[-1])
    windows = max(1, int(np.ceil(last / window - 0.1)))  # a last one that is shorter than a tenth belongs to the one before
    of = np.minimum(starts // window, windows - 1).astype(np.int64)
    widths = np.append(np.full(windows - 1, window), last - (windows - 1) * window)
    rates = np.bincount(of, minlength=windows) / widths
    by_row = np.lexsort((np.arange(len(w)), w.program))
    program = w.program[by_row]
    follows = np.concatenate(([False], program[1:] == program[:-1]))
    later, before = by_row[follows], by_row[np.flatnonzero(follows) - 1]
    waits = np.diff(w.wait_offsets)[later] > 0
    pauses = np.where(waits, w.pause[later], w.arrival[later] - np.fmax.accumulate(w.arrival)[before])
    pauses = np.maximum(pauses[np.isfinite(pauses)], 0.0)
    added = np.maximum(1, w.input_tokens[later] - w.input_tokens[before] - w.output_tokens[before])
    many = len(np.unique(w.program)) > 1
    root = common_root([w.ids(row) for row in range(len(w))]) * w.block_tokens if many and w.known_tokens.all() else 0
    return Fitted(
        name=where, window=float(window), rates=rates, cvs=_variation(starts, of, windows),
        turns=_law(np.bincount(w.program)[np.unique(w.program)]), first_input=_law(w.input_tokens[by_row[~follows]]),
        added=_law(added), output=_law(w.output_tokens), pauses=_law(pauses),
        recorded=not waits.any(), root_tokens=int(min(root, w.input_tokens.min())), grows=bool(w.known_tokens.any()),
        block_tokens=w.block_tokens, licence=w.source.licence,
    )


def generate_fitted(fitted: Fitted, programs: int, seed: int, *, rate: float = 1.0, context: int = 131_072) -> Workload:
    """`programs` programs drawn from what was fitted, closed loop, `rate` times as many a second as in the trace; when the
    windows are through they begin again. Prompts grow by appending where the trace identifies tokens, and share its common
    root; a program ends before a turn of more than `context` tokens. Raises TraceError naming the argument."""
    where = "generate.fitted"
    if type(programs) is not int or programs < 1:
        raise TraceError(where, "programs", found=programs, allowed="a whole number, at least 1")
    if not 0 < rate < np.inf:
        raise TraceError(where, "rate", found=rate, allowed="a finite number above 0")
    starts = _starts(fitted, programs, seed) / rate
    root = fitted.root_tokens if fitted.grows else 0
    ids = BlockIds(fitted.block_tokens)
    base = ids.grow(None, 0, root)
    base.open = False  # every program continues it with other tokens
    rows: list[tuple[int, int, int, float, Context]] = []  # (program, input, output, pause, context)
    cut = 0
    for p in range(programs):
        random = generator(seed, "fitted/program", p)
        held: Context | None = base
        prompt = max(root + 1, _pick(fitted.first_input, random)) if root else _pick(fitted.first_input, random)
        for turn in range(_pick(fitted.turns, random)):
            output, added = _pick(fitted.output, random), _pick(fitted.added, random) if turn else 0
            pause = float(fitted.pauses[int(random.integers(len(fitted.pauses)))]) if turn and len(fitted.pauses) else 0.0
            if turn:
                prompt = held.tokens + added if fitted.grows and held else prompt + added
            if prompt + output > min(context, MOST_TOKENS):
                cut += 1
                break
            if fitted.grows:
                held = ids.grow(held, min(held.tokens, prompt) if held else 0, prompt + output)
            rows.append((p, prompt, output, pause, held if fitted.grows and held else Context(0)))
            if not fitted.grows:
                prompt += output
    if not rows:
        raise TraceError(where, "context", found=context, allowed="room for at least one turn")
    return _workload(fitted, rows, starts, programs, seed, rate, cut, context)


def _workload(
    fitted: Fitted, rows: list[tuple[int, int, int, float, Context]], starts: np.ndarray, programs: int, seed: int,
    rate: float, cut: int, context: int,
) -> Workload:
    program, inputs, outputs, pauses, contexts = (list(column) for column in zip(*rows, strict=True))
    _, numbers = np.unique(program, return_inverse=True)
    turn = counted(numbers)
    known, runs = columns(contexts)
    notes = (
        f"generated: {programs} programs like those of {fitted.name}, {len(rows)} requests, seed {seed}: rate (times "
        f"{rate:g}) and CV of starts by windows of {fitted.window:g} s; turns, lengths and pauses drawn independently",
        *(["pauses are times between recorded arrivals, with the service of the turn before in them"]
          if fitted.recorded and len(fitted.pauses) else []),
        *([f"{cut} programs end before a turn of more than {context} tokens"] if cut else []),
        (f"prompts grow by appending; all share {fitted.root_tokens} tokens, else programs share nothing" if fitted.grows
         else "the trace identifies no tokens: nothing is shared"),
    )
    waits = [[row - 1] if k else [] for row, k in enumerate(turn.tolist())]
    return build(
        arrival=np.where(turn == 0, starts[np.array(program)], np.nan), input_tokens=np.array(inputs),
        output_tokens=np.array(outputs), source=Source(f"fitted to {fitted.name}", fitted.licence, notes=notes),
        block_tokens=fitted.block_tokens, known_tokens=known, runs=runs, program=numbers, turn=turn,
        gap=np.where(turn == 0, 0.0, np.array(pauses)), waits=waits,
    )


def _starts(fitted: Fitted, n: int, seed: int) -> np.ndarray:
    """When n programs start: unit gaps of each window's CV, in the time in which its rate has been integrated."""
    windows = len(fitted.rates)
    begin = np.arange(windows + 1) * fitted.window
    mass = np.concatenate(([0.0], np.cumsum(fitted.rates * fitted.window)))
    random = generator(seed, "fitted/start")
    due = np.empty(n)
    now = 0.0
    for k in range(n):
        window = min(int(np.searchsorted(mass, now % mass[-1], side="right")) - 1, windows - 1)
        cv = float(fitted.cvs[window])
        now += float(random.gamma(1 / cv**2, cv**2)) if cv > 1e-3 else 1.0
        due[k] = now
    return np.maximum.accumulate(np.floor(due / mass[-1]) * begin[-1] + at_mass(due % mass[-1], begin, mass))


def _variation(starts: np.ndarray, of: np.ndarray, windows: int) -> np.ndarray:
    """float64[windows]; `of`: the window of each start."""
    gap = np.diff(starts)
    out = np.ones(windows)
    for k in range(windows):
        own = gap[of[1:] == k]
        if len(own) >= 3 and own.mean() > 0:
            out[k] = float(own.std() / own.mean())
    return out


def _law(values: np.ndarray) -> np.ndarray:
    """Sorted; of many values those at evenly spaced ranks."""
    values = np.sort(values)
    if len(values) <= _POINTS:
        return values
    return values[np.rint(np.linspace(0, len(values) - 1, _POINTS)).astype(np.int64)]


def _pick(law: np.ndarray, random: np.random.Generator) -> int:
    return int(law[int(random.integers(len(law)))])
