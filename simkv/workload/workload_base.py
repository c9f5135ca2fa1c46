"""What the models of a workload have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
)

#: More than this is refused before anything is built: a typo, or a run for another tool.
MAX_REQUEST_COUNT = 10_000_000
MAX_TOKEN_COUNT = 100_000_000
MAX_SECONDS = 1e9

Tokens = Annotated[int, Field(gt=0, le=MAX_TOKEN_COUNT)]
Count = Annotated[int, Field(gt=0, le=MAX_REQUEST_COUNT)]
Time = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Seed = Annotated[int, Field(ge=0)]


def _never_rise(rates: list[float]) -> list[float]:
    if sorted(rates, reverse=True) != rates:
        raise ValueError(f"rates must not rise from position to position; found {rates}")
    return rates


Share = Annotated[float, Field(ge=0, le=1)]
#: The chance of each draft if those before it are accepted, or shares accepted by position.
AcceptanceRates = Annotated[
    Annotated[Share, Tag("one")]
    | Annotated[list[Share], Field(min_length=1), AfterValidator(_never_rise), Tag("by position")],
    Discriminator(lambda rates: "by position" if isinstance(rates, list) else "one"),
]


def make_random_stream(seed: int, *purpose: int) -> np.random.Generator:
    """A random stream that depends on the seed and the purpose alone."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=purpose)))


class StrictModel(BaseModel):
    """A part of a scenario file: no unknown fields, no guessing of types, never changed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


def find_file(name: str, info: ValidationInfo) -> Path:
    """The file ``name`` beside the scenario, or where simkv was started.

    The validation's context names the scenario's ``folder``. Raises ValueError if there is none.
    """
    beside = (info.context or {}).get("folder", Path()) / name
    for path in (beside, Path(name)):
        if path.exists():
            return path
    raise ValueError(f"there is no file {beside}; a path beside the scenario file is expected")
