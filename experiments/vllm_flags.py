"""Every flag of `vllm serve`, and what it means for a study: mapped to a key, of no matter for timing, or not modelled.

The names are those of 0.19.0, 0.24.0 and 0.33.0 (`vllm/engine/arg_utils.py` and the front end's `cli_args.py` of the
released wheels), and of older releases since 0.6 that people still type. A name's suffix says what it takes: nothing = one
value, `?` = a switch (also as --no-NAME; --enable-NAME as --disable-NAME), `*` = one value or more, `~` = a value or none.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

Takes = Literal["value", "switch", "list", "optional"]
Effect = Literal["mapped", "harmless", "matters"]
_SUFFIX: dict[str, Takes] = {"?": "switch", "*": "list", "~": "optional"}


@dataclass(frozen=True)
class Flag:
    name: str  # the long form without dashes
    takes: Takes
    effect: Effect
    why: str = ""  # why it does not matter, or what is missing because of it
    inert: str | None = None  # the value that says "off": then it does not matter


# Read by from_vllm.py, which says for each in the study where its value came from.
MAPPED = """
model runner convert task dtype max-model-len quantization hf-overrides hf-config-path rope-scaling
tensor-parallel-size data-parallel-size block-size gpu-memory-utilization kv-cache-memory-bytes kv-cache-dtype
num-gpu-blocks-override enable-prefix-caching? kv-offloading-size kv-offloading-backend kv-transfer-config
max-num-batched-tokens max-num-scheduled-tokens max-num-seqs max-num-active-seqs long-prefill-token-threshold
long-prefill-token-threshold-adaptive? scheduling-policy enable-chunked-prefill? scheduler-reserve-full-isl? watermark
prefill-schedule-interval async-scheduling? performance-mode
"""

HARMLESS = {
    "the server's address, keys and certificates": """
host port uds grpc? grpc-port api-key* ssl-keyfile ssl-certfile ssl-ca-certs enable-ssl-refresh? ssl-cert-reqs ssl-ciphers
root-path allow-credentials? allowed-origins allowed-methods allowed-headers served-model-name* h11-max-incomplete-event-size
h11-max-header-count sse-keep-alive-interval enable-request-id-headers? fingerprint-mode fingerprint-value
""",
    "the front end, whose time is not simulated": """
middleware api-server-count headless? renderer-num-workers disable-frontend-multiprocessing? disable-fastapi-docs?
enable-offline-docs? enable-tokenizer-info-endpoint? enable-server-load-tracking? tokens-only? enable-scale-out?
data-parallel-supervisor-port dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s
dp-supervisor-probe-failure-threshold shutdown-timeout aggregate-engine-logging? fail-on-environ-validation?
""",
    "logs, metrics and debugging": """
uvicorn-log-level disable-uvicorn-access-log? disable-access-log-for-endpoints log-config-file logging-config log-level
max-log-len log-error-stack? enable-log-requests? disable-log-requests? enable-log-outputs? enable-log-deltas?
disable-log-stats? show-hidden-metrics-for-version otlp-traces-endpoint collect-detailed-traces* kv-cache-metrics?
kv-cache-metrics-sample cudagraph-metrics? enable-mfu-metrics? enable-logging-iteration-details? custom-histogram-buckets
per-request-spec-decode-metrics enable-per-request-metrics? jit-monitor-mode jit-monitor-verbose? profiler-config
watchdog-config kv-events-config enable-prompt-tokens-details? enable-force-include-usage? return-tokens-as-token-ids?
""",
    "tokenizer, chat template and the shape of answers": """
tokenizer tokenizer-mode tokenizer-revision skip-tokenizer-init? tokenizer-pool-size tokenizer-pool-type
tokenizer-pool-extra-config chat-template chat-template-content-format trust-request-chat-template?
trust-request-mm-kwargs? default-chat-template-kwargs response-role enable-auto-tool-choice? tool-call-parser
tool-parser-plugin tool-server tool-strict-level exclude-tools-when-tool-choice-none? reasoning-parser
reasoning-parser-plugin reasoning-config reasoning-effort-map enable-reasoning? cohere-is-reasoning-model? cohere-format
anthropic-disabled-thinking-effort generation-config override-generation-config max-logprobs logprobs-mode
return-sampling-mask? use-fp64-gumbel? io-processor-plugin enable-prompt-embeds?
""",
    "where weights and code come from, and how they are loaded": """
revision code-revision trust-remote-code? download-dir load-format config-format model-loader-extra-config ignore-patterns*
use-tqdm-on-load? pt-load-map-location safetensors-load-strategy safetensors-prefetch-num-threads
safetensors-prefetch-block-size max-parallel-loading-workers hf-token~ seed allow-deprecated-quantization?
allowed-local-media-path allowed-media-domains* enable-ep-weight-filter? weight-transfer-config rope-theta
""",
    "images, audio and pooling models, which no study has": """
