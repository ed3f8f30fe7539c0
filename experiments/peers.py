"""The bench's workloads for other simulators: their file formats, their command lines, and a run of DynoSim."""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from simcore.errors import ConfigError
from simcore.traces.files import replacing
from simcore.traces.workload import Workload

if TYPE_CHECKING:
    from simcore.experiments.bench import Bench

# Vidur, sarathi scheduler, as fast as it goes: its plots, traces and metrics off, small random forests.
_VIDUR = """\
WANDB_MODE=disabled OPENBLAS_NUM_THREADS=1 python -m vidur.main --replica_config_device a100
  --replica_config_model_name meta-llama/Meta-Llama-3-8B --cluster_config_num_replicas 1
  --replica_config_tensor_parallel_size 1 --replica_config_num_pipeline_stages 1
  --request_generator_config_type trace_replay --trace_request_generator_config_trace_file {file}
  --trace_request_generator_config_max_tokens 4096 --replica_scheduler_config_type sarathi
  --sarathi_scheduler_config_batch_size_cap 256 --sarathi_scheduler_config_block_size 16
  --sarathi_scheduler_config_chunk_size 512
  --random_forrest_execution_time_predictor_config_prediction_max_prefill_chunk_size 4096
  --random_forrest_execution_time_predictor_config_prediction_max_batch_size 256
  --random_forrest_execution_time_predictor_config_prediction_max_tokens_per_request 4096
  --random_forrest_execution_time_predictor_config_num_training_job_threads 1
  --random_forrest_execution_time_predictor_config_num_estimators 50
  --random_forrest_execution_time_predictor_config_max_depth 16
  --random_forrest_execution_time_predictor_config_min_samples_split 2
  --random_forrest_execution_time_predictor_config_k_fold_cv_splits 2
  --no-metrics_config_store_plots --no-metrics_config_enable_chrome_trace --no-metrics_config_write_metrics"""

# BLIS draws a Poisson stream of its own: the same load, not the same arrivals.
_BLIS = """\
./blis run --model meta-llama/llama-3.1-8b-instruct --hardware H100 --tp 1 --num-requests {n} --rate {rate:g}
  --prompt-tokens {i} --prompt-tokens-stdev 0 --prompt-tokens-min {i} --prompt-tokens-max {i}
  --output-tokens {o} --output-tokens-stdev 0 --output-tokens-min {o} --output-tokens-max {o}
  --block-size-in-tokens 16 --total-kv-blocks 28000 --max-num-seqs 256 --max-num-batched-tokens 2048
  --timeout -1 --seed 1"""


def export(name: str, workload: Workload, folder: Path) -> None:
    """Write `<name>.jsonl` (Mooncake: ms, hash ids of `workload.block_tokens` tokens; what DynoSim reads) and
    `<name>.vidur.csv` (seconds; no token identity)."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = (workload.arrival, workload.input_tokens, workload.output_tokens)
    lengths = list(zip(*(column.tolist() for column in columns), strict=True))
    with replacing(folder / f"{name}.jsonl") as stream:
        for i, (arrival, inputs, outputs) in enumerate(lengths):
            row = {"timestamp": arrival * 1000, "input_length": inputs, "output_length": outputs,
                   "hash_ids": workload.ids(i).tolist()}
            stream.write(json.dumps(row) + "\n")
    with replacing(folder / f"{name}.vidur.csv") as stream:
        out = csv.writer(stream, lineterminator="\n")
        out.writerow(("arrived_at", "num_prefill_tokens", "num_decode_tokens"))
        out.writerows(lengths)


def dynosim_command(bench: Bench, python: Path, file: Path, report: Path) -> list[str]:
    """DynoSim (ai-dynamo 1.4.2), offline, its default timing polynomial, under the very settings of `bench.engine`."""
    arguments = bench.engine | {"enable_chunked_prefill": True}
    return [str(python), "-m", "dynamo.replay", str(file), "--replay-mode", "offline", "--num-workers", str(bench.replicas),
            "--trace-block-size", "512", "--extra-engine-args", json.dumps(arguments), "--report-json", str(report)]


def commands(bench: Bench, folder: Path) -> str:
    """Command lines that play the exported files. Vidur and BLIS know no prefix sharing: W1 and W2 only."""
    report = Path(f"{bench.name}.dynosim.json")
    lines = [f"# {bench.name}", shlex.join(dynosim_command(bench, Path("python"), folder / f"{bench.name}.jsonl", report))]
    if bench.generated:
        own = {"n": bench.requests, "rate": bench.rate or 100_000, "i": bench.input_tokens, "o": bench.output_tokens}
        texts = (_VIDUR.format(file=shlex.quote(str(folder / f"{bench.name}.vidur.csv"))), _BLIS.format(**own))
        lines += [text.replace("\n", " \\\n") for text in texts]
    return "\n".join(lines)


def dynosim_rate(python: Path, bench: Bench, repeat: int) -> float:
    """Requests per second by DynoSim's own `wall_time_ms` (its simulation alone, without start-up), best of three times as
    many runs as ours: other work on the machine lengthens wall time, and CPU time hardly. Raises ConfigError when it fails
    or completes fewer requests."""
    workload, rates = bench.workload(), []
    with tempfile.TemporaryDirectory() as folder:
        export(bench.name, workload, Path(folder))
        report = Path(folder) / "report.json"
        for _ in range(3 * repeat):
            command = dynosim_command(bench, python, Path(folder) / f"{bench.name}.jsonl", report)
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                raise ConfigError("--dynosim", why=f"{bench.name}: {(ran.stderr.strip() or 'no message').splitlines()[-1]}")
            found = json.loads(report.read_text(encoding="utf-8"))
            if found["completed_requests"] != len(workload):
                raise ConfigError("--dynosim", found=f"{found['completed_requests']} requests completed",
                                  allowed=f"the {len(workload)} of {bench.name}")
            rates.append(1000 * len(workload) / found["wall_time_ms"])
    return max(rates)
