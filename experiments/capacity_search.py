"""How much is needed, or carried: fewest replicas, fewest GPUs, or the highest rate at which an SLO is met.

The SLO is met where the share of requests within all its limits is at least the percentile. Every trial meets the same
requests under the same seeds; other rates clone or thin whole sessions (traces) or draw on (generated requests), so that the
requests of a lower rate are among those of a higher one. Rates stand on a grid of steps of `precision`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite, log
from typing import Any

from simcore.errors import ConfigError
from simcore.experiments.bisection import Found, least, not_monotone
from simcore.experiments.capacity_trials import UNFIT, Trial, Trials, span_of
from simcore.experiments.run import build_deployment, build_workload
from simcore.experiments.study import AgentsWorkload, DiurnalWorkload, FittedWorkload, PoissonWorkload, Study

HOURS_A_MONTH = 730  # 8,760 / 12
MOST_TIMES = 1024  # the study's rate is changed by at most this factor, up or down
PLATEAU = 0.001  # share: a rise below this over two doublings is none
FIND = ("replicas", "rate", "gpus")


@dataclass(frozen=True)
class Axis:
    """What is varied: whole numbers, of which a greater one makes the SLO easier to meet. `value` in `unit`."""

    unit: str
    fewest: int
    most: int
    start: int
    stride: int  # of the first move
    settings: Callable[[int], dict[str, Any]]
    value: Callable[[int], float]
    label: Callable[[int], str]


@dataclass(frozen=True)
class Search:
    """`answer` meets the SLO and `failed`, next to it, does not (None: there is none). By the intervals, the answer lies
    between `may` (the easiest that certainly fails lies just below it) and `sure` (None: none was certain to meet it)."""

    axis: Axis
    fixed: dict[str, Any]
    found: Found
    trials: dict[int, Trial]
    answer: Trial | None
    failed: Trial | None
    may: Trial | None = None
    sure: Trial | None = None
    value: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    why: str = ""
    not_monotone: list[tuple[str, str]] = field(default_factory=list)

    @property
    def certain(self) -> bool:
        return self.answer is not None and self.sure is self.answer and self.may is self.answer


def replicas_axis(most: int, study: Study | None = None) -> Axis:
    """Replicas from 1 on, or from as many as the study's events name."""
    named = [event.replica for event in study.events if event.replica is not None] if study is not None else []
    fewest = max(named, default=0) + 1
    if most < fewest:
        raise ConfigError("--most", found=most, allowed=f"at least {fewest}: the study's events name replica {fewest - 1}")
    return Axis("replicas", fewest, most, fewest, 1, lambda n: {"cluster.replicas": n}, float,
                lambda n: f"{n} replica{'s' if n > 1 else ''}")


def rate_axis(study: Study, folder: Any, precision: float) -> Axis:
    """The load of a study: requests or sessions a second, or workers where these start programs. Raises ConfigError where
    it has none that could be changed."""
    config = study.workload
    if config.start is not None and config.start.workers is not None:
        now = config.start.workers
        return Axis("workers", -MOST_TIMES * now, -1, -now, now, lambda n: {"workload.start.workers": -n},
                    lambda n: float(-n), lambda n: f"{-n} worker{'s' if n < -1 else ''}")
    workload = build_workload(config, folder, study.seeds[0])
    sessions, span = workload.n_programs, span_of(workload)
    if sessions < 2 or not span > 0:
        raise ConfigError("workload", why="all requests arrive at once, or there is one session: no rate can be found",
                          allowed="arrivals over a time, or workload.start.workers")
    unit, generate = "sessions/s" if sessions < len(workload) else "requests/s", config.generate
    base, step, lowest = (sessions - 1) / span, log(1 + precision), log(1 / MOST_TIMES)

    def factor(n: int) -> float:
        return float((1 + precision) ** -n)

    settings: Callable[[int], dict[str, Any]]
    if config.start is not None:
        rate = config.start.rate or 0.0
        programs = generate.programs if isinstance(generate, AgentsWorkload) else 0

        def settings(n: int) -> dict[str, Any]:
            if n == 0:
                return {}
            asked = {"workload.start.rate": rate * factor(n)}
            return asked | ({"workload.generate.programs": ceil(programs * max(1.0, factor(n)))} if programs else {})
    elif isinstance(generate, PoissonWorkload):
        base = generate.rate

        def settings(n: int) -> dict[str, Any]:  # as long a time at a higher rate, as many requests at a lower one
            return {} if n == 0 else {"workload.generate.rate": generate.rate * factor(n),
                                      "workload.generate.requests": ceil(generate.requests * max(1.0, factor(n)))}
    elif isinstance(generate, DiurnalWorkload):

        def settings(n: int) -> dict[str, Any]:
            return {} if n == 0 else {"workload.generate.rates": [rate * factor(n) for rate in generate.rates],
                                      "workload.generate.requests": ceil(generate.requests * max(1.0, factor(n)))}
    elif isinstance(generate, FittedWorkload):

        def settings(n: int) -> dict[str, Any]:
            return {} if n == 0 else {"workload.generate.rate_factor": generate.rate_factor * factor(n),
                                      "workload.generate.programs": ceil(generate.programs * max(1.0, factor(n)))}
    else:
        thin, clone = config.thin or 1.0, config.clone or 1.0
        lowest = max(lowest, log(2 / sessions))

        def settings(n: int) -> dict[str, Any]:
            times = factor(n)
            return {"workload.clone": clone * times} if times > 1 else {"workload.thin": thin * times} if times < 1 else {}
    doubling = max(1, round(log(2) / step))
    reach = int(log(MOST_TIMES) / step)
    return Axis(unit, -reach, max(0, int(-lowest / step)), 0, doubling, settings, lambda n: base * factor(n),
                lambda n: f"{base * factor(n):.4g} {unit}")


