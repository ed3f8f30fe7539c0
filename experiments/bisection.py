"""The least whole number at which something holds: a bracket found by growing strides, then bisection.

Nothing is taken for granted but what was asked: the answer holds, and the number below it does not (or is out of bounds).
If what is asked rises from no to yes once, the answer is exact; if it does not, `not_monotone` says where it fell back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Found:
    """`answer`: the least number at which it holds; None if it held nowhere that was asked. `failed`: the number below, at
    which it does not hold; None if the answer is the least that is allowed. `stopped`: the greatest number asked, where
    nothing held."""

    answer: int | None
    failed: int | None
    stopped: int | None = None


def least(
    holds: Callable[[int], bool], start: int, *, fewest: int, most: int, stride: int = 1,
    hopeless: Callable[[int], bool] = lambda number: False,
) -> Found:
    """Search `fewest` .. `most` from `start`, upwards or downwards in strides that double.

    `hopeless(number)` ends the way up after a number at which it does not hold, where greater ones would not help. About
    2 log2(distance / stride) + log2(stride) numbers are asked, none of them twice.
    """
    if not fewest <= start <= most or stride < 1:
        raise ValueError(f"start {start} must lie in {fewest} .. {most}, and stride {stride} be at least 1")
    bad: int | None = None
    good = start
    if holds(start):
        while good > fewest:
            at = max(fewest, good - stride)
            if not holds(at):
                bad = at
                break
            good, stride = at, 2 * stride
    else:
        while True:
            bad = good
            if bad == most or hopeless(bad):
                return Found(None, bad, bad)
            good = min(most, bad + stride)
            if holds(good):
                break
            stride *= 2
    if bad is None:
        return Found(good, None)
    while good - bad > 1:
        middle = (good + bad) // 2
        if holds(middle):
            good = middle
        else:
            bad = middle
    return Found(good, bad)


def not_monotone(held: Mapping[int, bool]) -> list[tuple[int, int]]:
    """Pairs (a, b) of numbers that were asked, a < b and nothing asked between them, where it held at a and not at b."""
    numbers = sorted(held)
    return [(a, b) for a, b in pairwise(numbers) if held[a] and not held[b]]
