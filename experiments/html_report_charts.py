"""Charts of the HTML report: inline SVG from arrays. No script, no style of their own (the page's classes), equal bytes for
equal data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, isfinite, log10

import numpy as np

WIDTH, HEIGHT = 600, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 46
COLOURS = 8  # of the page's palette; further series are dashed


@dataclass(frozen=True)
class Series:
    """One line: `x` and `y` float64[n]. `low` and `high`: ends of intervals, NaN where there is none; `notes`: what the
    pointer shows at each point; `mark`: a point to be ringed."""

    name: str
    x: np.ndarray
    y: np.ndarray
    number: int = 0  # its colour
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    notes: Sequence[str] = ()
    mark: int | None = None


@dataclass(frozen=True)
class Scale:
    """Data to pixels, linear or logarithmic; `ticks` with their texts."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False
    ticks: list[tuple[float, str]] = field(default_factory=list)

    def __call__(self, value: np.ndarray | float) -> np.ndarray:
        v = np.asarray(value, dtype=float)
        a, b = (log10(self.low), log10(self.high)) if self.log else (self.low, self.high)
        v = np.log10(np.maximum(v, self.low)) if self.log else v
        return self.start + (v - a) / (b - a) * (self.stop - self.start)


def scale(values: np.ndarray, start: float, stop: float, *, log: bool = False, zero: bool = True,
          high: float | None = None) -> Scale:
    """A scale over the finite values (above 0 if `log`), its ends on round numbers. `high`: its upper end, if given."""
    v = values[np.isfinite(values) & ((values > 0) | (not log))]
    low, top = (float(v.min()), float(v.max())) if len(v) else (0.1, 1.0)
    if log:
        ticks = _log_ticks(low, top)
        low, top = min(low, ticks[0]), max(top, ticks[-1])
        if not top > 1.001 * low:
            low, top = low / 2, top * 2
        return Scale(low, top, start, stop, True, [(t, _text(t)) for t in ticks])
    low = min(low, 0.0) if zero else low
    top = top if high is None else high
    if not top > low:
        low, top = (0.0, 1.0) if zero and low == 0 else (low - 1, low + 1)
    ticks = _ticks(low, top)
    if high is None:
        top = max(top, ticks[-1])
    return Scale(min(low, ticks[0]) if zero else low, top, start, stop, False,
                 [(t, _text(t)) for t in ticks if low <= t <= top])


def _ticks(low: float, high: float, about: int = 6) -> list[float]:
    raw = (high - low) / about
    power = 10.0 ** floor(log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = floor(low / step), ceil(high / step * 0.999999)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    a, b = floor(log10(low)), ceil(log10(high))
    for within in ((1, 2, 5), (1,)):
        ticks = [float(f"{m}e{p}") for p in range(a, b + 1) for m in within]
        below = [t for t in ticks if t <= low * 1.0000001]
        above = [t for t in ticks if t >= high * 0.9999999]
        chosen = [t for t in ticks if (below[-1] if below else ticks[0]) <= t <= (above[0] if above else ticks[-1])]
        if len(chosen) <= 9:
            return chosen
    every = ceil(len(chosen) / 9)
    return chosen[::every]


def _text(value: float) -> str:
    for size, word in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if word == 'k' else size):g}{word}"
    return f"{value:g}"


def colour(number: int) -> str:
    """CSS classes of the series of this number."""
    return f"s{number % COLOURS}" + (" dashed" if number >= COLOURS else "")


def _frame(x: Scale, y: Scale, x_label: str, y_label: str, height: int, title: str) -> list[str]:
    """The chart's start, grid and axes; `title` is what a screen reader says."""
    bottom = height - _BOTTOM
    out = [f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">']
    for value, text in y.ticks:
        at = _n(y(value))
        out.append(f'<path class="grid" d="M{_LEFT} {at}H{WIDTH - _RIGHT}"/>'
                   f'<text class="tick end" x="{_LEFT - 6}" y="{at}" dy=".32em">{escape(text)}</text>')
    for value, text in x.ticks:
        at = _n(x(value))
        out.append(f'<path class="grid" d="M{at} {_TOP}V{bottom}"/>'
                   f'<text class="tick middle" x="{at}" y="{bottom + 16}">{escape(text)}</text>')
    out.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{WIDTH - _RIGHT}"/>'
               f'<text class="label middle" x="{(_LEFT + WIDTH - _RIGHT) / 2:g}" y="{height - 8}">{escape(x_label)}</text>'
               f'<text class="label middle" transform="translate(14 {(_TOP + bottom) / 2:g}) rotate(-90)">'
               f"{escape(y_label)}</text>")
    return out


