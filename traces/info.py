"""What is in a workload: counts, rates, lengths, sessions, and the best hit rate that any cache could reach."""

from __future__ import annotations

import numpy as np

from simcore.traces.identity import numbered_ids
from simcore.traces.workload import Workload


def describe(workload: Workload, block_size: int = 16) -> dict:
    """A JSON-able summary. Times in seconds, rates in requests a second, lengths in tokens.

    `pauses`: for each tool (and for all together), how long its programs wait between turns: gap and calls, without slots.
    """
    w = workload
    own = w.arrival[np.isfinite(w.arrival)]
    span = float(own[-1] - own[0]) if len(own) else 0.0
    turns = np.bincount(w.program) if len(w) else np.zeros(0, dtype=np.int64)
    turns = turns[turns > 0]
    minute = np.bincount(((own - own[0]) // 60).astype(np.int64)) if len(own) else np.zeros(1, dtype=np.int64)
    cached = best_cached_tokens(w, block_size)
    total = int(w.input_tokens.sum())
    return {
        "name": w.source.name,
        "licence": w.source.licence,
        "origin": w.source.origin,
        "requests": len(w),
        "closed_loop_requests": int((np.diff(w.wait_offsets) > 0).sum()),
        "workers": w.workers,
        "started_by_workers": int(w.by_worker.sum()),
        "span": span,
        "mean_rate": len(own) / span if span else None,
        "peak_rate": int(minute.max()) / 60,
        "input_tokens": _spread(w.input_tokens),
        "output_tokens": _spread(w.output_tokens),
        "known_tokens": int(w.known_tokens.sum()),
        "sessions": len(turns),
        "turns_mean": float(turns.mean()) if len(turns) else 0.0,
        "turns_max": int(turns.max()) if len(turns) else 0,
        "block_size": block_size,
        "trace_block_tokens": w.block_tokens,
        "best_hit_rate": int(cached.sum()) / total if total else 0.0,
        "tools": list(w.tools),
        "pauses": _pauses(w),
        "notes": list(w.source.notes),
        "skipped": len(w.skipped),
        "skipped_rows": list(w.skipped),
    }


def best_cached_tokens(workload: Workload, block_size: int) -> np.ndarray:
    """Prompt tokens of each request that an infinite cache of full blocks would hold, int64[n].

    The cache holds every full block of the known tokens of all earlier rows. A hit covers whole blocks and at most
    prompt - 1 tokens (one token must be computed). Ids are prefix identities, so it is enough to remember how far into
    each trace block an earlier row has come.
    """
    w = workload
    cached = np.zeros(len(w), dtype=np.int64)
    rows, size = numbered_ids(w)
    reached = np.zeros(size, dtype=np.int64)  # tokens of each trace block that an earlier row knows
    for i, ids in enumerate(rows):
        if not len(ids):
            continue
        seen = int(np.count_nonzero(reached[ids]))  # leading ids: whoever holds one holds all before it
        if seen:
            shared = (seen - 1) * w.block_tokens + int(reached[ids[seen - 1]])
            most = min(shared, int(w.known_tokens[i]), int(w.input_tokens[i]) - 1)
            cached[i] = most // block_size * block_size
        own = np.clip(w.known_tokens[i] - np.arange(len(ids)) * w.block_tokens, 0, w.block_tokens)
        reached[ids] = np.maximum(reached[ids], own)
    return cached


def render(info: dict) -> str:
    """`describe` as text for a terminal."""
    mean_rate = "-" if info["mean_rate"] is None else f"{info['mean_rate']:.3f}/s"
    lines = [
        f"{info['name']}" + (f"  ({info['licence']})" if info["licence"] else ""),
        *([f"  from      {info['origin']}"] if info["origin"] else []),
        f"  requests  {info['requests']:,} ({info['closed_loop_requests']:,} wait for others), "
        f"{info['skipped']:,} rows skipped",
        f"  span      {info['span']:,.1f} s, mean {mean_rate}, busiest minute {info['peak_rate']:.3f}/s",
        f"  sessions  {info['sessions']:,}, turns mean {info['turns_mean']:.2f}, max {info['turns_max']:,}",
        f"  {'tokens':9} {'total':>15} {'mean':>10} {'p50':>9} {'p90':>9} {'p99':>9} {'max':>9}",
    ]
    for label, key in (("input", "input_tokens"), ("output", "output_tokens")):
        s = info[key]
        lines.append(
            f"  {label:9} {s['total']:>15,} {s['mean']:>10,.1f} {s['p50']:>9,.0f} {s['p90']:>9,.0f} {s['p99']:>9,.0f} "
            f"{s['max']:>9,}"
        )
    if info["workers"]:
        lines.append(f"  workers   {info['workers']:,} start {info['started_by_workers']:,} programs")
    for tool, p in info["pauses"].items():
        lines.append(f"  pause     {tool}: {p['turns']:,} turns, mean {p['mean']:,.3f} s, p50 {p['p50']:,.3f}, p90 "
                     f"{p['p90']:,.3f}, p99 {p['p99']:,.3f}, max {p['max']:,.3f}")
    lines.append(
        f"  best possible hit rate {info['best_hit_rate']:.4f} of prompt tokens "
        f"(infinite cache, blocks of {info['block_size']} tokens)"
    )
    lines += [f"  note: {note}" for note in info["notes"]]
    lines += [f"  skipped: {row}" for row in info["skipped_rows"]]
    return "\n".join(lines)


def _pauses(w: Workload) -> dict[str, dict[str, float | int]]:
    """By tool; "all" where there are several, and for turns whose tool is not known."""
    depends = np.diff(w.wait_offsets) > 0
    pause = w.pause
    chosen = {tool: depends & (w.tool == k) for k, tool in enumerate(w.tools)}
    chosen = {tool: rows for tool, rows in chosen.items() if rows.any()}
    if len(chosen) != 1 or (depends & (w.tool < 0)).any():
        chosen["all"] = depends
    out: dict[str, dict[str, float | int]] = {}
    for tool, rows in chosen.items():
        if rows.any():
            p50, p90, p99 = (float(q) for q in np.quantile(pause[rows], (0.5, 0.9, 0.99)))
            out[tool] = {"turns": int(rows.sum()), "mean": float(pause[rows].mean()), "p50": p50, "p90": p90, "p99": p99,
                         "max": float(pause[rows].max())}
    return out


def _spread(values: np.ndarray) -> dict[str, float | int]:
    if not len(values):
        return {"total": 0, "mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0}
    p50, p90, p99 = (float(q) for q in np.quantile(values, (0.5, 0.9, 0.99)))
    total, most = int(values.sum()), int(values.max())
    return {"total": total, "mean": float(values.mean()), "p50": p50, "p90": p90, "p99": p99, "max": most}
