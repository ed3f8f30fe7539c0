"""Measures a decoder's operators, batch by batch, where they run: inside whole steps.

An operator alone in a loop finds its weights in the cache; in a step it does not. So every row of a profile is a whole step,
with a clock read between its operators.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simcore.kernels.decoder import Decoder, no_lap
from simcore.kernels.executor import RealExecutor
from simcore.kernels.install import require
from simcore.models.batch import Batch
from simcore.models.operator_profile import OperatorProfile, ProfileRow, read_profile, write_profile
from simcore.models.request import Request

torch = require()

Point = tuple[tuple[int, ...], tuple[int, ...]]  # (counts, before) of a batch


def grid(*, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, pool_tokens: int) -> list[Point]:
    """Batches to fit by: decodes of several numbers and contexts, prompts' chunks after several prefixes, and both."""
    fits = min(max_model_len, pool_tokens)
    contexts = [c for c in (16, fits // 64, fits // 16, fits // 4, fits - 1) if c >= 1]
    points: dict[Point, None] = {}

    def add(counts: Sequence[int], before: Sequence[int]) -> None:
        held = sum(counts) + sum(before)
        longest = max(c + b for c, b in zip(counts, before, strict=True))
        if held <= pool_tokens and longest <= max_model_len and sum(counts) <= max_num_batched_tokens:
            points[tuple(counts), tuple(before)] = None

    sequences = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256) if n <= max_num_seqs]
    for n in sequences:
        for context in contexts:
            add([1] * n, [context] * n)
    for chunk in (2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192):
        for before in (0, *contexts[1:]):
            add([chunk], [min(before, fits - chunk)] if fits > chunk else [0])
        for n in (1, 4, max_num_seqs - 1):
            add([1] * n + [chunk], [fits // 16] * n + [0])
    for chunk in (16, 64):
        for n in (2, 4):
            add([chunk] * n, [0] * n)
    return list(points)


def drawn(
    count: int, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, pool_tokens: int, seed: int
) -> list[Point]:
    """Batches to judge by: any number of decodes and chunks of any lengths that fit."""
    random = np.random.default_rng(seed)
    points: list[Point] = []
    while len(points) < count:
        n, chunks = int(random.integers(0, max_num_seqs + 1)), int(random.integers(0, 3))
        if not n + chunks:
            continue
        counts = [1] * n + [int(x) for x in np.exp(random.uniform(np.log(2), np.log(max_num_batched_tokens), chunks))]
        before = [int(x) for x in np.exp(random.uniform(0, np.log(max_model_len - 1), len(counts)))]
        before = [min(b, max_model_len - c) for b, c in zip(before, counts, strict=True)]
        held = sum(counts) + sum(before)
        if len(counts) <= max_num_seqs and sum(counts) <= max_num_batched_tokens and held <= pool_tokens:
            points.append((tuple(counts), tuple(before)))
    return points


def measure(
    decoder: Decoder, points: Sequence[Point], path: Path, *, repeats: int = 5, held_out: Sequence[Point] = (),
    report: Callable[[int, int], Any] | None = None,
) -> OperatorProfile:
    """The profile at `path`, of every point; what already stands there is kept. The file is whole after every point.

    `report(done, all)` is called after each. Points that need more blocks than the decoder has are the caller's error.
    Raises ConfigError if the file is no profile; one of another model or machine is begun anew.
    """
    profile = _empty(decoder)
    if path.is_file():
        found = read_profile(path)
        profile = found if found.of_same(profile) else profile
    have = {(tuple(row.counts), tuple(row.before), row.held_out) for row in profile.rows}
    wanted = [(*point, False) for point in points] + [(*point, True) for point in held_out]
    missing = [point for point in dict.fromkeys(wanted) if point not in have]
    for row in decoder.kv:
        for cache in row:
            cache.normal_()
    for done, (counts, before, held) in enumerate(missing):
        profile.rows.append(_row(decoder, counts, before, repeats, held))
        write_profile(path, profile)
        if report:
            report(done + 1, len(missing))
    return profile


def drift(decoder: Decoder, profile: OperatorProfile, *, rows: int = 9, repeats: int = 5) -> float:
    """How long batches of the profile take now over how long they took then: median over `rows` of them. A machine that is
    shared, or that was warmer, is another machine."""
    some = profile.rows[:: max(1, len(profile.rows) // rows)]
    return float(np.median([_row(decoder, row.counts, row.before, repeats, False).seconds / row.seconds for row in some]))


def _empty(decoder: Decoder) -> OperatorProfile:
    return OperatorProfile(
        model=decoder.llm.name, parameters=decoder.llm.parameters, device=device_name(decoder.device),
        software=f"torch {torch.__version__}, {torch.get_num_threads()} threads",
        dtype=str(decoder.dtype).removeprefix("torch."), block_size=decoder.block_size)


def device_name(device: str) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU {torch.backends.cpu.get_cpu_capability()}"


def _row(decoder: Decoder, counts: Sequence[int], before: Sequence[int], repeats: int, held_out: bool) -> ProfileRow:
    batch = made_up(decoder, counts, before)
    clock = _Clock(decoder)
    runs = []
    gc.collect()
    gc.disable()
    try:
        for repeat in range(repeats + 1):
            run = clock.run(batch)
            if repeat:  # the first finds nothing ready
                runs.append(run)
    finally:
        gc.enable()
    runs.sort(key=lambda run: run[0])
    seconds, operators = runs[len(runs) // 2]
    return ProfileRow(counts=list(counts), before=list(before), samples=len(counts), seconds=seconds, low=runs[0][0],
                      high=runs[-1][0], repeats=repeats, operators=operators, held_out=held_out)


def made_up(decoder: Decoder, counts: Sequence[int], before: Sequence[int], seed: int = 0) -> Batch:
    """A batch of these shapes over blocks in a random order; every sequence yields a token."""
    batch = Batch(0, counts, before, [True] * len(counts))
    size = decoder.block_size
    free = np.random.default_rng(seed).permutation(np.arange(1, decoder.num_blocks)).tolist()
    for i, (count, done) in enumerate(zip(counts, before, strict=True)):
        request = Request(i, done + count, 1, [])
        request.blocks = [free.pop() for _ in range(-(-(done + count) // size))]
        batch.requests.append(request)
    return batch


class _Clock:
    """Times a step and, between its operators, each of them: by the host's clock, or on CUDA by events."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.executor = RealExecutor(decoder)
        self.cuda = decoder.device == "cuda"
        self.marks: list[tuple[str, Any]] = []

    def run(self, batch: Batch) -> tuple[float, dict[str, float]]:
        """(s, operator -> s of all layers)."""
        self.marks = []
        self.decoder.lap = self._lap
        try:
            seconds = self.executor.start(batch, 0.0).device_seconds
        finally:
            self.decoder.lap = no_lap
        operators: dict[str, float] = {}
        for (_, start), (name, end) in zip(self.marks, self.marks[1:], strict=False):
            operators[name] = operators.get(name, 0.0) + (start.elapsed_time(end) / 1e3 if self.cuda else end - start)
        return seconds, operators

    def _lap(self, name: str) -> None:
        self.marks.append((name, self._now()))

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
