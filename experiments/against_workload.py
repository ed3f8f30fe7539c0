"""The workload of a measured run: the same requests, sent as they were sent as far as the file says how.

What a request's tokens share with others stands in no such file. Where the study's own workload has the same prompts,
length by length in the same order, its token identities (and programs) are taken; else nothing is shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from simcore.errors import ConfigError, TraceError
from simcore.experiments.against_files import CSV, OURS, Client, Requests
from simcore.randomness import generator
from simcore.traces.workload import Source, Workload, build

ARRIVALS = ("auto", "recorded", "process", "clients")
WORKLOADS = ("auto", "file", "study")
SAME_TIME = 1e-6  # s; arrivals that agree to this are the same
FEW = 0.01  # share of the requests below which a loss is only noted


@dataclass(frozen=True)
class Planned:
    """What is played for a measured run. `rows`: the file's row of each request of the workload, -1 = in no row; `drawn`:
    whether another seed draws other arrivals; `notes`: how it was made, for the report."""

    workload: Workload
    rows: np.ndarray
    drawn: bool
    notes: tuple[str, ...]


def plan_requests(measured: Requests, own: Callable[[], Workload], seed: int, arrivals: str, workload: str) -> Planned:
    """The workload of `measured`. `own` builds the study's; `arrivals` is one of ARRIVALS, `workload` one of WORKLOADS.

    Raises ConfigError for an option that the file cannot meet, TraceError where nothing says when requests came.
    """
    for option, value, allowed in (("--arrivals", arrivals, ARRIVALS), ("--workload", workload, WORKLOADS)):
        if value not in allowed:
            raise ConfigError(option, found=value, allowed=", ".join(allowed))
    base = own() if workload != "file" else None
    differs = None if base is None else _first_difference(measured, base)
    if workload == "study":
        if differs is not None:
            raise ConfigError("--workload", found="study", why=f"it is not what {measured.path} measured: {differs}",
                              allowed="auto, file, or the study whose workload was measured")
        assert base is not None
        return Planned(base, np.arange(len(base)), False, ("the study's own workload, as the option asks",))
    if base is not None and differs is None and arrivals == "auto" and _same_run(measured, base):
        return Planned(base, np.arange(len(base)), False,
                       ("lengths and arrivals are those of the study's own workload, which is played",))
    why = f"the study's workload is another ({differs})" if base is not None else "the study's workload is not looked at"
    return _from_file(measured, base if differs is None else None, why, seed, arrivals)


def _from_file(measured: Requests, base: Workload | None, why_none: str, seed: int, arrivals: str) -> Planned:
    rows = np.flatnonzero(measured.played)
    notes = []
    lost = len(measured) - len(rows)
    if lost:
        loud = "" if lost <= FEW * len(measured) else " (MANY: their load on the server is missing)"
        notes.append(f"{lost} of {len(measured)} requests failed or never came, and are not played{loud}")
    mode = _mode(measured, len(rows), arrivals)
    client = measured.client
    workers = 0
    if mode == "recorded":
        assert measured.arrival is not None
        rows = rows[np.argsort(measured.arrival[rows], kind="stable")]
        times = np.maximum(measured.arrival[rows], 0.0)
        notes.append("arrivals: as recorded")
        if client.max_concurrency is not None and client.max_concurrency < len(measured):
            notes.append(f"the client held requests back at {client.max_concurrency} in flight, so that recorded sending "
                         "times depend on the server's answers")
    elif mode == "clients":
        workers, times = _limit(measured), np.full(len(rows), np.nan)
        notes.append(f"arrivals: closed loop, {workers} clients that send the next request when one is answered")
    else:
        times = draw_arrivals(len(rows), client, seed)
        notes.append(_said(client, len(rows), seed))
        if client.max_concurrency is not None and client.max_concurrency < len(measured):
            notes.append(f"the client's limit of {client.max_concurrency} in flight is not modelled beside a rate")
    known, ids = None, None
    columns: dict[str, Any] = {}
    if base is not None:
        total = measured.input_tokens[rows] + measured.output_tokens[rows]
        known = np.minimum(base.known_tokens[rows], total)
        ids = [base.ids(int(i))[: -(-int(k) // base.block_tokens)] for i, k in zip(rows, known, strict=True)]
        if not workers:  # clients take programs whole, and each request is one here
            columns = {"program": np.unique(base.program[rows], return_inverse=True)[1], "turn": base.turn[rows]}
        columns["priority"] = base.priority[rows]
        if len(base.wait_for) and not workers:
            notes.append("turns come when the file says that they came, not when the turn before them ends in the "
                         "simulation")
        notes.append("token identity: of the study's workload, whose prompts are as long, one by one" if known.any() else
                     "token identity: neither the file nor the study's workload has any, nothing is shared")
    else:
        notes.append(f"token identity: the file has none, and {why_none}, so nothing is shared: where the server found "
                     "prefixes in its cache, the simulation computes them")
    made = build(
        arrival=times, input_tokens=measured.input_tokens[rows], output_tokens=np.maximum(measured.output_tokens[rows], 1),
        source=Source(measured.path, notes=tuple(notes)), known_tokens=known, block_ids=ids, workers=workers,
        block_tokens=base.block_tokens if base is not None else 16, **columns)
    return Planned(made, rows, mode == "process" and client.rate != inf, tuple(notes))


def _mode(measured: Requests, played: int, arrivals: str) -> str:
    """recorded, clients or process. Raises where the file does not say what that needs."""
    client = measured.client
    if arrivals == "recorded" and measured.arrival is None:
        raise ConfigError("--arrivals", found=arrivals, why=f"{measured.path} has no start_times",
                          allowed="auto, process, clients")
    if arrivals == "process" and client.rate is None and client.ramp is None:
        raise ConfigError("--arrivals", found=arrivals, why=f"{measured.path} has no request_rate", allowed="auto, recorded")
    if arrivals == "clients":
        _limit(measured)
    if arrivals != "auto":
        return arrivals
    at_once = client.rate == inf and client.ramp is None
    if client.max_concurrency is not None and client.max_concurrency < played and at_once:
        return "clients"
    if measured.arrival is not None:
        return "recorded"
    if client.rate is not None or client.ramp is not None:
        return "process"
    raise TraceError(measured.path, "start_times", allowed="a result that has one of them",
                     why="neither start_times nor request_rate: nothing says when requests came")


def _limit(measured: Requests) -> int:
    if measured.client.max_concurrency is None:
        raise ConfigError("--arrivals", found="clients", why=f"{measured.path} has no max_concurrency",
                          allowed="auto, recorded, process")
    return measured.client.max_concurrency


def draw_arrivals(n: int, client: Client, seed: int) -> np.ndarray:
    """float64[n], s: gaps as `vllm bench serve` draws them (`get_request`): Gamma of shape `burstiness` (inf = all equal),
    stretched to n / rate together at a constant rate; the first request comes after the first gap."""
    rates = np.full(n, client.rate if client.rate is not None else inf)
    if client.ramp is not None:
        how, first, last = client.ramp
        share = np.arange(n) / max(n - 1, 1)
        rates = first + (last - first) * share if how == "linear" else first * (last / first) ** share
    if np.isinf(rates).all():
        return np.zeros(n)
    if not (rates > 0).all():
        rates = np.maximum(rates, np.min(rates[rates > 0], initial=inf))  # a ramp from 0: vLLM refuses the first request
    gaps = np.ones(n)
    if np.isfinite(client.burstiness):
        gaps = generator(seed, "against/arrival").gamma(client.burstiness, 1 / client.burstiness, size=n)
    times = np.cumsum(gaps / rates)
    if client.ramp is None and times[-1] > 0:
        times *= n / rates[0] / times[-1]
    return times


def _said(client: Client, n: int, seed: int) -> str:
    if client.ramp is not None:
        how, first, last = client.ramp
        return (f"arrivals: drawn, rate rising from {first:g} to {last:g} requests/s ({how}), seed {seed}: not the measured "
                "ones")
    if client.rate == inf:
        return f"arrivals: {n} requests at once"
    shape = {1.0: "Poisson", inf: "equal gaps"}.get(client.burstiness, f"Gamma gaps of burstiness {client.burstiness:g}")
    return (f"arrivals: the file has no start_times, so they are drawn: {shape} at {client.rate:g} requests/s, seed {seed}: "
            "the same process, not the same arrivals")


def _first_difference(measured: Requests, base: Workload) -> str | None:
    """Where the study's workload has other prompts than the file; None = nowhere."""
    if len(base) != len(measured):
        return f"{len(base)} requests, measured {len(measured)}"
    other = base.input_tokens != measured.input_tokens
    if other.any():
        k = int(np.argmax(other))
        return f"request {k} has {base.input_tokens[k]} input tokens, measured {measured.input_tokens[k]}"
    return None


def _same_run(measured: Requests, base: Workload) -> bool:
    """Whether the file measured the study's workload itself: outputs, and arrivals where the workload has them."""
    good = measured.good
    if (base.output_tokens != measured.output_tokens)[good].any() or measured.arrival is None:
        return False
    given = np.isfinite(base.arrival)
    if not given.any():  # clients start the programs: only ours tells who they were
        return measured.kind == OURS or (measured.kind == CSV and measured.split is not None)
    both = given & ~np.isnan(measured.arrival) & measured.played
    if not both.any():
        return False
    off = (measured.arrival - measured.arrival[both].min()) - (base.arrival - base.arrival[both].min())
    return bool((np.abs(off[both]) <= SAME_TIME).all())