def search(trials: Trials, axis: Axis, fixed: dict[str, Any], *, refine: bool = True) -> Search:
    """The least number on the axis that meets the SLO; with `refine` also its neighbours and what the intervals allow."""
    asked: dict[int, Trial] = {}

    def trial(n: int) -> Trial:
        if n not in asked:
            asked[n] = trials.at(axis.label(n), {**fixed, **axis.settings(n)})
        return asked[n]

    def hopeless(n: int) -> bool:
        return _plateau(list(asked.values())[-3:])

    found = least(lambda n: trial(n).meets, axis.start, fewest=axis.fewest, most=axis.most, stride=axis.stride,
                  hopeless=hopeless)
    if found.answer is None:
        last = asked[found.stopped] if found.stopped is not None else None
        why = _why_none(axis, last, _plateau(list(asked.values())[-3:]))
        return Search(axis, fixed, found, asked, None, last, why=why)
    answer, failed = asked[found.answer], None if found.failed is None else asked[found.failed]
    value = axis.value(found.answer)
    if not refine:
        return Search(axis, fixed, found, asked, answer, failed, value=value)
    if found.answer < axis.most:
        trial(found.answer + 1)
    slack = max(4, abs(found.answer)) if axis.unit in ("replicas", "workers") else 2 * axis.stride
    sure = least(lambda n: trial(n).surely_meets, found.answer, fewest=found.answer,
                 most=min(axis.most, found.answer + slack)).answer
    may = least(lambda n: trial(n).may_meet, found.answer, fewest=axis.fewest, most=found.answer).answer
    ends = [axis.value(n) for n in (found.answer, may, sure) if n is not None]
    wrong = not_monotone({n: t.meets for n, t in asked.items()})
    return Search(axis, fixed, found, asked, answer, failed, asked[may] if may is not None else None,
                  asked[sure] if sure is not None else None, value, min(ends), max(ends),
                  not_monotone=[(axis.label(a), axis.label(b)) for a, b in wrong])


def _plateau(last: Sequence[Trial]) -> bool:
    """Whether the last three trials show that more of the same does not help: the share stays, and nothing waits."""
    if len(last) < 3:
        return False
    shares = [trial.level.value for trial in last]
    idle = last[-1].mean_queue <= 0.05 * last[-1].mean_e2e and last[-1].misses["not finished"] <= PLATEAU
    return idle and max(shares) - min(shares) < PLATEAU


def _why_none(axis: Axis, last: Trial | None, plateau: bool) -> str:
    if last is None:
        return "nothing was tried"
    if plateau:
        return (f"nothing waits at {last.label}, and still {last.level.value:.2%} of the requests are within the SLO: the "
                "steps themselves take too long for it (another GPU, more tensor parallelism, or another SLO)")
    return f"not met at {last.label}, the most that was allowed: {last.said}"


@dataclass(frozen=True)
class Shape:
    """A tensor-parallel size that was tried: its search, or why it cannot serve."""

    size: int
    search: Search | None
    why: str = ""

    @property
    def gpus(self) -> int | None:
        return None if self.search is None or self.search.answer is None else self.search.answer.gpus