limit-mm-per-prompt enable-mm-embeds? media-io-kwargs mm-processor-kwargs mm-processor-cache-gb mm-processor-cache-type
mm-shm-cache-max-object-size-mb mm-encoder-only? mm-encoder-tp-mode mm-encoder-attn-backend mm-encoder-attn-dtype
mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path mm-encoder-fp8-scale-save-margin interleave-mm-strings?
skip-mm-profiling? video-pruning-rate video-pruning-method mm-tensor-ipc mm-hasher-algorithm mm-processor-device
mm-ipc-gpu-memory-gb mm-device-do-normalize? language-model-only? disable-mm-preprocessor-cache?
disable-chunked-mm-input? enable-multimodal-encoder-data-parallel? ec-transfer-config ec-manager-config
enable-flash-late-interaction? pooler-config override-pooler-config
""",
    "state-space, linear-attention and diffusion models, which are refused anyway": """
mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size mamba-cache-mode mamba-backend mamba-ssu-algorithm
enable-mamba-cache-stochastic-rounding? mamba-cache-philox-rounds enable-mamba-shared-prefix-checkpoint?
replayssm-buffer-len use-replayssm? gdn-prefill-backend kda-prefill-backend kda-decode-backend diffusion-config
kv-sharing-fast-prefill? sparse-indexer-topk-backend engram-config
""",
    "placement of processes": """
distributed-executor-backend worker-use-ray? engine-use-ray? master-addr master-port node-rank distributed-timeout-seconds
cpu-distributed-timeout-seconds device-ids device data-parallel-rank data-parallel-start-rank data-parallel-size-local
data-parallel-address data-parallel-rpc-port data-parallel-backend data-parallel-hybrid-lb? data-parallel-external-lb?
data-parallel-multi-port-external-lb? disable-nccl-for-dp-synchronization? ray-workers-use-nsight? worker-cls
worker-extension-cls numa-bind? numa-bind-nodes* numa-bind-cpus* enable-fault-tolerance? fault-tolerance-config
""",
    "of no effect on a running server of today's versions": """
prefix-caching-hash-algo calculate-kv-scales? enable-sleep-mode? sleep-mode-backend sleep-mode-offload-cudagraph?
sleep-preserve-parameter-names* enable-cumem-allocator? enable-nccl-comm-suspend? enable-trace-replay? swap-space
use-v2-block-manager? num-lookahead-slots preemption-mode disable-async-output-proc? multi-step-stream-outputs?
quantization-param-path override-neuron-config max-seq-len-to-capture max-context-len-to-capture prompt-adapters*
enable-prompt-adapter? max-prompt-adapters max-prompt-adapter-token enable-layerwise-nvtx-tracing? watermark-config
disable-hybrid-kv-cache-manager? enable-shm-tensor-arena? aux-output-config enable-return-routed-experts?
""",
}

_KERNELS = "another choice of kernels or graphs: step times are of the roofline, or of a calibrated cost model, either way"
MATTERS = {
    "pipeline parallelism is not simulated: the study has the GPUs of one stage only": "pipeline-parallel-size=1",
    "experts are simulated as split over the tensor-parallel ranks, not placed whole": """
enable-expert-parallel? all2all-backend enable-eplb? eplb-config num-redundant-experts eplb-window-size eplb-step-interval
eplb-log-balancedness? expert-placement-strategy enable-elastic-ep? elastic-ep-max-dp-size
""",
    "context parallelism is not simulated": """
decode-context-parallel-size=1 prefill-context-parallel-size=1 dcp-comm-backend dcp-q-replicate?
dcp-kv-cache-interleave-size=1 cp-kv-cache-interleave-size=1
""",
    "links between nodes are not simulated: all ranks have the GPU preset's link": "nnodes=1",
    "speculative decoding is not simulated: expect a shorter TPOT on the server": """
speculative-config spec-method spec-model spec-tokens speculative-model num-speculative-tokens
speculative-draft-tensor-parallel-size speculative-model-quantization speculative-disable-mqa-scorer?
speculative-max-model-len speculative-disable-by-batch-size ngram-prompt-lookup-max ngram-prompt-lookup-min
spec-decoding-acceptance-method typical-acceptance-sampler-posterior-threshold typical-acceptance-sampler-posterior-alpha
disable-logprobs-during-spec-decoding?
""",
    "LoRA adapters are not simulated, neither their memory nor their time": """
enable-lora? lora-modules* max-loras max-lora-rank max-cpu-loras lora-dtype lora-extra-vocab-size enable-lora-bias?
long-lora-scaling-factors fully-sharded-loras? lora-target-modules* default-mm-loras enable-tower-connector-lora?
specialize-active-lora? enable-mixed-moe-lora-format? enable-moe-shared-loras? max-lora-cls-labels
qlora-adapter-name-or-path
""",
    "without CUDA graphs a step costs the host more: raise cost_model.step_overhead": "enforce-eager?",
    _KERNELS: """
