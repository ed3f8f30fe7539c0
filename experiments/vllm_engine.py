"""The `engine` keys of a server: its flags, vLLM's defaults where there are none, and the KV size of its log."""

from __future__ import annotations

from typing import Any

from simcore.errors import ConfigError
from simcore.experiments.vllm_model import Model
from simcore.experiments.vllm_server import Line, Server, positive, real, whole
from simcore.models.engine import LMCACHE_CHUNK
from simcore.models.gpu import GpuSpec

GIB = 2**30
_LMCACHE_DEFAULT_GB = 5.0  # LMCache's max_local_cpu_size, of each worker
_HOST_CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")
_LMCACHE_CONNECTORS = ("LMCacheConnectorV1", "LMCacheConnectorV1Dynamic", "LMCacheMPConnector", "LMCacheConnector")


def engine_lines(server: Server, model: Model, gpu: GpuSpec, tp: int, asked: int | None) -> list[Line]:
    """Every key of EngineSettings that vLLM's flags can set. `asked`: max_model_len of the flags, -1 = auto, None = not
    given. Raises ConfigError naming the flag."""
    version, log = server.version, server.log
    prefix, prefix_says = server.switch("enable-prefix-caching")
    chunked, chunked_says = server.switch("enable-chunked-prefill")
    block, block_says = server.number("block-size", positive)
    utilisation, utilisation_says = server.number("gpu-memory-utilization", real)
    default = f"vLLM {version}'s default"
    longest, longest_says = _longest(server, model, asked)
    lines = [
        Line("engine.version", version, server.version_says),
        Line("engine.block_size", block or 16, block_says or default),
    ]
    blocks, blocks_says = _blocks(server, model, tp, block or 16, longest, log is not None)
    if blocks is not None:
        lines.append(Line("engine.num_gpu_blocks", blocks, blocks_says))
    lines.append(Line(
        "engine.gpu_memory_utilization", (0.9 if version == "0.19.0" else 0.92) if utilisation is None else utilisation,
        (utilisation_says or default) + (", not used: num_gpu_blocks is known" if blocks is not None else "")))
    lines += _batch(server, gpu, longest, chunked is not False)
    fitted = asked == -1 and (log is None or log.longest is None) and model.limit == model.llm.max_position_embeddings
    lines.append(Line("engine.max_model_len", None if fitted else longest, longest_says))
    lines.append(Line("engine.enable_prefix_caching", prefix is not False, prefix_says or default))
    lines.append(Line("engine.enable_chunked_prefill", chunked is not False, chunked_says or default))
    lines += _scheduler(server)
    host = _host_tier(server, model, tp, block or 16)
    wanted, says = server.switch("async-scheduling")
    asynchronous = wanted is not False and not (wanted is None and server.older_than(0, 14))
    if asynchronous and host:
        asynchronous, says = False, "off: not simulated together with a host tier (the server has it on)"
        server.matters.append("asynchronous scheduling: off in the study, since it is not simulated with a host tier")
    elif wanted is None:
        says = "vLLM's default from 0.14 on" if asynchronous else "vLLM's default before 0.14"
    lines.append(Line("engine.async_scheduling", asynchronous, says))
    return lines + host


def _longest(server: Server, model: Model, asked: int | None) -> tuple[int, str]:
    log = server.log
    if log is not None and log.longest is not None:
        return log.longest, log.where("longest")
    if asked is None:
        return model.limit, "the model's own, as vLLM takes it"
    where = server.given["max-model-len"].where
    if asked == -1:
        server.matters.append("--max-model-len auto: vLLM takes the longest that fits; the study has the model's own")
        return model.limit, f"{where} auto: the model's own"
    return asked, where


