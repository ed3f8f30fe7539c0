"""What the terminal shows: one table in AIPerf's layout, paired differences, the headline, and what was assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from simcore.experiments.compare import Comparison
from simcore.experiments.run import kv_link_bandwidth
from simcore.experiments.statistics import Difference
from simcore.experiments.study import Study
from simcore.models.gpu import load_gpu
from simcore.models.kv_capacity import KvCapacity
from simcore.models.metrics import STATISTICS
from simcore.models.serving import Deployment
from simcore.models.split_cluster import KV_LATENCY
from simcore.models.steady import RULE

_SPREADS = [
    ("Job Completion Time (s)", "jct", 1e-3),
    ("Time To First Token (ms)", "ttft", 1.0),
    ("Time Per Output Token (ms)", "tpot", 1.0),
    ("Inter Token Latency (ms)", "itl", 1.0),
    ("Request Latency, E2E (ms)", "e2el", 1.0),
]
_SCALARS = [
    ("Output Token Throughput (tokens/sec)", "output_throughput", 1.0),
    ("Request Throughput (requests/sec)", "request_throughput", 1.0),
    ("Request Goodput (requests/sec)", "request_goodput", 1.0),
    ("Requests Within SLO (%)", "slo_attainment", 100.0),
    ("Prefix Hit Rate (%)", "prefix_cache_hit_rate", 100.0),
    ("Utilisation (%)", "utilization", 100.0),
    ("$ per Million Output Tokens Within SLO", "usd_per_million_output_tokens_within_slo", 1.0),
    ("Preemptions", "preemptions", 1),
    ("Requests Finished", "completed", 1),
    ("Requests Refused / Cancelled / Unfinished", "failed", 1),
]
_PROGRAM_SCALARS = [
    ("JCT: queueing (s)", "mean_jct_queueing_ms", 1e-3),
    ("JCT: prefill (s)", "mean_jct_prefill_ms", 1e-3),
    ("JCT: decode (s)", "mean_jct_decode_ms", 1e-3),
    ("JCT: tools and people (s)", "mean_jct_tool_ms", 1e-3),
    ("JCT: reload (s)", "mean_jct_reload_ms", 1e-3),
    ("Tokens recomputed that the program had", "recomputed_tokens", 1),
]


def metrics_table(title: str, summaries: dict[str, dict[str, Any]]) -> Table:
    """Rows are metrics, one line a policy; columns are statistics. Scalars stand under `mean`."""
    table = Table(title=title, title_justify="left")
    table.add_column("Metric")
    if len(summaries) > 1:
        table.add_column("Policy")
    for statistic in STATISTICS:
        table.add_column(statistic, justify="right")

    def add(name: str, cells: dict[str, Sequence[str]]) -> None:
        for k, (label, values) in enumerate(cells.items()):
            lead = [name if k == 0 else ""] + ([label] if len(summaries) > 1 else [])
            table.add_row(*lead, *values, end_section=k == len(cells) - 1)

    for name, key, scale in _SPREADS:
        if not all(f"mean_{key}_ms" in s for s in summaries.values()):
            continue
        add(name, {label: [number(s[f"{stat}_{key}_ms"], scale) for stat in STATISTICS] for label, s in summaries.items()})
    windows = {label: s["window"]["state"] for label, s in summaries.items() if "window" in s}
    programs = all("programs" in s for s in summaries.values())
    for name, key, scale in [*(_PROGRAM_SCALARS if programs else ()), *_SCALARS]:
        add(name, {label: [number(s[key], scale), "N/A", "N/A", "N/A"] for label, s in summaries.items()})
    if set(windows.values()) - {"all"}:
        words = {"all": "all", "steady": "steady", "unstable": "unstable", "none": "none shown"}
        add("Window", {label: [words[state], "", "", ""] for label, state in windows.items()})
    return table


def differences_table(comparison: Comparison) -> Table:
    first = comparison.arms[0].label
    table = Table(title=f"Paired difference to {first} (95% interval)", title_justify="left")
    table.add_column("Metric")
    for label in comparison.differences:
        table.add_column(label, justify="right")
    for k, d in enumerate(next(iter(comparison.differences.values()))):
        cells = [_difference(ds[k]) for ds in comparison.differences.values()]
        table.add_row(f"{d.label} ({d.unit})", *cells)
    return table


def _difference(d: Difference) -> str:
    if d.why:
        return f"{number(d.difference, sign=True)} (no interval)"
    style = ("green" if d.better else "red") if d.known else "dim"
    return f"[{style}]{number(d.difference, sign=True)} ({number(d.low, sign=True)} .. {number(d.high, sign=True)})[/]"


def number(value: float | None, scale: float = 1.0, sign: bool = False) -> str:
    if value is None or value != value:
        return "N/A"
    value *= scale
    plus = "+" if sign else ""
    if isinstance(value, int) or (value == int(value) and abs(value) >= 100):
        return f"{value:{plus},.0f}"
    return f"{value:{plus},.2f}" if abs(value) >= 0.01 or value == 0 else f"{value:{plus}.2g}"


def assumptions(study: Study, capacity: KvCapacity, cost: str, notes: Sequence[str]) -> list[str]:
    """What stands behind the numbers and was not measured here. `cost`: what stands behind step times."""
    lines = [f"engine: vLLM {study.engine.version} semantics (docs/scheduler.md); {study.llm.name} on "
             f"{study.cluster.replicas} x {study.cluster.tensor_parallel_size} {study.cluster.gpu}"]
    pool = f"KV pool: {capacity.tokens:,} tokens a replica"
    if capacity.estimated:
        low, high = capacity.low, capacity.high
        pool += (f", estimated; -20% is num_gpu_blocks {low:,}, +20% {high:,}: see whether the result holds with "
                 f"--vary engine.num_gpu_blocks={low},{high}")
    lines.append(pool)
    if study.engine.kv_offloading_size:
        bandwidth = (load_gpu(study.cluster.gpu).host_bandwidth or 0.0) * study.cluster.tensor_parallel_size
        lines.append(
            f"host memory: {study.engine.kv_offloading_size:g} GiB a replica, {study.engine.kv_offloading_backend}; link "
            f"{bandwidth / 1e9:g} GB/s each way (models/gpus says from where), {Deployment.host_latency * 1e6:g} us a copy")
    c = study.cluster
    if c.prefill_replicas:
        latency = KV_LATENCY if c.kv_link_latency is None else c.kv_link_latency
        lines.append(f"prefill and decode separate: {c.prefill_replicas}P{c.decode_replicas}D; KV link "
                     f"{kv_link_bandwidth(study, load_gpu(c.gpu)) / 1e9:g} GB/s a replica each way"
                     f"{'' if c.kv_link_gbps else ' (the links of the GPUs to each other)'}, {latency * 1e6:g} us a push")
    lines.append(cost)
    lines.append(f"assumed by the study: SLO {study.limits} (ms); "
                 f"{study.cost.usd_per_gpu_hour if study.cost.usd_per_gpu_hour is not None else 'no'} $ per GPU-hour")
    return lines + [f"workload: {note}" for note in notes]


def window_lines(comparison: Comparison) -> list[str]:
    """What of the runs counts, and why an arm shows no mean."""
    windows = comparison.windows
    if comparison.file.study.window == "all":
        return ["Window: all requests; nothing is cut"]
    shown = {label: window.cut for label, window in windows.items() if window.shown}
    each = ", ".join(f"{label} {cut:,}" for label, cut in shown.items())
    lines = [f"Window: steady ({RULE}): the first {max(shown.values()):,} requests of each run are cut, the latest of what "
             f"the arms ask for ({each})"] if shown else []
    return lines + [f"Window of {label}: {window.why}" for label, window in windows.items() if not window.shown]


def print_comparison(console: Console, comparison: Comparison, assumed: Sequence[str]) -> None:
    summaries = {arm.label: runs[0].summary for arm, runs in zip(comparison.arms, comparison.results, strict=True)}
    study = comparison.file.study
    title = f"simcore | {study.name}" + (f" | seed {study.seeds[0]}" if len(study.seeds) > 1 else "")
    console.print(metrics_table(title, summaries))
    console.print(differences_table(comparison))
    for line in window_lines(comparison):
        console.print(line, highlight=False, soft_wrap=True)
    for label, text in comparison.parting.items():
        console.print(f"First parting of {label}: {text}", style="dim", highlight=False)
    for label, ds in comparison.differences.items():
        left_out = max(d.left_out for d in ds)
        if left_out:
            console.print(f"Left out of {label}'s pairs: {left_out:,} requests that did not finish in both runs; "
                          "a policy that refuses the slow ones looks fast", style="bold yellow", highlight=False)
    for label, frame in comparison.carriers.items():
        requests = ", ".join(str(r) for r in frame["request"])
        share = 100 * float(frame["share_of_change"].abs().sum())
        console.print(f"Largest changes of E2E under {label}: requests {requests} ({share:.0f}% of all changes)",
                      style="dim", highlight=False)
    for label, found in comparison.oracles.items():
        console.print(f"ORACLE: {label} uses the true future ({', '.join(found)})", style="bold yellow")
    console.print("\nAssumed:", style="bold")
    for line in assumed:
        console.print(f"  {line}", highlight=False, style="dim", soft_wrap=True)
    console.print()
    for k, line in enumerate(comparison.headline):
        console.print(line, style="bold" if k == 0 else None, highlight=False, soft_wrap=True)