def line_chart(
    series: Sequence[Series], *, title: str, x_label: str, y_label: str, x_log: bool = False, steps: bool = False,
    y_high: float | None = None, points: bool = False, x_zero: bool = False, x_high: float | None = None,
) -> str:
    """Lines over one pair of axes. `steps`: a value holds until the next; `points`: each point is drawn, with its note."""
    shown = [s for s in series if len(s.x)]
    if not shown:
        return f'<p class="none">{escape(title)}: nothing to draw.</p>'
    ends = [v for s in shown for v in (s.low, s.high) if v is not None]
    x = scale(np.concatenate([s.x for s in shown]), _LEFT, WIDTH - _RIGHT, log=x_log, zero=x_zero, high=x_high)
    y = scale(np.concatenate([*(s.y for s in shown), *ends]), HEIGHT - _BOTTOM, _TOP, high=y_high)
    out = _frame(x, y, x_label, y_label, HEIGHT, title)
    for s in shown:
        out.append(f'<g class="series {colour(s.number)}" data-series="{s.number}"><title>{escape(s.name)}</title>')
        out.append(f'<path class="line" d="{_path(x(s.x), y(s.y), steps)}"/>')
        if s.low is not None and s.high is not None:
            out += [f'<path class="line" d="M{_n(x(a))} {_n(y(b))}V{_n(y(c))}"/>'
                    for a, b, c in zip(s.x, s.low, s.high, strict=True) if isfinite(b) and isfinite(c)]
        if points:
            for k, (a, b) in enumerate(zip(s.x, s.y, strict=True)):
                note = f"{s.name}{': ' + s.notes[k] if s.notes else ''}"
                out.append(f'<circle class="dot" cx="{_n(x(a))}" cy="{_n(y(b))}" r="3.5"><title>{escape(note)}</title>'
                           "</circle>")
        if s.mark is not None:
            out.append(f'<circle class="knee" cx="{_n(x(s.x[s.mark]))}" cy="{_n(y(s.y[s.mark]))}" r="8">'
                       f"<title>{escape(s.name)}: knee</title></circle>")
        out.append("</g>")
    return "".join([*out, "</svg>"])


def area_chart(
    x: np.ndarray, layers: Sequence[tuple[str, np.ndarray]], *, title: str, x_label: str, y_label: str, top: float,
) -> str:
    """Layers (CSS class, float64[n]) stacked from below over a common `x`; each value holds until the next."""
    if len(x) < 2:
        return f'<p class="none">{escape(title)}: nothing to draw.</p>'
    across = scale(x, _LEFT, WIDTH - _RIGHT, high=float(x[-1]))
    up = scale(np.array([top]), HEIGHT - _BOTTOM, _TOP, high=top)
    out = _frame(across, up, x_label, y_label, HEIGHT, title)
    floor_ = np.zeros(len(x))
    at = across(x)
    for name, values in layers:
        ceiling = floor_ + values
        if values.any() and floor_.min() < top:
            ceiling = np.minimum(ceiling, top)
            upper, lower = _path(at, up(ceiling), True), _path(at[::-1], up(floor_)[::-1], True, back=True)
            out.append(f'<path class="area {name}" d="{upper}L{lower[1:]}Z"/>')
        floor_ = ceiling
    return "".join([*out, "</svg>"])


