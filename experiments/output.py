"""Result folders: Parquet tables, summary.json, run.json, the resolved configuration and a plot."""

from __future__ import annotations

import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from pandas.api.types import is_numeric_dtype

import simcore
from simcore.experiments.compare import Comparison
from simcore.experiments.run import build_cost, build_deployment, study_llm
from simcore.experiments.study import Study
from simcore.files import to_json
from simcore.models.serving import RunResult
from simcore.traces.workload import Workload

_VERSIONED = ("simpy", "numpy", "scipy", "numba", "pandas", "pyarrow", "pydantic", "matplotlib")


def write_run(
    folder: Path, study: Study, result: RunResult, origin: Path, *, facts: dict[str, Any], detailed: bool, csv: bool,
    tables: bool = True,
) -> None:
    """One run: `<table>.parquet` (or .csv), summary.json, config.yaml. `facts` go into the summary (capacity, notes...)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in result.tables.items() if tables else ():
        if csv:
            table.to_csv(folder / f"{name}.csv", index=False)
        else:
            write_parquet(table, folder / f"{name}.parquet")
    summary = {**result.summary, **facts}
    if detailed:
        summary |= per_request_lists(result)
    (folder / "summary.json").write_text(to_json(summary), encoding="utf-8")
    write_config(folder / "config.yaml", study, origin)


def write_parquet(table: pd.DataFrame, file: Path) -> None:
    """Dictionaries for text only: numbers rarely repeat, and looking for that costs more than all the rest."""
    texts = [name for name, kind in table.dtypes.items() if not is_numeric_dtype(kind)]
    table.to_parquet(file, index=False, use_dictionary=texts)


def write_comparison(
    folder: Path, comparison: Comparison, *, facts: list[dict[str, Any]], detailed: bool, csv: bool
) -> None:
    """A folder an arm (and seed, if there are several), then what compares them. `facts`: one dict an arm."""
    places = folder_names([arm.label for arm in comparison.arms])
    for arm, name, results, own in zip(comparison.arms, places, comparison.results, facts, strict=True):
        for seed, result in zip(arm.study.seeds, results, strict=True):
            place = folder / name
            if len(results) > 1:
                place = place / f"seed-{seed}"
            write_run(place, arm.study, result, comparison.file.folder, facts=own, detailed=detailed, csv=csv)
    table = comparison.table
    if csv:
        table.to_csv(folder / "comparison.csv", index=False)
    else:
        write_parquet(table, folder / "comparison.parquet")
    (folder / "summary.json").write_text(to_json({**comparison.summary(), **shared(facts)}), encoding="utf-8")
    write_config(folder / "config.yaml", comparison.file.study, comparison.file.folder)


def study_facts(study: Study, workload: Workload, folder: Path) -> dict[str, Any]:
    """What goes with every result: notes on the workload, the KV pool, assumed numbers."""
    _, capacity = build_deployment(study, folder)
    return {
        "engine_version": study.engine.version,
        "workload": {"source": workload.source.name, "licence": workload.source.licence,
                     "notes": list(workload.source.notes), "skipped": list(workload.skipped)},
        "kv_pool": {"num_gpu_blocks": capacity.blocks, "tokens": capacity.tokens, "estimated": capacity.estimated,
                    "low": capacity.low, "high": capacity.high, "bytes": capacity.breakdown},
        "assumed": build_cost(study, folder, study_llm(study)).listed,
    }


def shared(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """The facts in which all arms agree; the others stand in the arms' own summaries."""
    return {key: value for key, value in facts[0].items() if all(other[key] == value for other in facts)}


def write_config(path: Path, study: Study, origin: Path) -> None:
    """The study with every default filled in; it can be run again as it stands, from anywhere on this machine (`origin`:
    the folder that its relative paths start from)."""
    values = {**study.model_dump(), "folder": str(origin)}
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def run_facts(speeds: dict[str, Any], command: list[str], wall_seconds: float) -> dict[str, Any]:
    """What is true of this run of the simulator and of no result: host, versions, speed. Kept apart from summary.json, so
    that equal results are equal bytes."""
    import resource

    return {
        "command": command,
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "wall_seconds": wall_seconds,
        "sim_speed": speeds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "host": {"machine": platform.machine(), "system": platform.system(), "python": sys.version.split()[0]},
        "versions": {"simcore": simcore.__version__, **{name: metadata.version(name) for name in _VERSIONED}},
    }


def per_request_lists(result: RunResult) -> dict[str, list[Any]]:
    """The lists of `vllm bench serve --save-detailed`: one entry a request, in request order; times in seconds."""
    requests = result.requests
    zero = requests["arrival"].min()
    failed = (requests["status"] != "finished").to_numpy(dtype=bool)
    return {
        "input_lens": requests["input_tokens"].tolist(),
        "output_lens": requests["generated_tokens"].tolist(),
        "ttfts": requests["ttft"].tolist(),
        "itls": [result.itls(i).tolist() for i in range(len(requests))],
        "latencies": requests["e2e"].tolist(),
        "start_times": (requests["arrival"] - zero).tolist(),
        "queue_times": requests["queue_time"].tolist(),
        "errors": np.where(failed, requests["status"] + ": " + requests["reason"], "").tolist(),
    }


def folder_names(labels: list[str]) -> list[str]:
    """Labels as folder names: what is not a letter, digit, dot or dash becomes a dash; alike ones are numbered."""
    names: list[str] = []
    for label in labels:
        plain = name = "".join(c if c.isalnum() or c in ".-" else "-" for c in label)[:100].strip("-.") or "arm"
        number = 2
        while name.lower() in {other.lower() for other in names}:
            name, number = f"{plain}-{number}", number + 1
        names.append(name)
    return names
