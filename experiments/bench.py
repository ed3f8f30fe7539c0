"""Speed of the simulator itself on fixed workloads: what `simcore bench` measures and prints (docs/speed.md).

All times are CPU seconds, all threads, least of the repeats. Each run has a process of its own; the garbage collector runs
as in any program.
"""

from __future__ import annotations

import json as jsonlib
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from math import inf
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

import simcore
from simcore.errors import ConfigError, SimcoreError
from simcore.experiments import peers
from simcore.experiments.output import write_run
from simcore.experiments.pages import fill_page, read_page
from simcore.experiments.report import number
from simcore.experiments.run import build_deployment, build_policies
from simcore.experiments.study import Study
from simcore.files import to_json, write_whole
from simcore.models.decision_points import Admission, Refuse, ReplicaRouting
from simcore.models.serving import RunResult, serve
from simcore.models.views import Engine, ReplicaView, Turn
from simcore.traces.agent_generator import generate_agents
from simcore.traces.agents import start_programs
from simcore.traces.read import read
from simcore.traces.transform import head
from simcore.traces.workload import Source, Workload, build

ALLOWED = "W1-N-O, W2-N (N requests, O output tokens; N as 500 or 10k), W4, W4-16, R4, R5"
TIMEOUTS = 300_000  # of the bare SimPy loop
WARM_UP = 200  # requests played first: kernels are loaded, imports done
MEMORY_SIZES = (10_000, 50_000)  # requests of the two runs whose peaks are compared
PARTS = ("requests_per_cpu_second", "with_tables", "with_python_policies")  # keys of the three rates

# The peer's engine when nothing is said (MockEngineArgs of ai-dynamo 1.4.2): 16,384 blocks, here of 512 tokens. That is
# more KV than a GPU holds, so W4 measures speed alone. W4-16 has the same tokens in blocks of 16.
_W4_TOKENS = 16_384 * 512
_W4_BUDGET = 8_192
SimPath = Literal["planned", "step-by-step"]


