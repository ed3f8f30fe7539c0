"""Sessions as kv-cache-tester and the Weka corpora publish them: a JSON file each, a folder of these, an array or JSONL.

Format: github.com/callanjfox/kv-cache-tester (`traces/`) and what was made of it (docs.nvidia.com/aiperf, Weka traces). In
some, times in a sub-agent count from the session's start, in others from the sub-agent's; some requests have no `hash_ids`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from simcore.errors import TraceError
from simcore.traces.coding_agents import read_sessions
from simcore.traces.files import json_documents
from simcore.traces.workload import Source, Workload

SUB_AGENT_TIMES = ("auto", "relative", "absolute")
_TICK = 1.0  # s; session times are whole seconds


def read_weka(
    path: str | Path, *, clock: str = "closed-loop", long: str = "drop", context: int = 131072,
    max_gap: float | None = None, sub_agent_times: str = "auto", source: Source | None = None, skip_bad: bool = False,
) -> Workload:
    """The sessions of a file, or of all .json and .jsonl files of a folder, as `read_coding_agents` makes them.

    `sub_agent_times`: what times in a sub-agent count from; auto, one answer for the whole input: absolute where no
    sub-agent has a request before it began and some begin more than a second after the session did. Raises TraceError.
    """
    if sub_agent_times not in SUB_AGENT_TIMES:
        raise TraceError(str(path), "sub_agent_times", found=sub_agent_times, allowed=", ".join(SUB_AGENT_TIMES))
    absolute = sub_agent_times == "absolute" or (sub_agent_times == "auto" and _absolute(path))
    return read_sessions(path, _documents(path), clock=clock, long=long, context=context, max_gap=max_gap, source=source,
                         skip_bad=skip_bad, absolute=absolute, unnamed=True)


def _documents(path: str | Path) -> Iterator[tuple[str, dict[str, object] | TraceError]]:
    if not Path(path).is_dir():
        yield from json_documents(path)
        return
    files = [file for file in sorted(Path(path).iterdir())
             if file.name.removesuffix(".gz").endswith((".json", ".jsonl")) and file.is_file()]
    if not files:
        raise TraceError(str(path), found="no files", allowed=".json or .jsonl files of sessions")
    for file in files:
        yield from json_documents(file)


def _absolute(path: str | Path) -> bool:
    """Whether sub-agents' times fit only a count from the session's start."""
    late = False
    for _, row in _documents(path):
        requests = row.get("requests") if isinstance(row, dict) else None
        for marker in requests if isinstance(requests, list) else ():
            if not isinstance(marker, dict) or marker.get("type") != "subagent":
                continue
            inner = marker.get("requests")
            first = inner[0].get("t") if isinstance(inner, list) and inner and isinstance(inner[0], dict) else None
            at, lasts = marker.get("t"), marker.get("duration_ms")
            if not all(isinstance(value, int | float) for value in (first, at, lasts)):
                continue
            begun = at - lasts / 1000  # type: ignore[operator]
            if first < begun - _TICK:  # type: ignore[operator]
                return False
            late |= begun > _TICK
    return late
