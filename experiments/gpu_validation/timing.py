"""Times of work on a GPU, and the two rates that everything is measured against: copies and matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

from simcore.kernels.install import require

torch = require()

DATA_SHEET_BANDWIDTH = 4.8e12  # B/s, NVIDIA H200
DATA_SHEET_MATMUL = 989e12  # FLOP/s, bf16 without sparsity, NVIDIA H200 SXM
COPY_BYTES = 4 << 30
MATMUL_SIZE = 8192
L2_BYTES = 50 << 20
WORKING_SET = 6 * L2_BYTES  # bytes: what a round of calls touches at least, so that none finds its input in the cache
MEASURED_SECONDS = 0.15  # of a timing, all repeats together
CEILING_SECONDS = 0.6  # of a ceiling: long enough for the clocks to settle under load
LEAST_REPEATS, MOST_REPEATS = 5, 50


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, least and most of `repeats` rounds of `calls` calls.

    `by`: "graph" (a CUDA graph replayed between events: no host in it), "events" (where a call could not be captured: the
    host's launches may show), "clock" (no GPU).
    """

    seconds: float
    low: float
    high: float
    repeats: int
    calls: int
    by: str


@dataclass(frozen=True)
class Ceilings:
    """Copy bandwidth, read and written bytes (B/s); bf16 matmul rate on random data (FLOP/s)."""

    copy: float
    matmul: float


def timed(calls: Sequence[Callable[[], Any]], measured_seconds: float = MEASURED_SECONDS) -> Timing:
    """Of one of `calls`, which do the same to different data and run one after another; the first round warms up."""
    for call in calls:
        call()
    if device() == "cpu":
        began = time.perf_counter()
        for call in calls:
            call()
        each = (time.perf_counter() - began) / len(calls)
        return Timing(each, each, each, 1, len(calls), "clock")
    torch.cuda.synchronize()
    play, by = _captured(calls)
    rough = _rounds(play, 2)[-1]
    repeats = int(min(MOST_REPEATS, max(LEAST_REPEATS, measured_seconds / max(rough, 1e-6))))
    rounds = [seconds / len(calls) for seconds in _rounds(play, repeats)]
    return Timing(median(rounds), min(rounds), max(rounds), repeats, len(calls), by)


def _captured(calls: Sequence[Callable[[], Any]]) -> tuple[Callable[[], Any], str]:
    graph = torch.cuda.CUDAGraph()

    def play() -> None:
        for call in calls:
            call()

    try:
        with torch.cuda.graph(graph):
            play()
    except RuntimeError as error:  # a call that waits for the GPU
        print(f"not captured: {error}")
        torch.cuda.synchronize()
        return play, "events"
    return graph.replay, "graph"


def _rounds(play: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each round; the host waits only after the last."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        play()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def rounds_for(bytes_of_call: float, most: int = 64) -> int:
    """Calls on different data that together touch `WORKING_SET`."""
    return max(1, min(most, -(-WORKING_SET // max(1, int(bytes_of_call)))))


def measure_ceilings(tiny: bool) -> tuple[Ceilings, Timing, Timing]:
    where = device()
    source = torch.empty(COPY_BYTES if not tiny else 1 << 16, dtype=torch.uint8, device=where).random_(0, 255)
    target = torch.empty_like(source)
    copy = timed([partial(target.copy_, source)] * 5, CEILING_SECONDS)
    copied = 2 * source.nbytes
    del source, target
    n = MATMUL_SIZE if not tiny else 32
    a, b = (torch.randn(n, n, device=where).to(torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    matmul = timed([partial(torch.matmul, a, b, out=c)] * 10, CEILING_SECONDS)
    del a, b, c
    free()
    return Ceilings(copied / copy.seconds, 2 * n**3 / matmul.seconds), copy, matmul


def free() -> None:
    """What nothing holds any more goes back to the device."""
    if device() == "cuda":
        torch.cuda.empty_cache()


def row(name: str, took: Timing, *, share: float, target: float | None, tiny: bool, **numbers: Any) -> dict[str, Any]:
    """A line of a section; a tiny run says nothing about speed, so its `ok` stays open."""
    return {"name": name, "share": share, "target": target, "ok": None if target is None or tiny else share >= target,
            **numbers, **asdict(took)}


def bandwidth(emit: Callable[[dict[str, Any]], None], tiny: bool) -> None:
    """The section `bandwidth`."""
    found, copy, matmul = measure_ceilings(tiny)
    rows = [
        row("copy", copy, share=found.copy / DATA_SHEET_BANDWIDTH, target=0.8, tiny=tiny, bytes_per_second=found.copy,
            data_sheet=DATA_SHEET_BANDWIDTH),
        row("matmul bf16", matmul, share=found.matmul / DATA_SHEET_MATMUL, target=None, tiny=tiny,
            flops_per_second=found.matmul, data_sheet=DATA_SHEET_MATMUL),
    ]
    says = "" if rows[0]["ok"] is not False else (
        "the copy misses 80% of the data sheet: it is no ceiling, and shares of it say too much")
    emit({"rows": rows, "says": says})