# --- the workloads --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """One workload and the engines that serve it: Llama-3.1-8B in bf16, each on one H100, routed round-robin. R4 and R5
    (agents) are ours alone: no peer reads programs."""

    name: str
    replicas: int
    engine: dict[str, Any]  # EngineSettings that differ from vLLM's defaults
    requests: int = 0  # 0: the shipped Mooncake trace, as it is
    rate: float = 0.0  # requests/s; 0 = all at t = 0
    input_tokens: int = 512
    output_tokens: int = 128
    agents: str = ""  # "coding-agents": the shipped sessions; else a workload of traces/agent_workloads.yaml
    programs_rate: float = 0.0  # programs/s
    policies: dict[str, str] = field(default_factory=dict)

    @property
    def generated(self) -> bool:
        return self.requests > 0

    def workload(self) -> Workload:
        if self.agents == "coding-agents":
            return start_programs(read(self.agents, max_gap=300.0), self.programs_rate, seed=1)
        if self.agents:
            return generate_agents(self.agents, rate=self.programs_rate, seed=1)
        if not self.generated:
            return read("mooncake-conversation")
        n, blocks = self.requests, -(-self.input_tokens // 512)
        first = np.arange(n, dtype=np.int64) * blocks  # ids of 512-token blocks that nobody shares, as in the export
        return build(
            arrival=np.array([t for _, t, _, _ in rows(n, self.rate, self.input_tokens, self.output_tokens)]),
            input_tokens=np.full(n, self.input_tokens), output_tokens=np.full(n, self.output_tokens), block_tokens=512,
            known_tokens=np.full(n, self.input_tokens), runs=(np.arange(n + 1), first, first + blocks - 1),
            source=Source(self.name, notes=(f"generated: {n} requests at {self.rate:g}/s, seed 1",)),
        )

    def study(self, **policies: str) -> Study:
        trace = f"{self.name}.jsonl" if self.generated or self.agents else "mooncake-conversation"
        return Study.model_validate({
            "name": self.name, "workload": {"trace": trace},
            "model": "llama-3.1-8b", "cluster": {"replicas": self.replicas, "gpu": "h100-sxm"}, "engine": self.engine,
            "policies": self.policies | policies,
        })


def find(name: str) -> Bench:
    """The workload of that name. Raises ConfigError."""
    size = r"(?P<n>[1-9]\d*k?)"
    found = re.fullmatch(rf"W1-{size}-(?P<o>[1-9]\d*)|W2-(?P<m>[1-9]\d*k?)", name)
    if found:
        count = found["n"] or found["m"]
        n = int(count.removesuffix("k")) * (1000 if count.endswith("k") else 1)
        engine = {"block_size": 16, "num_gpu_blocks": 28_000, "max_num_seqs": 256, "max_num_batched_tokens": 2_048,
                  "enable_prefix_caching": False}
        return Bench(name, 1, engine, n, 8.0 if found["n"] else 0.0, output_tokens=int(found["o"] or 128))
    if name in ("W4", "W4-16"):
        block = 512 if name == "W4" else 16
        return Bench(name, 8, {"block_size": block, "num_gpu_blocks": _W4_TOKENS // block, "max_num_seqs": 256,
                               "max_num_batched_tokens": _W4_BUDGET, "enable_prefix_caching": True})
    if name == "R4":
        return Bench(name, 1, {"block_size": 64}, agents="coding-agents", programs_rate=0.006)
    if name == "R5":
        return Bench(name, 1, {"block_size": 16}, agents="swe-bench", programs_rate=0.09,
                     policies={"admission": "program-fcfs", "retention": "static-ttl"})
    raise ConfigError("--workloads", found=name, allowed=ALLOWED)


def rows(n: int, rate: float = 8.0, isl: int = 512, osl: int = 128, seed: int = 1) -> Iterator[tuple[int, float, int, int]]:
    """(number, arrival s, input tokens, output tokens) of each request. Python's own generator, so that the peers' files
    can be made without this project."""
    r, t = random.Random(seed), 0.0
    for i in range(n):
        yield i, t, isl, osl
        t += r.expovariate(rate) if rate > 0 else 0.0


# --- a user's own policies ------------------------------------------------------------------------------------------


class LeastOutstanding(ReplicaRouting):
    """Reads live views of every replica at every request, as a user's own router would."""

    def route(self, turn: Turn, replicas: Sequence[ReplicaView], now: float) -> int:
        return min(replicas, key=lambda replica: (replica.outstanding, -replica.free_blocks, replica.id)).id


class PriorityThenArrival(Admission):
    """First come, first served (no workload here has priorities), but decided in Python at every request."""

    def __init__(self, most_waiting: float = inf) -> None:
        self.most_waiting = most_waiting

    def accept(self, turn: Turn, engine: Engine) -> Refuse | None:
        return Refuse("queue is full") if engine.num_waiting >= self.most_waiting else None

    def key(self, turn: Turn, now: float) -> tuple:
        return (turn.priority, turn.arrival)


OWN_POLICIES = {
    "replica_routing": f"{__name__}:{LeastOutstanding.__name__}", "admission": f"{__name__}:{PriorityThenArrival.__name__}",
}


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(bench: Bench, *, repeat: int = 3, path: SimPath = "planned") -> dict[str, Any]:
    """Speed of one workload; the keys are explained in docs/speed.md. Rates are per CPU-second."""
    runs, own = [], []
    for _ in range(repeat):  # in turn, so that a slow spell of the machine meets both
        runs.append(_in_own_process(bench.name, path))
        own.append(_in_own_process(bench.name, path, own_policies=True))
    n = runs[0]["requests"]
    rate = n / min(run["loop_seconds"] for run in runs)
    timeouts = max(run["timeouts"] for run in runs)
    memory = _memory_growth(bench, path) if bench.rate else dict.fromkeys(("bytes_per_request", "table_bytes_per_request"))
    return {
        "requests": n, "requests_per_cpu_second": rate, "with_tables": n / min(run["whole_seconds"] for run in runs),
        "with_python_policies": n / min(run["loop_seconds"] for run in own),
        "requests_per_simpy_timeout": rate / timeouts, "simpy_timeouts_per_cpu_second": timeouts,
        "output_tokens_per_cpu_second": rate * runs[0]["facts"]["output_tokens"] / n,
        **runs[0]["facts"], **memory, "repeat": repeat,
    }


