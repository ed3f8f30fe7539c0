"""InferCept (arXiv 2402.01869): while a tool runs, keep the KV or let it go, whichever wastes less GPU memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, inf

import numpy as np

from simcore.models.decision_points import Extend, Pin, Release, Room, Swap, Unpin
from simcore.models.facts import Fact, PinDropped
from simcore.models.views import Engine, Pinned, Site, Turn
from simcore.policies.retention._pinning import Pinning
from simcore.policies.retention._rebuild import RebuildTime


class Infercept(Pinning):
    """Waste is memory times time; a token's bytes cancel, so it is counted in token-seconds. C: tokens of the context,
    C_other: tokens of the running requests, T(x): seconds to compute x tokens, n: steps that computing C takes.

        preserve   T_int * C                                    T_int: time since the call, its estimate of what is to come
        discard    T(C) * C / 2 + n * T(C / n) * C_other        recomputed in chunks
        swap       0, or 2 * T_swap(C) * C_other if `swap_blocks`

    Asked anew every `cadence` seconds; once the tool has returned, the turn keeps what it has. Swapping needs an engine
    with a host tier, which stores a turn as it ends. As its transfers do not block (Continuum's re-implementation on
    LMCache, arXiv 2511.02230, section 6), the waste is 0 and nothing is preserved then. A preserved turn that is let go
    later has the copy that the tier made at its end. Preserved KV gives way only where nothing that runs could give room.
    InferCept serves in the order in which programs came: `admission: program-fcfs`.
    """

    observes: tuple[type[Fact], ...] = (PinDropped,)

    def __init__(self, cadence: float = 0.1, swap_blocks: bool = False, tools_only: bool = True) -> None:
        if not 0 < cadence < inf:
            raise ValueError(f"cadence = {cadence!r}; allowed: seconds > 0")
        super().__init__("deadlock", tools_only)
        self.cadence = cadence
        self.swap_blocks = swap_blocks
        self._pins = 0
        self._due = -inf  # the wake-up asked for last

    def start(self, site: Site, rng: np.random.Generator) -> None:
        self._site = site
        self._rebuild = RebuildTime(site)

    def observe(self, fact: Fact) -> None:
        self._pins -= 1

    def next_wakeup(self, now: float) -> float:
        if not self._pins:
            return inf
        if self._due <= now:  # the latest answer stands: a due time must not move whenever something happens
            self._due = now + self.cadence
        return self._due

    def at_turn_end(self, turn: Turn, engine: Engine) -> Release | Pin | Swap:
        tokens, others = turn.context_tokens, engine.running_tokens
        if self.called_tool(turn) is None:
            return Release()
        if self._preserves(0.0, tokens, others):
            self._pins += 1
            return Pin(inf)
        return Swap("host") if self._swap(tokens, others) <= self._discard(tokens, others) else Release()

    def review(self, pins: Sequence[Pinned], engine: Engine) -> Iterable[Unpin | Extend | Swap]:
        others, now = engine.running_tokens, engine.now
        return [Unpin(pin.program) for pin in pins
                if not pin.next_turn_waiting and not self._preserves(now - pin.since, pin.tokens, others)]

    def make_room(self, room: Room, pins: Sequence[Pinned], engine: Engine) -> Iterable[int]:
        if room.cause == "decode" and engine.num_running > 1:
            return ()
        return super().make_room(room, pins, engine)

    def _preserves(self, waited: float, tokens: int, others: int) -> bool:
        """Whether keeping `tokens` tokens `waited` seconds after the call wastes less than anything else."""
        return waited * tokens < min(self._discard(tokens, others), self._swap(tokens, others))

    def _discard(self, tokens: int, others: int) -> float:
        chunks = ceil(tokens / self._site.settings.step_budget)
        time = self._rebuild.prefill
        return time(tokens) * tokens / 2 + chunks * time(tokens / chunks) * others

    def _swap(self, tokens: int, others: int) -> float:
        seconds = self._site.reload_seconds(tokens)
        if seconds is None:
            return inf
        return 2 * seconds * others if self.swap_blocks else 0.0
