"""Runs the sections, each within its time, and writes one JSON, whole again after each of them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from simcore.experiments.gpu_validation import kernels_sha256
from simcore.experiments.gpu_validation.checks import cases, summary
from simcore.experiments.gpu_validation.experts_sweep import experts_sweep
from simcore.experiments.gpu_validation.live import live, verdict
from simcore.experiments.gpu_validation.processes import Emit, Outcome, run_jobs
from simcore.experiments.gpu_validation.rooflines import rooflines
from simcore.experiments.gpu_validation.timing import bandwidth
from simcore.files import to_json, write_whole

FORMAT = "simcore gpu validation 1"
ALL_SECONDS = 470.0  # of all sections; with start and end within eight minutes
CASE_SECONDS = 60.0  # of one kernel's check
DEVICE_SECONDS = 60.0  # to find out what the device is

Section = Callable[[Emit, bool], None]


@dataclass(frozen=True)
class Planned:
    """`seconds`: its budget. `run`: None for the checks, which are many jobs."""

    seconds: float
    run: Section | None


def plan(out: Path) -> dict[str, Planned]:
    """The sections in the order in which they run."""

    def of_model(model: str) -> Section:
        profile = out.with_name(f"{out.stem}-profile-{model}.json")
        return lambda emit, tiny: live(model, profile, emit, tiny)

    return {
        "bandwidth": Planned(20, bandwidth),
        "kernels": Planned(110, None),
        "rooflines": Planned(60, rooflines),
        "experts": Planned(80, experts_sweep),
        "live-llama-3.1-8b": Planned(140, of_model("llama-3.1-8b")),
        "live-qwen3-30b-a3b": Planned(130, of_model("qwen3-30b-a3b")),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every section that ran came to its end, whatever it found; 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON; sections of the same kernels in it are kept")
    parser.add_argument("--only", default="", help="sections, or beginnings of their names, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on a CPU too: shows that it runs, nothing else")
    parser.add_argument("--seconds", type=float, default=ALL_SECONDS, help="of all sections (default %(default)s)")
    chosen = parser.parse_args(arguments)
    ends = time.monotonic() + chosen.seconds
    sections = plan(chosen.out)
    names = [name for name in sections if any(name.startswith(only) for only in chosen.only.split(","))]
    if not names:
        parser.error(f"--only {chosen.only}: none of {', '.join(sections)}")
    warming = _warm_up_numba() if not chosen.tiny and any(name.startswith("live") for name in names) else None
    found = begin(chosen.out, chosen.tiny)
    write_whole(chosen.out, to_json(found))
    try:
        for name in names:
            if name.startswith("live") and warming is not None:
                warming.wait()
            planned = sections[name]
            seconds = min(planned.seconds, ends - time.monotonic()) if not chosen.tiny else chosen.seconds
            found["sections"][name] = run_section(planned, seconds, chosen.tiny)
            write_whole(chosen.out, to_json(found))
            print(_line(name, found["sections"][name]), flush=True)
    finally:
        if warming is not None and warming.poll() is None:
            warming.kill()
    print(_table(found["sections"]))
    return int(any("error" in found["sections"][name] for name in names))


def begin(out: Path, tiny: bool) -> dict[str, Any]:
    """The file without new sections: those that `out` holds of the same kernels on the same device."""
    head = {"format": FORMAT, "date": datetime.now(UTC).isoformat(timespec="seconds"), "kernels_sha256": kernels_sha256(),
            "tiny": tiny, **about_device()}
    sections: dict[str, Any] = {}
    try:
        before = json.loads(out.read_text(encoding="utf-8"))
        if all(before.get(key) == head[key] for key in ("format", "kernels_sha256", "tiny", "device")):
            sections = before["sections"]
    except (OSError, ValueError):
        pass
    return {**head, "sections": sections}


def about_device() -> dict[str, Any]:
    """In a process of its own: this one must not touch the GPU."""
    return run_jobs({"device": _device}, workers=1, seconds=DEVICE_SECONDS)["device"].found


def _device(emit: Emit) -> None:
    import torch
    import triton

    found: dict[str, Any] = {"device": "CPU", "driver": None, "torch": torch.__version__, "triton": triton.__version__,
                             "python": sys.version.split()[0], "cpus": os.cpu_count()}
    if torch.cuda.is_available():
        of = torch.cuda.get_device_properties(0)
        found |= {"device": of.name, "memory_bytes": of.total_memory, "multiprocessors": of.multi_processor_count,
                  "cuda": torch.version.cuda}
        emit(found)
        asked = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                               text=True, check=True)
        found["driver"] = asked.stdout.strip()
    emit(found)


def run_section(planned: Planned, seconds: float, tiny: bool) -> dict[str, Any]:
    """What a section found, with `seconds`, `budget_seconds`, `ok` (None: nothing to judge) and perhaps `error`."""
    began = time.monotonic()
    if seconds <= 0:
        outcome = Outcome(error="not begun: the time was up")
    elif planned.run is None:
        outcome = _check(seconds, tiny)
    else:
        run = planned.run
        outcome = run_jobs({"": lambda emit: run(emit, tiny)}, workers=1, seconds=seconds)[""]
    found = {**outcome.found, "seconds": time.monotonic() - began, "budget_seconds": planned.seconds}
    if outcome.error is None and found.get("failed"):
        outcome.error = f"{len(found['failed'])} parts failed: see failed"
    if outcome.error is not None:
        found["error"] = outcome.error
    return {**found, "ok": False if "error" in found else verdict(found)}


def _check(seconds: float, tiny: bool) -> Outcome:
    """The section `kernels`: every case in a process of its own, as many at a time as there are cores but one."""
    workers = max(1, (os.cpu_count() or 2) - 1)
    outcomes = run_jobs(cases(tiny), workers=workers, seconds=seconds, each=seconds if tiny else CASE_SECONDS)
    rows = [{"name": name, "seconds": one.seconds, **one.found} for name, one in outcomes.items()]
    failed = {name: one.error for name, one in outcomes.items() if one.error is not None}
    return Outcome({"rows": [row for row in rows if "error" in row], "worst": summary(rows), "failed": failed})


def _warm_up_numba() -> subprocess.Popen[bytes]:
    """Compiles what the simulated run needs while the GPU is busy with other sections."""
    return subprocess.Popen([sys.executable, "-m", "simcore.experiments.precompile"], stdout=subprocess.DEVNULL)


def _line(name: str, found: dict[str, Any]) -> str:
    says = {True: "all targets met", False: "targets missed", None: "nothing judged"}[found["ok"]]
    return f"{name}: {found.get('error', says)} ({found['seconds']:.0f} s of {found['budget_seconds']:.0f})"


def _table(sections: dict[str, Any]) -> str:
    """What has a number to look at, a line each."""
    lines = []
    for name, found in sections.items():
        lines.append(_line(name, found))
        for key, worst in found.get("worst", {}).items():
            lines.append(f"  {key}: error {worst['error']:.2g} of {worst['tolerance']:g} ({worst['case']})")
        lines += [f"  failed: {case}: {error}" for case, error in found.get("failed", {}).items()]
        for row in found.get("rows", []) if "worst" not in found else []:
            mark = {True: "", False: "  MISSED", None: ""}[row["ok"]]
            if "share" in row:
                target = "" if row["target"] is None else f", target {row['target']:.0%}"
                lines.append(f"  {row['name']}: {row['share']:.1%}{target}, {row['seconds'] * 1e6:,.1f} us{mark}")
            elif "metric" in row:
                lines.append(f"  {row['metric']}: {row['measured']:.4g} s, error {row['error']:.1%}{mark}")
            else:
                lines.append(f"  {row['name']}: {row['value']:.4g}, target {row['target']:g}{mark}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
