"""Settings of one engine (a replica's scheduler and KV pool), under vLLM's names and defaults; what its version means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Version = Literal["0.19.0", "0.24.0", "0.33.0"]
Positive = Annotated[int, Field(ge=1)]

LMCACHE_CHUNK = 256  # tokens, LMCache's default chunk_size


class EngineSettings(BaseModel):
    """vLLM V1's knobs. Lengths are tokens. What is not here is not modelled (docs/scheduler.md lists the rules)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Version = "0.33.0"
    block_size: Positive = 16
    num_gpu_blocks: Annotated[int, Field(ge=2, le=20_000_000)] | None = Field(
        None, description="as vLLM logs it, block 0 (never handed out) included; None = estimated from the GPU's memory"
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    max_num_seqs: Positive = 256
    max_num_batched_tokens: Positive = 8192
    max_num_scheduled_tokens: Positive | None = Field(None, description="replaces max_num_batched_tokens as the step budget")
    max_num_active_seqs: Positive | None = Field(None, description="cap on the running list (0.33.0)")
    max_model_len: Positive | None = Field(None, description="None = the model's max_position_embeddings")
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduler_reserve_full_isl: bool = Field(True, description="admit only if the whole known sequence fits now")
    watermark: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="share left free at admission (0.24.0)")
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = Field(0, description="cap on a prefill chunk, 0 = none")
    long_prefill_token_threshold_adaptive: bool = Field(
        False, description="raise that cap to max_num_batched_tokens // (running + waiting) (0.33.0)"
    )
    prefill_schedule_interval: Annotated[int, Field(ge=0)] = Field(
        0, description="steps between prefills while something decodes, 0 = no spacing (acts in 0.33.0)"
    )
    async_scheduling: bool = Field(False, description="plan one step ahead of the executor: two batches in flight")
    kv_offloading_size: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="GiB of host memory for the KV of a replica, all ranks together; None = no such tier"
    )
    kv_offloading_backend: Literal["native", "lmcache"] = Field(
        "native", description="native: blocks of prompts; lmcache: chunks of 256 tokens of prompts and outputs"
    )
    room_order: Literal["pins_first", "rows_first"] = Field(
        "pins_first", description="when a decode lacks blocks: ask retention to drop pins, or preempt, first"
    )

    @model_validator(mode="after")
    def _settings_of_the_version(self) -> EngineSettings:
        since = {
            "watermark": "0.24.0", "prefill_schedule_interval": "0.24.0", "max_num_active_seqs": "0.33.0",
            "long_prefill_token_threshold_adaptive": "0.33.0",
        }
        for key, first in since.items():
            if getattr(self, key) and _number(self.version) < _number(first):
                raise ValueError(f"{key} exists from version {first} on, and engine.version is {self.version}")
        return self

    @model_validator(mode="after")
    def _settings_of_the_host_tier(self) -> EngineSettings:
        if self.kv_offloading_size is None:
            return self
        if not self.enable_prefix_caching:
            raise ValueError("kv_offloading_size finds KV by the hashes of blocks: it needs enable_prefix_caching")
        if self.async_scheduling:
            raise ValueError("kv_offloading_size and async_scheduling are not simulated together; switch one of them off")
        if self.kv_offloading_backend == "lmcache" and LMCACHE_CHUNK % self.block_size:
            raise ValueError(f"kv_offloading_backend lmcache stores chunks of {LMCACHE_CHUNK} tokens: block_size "
                             f"{self.block_size} does not divide them")
        return self

    @property
    def step_budget(self) -> int:
        """Tokens a step may compute."""
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens

    @property
    def semantics(self) -> Semantics:
        return _SEMANTICS[self.version]


@dataclass(frozen=True)
class Semantics:
    """Where the supported vLLM releases differ (data set vllm_scheduler_golden, "What changed between the versions")."""

    unhashed_blocks_reused_first: bool  # freed blocks without a hash go to the front of the free list
    lone_prefill_uncapped: bool  # long_prefill_token_threshold is not applied to the only request in the system
    self_victim_passes: bool  # priority: when the asking request is the victim, the next running request is served
    index_follows_victim: bool  # the running index is corrected for any victim before it, scheduled or not
    spaced_prefills: bool  # schedule() looks at prefill_schedule_interval


_SEMANTICS = {
    "0.19.0": Semantics(False, False, False, False, False),
    "0.24.0": Semantics(True, False, False, False, False),
    "0.33.0": Semantics(True, True, True, True, True),
}


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