def _in_own_process(name: str, path: SimPath, *, own_policies: bool = False) -> dict[str, Any]:
    """`play` in a fresh process, as `simcore run` would be: in one process the garbage of one run is collected in the next,
    which makes that one look 10 to 20% slower than it is."""
    code = ("from simcore.experiments.bench import play; from simcore.files import to_json; "
            f"print(to_json(play({name!r}, {path!r}, own_policies={own_policies})))")
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode:  # its message stands on stderr already
        raise SimcoreError(f"{name}: the run failed with exit code {ran.returncode}")
    found: dict[str, Any] = jsonlib.loads(ran.stdout)
    return found


def play(name: str, path: SimPath, *, own_policies: bool = False) -> dict[str, Any]:
    """One run: CPU seconds of the loop, CPU seconds with frames, summary and Parquet, peak resident bytes before those are
    written (None where the system does not tell), bytes of the tables, SimPy's rate, and what the run says of itself."""
    bench = find(name)
    workload, study = bench.workload(), bench.study(**(OWN_POLICIES if own_policies else {}))
    deployment, _ = build_deployment(study)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)

        def write(result: RunResult) -> None:
            write_run(folder, study, result, folder, facts={}, detailed=False, csv=False)

        few = head(workload, min(WARM_UP, len(workload)))
        write(serve(few, deployment, build_policies(study, folder), path=path))
        timeouts = simpy_timeouts(TIMEOUTS)
        policies = build_policies(study, folder)
        begun = time.process_time()
        result = serve(workload, deployment, policies, sample_every=study.sample_every, path=path)
        whole = time.process_time() - begun
        peak = _peak_bytes()
        begun = time.process_time()
        write(result)
        whole += time.process_time() - begun
    kept = ("decisions_per_request", "stops_per_request", "steps_per_request", "planned_share", "path", "why_not_planned")
    return {
        "requests": len(workload), "loop_seconds": result.speed["cpu_seconds"], "whole_seconds": whole, "timeouts": timeouts,
        "peak_bytes": peak, "table_bytes": sum(int(t.memory_usage(index=False).sum()) for t in result.tables.values()),
        "facts": {
            "completed": result.summary["completed"], "output_tokens": result.summary["total_output_tokens"],
            "simulated_seconds": result.summary["duration"], **{key: result.speed[key] for key in kept},
        },
    }


def simpy_timeouts(count: int) -> float:
    """Timeouts per CPU-second of a bare SimPy loop: one process that yields them one by one."""
    import simpy

    def clock(env: simpy.Environment) -> Generator[simpy.Event, Any, None]:
        for _ in range(count):
            yield env.timeout(1.0)

    env = simpy.Environment()
    env.process(clock(env))
    begun = time.process_time()
    env.run()
    return count / (time.process_time() - begun)


def _peak_bytes() -> int | None:
    """Of this process. Not getrusage: Linux carries its ru_maxrss through exec, so a child would report its parent's."""
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE) if status.exists() else None
    return int(found[1]) * 1024 if found else None


