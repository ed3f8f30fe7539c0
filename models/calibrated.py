"""The calibrated cost model: what each operator takes, from a profile of one model on one machine.

`simcore calibrate` writes its file; a study names it by `cost_model: {kind: calibrated, file: ...}`. An operator that works
on tokens alone has a table of seconds over tokens (tiles and code paths make steps in it that no line follows); any other
has seconds per unit of work, the features of step_time.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from simcore.errors import ConfigError
from simcore.models import step_time
from simcore.models.llm import LlmSpec
from simcore.models.roofline import distinct_experts, with_seconds
from simcore.models.step_time import COLUMNS, StepTables

# Units of work by name, as files have them: columns of step_time.py.
UNITS = {
    "tokens": step_time.TOKENS, "sampled": step_time.SAMPLED, "sequences": step_time.SEQUENCES,
    "kv_read": step_time.KV_READ, "qk_pairs": step_time.QK_PAIRS, "chunks": step_time.CHUNKS,
    "experts": step_time.EXPERTS, "constant": step_time.CONSTANT,
}
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Unit = Literal["tokens", "sampled", "sequences", "kv_read", "qk_pairs", "chunks", "experts", "constant"]


class CalibratedConfig(BaseModel):
    """What a study says: the file that `simcore calibrate` wrote, from the study's folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["calibrated"]
    file: str


class CalibratedOperator(BaseModel):
    """Seconds per unit of work, all layers together."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    seconds: dict[Unit, Seconds]


class TokenTable(BaseModel):
    """Seconds of an operator, all layers together, at these numbers of tokens; between them a line, beyond the last one the
    slope from 0 to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    tokens: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    seconds: list[Seconds]

    @model_validator(mode="after")
    def _one_each(self) -> TokenTable:
        if len(self.tokens) != len(self.seconds) or sorted(set(self.tokens)) != self.tokens:
            raise ValueError("give ascending tokens and as many seconds")
        return self

    def at(self, tokens: np.ndarray) -> np.ndarray:
        """float64 of any number of tokens."""
        inside = np.interp(tokens, self.tokens, self.seconds)
        last = self.tokens[-1]
        return np.where(tokens > last, self.seconds[-1] / last * tokens, inside)


class CalibratedModel(BaseModel):
    """A fitted cost model. `fitted_on` says on how many rows, and how far off it is on rows that were held out."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal["simcore cost model 1"] = "simcore cost model 1"
    model: str
    parameters: int
    device: str
    software: str
    dtype: str
    tables_of_tokens: list[TokenTable]
    operators: list[CalibratedOperator]
    step_overhead: Seconds
    sequence_overhead: Seconds
    fitted_on: dict[str, float]

    def tables(self, llm: LlmSpec, *, tensor_parallel_size: int, max_num_batched_tokens: int) -> StepTables:
        """Tables for `llm`. Raises ConfigError if it is not the model that was measured, or stands on several GPUs."""
        if llm.parameters != self.parameters:
            raise ConfigError("cost_model.file", found=f"a profile of {self.model} ({self.parameters:,} parameters)",
                              allowed=f"one of {llm.name} ({llm.parameters:,} parameters)")
        if tensor_parallel_size != 1:
            raise ConfigError("tensor_parallel_size", found=tensor_parallel_size,
                              allowed="1 with a calibrated cost model: one device was measured")
        tabulated = np.zeros(COLUMNS)
        tabulated[step_time.TABULATED] = 1.0
        rows = np.array([tabulated, *(_row(op.seconds) for op in self.operators)])
        tokens = np.arange(max_num_batched_tokens + 1)
        seconds = sum((table.at(tokens) for table in self.tables_of_tokens), np.zeros(len(tokens)))
        seconds[0] = 0.0
        experts = distinct_experts(llm.experts, llm.top_k, max_num_batched_tokens)
        return StepTables(rows, np.zeros_like(rows), with_seconds(experts, seconds))

    def listed(self) -> dict[str, float]:
        """Each fitted number by name, as results print it. (The tables are measured.)"""
        out = {"calibrated.step_overhead": self.step_overhead, "calibrated.sequence_overhead": self.sequence_overhead}
        for op in self.operators:
            out |= {f"calibrated.{op.name}.{unit}": value for unit, value in op.seconds.items()}
        return out


def _row(seconds: dict[Unit, float]) -> np.ndarray:
    row = np.zeros(COLUMNS)
    for unit, value in seconds.items():
        row[UNITS[unit]] = value
    return row


def read_calibrated(path: Path) -> CalibratedModel:
    """Raises ConfigError naming file and key."""
    try:
        return CalibratedModel.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), why=f"cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(str(path), key, found=first.get("input"), allowed="a file that simcore calibrate wrote",
                          why=first["msg"]) from None
