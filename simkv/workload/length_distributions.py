"""Distributions of lengths in tokens and of times in seconds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import (
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from simkv.workload.trace_reader import cached_trace
from simkv.workload.workload_base import (
    MAX_TOKEN_COUNT,
    StrictModel,
    Time,
    Tokens,
    find_file,
)

LengthField = Literal["prompt_tokens", "output_tokens"]
#: Maximum number of lengths in a zipf distribution, because all weights are stored.
MAX_ZIPF_LENGTHS = 1_000_000


class Uniform(StrictModel):
    """Uniform distribution of integers from ``low`` to ``high``, inclusive."""

    distribution: Literal["uniform"]
    low: Tokens
    """Minimum."""
    high: Tokens
    """Maximum."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low must not exceed high; found {self.low} and {self.high}")
        return self

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        return [int(x) for x in random.integers(self.low, self.high, count, endpoint=True)]


class RandomRange(StrictModel):
    """Uniform distribution around ``len``, as in ``vllm bench serve --dataset-name random``.

    The range is from ``len * (1 - range_ratio)`` to ``len * (1 + range_ratio)``.
    """

    # The limits are rounded down and up, respectively. Lengths are at least 1.

    distribution: Literal["random"]
    len: Tokens
    """Center of the range."""
    range_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Half-width of the range as a fraction of ``len``."""

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        low = max(math.floor(self.len * (1 - self.range_ratio)), 1)
        high = math.ceil(self.len * (1 + self.range_ratio))
        return [int(x) for x in random.integers(low, high, count, endpoint=True)]


class LogNormal(StrictModel):
    """Log-normal distribution of lengths, rounded and clipped to 1 .. ``max``.

    ``sigma`` is the standard deviation of the logarithm.
    """

    distribution: Literal["lognormal"]
    mean: Annotated[float, Field(gt=0, le=MAX_TOKEN_COUNT)]
    """Mean of the lengths (not of their logarithm)."""
    sigma: Annotated[float, Field(ge=0, le=10)] = 0.7
    """Standard deviation of the logarithm."""
    max: Tokens = MAX_TOKEN_COUNT
    """Maximum; longer lengths are clipped."""

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        drawn = random.lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma, count)
        return [int(x) for x in np.clip(np.rint(drawn), 1, self.max)]


class Zipf(StrictModel):
    """Zipf distribution of lengths from ``low`` to ``high``.

    The frequency of the k-th length is proportional to ``k ** -exponent``.
    """

    distribution: Literal["zipf"]
    low: Tokens = 1
    """Shortest length, which is the most frequent."""
    high: Tokens
    """Longest length."""
    exponent: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Exponent that determines how fast the frequency decreases from ``low`` to ``high``; 0 gives a
    uniform distribution."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low <= self.high < self.low + MAX_ZIPF_LENGTHS:
            raise ValueError(
                f"high must be between low and low + {MAX_ZIPF_LENGTHS:,}; found {self.low} and "
                f"{self.high}"
            )
        return self

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        ranks = np.arange(1, self.high - self.low + 2, dtype=np.float64)
        total = np.cumsum(ranks**-self.exponent)
        places = np.searchsorted(total / total[-1], random.random(count), side="right")
        return [self.low + int(place) for place in places]


class Empirical(StrictModel):
    """Lengths sampled uniformly from the requests of a ``trace``.

    ``of`` selects prompt or output lengths.
    """

    # The default is the kind of the field that has this distribution.

    distribution: Literal["empirical"]
    trace: str
    """Trace file to sample lengths from."""
    of: LengthField | None = None
    """Lengths to sample: prompt or output (default: the kind of the field that uses this
    distribution)."""
    _path: Path = PrivateAttr(default_factory=Path)

    @field_validator("trace")
    @classmethod
    def _there(cls, name: str, info: ValidationInfo) -> str:
        find_file(name, info)
        return name

    @model_validator(mode="after")
    def _located(self, info: ValidationInfo) -> Self:
        self._path = find_file(self.trace, info)
        return self

    def values(self, which: LengthField) -> list[int]:
        """Return the lengths in the trace. Raises InputError if the trace cannot be read."""
        lengths: list[int] = getattr(cached_trace(self._path).rows, self.of or which).tolist()
        return lengths


def classify_distribution(value: Any) -> str:
    """Return the kind of a length or time: ``number`` or the name of a distribution."""
    if isinstance(value, StrictModel):
        return str(getattr(value, "distribution", None))
    return str(value.get("distribution")) if isinstance(value, dict) else "number"


LengthDistribution = Annotated[
    Annotated[Tokens, Tag("number")]
    | Annotated[Uniform, Tag("uniform")]
    | Annotated[RandomRange, Tag("random")]
    | Annotated[LogNormal, Tag("lognormal")]
    | Annotated[Zipf, Tag("zipf")]
    | Annotated[Empirical, Tag("empirical")],
    Discriminator(classify_distribution),
]


def sample_lengths(
    length: LengthDistribution,
    random: np.random.Generator,
    count: int,
    which: LengthField = "prompt_tokens",
) -> list[int]:
    """Sample ``count`` lengths for the field ``which``."""
    if isinstance(length, int):
        return [length] * count
    if isinstance(length, Empirical):
        values = length.values(which)
        return [values[place] for place in random.integers(0, len(values), count)]
    return length.draw(random, count)


class Exponential(StrictModel):
    """Exponential distribution of times with the given ``mean`` (s)."""

    distribution: Literal["exponential"]
    mean: Time
    """Mean in seconds."""

    def draw(self, random: np.random.Generator, count: int) -> list[float]:
        return [float(x) for x in random.exponential(self.mean, count)]


class UniformTime(StrictModel):
    """Uniform distribution of times from ``low`` to ``high`` (s)."""

    distribution: Literal["uniform"]
    low: Time
    """Minimum in seconds."""
    high: Time
    """Maximum in seconds."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low must not exceed high; found {self.low} and {self.high}")
        return self

    def draw(self, random: np.random.Generator, count: int) -> list[float]:
        return [float(x) for x in random.uniform(self.low, self.high, count)]


class LogNormalTime(StrictModel):
    """Log-normal distribution of times with the given ``mean`` (s).

    ``sigma`` is the standard deviation of the logarithm.
    """

    distribution: Literal["lognormal"]
    mean: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Mean of the times in seconds (not of their logarithm)."""
    sigma: Annotated[float, Field(ge=0, le=10)] = 0.7
    """Standard deviation of the logarithm."""

    def draw(self, random: np.random.Generator, count: int) -> list[float]:
        drawn = random.lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma, count)
        return [float(x) for x in drawn]


TimeDistribution = Annotated[
    Annotated[Time, Tag("number")]
    | Annotated[Exponential, Tag("exponential")]
    | Annotated[UniformTime, Tag("uniform")]
    | Annotated[LogNormalTime, Tag("lognormal")],
    Discriminator(classify_distribution),
]


def sample_times(time: TimeDistribution, random: np.random.Generator, count: int) -> list[float]:
    """Sample ``count`` times in seconds."""
    return [float(time)] * count if isinstance(time, int | float) else time.draw(random, count)
