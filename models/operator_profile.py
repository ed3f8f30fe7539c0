"""A profile: how long the operators of a model took on a machine, batch by batch. Measured by kernels/measure.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simcore.errors import ConfigError
from simcore.files import write_whole

Tokens = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ProfileRow(BaseModel):
    """One batch: sequence i computes `counts[i]` tokens after `before[i]`; the first `samples` sequences yield a token.

    `seconds`: the whole step, median of `repeats`; `low` and `high`: its least and most. `operators`: name -> seconds of the
    step, all layers together, in the repeat of the median.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    counts: list[Tokens]
    before: list[Annotated[int, Field(ge=0)]]
    samples: Annotated[int, Field(ge=0)]
    seconds: Seconds
    low: Seconds
    high: Seconds
    repeats: Annotated[int, Field(ge=1)]
    operators: dict[str, Seconds]
    held_out: bool = False


class OperatorProfile(BaseModel):
    """Rows of one model on one machine. `held_out` rows are measured to judge a fit, never to make one."""

    model_config = ConfigDict(extra="forbid")
    format: Literal["simcore operator profile 1"] = "simcore operator profile 1"
    model: str
    parameters: int
    device: str
    software: str
    dtype: str
    block_size: int
    rows: list[ProfileRow] = []

    def of_same(self, other: OperatorProfile) -> bool:
        """Whether the other's rows could stand here."""
        return self.model_dump(exclude={"rows"}) == other.model_dump(exclude={"rows"})


def read_profile(path: Path) -> OperatorProfile:
    """Raises ConfigError naming file and key."""
    try:
        return OperatorProfile.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), why=f"cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(str(path), key, found=first.get("input"), allowed="an operator profile",
                          why=first["msg"]) from None


def write_profile(path: Path, profile: OperatorProfile) -> None:
    write_whole(path, profile.model_dump_json(indent=1) + "\n")
