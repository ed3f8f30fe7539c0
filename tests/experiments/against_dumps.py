"""Measured files for tests, made by hand or from a run of the simulator as a server would have reported it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

# Edges of vllm/v1/metrics/loggers.py.
TTFT = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0]
TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
LATENCY = [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0]
LENGTHS = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0]
EPOCH = 1.7e9


def bench(n: int = 4, **changes: Any) -> dict[str, Any]:
    """A result of `vllm bench serve --save-detailed`: request k has 100 + k prompt tokens, 5 output tokens, a TTFT of
    (k + 1) / 10 s and gaps of 20 ms, sent at k seconds of a clock that began long before."""
    ttfts = [(k + 1) / 10 for k in range(n)]
    made = {
        "date": "20260101-000000", "backend": "openai", "model_id": "meta-llama/Llama-3.1-8B", "num_prompts": n,
        "request_rate": 1.0, "burstiness": 1.0, "max_concurrency": None, "duration": n + 1.0, "completed": n, "failed": 0,
        "input_lens": [100 + k for k in range(n)], "output_lens": [5] * n, "ttfts": ttfts,
        "itls": [[0.02] * 4 for _ in range(n)], "start_times": [5e5 + k for k in range(n)],
        "generated_texts": ["x"] * n, "errors": [""] * n, "mean_ttft_ms": 1e3 * float(np.mean(ttfts)), "mean_itl_ms": 20.0,
    }
    made |= changes
    return {key: value for key, value in made.items() if value is not ...}


def write(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def series(name: str, values: list[float], step: float = 10.0, **labels: str) -> dict[str, Any]:
    """One series of a query_range answer."""
    return {"metric": {"__name__": name, "engine": "0", "model_name": "m", **labels},
            "values": [[EPOCH + k * step, f"{value:.17g}"] for k, value in enumerate(values)]}


def answer(*found: dict[str, Any]) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": "matrix", "result": list(found)}}


def histogram(name: str, edges: list[float], at: np.ndarray, values: np.ndarray, times: np.ndarray, step: float,
              **labels: str) -> list[dict[str, Any]]:
    """Bucket, sum and count series of observations `values` made at `at`, scraped at `times`."""
    seen = [at <= t for t in times]
    made = [series(f"vllm:{name}_bucket", [float((values[s] <= edge).sum()) for s in seen], step, le=f"{edge}", **labels)
            for edge in edges]
    made.append(series(f"vllm:{name}_bucket", [float(s.sum()) for s in seen], step, le="+Inf", **labels))
    made.append(series(f"vllm:{name}_sum", [float(values[s].sum()) for s in seen], step, **labels))
    return [*made, series(f"vllm:{name}_count", [float(s.sum()) for s in seen], step, **labels)]


def dump(result: Any, step: float, begin: float, end: float, blocks: int, **labels: str) -> dict[str, Any]:
    """What Prometheus would have of a run, from `begin` to `end` of its time."""
    r = result.requests
    col = {name: r[name].to_numpy(dtype=float) for name in r.columns if name not in ("status", "reason")}
    times = np.arange(begin, end + step / 2, step)
    done, first = col["ended"], col["first_token"]
    tokens = [result.token_times(i) for i in result.token_steps]
    late = np.concatenate([t[1:] for t in tokens])
    gaps = np.concatenate([np.diff(t) for t in tokens])
    every = np.sort(np.concatenate(tokens))
    made = histogram("time_to_first_token_seconds", TTFT, first, col["ttft"], times, step, **labels)
    made += histogram("inter_token_latency_seconds", TOKEN, late, gaps, times, step, **labels)
    tpot = np.nan_to_num(col["tpot"])
    made += histogram("request_time_per_output_token_seconds", TOKEN, done, tpot, times, step, **labels)
    made += histogram("e2e_request_latency_seconds", LATENCY, done, col["e2e"], times, step, **labels)
    made += histogram("request_queue_time_seconds", LATENCY, done, col["queue_time"], times, step, **labels)
    made += histogram("request_prefill_time_seconds", LATENCY, done, first - col["admitted"], times, step, **labels)
    made += histogram("request_decode_time_seconds", LATENCY, done, done - first, times, step, **labels)
    made += histogram("request_prompt_tokens", LENGTHS, done, col["input_tokens"], times, step, **labels)
    made += histogram("request_generation_tokens", LENGTHS, done, col["output_tokens"], times, step, **labels)

    def count(name: str, of: np.ndarray, weight: np.ndarray | None = None) -> dict[str, Any]:
        weights = np.ones(len(of)) if weight is None else weight
        return series(f"vllm:{name}", [float(weights[of <= t].sum()) for t in times], step, **labels)

    made += [count("prompt_tokens_total", first, col["input_tokens"]), count("generation_tokens_total", every),
             count("request_success_total", done), count("num_preemptions_total", done, col["preemptions"]),
             count("prefix_cache_queries_total", col["admitted"], col["input_tokens"]),
             count("prefix_cache_hits_total", col["admitted"], col["cached_tokens"])]
    inside = [(col["arrival"] <= t) & (done > t) for t in times]
    made.append(series("vllm:num_requests_running", [float((s & (col["admitted"] <= t)).sum())
                                                     for s, t in zip(inside, times, strict=True)], step, **labels))
    made.append(series("vllm:num_requests_waiting", [float((s & (col["admitted"] > t)).sum())
                                                     for s, t in zip(inside, times, strict=True)], step, **labels))
    made.append(series("vllm:kv_cache_usage_perc", [0.25] * len(times), step, **labels))
    return answer(*made)
