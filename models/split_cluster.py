"""Prefill and decode on separate replicas: prompts are computed on some, and their KV is pushed to others, which go on.

A request enters at a prefill replica as one that ends after its prompt (`PrefillStay`; the token that it yields there is not
delivered), and its blocks stay held. Then it goes to a decode replica, which takes blocks for all of the prompt before the
push begins, as for a load from a host tier (offload.py), computes the last token of the prompt when the KV has arrived, and
delivers every token. The semantics are those of vLLM with a KV connector (NIXL); docs/disaggregation.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from simcore.errors import ConfigError, PolicyError
from simcore.link import Flow, Link, Network
from simcore.models.batch import StartPush
from simcore.models.cluster import Cluster
from simcore.models.engine import EngineSettings
from simcore.models.failures import Failures
from simcore.models.policy_desk import view_of
from simcore.models.replica import Replica
from simcore.models.request import Request
from simcore.recorder import Table
from simcore.simulation import ARRIVAL

if TYPE_CHECKING:
    import pandas as pd

KV_LATENCY = 10e-6  # s that a push takes beyond bytes / bandwidth, where nothing else is said
NOT_PLANNED = "cluster.prefill_replicas: prompts go from replica to replica inside the run"


class SplitRequest(Request):
    """A request of a split cluster, as the decode replica has it. `arrival`: where it is now (s), `arrived`: at the cluster;
    `stay`: on the prefill replica; `source`: that stay, while its KV is still to be pushed; `decode`: the replica that the
    router, or the cluster, has chosen."""

    __slots__ = ("arrived", "decode", "gap", "source", "stay")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.arrived = self.arrival
        self.gap = nan
        self.stay: PrefillStay | None = None
        self.source: PrefillStay | None = None
        self.decode: int | None = None


class PrefillStay(Request):
    """A request `main` on its prefill replica `home`: the prompt and one token."""

    __slots__ = ("home", "main")

    def __init__(self, main: SplitRequest, home: Replica) -> None:
        super().__init__(
            main.id, main.input_tokens, 1, main.keys, main.arrival, main.priority, main.program, main.program_arrival,
            main.turn, main.tool, main.is_last, main.last_known, main.following)
        self.main = main
        self.home = home


class PushLinks:
    """A link out of each prefill replica and one into each decode replica, of `bandwidth` bytes/s (all ranks together); a
    push crosses two of them and shares both. `latency`: s of a push beyond its bytes."""

    def __init__(
        self, network: Network, prefill: int, replicas: int, bandwidth: float, latency: float, table: Table
    ) -> None:
        self.links = [
            Link(f"replica {r} KV out", bandwidth, latency) if r < prefill else Link(f"replica {r} KV in", bandwidth)
            for r in range(replicas)]
        self.pushes = 0  # those that have ended
        self.bytes = 0.0
        self.seconds = 0.0
        self._network = network
        self._table = table

    def start(self, copy: StartPush, done: Callable[[StartPush, float], None]) -> None:
        """Begin a push now; `done(copy, seconds)` is called when its last byte has arrived, and the source lets go."""
        source: PrefillStay = copy.source
        target = copy.request.replica

        def ended(flow: Flow) -> None:
            seconds = flow.ended - flow.started
            self.pushes += 1
            self.bytes += flow.bytes
            self.seconds += seconds
            self._table.append((flow.ended, target, copy.link, copy.request.id, flow.bytes, seconds))
            source.home.pushed(source)
            source.forget_work()
            done(copy, seconds)

        self._network.start(Flow(copy.bytes, (self.links[source.replica], self.links[target])), ended)


class SplitCluster(Cluster):
    """See the module. The first `prefill` replicas compute prompts, the others decode."""

    def __init__(self, *args: Any, prefill: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._prefill = prefill
        self.prefill_replica = np.full(len(self.workload), -1, dtype=np.int64)  # by request; -1 = never routed
        self.prefill_ended = np.full(len(self.workload), nan)  # s

    # --- the way of a request -----------------------------------------------------------------------------------------

    def _send(self, request: Any, gap: float, now: float) -> None:
        """Route the request, and hand it to its prefill replica."""
        router, i = self.router, request.id
        prefill, request.decode = self._pair(router.route(view_of(request, router), self._views, now), now)
        request.gap = gap
        home = self.replicas[prefill]
        home.outstanding += 1
        if request.decode is not None:
            self.replicas[request.decode].outstanding += 1
        self.prefill_replica[i] = prefill
        self._note(prefill, i)
        stay = request.stay = PrefillStay(request, home)
        if router.decision_seconds:
            self.sim.at(now + router.decision_seconds, self._enter, ARRIVAL, id=i, args=(stay,))
        else:
            self._enter(stay)

    def _pair(self, answer: Any, now: float) -> tuple[int, int | None]:
        """The router's answer as (prefill, decode); decode None = whoever has the least to do then."""
        prefill, replicas = self._prefill, len(self.replicas)
        first, second = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
        if not _within(first, 0, prefill) or not (second is None or _within(second, prefill, replicas)):
            raise PolicyError(
                self.router, now, f"route answered {answer!r}; allowed: a prefill replica, 0 .. {prefill - 1}, or (prefill, "
                f"decode) with a decode replica {prefill} .. {replicas - 1}")
        return int(first), None if second is None else int(second)

    def _enter(self, stay: PrefillStay) -> None:
        """What could never run to its end on a decode replica (all are alike) is refused before its prompt is computed."""
        refused = stay.home.never_fits(stay.main)
        stay.home.submit(stay.main if refused else stay, stay.main.gap)

    def request_ended(self, request: Any) -> None:
        if isinstance(request, PrefillStay):
            self._prefilled(request)
            return
        if request.source is not None:  # the decode replica has refused it
            request.source.home.pushed(request.source)
            request.source = None
        if request.decode is not None and request.decode != request.replica:  # the prefill replica has
            self.replicas[request.decode].outstanding -= 1
        super().request_ended(request)

    def _prefilled(self, stay: PrefillStay) -> None:
        """The prompt is computed, or refused."""
        main, now = stay.main, self.sim._now
        if stay.state == "refused":
            main.state, main.reason, main.ended, main.replica = "refused", stay.reason, now, stay.replica
            self.request_ended(main)
            return
        stay.home.outstanding -= 1
        self.prefill_ended[main.id] = now
        if main.decode is None:
            main.decode = min(range(self._prefill, len(self.replicas)), key=self._outstanding_tokens)
            self.replicas[main.decode].outstanding += 1
        self._note(main.decode, main.id)
        if stay.state == "handed":
            main.source = stay  # else it was preempted while its token was in flight: nothing is left to be pushed
        main.arrival = now
        self.replicas[main.decode].submit(main, main.gap)

    def _outstanding_tokens(self, replica: int) -> int:
        """Known tokens of all requests there."""
        scheduler = self.replicas[replica].scheduler
        engine = scheduler.engine
        return engine.running_tokens + engine.waiting_tokens + sum(r.known for r in scheduler.loading.values())

    def _note(self, replica: int, request: int) -> None:
        if self._log is not None:
            self._log((self.sim._now, "replica_routing", replica, request, self._names[replica]))

    # --- the record ---------------------------------------------------------------------------------------------------

    def _record(self, request: Any, status: str, reason: str) -> None:
        """One row for both stays. What was reused, and when it was admitted, are the prefill replica's."""
        stay: PrefillStay | None = request.stay
        if stay is not None:
            if stay.state == "running":
                stay.service += self.sim._now - stay.running_since
            if request.replica < 0:
                request.replica = stay.replica
            request.arrival = request.arrived
            request.admitted, request.cached_first = stay.admitted, stay.cached_first
            request.cached_all += stay.cached_all
            request.preemptions += stay.preemptions
            request.service += stay.service
            request.stay = None
        super()._record(request, status, reason)

    def columns(self, requests: pd.DataFrame) -> None:
        """Put the columns that only a split cluster has into its requests table."""
        requests["prefill_replica"] = self.prefill_replica
        requests["prefill_ended"] = self.prefill_ended

    def summary(self, links: PushLinks, duration: float) -> dict[str, Any]:
        """`mean_push_time`: s a push; the utilisations: of the two kinds of replicas, over `duration` s."""
        busy = [replica.busy_seconds for replica in self.replicas]
        parts = {"prefill": busy[: self._prefill], "decode": busy[self._prefill :]}
        return {
            "pushes": links.pushes, "bytes_pushed": links.bytes,
            "mean_push_time": links.seconds / links.pushes if links.pushes else nan,
            **{f"{part}_utilization": float(np.mean(seconds)) / duration if duration > 0 else nan
               for part, seconds in parts.items()},
        }


