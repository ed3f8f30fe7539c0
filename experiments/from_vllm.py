"""Turns a `vllm serve` command, a vLLM start-up log, or both into a study file that says where each value came from.

Defaults that depend on version, GPU and usage are filled in as `vllm/engine/arg_utils.py` of the supported releases has them
(`get_batch_defaults`, `_set_default_max_num_seqs_and_batched_tokens_args`); flags that are not modelled are listed.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from simcore.errors import ConfigError
from simcore.experiments.run import build_deployment
from simcore.experiments.study import PoissonWorkload, read_study
from simcore.experiments.vllm_command import parse_command
from simcore.experiments.vllm_engine import engine_lines
from simcore.experiments.vllm_log import looks_like_log, read_log
from simcore.experiments.vllm_model import Model, resolve_model
from simcore.experiments.vllm_server import Choices, Line, Server, length, positive
from simcore.files import to_json, write_whole
from simcore.models.engine import EngineSettings
from simcore.models.gpu import GpuSpec, gpu_names, load_gpu
from simcore.traces.read import SHIPPED


@dataclass
class Written:
    """A study as text, what it was made of, and what was left out."""

    text: str
    lines: list[Line]
    matters: list[str] = field(default_factory=list)  # known to matter, not modelled
    harmless: dict[str, list[str]] = field(default_factory=dict)  # why -> flags
    unknown: list[str] = field(default_factory=list)
    model: Model | None = None
    model_file: Path | None = None  # the file beside the study that the model's own configuration goes to


def build(server: Server) -> Written:
    """The study of a server. Raises ConfigError for whatever it cannot be."""
    choices = server.choices
    for name, allowed in (("runner", ("auto", "generate")), ("task", ("auto", "generate")), ("convert", ("auto", "none"))):
        found, where = server.text(name)
        if found not in (None, *allowed):
            raise ConfigError(where, name, found=found, why="does not generate text", allowed=" or ".join(allowed))
    served, served_where = server.text("model")
    if served is None:
        raise ConfigError("the command", "model", why="is not named", allowed="vllm serve MODEL, or --model")
    gpu, gpu_says = _gpu(server)
    tp, tp_says = server.number("tensor-parallel-size", positive)
    dp, dp_says = server.number("data-parallel-size", positive)
    kv, kv_says = _kv_dtype(server)
    quantization, _ = server.text("quantization")
    overrides, _ = server.mapping("hf-overrides")
    rope, _ = server.mapping("rope-scaling")
    asked, _ = server.number("max-model-len", length)
    model = resolve_model(
        served, where=served_where, config=choices.model_config, quantization=quantization, kv_cache_dtype=kv,
        overrides={**overrides, **({"rope_scaling": rope} if rope else {})}, longest=asked if asked and asked > 0 else None,
        allow_long=server.command.environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1")
    server.matters += model.warnings
    if server.text("dtype")[0] in ("float", "float32"):
        server.matters.append("--dtype float32: weights and KV are simulated in 16 bits")
    model.llm.kv_copies(tp or 1)  # heads divide over the ranks, or it is refused now
    if (dp or 1) > 1 and model.llm.experts:
        server.matters.append("--data-parallel-size of a mixture of experts: vLLM shards the experts over all ranks; here "
                              "each replica holds all of them")
    name = re.sub(r"[^a-z0-9.]+", "-", served.rstrip("/").rsplit("/", 1)[-1].lower()).strip("-")
    model_file = (choices.folder / f"{name}-as-served.yaml").resolve() if model.file else None
    lines = [Line("model.name", str(model_file or model.name), model.says)]
    if model.weight_dtype:
        lines.append(Line("model.weight_dtype", model.weight_dtype, model.weight_says))
    lines.append(Line("model.kv_cache_dtype", kv, kv_says or "vLLM's default"))
    replicas = (dp or 1) * choices.replicas
    lines += [
        Line("cluster.replicas", replicas, " x ".join(filter(None, (
            dp_says and f"{dp_says} (each rank an engine)",
            f"--replicas {choices.replicas}" if choices.replicas > 1 else None))) or "one server"),
        Line("cluster.gpu", gpu.name, gpu_says),
        Line("cluster.tensor_parallel_size", tp or 1, tp_says or "vLLM's default"),
    ]
    lines += engine_lines(server, model, gpu, tp or 1, asked)
    policy, policy_says = server.text("scheduling-policy")
    if policy not in (None, "fcfs", "priority"):
        raise ConfigError(policy_says, "scheduling-policy", found=policy, allowed="fcfs or priority")
    lines.append(Line("policies.admission", policy or "fcfs", policy_says or "vLLM's default"))
    lines.append(Line("policies.retention", "lru", "vLLM has no other"))
    if replicas > 1:
        lines.append(Line("policies.replica_routing", "least-loaded", "nearest to vLLM's own balancing between its engines"))
    _check_engine(server, lines)
    longest = next(line.value for line in lines if line.key == "engine.max_model_len") or model.limit
    text = _render(server, lines, f"vllm-{name}", _workload(choices, longest))
    return Written(text, lines, server.matters, server.harmless, server.unknown, model, model_file)


def _gpu(server: Server) -> tuple[GpuSpec, str]:
    log, chosen = server.log, server.choices.gpu
    if chosen is not None:
        if log is not None and log.gpu not in (None, chosen.lower()):
            server.matters.append(f"{log.where('gpu')}: names {log.gpu}, and --gpu says {chosen}")
        return load_gpu(chosen), "--gpu"
    if log is not None and log.gpu is not None:
        return load_gpu(log.gpu), f"named in {log.where('gpu')}"
    raise ConfigError("--gpu", why="the server's GPU is not known", allowed=f"{', '.join(gpu_names())}, or a YAML file")


def _kv_dtype(server: Server) -> tuple[str, str]:
    text, where = server.text("kv-cache-dtype")
    if text in (None, "auto"):
        return "auto", where
    if text in ("bfloat16", "float16", "bf16"):
        return "bf16", f"{where} {text}"
    if text in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        return "fp8", f"{where} {text}"
    server.matters.append(f"--kv-cache-dtype {text}: not modelled; the study has fp8, set model.kv_cache_dtype")
    return "fp8", f"{where} {text}, which is not modelled"


def _check_engine(server: Server, lines: list[Line]) -> None:
    """Refuse settings that contradict each other or the release, naming the flags that set them."""
    data = {line.key.split(".", 1)[1]: line.value for line in lines if line.key.startswith("engine.")}
    try:
        EngineSettings.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        source = next((line.source for line in lines if line.key == f"engine.{key}"), "the server's flags")
        raise ConfigError(source, key, found=data.get(key), allowed=first["msg"].removeprefix("Value error, ")) from None


def _workload(choices: Choices, longest: int) -> dict[str, Any]:
    if choices.trace is not None:
        trace = choices.trace if choices.trace in SHIPPED else str(Path(choices.trace).resolve())
        if choices.trace not in SHIPPED and not Path(choices.trace).is_file():
            raise ConfigError("--trace", found=choices.trace, why="no such file",
                              allowed=f"a file, or a shipped trace ({', '.join(SHIPPED)})")
        return {"trace": trace}
    mean_in, mean_out = max(1, min(1024, longest // 8)), max(1, min(256, longest // 16))
    generate = {"requests": choices.requests, "rate": choices.rate, "input_tokens": {"mean": mean_in, "sd": mean_in},
                "output_tokens": {"mean": mean_out, "sd": mean_out}}
    try:
        PoissonWorkload.model_validate(generate)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--{first['loc'][0]}", found=first["input"], allowed=first["msg"]) from None
    return {"generate": generate}


def _render(server: Server, lines: list[Line], name: str, workload: dict[str, Any]) -> str:
    """The study as YAML; every value with its source behind it."""
    out = ["# Made by `simcore config from-vllm`. Behind each value stands where it came from: read it before you believe a",
           "# result."]
    if server.matters:
        out += ["#", "# Matters, and is not modelled or not certain; results are without it:"]
        out += [f"#   {_one_line(item)}" for item in server.matters]
    if server.unknown:
        out += ["#", f"# Not known here, and left out: {', '.join(server.unknown)}"]
    if server.harmless:
        out += ["#", "# Does not matter for timing:"]
        out += [f"#   {why}: {', '.join(dict.fromkeys(names))}" for why, names in server.harmless.items()]
    out += [f"name: {_scalar(name)}", "", "# PLACEHOLDER: put your own requests here (trace: FILE; simcore trace info FILE)."
            if "generate" in workload else "# As --trace says.", "workload:"]
    out += ["  " + line for line in yaml.safe_dump(workload, sort_keys=False, default_flow_style=None).splitlines()]
    section = ""
    for line in lines:
        head, key = line.key.split(".", 1)
        if head != section:
            out += ["", f"{head}:"]
            section = head
        out.append(f"  {key}: {_scalar(line.value)} # {_one_line(line.source)}")
    out += ["", "# PLACEHOLDER: what your users would accept, in ms.", "slo:", "  ttft_ms: 2000", "  tpot_ms: 50", ""]
    return "\n".join(out)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("...").strip()


def convert(source: str | None, log: Path | None, choices: Choices) -> Written:
    """`source`: a command, or a file that holds one, or a log. Raises ConfigError."""
    command, where = None, "the command"
    text = source
    if source is not None and "\n" not in source and len(source) < 4096 and Path(source).is_file():
        text = Path(source).read_text(encoding="utf-8", errors="replace")
        where = source
        if looks_like_log(text):
            if log is not None:
                raise ConfigError("--log", found=str(log), why=f"{source} is a log too", allowed="one log")
            text, log = None, Path(source)
    if text is None and log is None:
        raise ConfigError("the command", why="there is none, and no log", allowed="'vllm serve MODEL ...', or a log")
    if text is not None:
        command = parse_command(text, where, skip_unknown=choices.skip_unknown)
    return build(Server(command, read_log(log, skip_unknown=choices.skip_unknown) if log else None, choices))


def run_from_vllm(
    source: str | None, *, log: Path | None = None, out: Path | None = None, gpu: str | None = None,
    model_config: Path | None = None, vllm_version: str | None = None, trace: str | None = None, rate: float = 1.0,
    requests: int = 500, replicas: int = 1, skip_unknown: bool = False, force: bool = False, json: Path | None = None,
) -> None:
    """Write the study to `out` (None = stdout); warnings go to stderr. Raises ConfigError; then nothing is written."""
    written = convert(source, log, Choices(
        gpu, model_config, vllm_version, trace, rate, requests, replicas, skip_unknown, out.parent if out else Path()))
    to_stdout = json is not None and str(json) == "-"
    if out is None:
        if written.model_file is not None:
            raise ConfigError("--out", why="the model's configuration as served is a file beside the study",
                              allowed="--out STUDY.yaml")
        if to_stdout:
            raise ConfigError("--out", why="stdout is the JSON's", allowed="--out STUDY.yaml, or --json FILE")
        print(written.text, end="")
    else:
        for path in filter(None, (out, written.model_file)):
            if path.exists() and not force:
                raise ConfigError("--out", found=str(path), why="exists", allowed="another name, or --force")
        if written.model_file is not None and written.model is not None:
            write_whole(written.model_file, yaml.safe_dump(written.model.file, sort_keys=False))
        write_whole(out, written.text)
        try:
            study = read_study(out).study
            build_deployment(study, out.parent)
        except ConfigError as error:
            written.matters.append(f"as it stands, simcore refuses to run it: {error}")
        print(f"wrote {out}", file=sys.stderr)
    for item in written.matters:
        print(f"warning: {item}", file=sys.stderr)
    if written.unknown:
        print(f"warning: not known here, and left out: {', '.join(written.unknown)}", file=sys.stderr)
    if json is not None:
        summary = {
            "study": str(out) if out else None, "not_modelled": written.matters, "unknown": written.unknown,
            "harmless": written.harmless,
            "keys": [{"key": line.key, "value": line.value, "source": line.source} for line in written.lines],
        }
        if to_stdout:
            print(to_json(summary), end="")
        else:
            write_whole(json, to_json(summary))