compilation-config optimization-level=2 kernel-config attention-config attention-backend moe-backend linear-backend
ir-op-priority monokernel? cudagraph-capture-sizes* cuda-graph-sizes* max-cudagraph-capture-size
enable-flashinfer-autotune? disable-cascade-attn? model-impl model-class-overrides override-attention-dtype
additional-config enable-batch-sharded-sampling? enable-hc-sp?
""",
    "all-reduce without the custom kernel is slower: raise cost_model.allreduce_latency": "disable-custom-all-reduce?",
    "overlap of micro-batches, and pacing between ranks, are not simulated": """
enable-dbo? dbo-decode-token-threshold dbo-prefill-token-threshold ubatch-size=0 dp-sync-interval
""",
    "weights in host memory are not simulated: the study keeps all of them on the GPU": """
cpu-offload-gb=0 cpu-offload-params* offload-backend offload-group-size=0 offload-num-in-group=1 offload-prefetch-step
offload-params*
""",
    "the server refuses requests past a queue length; the study queues them": "max-num-queued-reqs max-num-queued-tokens",
    "several partial prefills at once are not simulated": "max-num-partial-prefills=1 max-long-partial-prefills=1",
    "a scheduler of your own is not simulated": "scheduler-cls",
    "multi-step and delayed scheduling of the old engine are not simulated":
        "num-scheduler-steps=1 scheduler-delay-factor=0",
    "tokens reach the client in groups; the study counts each when it is made": "stream-interval=1",
    "constrained decoding costs time that is not simulated": """
structured-outputs-config logits-processors* logits-processor-pattern guided-decoding-backend
guided-decoding-disable-fallback? guided-decoding-disable-any-whitespace? guided-decoding-disable-additional-properties?
""",
    "layers with a sliding window are simulated with it": "disable-sliding-window? swa-bounded-replay?",
    "layers that keep 16-bit KV under an 8-bit kv-cache-dtype are simulated like the others": "kv-cache-dtype-skip-layers*",
    "quantisation of your own is not understood: check model.weight_dtype": "quantization-config",
    "retention and matching of cached prefixes are those of vLLM's defaults":
        "prefix-cache-retention-interval=0 prefix-match-unit",
}

ALIASES = {
    "tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size", "q": "quantization",
    "dcp": "decode-context-parallel-size", "pcp": "prefill-context-parallel-size", "ep": "enable-expert-parallel",
    "dpn": "data-parallel-rank", "dpr": "data-parallel-start-rank", "dpl": "data-parallel-size-local",
    "dpa": "data-parallel-address", "dpp": "data-parallel-rpc-port", "dpb": "data-parallel-backend",
    "dph": "data-parallel-hybrid-lb", "dpe": "data-parallel-external-lb", "dpm": "data-parallel-multi-port-external-lb",
    "n": "nnodes", "r": "node-rank", "sc": "speculative-config", "cc": "compilation-config", "ac": "attention-config",
    "asc": "api-server-count", "O": "optimization-level", "dc": "diffusion-config",
    "device-memory-utilization": "gpu-memory-utilization",
}  # fmt: skip


def _table() -> dict[str, Flag]:
    flags: dict[str, Flag] = {}

    def add(names: str, effect: Effect, why: str = "") -> None:
        for word in names.split():
            name, _, inert = word.partition("=")
            takes = _SUFFIX.get(name[-1], "value")
            name = name.rstrip("?*~")
            flags[name] = Flag(name, takes, effect, why, inert or None)

    add(MAPPED, "mapped")
    for why, names in HARMLESS.items():
        add(names, "harmless", why)
    for why, names in MATTERS.items():
        add(names, "matters", why)
    return flags


FLAGS = _table()


def find(name: str) -> tuple[Flag, bool] | None:
    """The flag of that name (dashes at its front taken off; `_` is `-`; an unambiguous beginning will do, as in argparse)
    and, for a switch, whether this form of it switches on. None = unknown."""
    name = ALIASES.get(name, name.replace("_", "-"))
    name = ALIASES.get(name, name)
    forms = [(name, True)]
    for prefix, opposite in (("no-", ""), ("disable-", "enable-"), ("enable-", "disable-")):
        if name.startswith(prefix):
            forms.append((opposite + name.removeprefix(prefix), False))
    if name.startswith("no-disable-"):
        forms.append((name.removeprefix("no-"), False))
    for form, on in forms:
        flag = FLAGS.get(form)
        if flag is not None and (on or flag.takes == "switch"):
            return flag, on
    begun = [flag for key, flag in FLAGS.items() if key.startswith(name)] if len(name) > 2 else []
    return (begun[0], True) if len(begun) == 1 else None


def nearest(name: str) -> str:
    """The known flag whose name is most like it, or nothing."""
    close = difflib.get_close_matches(name.replace("_", "-"), [*FLAGS, *ALIASES], n=1, cutoff=0.6)
    return ("--" if close and len(close[0]) > 3 else "-") + close[0] if close else ""
