"""Field types and the base class shared by workload models."""

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

#: Limits of workload fields; larger values are typos or inputs for another tool, and are rejected
#: before any request is built.
MAX_REQUEST_COUNT = 10_000_000
MAX_TOKEN_COUNT = 100_000_000
MAX_SECONDS = 1e9

Tokens = Annotated[int, Field(gt=0, le=MAX_TOKEN_COUNT)]
Count = Annotated[int, Field(gt=0, le=MAX_REQUEST_COUNT)]
Time = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Seed = Annotated[int, Field(ge=0)]


def _never_rise(rates: list[float]) -> list[float]:
    if sorted(rates, reverse=True) != rates:
        raise ValueError(f"rates must not increase with the position; found {rates}")
    return rates


Share = Annotated[float, Field(ge=0, le=1)]
#: Acceptance of draft tokens: the probability for each draft given that the earlier ones were
#: accepted, or rates by position.
AcceptanceRates = Annotated[
    Annotated[Share, Tag("one")]
    | Annotated[list[Share], Field(min_length=1), AfterValidator(_never_rise), Tag("by position")],
    Discriminator(lambda rates: "by position" if isinstance(rates, list) else "one"),
]


def make_random_stream(seed: int, *purpose: int) -> np.random.Generator:
    """Return a random number generator that depends only on ``seed`` and ``purpose``."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=purpose)))


class StrictModel(BaseModel):
    """Base class of scenario models: immutable, without unknown fields or type coercion."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


def find_file(name: str, info: ValidationInfo) -> Path:
    """Return the path of the file ``name`` beside the scenario or in the working directory.

    Raises ValueError if no file exists.
    """
    # The validation context holds the scenario's ``folder``.
    beside = (info.context or {}).get("folder", Path()) / name
    for path in (beside, Path(name)):
        if path.exists():
            return path
    raise ValueError(f"file {beside} does not exist; paths are relative to the scenario file")