def bar_rows(
    rows: Sequence[tuple[str, str]], parts: Sequence[tuple[str, Sequence[tuple[int, float, float]]]], *, title: str,
    x_label: str, longest: float,
) -> tuple[str, int]:
    """A row for each (label, what the pointer shows); `parts`: CSS class -> (row, start, stop), drawn in this order, one
    path a class. Returns the SVG and how many pieces were too narrow to be drawn."""
    row, narrow = 11, 0
    height = _TOP + _BOTTOM + row * len(rows)
    x = scale(np.array([0.0, longest]), _LEFT, WIDTH - _RIGHT, high=longest if longest > 0 else 1.0)
    y = Scale(0, max(len(rows), 1), _TOP, height - _BOTTOM)
    out = _frame(x, y, x_label, "", height, title)
    for k, (label, _) in enumerate(rows):
        middle = _TOP + row * (k + 0.5)
        out.append(f'<text class="tick end" x="{_LEFT - 6}" y="{middle:g}" dy=".32em">{escape(label)}</text>')
    for name, pieces in parts:
        path = []
        for k, start, stop in pieces:
            a, b = float(x(start)), float(x(stop))
            if b - a < 0.05:
                narrow += 1
                continue
            path.append(f"M{_n(a)} {_TOP + row * k + 1}h{_n(b - a)}v{row - 2}H{_n(a)}z")
        out.append(f'<path class="area {name}" d="{"".join(path)}"/>')
    for k, (_, note) in enumerate(rows):
        out.append(f'<rect class="over" x="{_LEFT}" y="{_TOP + row * k}" width="{WIDTH - _LEFT - _RIGHT}" height="{row}">'
                   f"<title>{escape(note)}</title></rect>")
    return "".join([*out, "</svg>"]), narrow


def forest(rows: Sequence[tuple[str, Sequence[tuple[int, float, float, float, str]]]], *, title: str, x_label: str) -> str:
    """A row a metric; in it, of each series, (number, middle, low, high, what the pointer shows); NaN ends = no interval."""
    row = 26
    height = _TOP + _BOTTOM + row * max(len(rows), 1)
    ends = np.array([v for _, of in rows for _, *values, _ in of for v in values if isfinite(v)] or [0.0])
    reach = float(np.abs(ends).max()) or 1.0
    left = 150
    x = Scale(-reach, reach, left, WIDTH - _RIGHT, False, [(t, _text(t)) for t in _ticks(-reach, reach) if abs(t) <= reach])
    out = [f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">']
    bottom = height - _BOTTOM
    for value, text in x.ticks:
        at = _n(x(value))
        out.append(f'<path class="{"axis" if value == 0 else "grid"}" d="M{at} {_TOP}V{bottom}"/>'
                   f'<text class="tick middle" x="{at}" y="{bottom + 16}">{escape(text)}</text>')
    for k, (label, of) in enumerate(rows):
        middle = _TOP + row * (k + 0.5)
        out.append(f'<text class="tick end" x="{left - 8}" y="{middle:g}" dy=".32em">{escape(label)}</text>')
        for j, (number, value, low, high, note) in enumerate(of):
            if not isfinite(value):
                continue
            at = _n(middle + (j - (len(of) - 1) / 2) * (row - 8) / max(len(of), 1))
            out.append(f'<g class="series {colour(number)}" data-series="{number}"><title>{escape(note)}</title>')
            if isfinite(low) and isfinite(high):
                out.append(f'<path class="line" d="M{_n(x(low))} {at}H{_n(x(high))}"/>')
            out.append(f'<circle class="dot" cx="{_n(x(value))}" cy="{at}" r="3"/></g>')
    centre = (left + WIDTH - _RIGHT) / 2
    out.append(f'<text class="label middle" x="{centre:g}" y="{height - 8}">{escape(x_label)}</text></svg>')
    return "".join(out)


def _path(x: np.ndarray, y: np.ndarray, steps: bool, back: bool = False) -> str:
    """Points that are not finite break the line. `steps`: across first, then up (`back`: up first)."""
    out: list[str] = []
    last: str | None = None
    for a, b in zip(x, y, strict=True):
        if not (isfinite(a) and isfinite(b)):
            last = None
            continue
        p, q = _n(a), _n(b)
        if last is None:
            out.append(f"M{p} {q}")
        elif steps:
            if q != last:
                out.append(f"V{q}H{p}" if back else f"H{p}V{q}")
            else:
                out.append(f"H{p}")
        else:
            out.append(f"L{p} {q}")
        last = q
    return "".join(out)


def _n(value: float | np.ndarray) -> str:
    """Pixels with two digits: 0.01 pixel is not seen, and equal data give equal bytes."""
    return f"{float(value):.2f}".rstrip("0").rstrip(".")
