"""Workloads of a scenario: requests listed, a burst of equal ones, or a seeded arrival process."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from simkv.request import Request, Segment

#: More than this is refused before anything is built: a typo, or a run for another tool.
MOST_REQUESTS = 10_000_000
MOST_TOKENS = 100_000_000

Tokens = Annotated[int, Field(gt=0, le=MOST_TOKENS)]
Count = Annotated[int, Field(gt=0, le=MOST_REQUESTS)]
Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Shape(_Model):
    """What is common to the ways of describing requests.

    ``max_tokens`` is the limit that the client asks for; by default what will be emitted.
    ``prefix_tokens`` leading prompt tokens are the same for all requests of a ``prefix_group``.
    """

    max_tokens: Tokens | None = None
    priority: int = 0
    has_images: bool = False
    ignore_eos: bool = False
    prefix_group: str | None = None
    prefix_tokens: Annotated[int, Field(ge=0)] = 0

    def request(
        self, number: int, arrival: float, prompt: int, output: int, timeout: float | None
    ) -> Request:
        """Request ``number`` of this shape."""
        segments: tuple[Segment, ...] = ()
        if self.prefix_group is not None and self.prefix_tokens:
            shared = min(self.prefix_tokens, prompt)
            segments = (
                Segment(f"g{self.prefix_group}", 0, shared),
                Segment(f"u{number}", 0, prompt - shared),
            )
        return Request(
            id=number,
            prompt_tokens=prompt,
            max_tokens=self.max_tokens or output,
            arrival=arrival,
            priority=self.priority,
            has_images=self.has_images,
            ignore_eos=self.ignore_eos,
            segments=segments,
            output_tokens=min(output, self.max_tokens or output),
            timeout=timeout,
        )


class Listed(Shape):
    """One request: ``arrival`` and ``timeout`` in seconds."""

    arrival: Time = 0.0
    prompt_tokens: Tokens
    output_tokens: Tokens
    timeout: Annotated[float, Field(gt=0)] | None = None


class Burst(Shape):
    """``num_prompts`` equal requests, ``interval`` seconds apart."""

    num_prompts: Count
    prompt_tokens: Tokens
    output_tokens: Tokens
    interval: Time = 0.0


class Uniform(_Model):
    """Whole numbers from ``low`` to ``high``, both included, all equally likely."""

    distribution: Literal["uniform"]
    low: Tokens
    high: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        if self.low > self.high:
            raise ValueError(f"low must not exceed high; found {self.low} and {self.high}")
        return self

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        return [int(x) for x in random.integers(self.low, self.high, count, endpoint=True)]


class LogNormal(_Model):
    """Rounded log-normal lengths with the given ``mean``, cut to 1 .. ``max``.

    ``sigma`` is the standard deviation of the logarithm.
    """

    distribution: Literal["lognormal"]
    mean: Annotated[float, Field(gt=0, le=MOST_TOKENS)]
    sigma: Annotated[float, Field(ge=0, le=10)] = 0.7
    max: Tokens = MOST_TOKENS

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        drawn = random.lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma, count)
        return [int(x) for x in np.clip(np.rint(drawn), 1, self.max)]


Length = Tokens | Annotated[Uniform | LogNormal, Field(discriminator="distribution")]


class Arrivals(Shape):
    """A seeded arrival process, with the words of ``vllm bench serve``.

    ``request_rate`` in requests per second; gaps are gamma distributed with shape ``burstiness``
    (1: Poisson, smaller: burstier, larger: smoother). Gaps and the two lengths have a random
    stream each, so that changing one leaves the others as they were.
    """

    num_prompts: Count
    request_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    burstiness: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    prompt_tokens: Length
    output_tokens: Length
    seed: Annotated[int, Field(ge=0)] = 0


class Workload(_Model):
    """What the clients send: exactly one of ``requests``, ``burst`` and ``arrivals``."""

    requests: list[Listed] | None = Field(None, min_length=1)
    burst: Burst | None = None
    arrivals: Arrivals | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Workload:
        given = [form for form in FORMS if getattr(self, form) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"exactly one of {', '.join(FORMS)} is needed; found {found}")
        return self

    @property
    def size(self) -> int:
        """Number of requests."""
        if self.requests is not None:
            return len(self.requests)
        counted = self.burst or self.arrivals
        return counted.num_prompts if counted else 0


FORMS = ("requests", "burst", "arrivals")


def generate(workload: Workload, timeout: float | None) -> list[Request]:
    """The requests of a workload; ``timeout`` (s) is for those that do not have their own."""
    if workload.requests is not None:
        return [
            row.request(
                number,
                row.arrival,
                row.prompt_tokens,
                row.output_tokens,
                row.timeout or timeout,
            )
            for number, row in enumerate(workload.requests)
        ]
    if workload.burst is not None:
        burst = workload.burst
        return [
            burst.request(
                number,
                number * burst.interval,
                burst.prompt_tokens,
                burst.output_tokens,
                timeout,
            )
            for number in range(burst.num_prompts)
        ]
    assert workload.arrivals is not None
    return _draw(workload.arrivals, timeout)


def _draw(arrivals: Arrivals, timeout: float | None) -> list[Request]:
    gaps, prompts, outputs = (
        np.random.Generator(np.random.PCG64(stream))
        for stream in np.random.SeedSequence(arrivals.seed).spawn(3)
    )
    count, shape = arrivals.num_prompts, arrivals.burstiness
    times = np.cumsum(gaps.gamma(shape, 1.0 / (arrivals.request_rate * shape), count))
    return [
        arrivals.request(number, float(time), prompt, output, timeout)
        for number, (time, prompt, output) in enumerate(
            zip(
                times,
                _lengths(arrivals.prompt_tokens, prompts, count),
                _lengths(arrivals.output_tokens, outputs, count),
                strict=True,
            )
        )
    ]


def _lengths(length: Length, random: np.random.Generator, count: int) -> list[int]:
    return [length] * count if isinstance(length, int) else length.draw(random, count)