def _within(answer: Any, low: int, high: int) -> bool:
    return isinstance(answer, (int, np.integer)) and not isinstance(answer, bool) and bool(low <= answer < high)


def check_split(
    prefill: int, replicas: int, bandwidth: float, latency: float, settings: EngineSettings, failures: Failures,
) -> None:
    """Raises ConfigError for a split that cannot be, and for what is not simulated beside one, by the study's keys."""
    if not 0 < prefill < replicas:
        raise ConfigError("cluster.prefill_replicas", found=prefill, allowed=f"1 .. {replicas - 1} of {replicas} replicas")
    if not (bandwidth > 0 and isfinite(bandwidth)):
        raise ConfigError("cluster.kv_link_gbps", found=bandwidth, allowed="a finite bandwidth above 0")
    if not (latency >= 0 and isfinite(latency)):
        raise ConfigError("cluster.kv_link_latency", found=latency, allowed="a time in s, at least 0")
    refuse_beside_split(settings, failures)


def refuse_beside_split(settings: EngineSettings, failures: Failures) -> None:
    """Raises ConfigError, under the study's key, for what is not simulated where prefill and decode are separate."""
    beside: Sequence[tuple[str, Any]] = (
        ("engine.kv_offloading_size", settings.kv_offloading_size), ("clients", failures.clients),
        ("events", list(failures.events) or None), ("cluster.view_delay", failures.view_delay or None),
    )
    for key, found in beside:
        if found is not None:
            raise ConfigError(
                key, found=found if isinstance(found, float) else None, why="not simulated together with prefill_replicas",
                allowed=f"a study without {key}, or a cluster of replicas that do both")