def search_gpus(trials: Trials, sizes: Sequence[int], most: int) -> tuple[Shape | None, list[Shape]]:
    """The fewest GPUs over tensor-parallel sizes: (the best, all). Of equal ones the smaller size is taken; `most`: GPUs."""
    shapes: list[Shape] = []
    best: int | None = None
    for size in sizes:
        fixed = {"cluster.tensor_parallel_size": size}
        try:
            build_deployment(trials.variant(fixed), trials.file.folder)
        except ConfigError as error:
            if error.where not in UNFIT:
                raise
            shapes.append(Shape(size, None, str(error)))
            continue
        room = (most if best is None else best) // size
        if room < max([1, *(e.replica + 1 for e in trials.study.events if e.replica is not None)]):
            limit = "the most allowed" if best is None else "fewer GPUs already meet the SLO"
            shapes.append(Shape(size, None, f"a replica has {size} GPUs: {limit}"))
            continue
        shape = Shape(size, search(trials, _named(replicas_axis(room, trials.study), size), fixed, refine=False))
        if shape.gpus is None and best is not None and shape.search is not None and not _plateau(
                list(shape.search.trials.values())[-3:]):
            shape = Shape(size, shape.search, f"more than {room} replica{'s' if room > 1 else ''} needed, so more GPUs")
        elif shape.gpus is None and shape.search is not None:
            shape = Shape(size, shape.search, shape.search.why)
        elif best is None or (shape.gpus is not None and shape.gpus < best):
            best = shape.gpus
        shapes.append(shape)
    chosen = next((k for k, shape in enumerate(shapes) if best is not None and shape.gpus == best), None)
    if chosen is None:
        return None, shapes
    size = shapes[chosen].size
    fixed = {"cluster.tensor_parallel_size": size}
    shapes[chosen] = Shape(size, search(trials, _named(replicas_axis(max(1, most // size), trials.study), size), fixed))
    return shapes[chosen], shapes


def _named(axis: Axis, size: int) -> Axis:
    return Axis(axis.unit, axis.fewest, axis.most, axis.start, axis.stride, axis.settings, axis.value,
                lambda n: f"{axis.label(n)} of {size} GPU{'s' if size > 1 else ''}")


@dataclass(frozen=True)
class Headroom:
    """How much more load the answer carries: `times` the study's, and the trial a grid step further that fails."""

    times: float | None
    failed: Trial | None
    why: str = ""


def headroom(trials: Trials, answer: Trial, precision: float) -> Headroom:
    """By a search over the rate at the answer's set-up. `precision` bounds its error."""
    try:
        axis = rate_axis(trials.study, trials.file.folder, precision)
    except ConfigError as error:
        return Headroom(None, None, error.why or str(error))
    there = Axis(axis.unit, axis.fewest, axis.start, axis.start, max(1, axis.stride // 2), axis.settings, axis.value,
                 lambda n: f"{answer.label}, {axis.label(n)}" if n != axis.start else answer.label)
    found = search(trials, there, answer.settings, refine=False)
    if found.answer is None or found.found.answer is None:
        return Headroom(None, None, found.why)
    times = axis.value(found.found.answer) / axis.value(axis.start)
    why = "" if found.failed is not None else f"not more than {times:.3g} times the load was tried"
    return Headroom(times, found.failed, why)


def costs(answer: Trial, usd_per_gpu_hour: float | None, users: float | None) -> dict[str, Any] | None:
    """Dollars of the answer; None without a price. A user is one of `users`, a worker, or a session an hour."""
    if usd_per_gpu_hour is None:
        return None
    workers = answer.study.workload.start.workers if answer.study.workload.start is not None else None
    if users is not None:
        count, of = users, "--users"
    elif workers is not None:
        count, of = float(workers), "workers"
    else:
        count, of = answer.sessions_per_hour, "sessions per hour of the workload"
    hour = usd_per_gpu_hour * answer.gpus
    month = hour * HOURS_A_MONTH

    def over(amount: float) -> float | None:
        return amount if isfinite(amount) else None

    def per_million(tokens_per_second: float) -> float | None:
        return over(hour / (tokens_per_second * 3600 / 1e6)) if tokens_per_second > 0 else None

    return {
        "usd_per_gpu_hour": usd_per_gpu_hour, "gpus": answer.gpus, "usd_per_hour": hour, "usd_per_month": month,
        "hours_a_month": HOURS_A_MONTH, "users": over(count), "users_are": of,
        "usd_per_user_and_month": over(month / count) if count > 0 else None,
        "usd_per_million_output_tokens": per_million(answer.output_throughput),
        "usd_per_million_tokens": per_million(answer.total_throughput),
    }


def saturation(answer: Trial | None, failed: Trial | None) -> dict[str, Any] | None:
    """The resource that gives out first: looked for at the trial next to the answer that fails, else at the answer."""
    seen = failed or answer
    if seen is None:
        return None
    resource, numbers = seen.pressure.saturated(seen.misses)
    worst = sorted((name for name in seen.misses if name != "not finished"), key=lambda name: -seen.misses[name])
    return {"resource": resource, "numbers": numbers, "at": seen.label, "fails_there": seen is failed,
            "beyond": seen.misses, "limit_broken_most": worst[0] if worst and seen.misses[worst[0]] > 0 else None}


def notes(trials: Sequence[Trial], answer: Trial | None) -> Iterator[str]:
    """What a reader should know before trusting the answer."""
    whys = {t.level.why for t in trials if t.level.method == "independent requests"}
    if whys and answer is not None and answer.level.method == "independent requests":
        yield (f"The interval is that of independent requests, which is too narrow ({answer.level.why}): "
               "more seeds (--seeds 1,2,3,4,5), or a longer trace, give a better one")
    if answer is not None and answer.span < 10 * answer.mean_e2e:
        yield (f"Requests arrive over {answer.span:.3g} s and take {answer.mean_e2e:.3g} s: a run this short shows how it "
               "starts, not how it goes on; more requests show that")
    if any(t.unsteady for t in trials):
        yield "Some trials show no steady state (window: steady); one whose queue grows counts as failed"
