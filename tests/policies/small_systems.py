"""Small systems of agents for tests: turns and tools by hand, and stand-ins for the views where only a few fields matter."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from serving_runs import run, workload

from simcore.models.engine import EngineSettings
from simcore.models.facts import Admitted, ProgramEnded, TurnArrived, TurnEnded


def first(program: int, at: float = 0.0, prompt: int = 8, output: int = 1) -> dict[str, Any]:
    """The first turn of a program; a step takes 1 s and a block has 4 tokens in all that follows."""
    return {"at": at, "program": program, "turn": 0, "prompt": prompt, "output": output,
            "ids": [100 * program + j for j in range(-(-prompt // 4))]}


def after(
    request: int, program: int, gap: float, prompt: int = 12, output: int = 1, tool: int = 0, turn: int = 1
) -> dict[str, Any]:
    """The turn that follows on `request` (a row), `gap` seconds after its end, with the same context."""
    return {"after": [request], "gap": gap, "program": program, "turn": turn, "prompt": prompt, "output": output,
            "tool": tool, "ids": [100 * program + j for j in range(-(-prompt // 4))]}


class Played:
    """A run's requests, and what retention decided: (time, what, answer), pins by program."""

    def __init__(self, rows: list[dict[str, Any]], *, ends_known: bool = True, **options: Any) -> None:
        result = run(workload(rows, tools=("grep", "pytest"), ends_known=ends_known), **options)
        self.requests = result.requests
        kept = result.decisions[result.decisions["kind"].isin(["retention", "unpin"])]
        self.decisions = list(zip(kept["time"], kept["kind"], kept["request"], kept["answer"], strict=True))

    def unpinned(self) -> list[tuple[float, int, str]]:
        return [(time, program, answer) for time, kind, program, answer in self.decisions if kind == "unpin"]

    def pinned(self) -> list[tuple[float, str]]:
        """(request, until) of each pin when it was made."""
        return [(request, answer.removeprefix("pin until ")) for _, kind, request, answer in self.decisions
                if kind == "retention" and answer.startswith("pin")]

    def admitted(self) -> list[float]:
        return self.requests["admitted"].tolist()

    def cached(self) -> list[int]:
        return self.requests["cached_tokens"].tolist()


def site(prefill: Callable[[int], float] = lambda tokens: 1e-3 * tokens, **more: Any) -> Any:
    return SimpleNamespace(**{
        "settings": EngineSettings(block_size=16, max_num_batched_tokens=1000), "num_blocks": 8000,
        "prefill_seconds": lambda tokens, prefix=0: prefill(tokens), "reload_seconds": lambda tokens: None} | more)


def turn(tokens: int = 1000, **fields: Any) -> Any:
    """An ended turn's view."""
    return SimpleNamespace(**{
        "id": 0, "program": 0, "context_tokens": tokens, "lower_tier_tokens": 0, "is_last": None, "next_tool": "grep"}
        | fields)


def engine(now: float = 0.0, **fields: Any) -> Any:
    return SimpleNamespace(**{"now": now, "num_running": 0, "running_tokens": 0} | fields)


def pin(program: int, **fields: Any) -> Any:
    return SimpleNamespace(**{
        "program": program, "program_arrival": float(program), "since": 0.0, "until": 10.0, "tokens": 100,
        "next_turn_waiting": False} | fields)


def room(program: int, cause: str = "admission") -> Any:
    return SimpleNamespace(cause=cause, blocks=1, head=SimpleNamespace(program=program))


def tool_ran(policy: Any, seconds: float, tool: str | None = "grep", request: int = 1, program: int = 1) -> None:
    """Tell the policy that a turn has come back after a tool call."""
    policy.observe(TurnArrived(0.0, request, program, seconds, tool))


def waited(policy: Any, seconds: float, *, had_pin: bool = False, resumed: bool = False, request: int = 1) -> None:
    policy.observe(Admitted(0.0, request, 1, seconds, had_pin, 0, resumed))


def program_of(policy: Any, turns: int, program: int = 7) -> None:
    """Tell the policy of a whole program."""
    for k in range(turns):
        policy.observe(TurnEnded(0.0, 100 + k, program, 1.0))
    policy.observe(ProgramEnded(0.0, program))