def _memory_growth(bench: Bench, path: SimPath) -> dict[str, float | None]:
    """Bytes that a further request costs, beyond the tables and in them, from two runs of different length."""
    small = min(bench.requests, MEMORY_SIZES[0])
    sizes = (small, small * MEMORY_SIZES[1] // MEMORY_SIZES[0])
    short, long = (_in_own_process(f"W1-{n}-{bench.output_tokens}", path) for n in sizes)
    more = sizes[1] - sizes[0]
    of_tables = (long["table_bytes"] - short["table_bytes"]) / more
    told = short["peak_bytes"] is not None
    return {"bytes_per_request": (long["peak_bytes"] - short["peak_bytes"]) / more - of_tables if told else None,
            "table_bytes_per_request": of_tables}


def machine() -> dict[str, Any]:
    return {
        "machine": platform.machine(), "system": platform.system(), "cores": os.cpu_count(),
        "python": platform.python_version(), "simcore": simcore.__version__,
        **{name: metadata.version(name) for name in ("numpy", "numba", "simpy", "pandas", "pyarrow")},
    }


# --- the command and what it shows ----------------------------------------------------------------------------------


def run_bench(
    workloads: str, *, repeat: int = 3, path: str = "planned", json: Path | None = None, export: Path | None = None,
    dynosim: Path | None = None, page: Path | None = None,
) -> dict[str, Any]:
    """Measure the named workloads one after the other. `export`: also write them for the peers; `dynosim`: a Python that
    has ai-dynamo, to play the very same files; `page`: put the table between the marks of this file. Raises ConfigError."""
    if path not in ("planned", "step-by-step"):
        raise ConfigError("--path", found=path, allowed="planned, step-by-step")
    chosen = [find(name.strip()) for name in workloads.split(",")]
    if dynosim is not None and not dynosim.is_file():
        raise ConfigError("--dynosim", found=str(dynosim), allowed="the path of a Python that has ai-dynamo")
    before = read_page(page, "bench") if page else ""
    console = Console(stderr=str(json) == "-", width=None if sys.stdout.isatty() else 140)
    if export:
        for bench in (b for b in chosen if not b.agents):
            peers.export(bench.name, bench.workload(), export)
            console.print(peers.commands(bench, export), highlight=False, soft_wrap=True)
    results: dict[str, Any] = {}
    beside: dict[str, dict[str, float]] = {}
    for bench in chosen:
        with console.status(f"{bench.name}, {repeat} times"):
            results[bench.name] = measure(bench, repeat=repeat, path=path)  # type: ignore[arg-type]
            if dynosim and not bench.agents:
                beside.setdefault("DynoSim", {})[bench.name] = peers.dynosim_rate(dynosim, bench, repeat)
    results["machine"] = machine()
    if beside:
        results["peers"] = beside
    console.print(terminal(results, beside))
    if page:
        fill_page(page, "bench", before, markdown(results, beside))
    if str(json) == "-":
        print(to_json(results), end="")
    elif json is not None:
        write_whole(json, to_json(results))
    return results


def _columns(results: dict[str, Any], beside: dict[str, dict[str, float]]) -> tuple[list[str], list[list[str]]]:
    """Headings and one line of texts a workload."""
    headings = ["Workload", "Requests / CPU-s", "with tables", "Python policies", "per SimPy timeout",
                "Output tokens / CPU-s", "Steps / request", "Planned", "KB / request"]
    for peer in beside:
        headings += [f"{peer}, requests / s", f"simcore / {peer}"]
    lines = []
    for name, r in results.items():
        if name in ("machine", "peers"):
            continue
        memory = r["bytes_per_request"]
        line = [name, *(f"{r[part]:,.0f}" for part in PARTS), f"{r['requests_per_simpy_timeout']:.4f}",
                f"{r['output_tokens_per_cpu_second']:,.0f}", number(r["steps_per_request"]),
                f"{100 * r['planned_share']:.1f}%", "" if memory is None else f"{memory / 1000:.1f}"]
        for rates in beside.values():
            rate = rates.get(name)
            line += [f"{rate:,.0f}", f"{r['requests_per_cpu_second'] / rate:.2f}"] if rate else ["", ""]
        lines.append(line)
    return headings, lines


def terminal(results: dict[str, Any], beside: dict[str, dict[str, float]]) -> Table:
    headings, lines = _columns(results, beside)
    table = Table(title=f"simcore bench | {_machine_line(results['machine'])}", title_justify="left")
    for k, heading in enumerate(headings):
        table.add_column(heading, justify="right" if k else "left")
    for line in lines:
        table.add_row(*line)
    return table


def markdown(results: dict[str, Any], beside: dict[str, dict[str, float]]) -> str:
    """The table of docs/speed.md. `beside`: peer -> workload -> requests per second, measured in the same run."""
    headings, lines = _columns(results, beside)
    table = [headings, ["---", *["---:"] * (len(headings) - 1)], *lines]
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    paths = {r["path"] for name, r in results.items() if name not in ("machine", "peers")}
    return f"{_machine_line(results['machine'])}; {', '.join(sorted(paths))} path.\n\n{body}\n"


def _machine_line(m: dict[str, Any]) -> str:
    return (f"simcore {m['simcore']}, Python {m['python']}, numpy {m['numpy']}, numba {m['numba']}, "
            f"{m['cores']} cores ({m['machine']})")