def _blocks(
    server: Server, model: Model, tp: int, block_size: int, longest: int, has_log: bool
) -> tuple[int | None, str]:
    """num_gpu_blocks: as overridden, as logged, or as kv-cache-memory-bytes has it; None = to be estimated."""
    forced, where = server.number("num-gpu-blocks-override", positive)
    log = server.log
    if forced is not None:
        return forced, where
    if log is not None and log.blocks is not None:
        return log.blocks, log.where("blocks")
    if log is not None and log.kv_tokens is not None:
        tokens = log.kv_tokens
        says = f"{log.where('kv_tokens')}: {tokens:,} tokens"
        if model.llm.window:
            server.matters.append(f"{says}: with sliding windows this counts requests of {longest:,} tokens each; "
                                  "shorter ones find more room on the server")
        # Newer releases print int(blocks / blocks of the longest request x its length).
        of_longest = -(-longest // block_size)
        whole_blocks = tokens % block_size == 0 or longest % block_size == 0
        return tokens // block_size if whole_blocks else -(-tokens * of_longest // longest), says
    if has_log:
        server.matters.append("the log has no line with the KV cache size: the number of blocks is estimated")
    size, where = server.number("kv-cache-memory-bytes", positive)
    if size is None:
        return None, ""
    copies = model.llm.kv_copies(tp)
    seqs = server.number("max-num-seqs", positive)[0] or 256
    room = tp * size - seqs * copies * model.llm.fixed_state_bytes
    blocks = room // (block_size * copies * model.llm.kv_bytes_per_token)
    if blocks < 2:
        raise ConfigError(where, "kv-cache-memory-bytes", found=size, why="holds no KV block of this model", allowed="more")
    return blocks, f"{where}: {size:,} bytes a GPU"


def _batch(server: Server, gpu: GpuSpec, longest: int, chunked: bool) -> list[Line]:
    """max_num_seqs and max_num_batched_tokens; where they are not given, as the release derives them from the GPU."""
    seqs, seqs_says = server.number("max-num-seqs", positive)
    tokens, tokens_says = server.number("max-num-batched-tokens", positive)
    mode, mode_says = server.text("performance-mode")
    if mode not in (None, "balanced", "interactivity", "throughput"):
        raise ConfigError(mode_says, "performance-mode", found=mode, allowed="balanced, interactivity or throughput")
    if mode == "interactivity":
        server.matters.append("--performance-mode interactivity: other kernels and graphs; step times are not changed")
    large, why = _tier(gpu, server.version)
    factor = 2 if mode == "throughput" else 1
    says = f"vLLM {server.version}'s default for an API server on {why}{', twice for throughput' if factor == 2 else ''}"
    given_seqs, given_tokens = seqs is not None, tokens is not None
    seqs = seqs if given_seqs else (1024 if large else 256) * factor
    if not given_tokens:
        tokens = (16384 if large > 1 else 8192 if large else 2048) * factor
        if not chunked:
            tokens = max(tokens, longest)
        tokens = min(tokens, seqs * longest)
    if not given_seqs:
        seqs = min(seqs, tokens)
    lines = [
        Line("engine.max_num_seqs", seqs, seqs_says if given_seqs else says),
        Line("engine.max_num_batched_tokens", tokens, tokens_says if given_tokens else says),
    ]
    for name in ("max-num-scheduled-tokens", "max-num-active-seqs"):
        value, where = server.number(name, positive)
        if value is not None:
            lines.append(Line(f"engine.{name.replace('-', '_')}", value, where))
    return lines


def _tier(gpu: GpuSpec, version: str) -> tuple[int, str]:
    """How large vLLM takes the GPU for, 0 to 2, and why."""
    if gpu.memory >= 160 * GIB and version == "0.33.0":
        return 2, f"a GPU of 160 GiB or more ({gpu.name})"
    if gpu.memory >= 70 * GIB and "a100" not in gpu.name.lower():
        return 1, f"a GPU of 70 GiB or more that is no A100 ({gpu.name})"
    return 0, f"a GPU under 70 GiB, or an A100 ({gpu.name})"


def _scheduler(server: Server) -> list[Line]:
    lines = []
    reserve, where = server.switch("scheduler-reserve-full-isl")
    if reserve is not None:
        lines.append(Line("engine.scheduler_reserve_full_isl", reserve, where))
    threshold, where = server.number("long-prefill-token-threshold", whole)
    if threshold:
        lines.append(Line("engine.long_prefill_token_threshold", threshold, where))
    adaptive, where = server.switch("long-prefill-token-threshold-adaptive")
    if adaptive:
        lines.append(Line("engine.long_prefill_token_threshold_adaptive", adaptive, where))
    watermark, where = server.number("watermark", real)
    if watermark:
        lines.append(Line("engine.watermark", watermark, where))
    interval, where = server.number("prefill-schedule-interval", positive)
    if interval is not None and interval > 1:  # 1 is a prefill in every step: no spacing
        lines.append(Line("engine.prefill_schedule_interval", interval, where))
    return lines


def _host_tier(server: Server, model: Model, tp: int, block_size: int) -> list[Line]:
    """kv_offloading_size and its backend, from their own flags or from a connector for host memory."""
    size, where = server.number("kv-offloading-size", real)
    backend, backend_where = server.text("kv-offloading-backend")
    if backend not in (None, "native", "lmcache"):
        raise ConfigError(backend_where, "kv-offloading-backend", found=backend, allowed="native or lmcache")
    if size is not None:
        if backend == "lmcache":
            server.matters.append("--kv-offloading-backend lmcache: newer releases leave the size to the LMCache server")
        return _tier_lines(server, size, where, backend or "native")
    config, where = server.mapping("kv-transfer-config")
    if not config:
        return []
    connector, extra = str(config.get("kv_connector")), config.get("kv_connector_extra_config") or {}
    extra = extra if isinstance(extra, dict) else {}
    if connector in _LMCACHE_CONNECTORS:
        return _tier_lines(server, *_lmcache_size(server, extra, tp, where), "lmcache")
    if connector in _HOST_CONNECTORS:
        if _number(extra.get("cpu_bytes_to_use")):
            return _tier_lines(server, _number(extra["cpu_bytes_to_use"]) / GIB, f"{where} cpu_bytes_to_use", "native")
        blocks, block = _number(extra.get("num_cpu_blocks")), _number(extra.get("block_size")) or block_size
        if blocks:
            held = blocks * block * model.llm.kv_bytes_per_token * model.llm.kv_copies(tp)
            return _tier_lines(server, held / GIB, f"{where} num_cpu_blocks {blocks:.0f}", "native")
    server.matters.append(f"--kv-transfer-config with {connector}: its transfers (disaggregated prefill, remote or shared "
                          "KV) are not taken over; each replica has its own pool")
    return []


def _lmcache_size(server: Server, extra: dict[str, Any], tp: int, where: str) -> tuple[float, str]:
    """GiB over all ranks. LMCache takes its size from the environment, a file, or the connector, for each worker."""
    environment = server.command.environment
    said = environment.get("LMCACHE_MAX_LOCAL_CPU_SIZE", extra.get("lmcache.max_local_cpu_size"))
    if "LMCACHE_CONFIG_FILE" in environment and said is None:
        server.matters.append("LMCACHE_CONFIG_FILE: not read; set engine.kv_offloading_size to max_local_cpu_size x ranks")
    if environment.get("LMCACHE_CHUNK_SIZE", str(LMCACHE_CHUNK)) != str(LMCACHE_CHUNK):
        server.matters.append(f"LMCACHE_CHUNK_SIZE: the study has chunks of {LMCACHE_CHUNK} tokens")
    size = _number(said) or _LMCACHE_DEFAULT_GB
    source = "LMCACHE_MAX_LOCAL_CPU_SIZE" if said is not None else "LMCache's default"
    return size * tp, f"{where}: {source} {size:g} GB a worker x {tp}"


def _tier_lines(server: Server, size: float, where: str, backend: str) -> list[Line]:
    prefix, _ = server.switch("enable-prefix-caching")
    if prefix is False:
        raise ConfigError(where, "kv-offloading-size", found=size, why="finds KV by the hashes of prefix caching",
                          allowed="without --no-enable-prefix-caching")
    return [Line("engine.kv_offloading_size", round(size, 6), where),
            Line("engine.kv_offloading_backend", backend, where)]


def _number(value: Any) -> float:
    """A number that a mapping or the environment holds; 0 where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0
