"""Generated requests: arrival processes, with the same options as ``vllm bench serve``.

Each sampled quantity (gaps, prompts, outputs, ...) has its own random stream, so a change to one
setting does not change the other quantities.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from simkv.core.request import Request
from simkv.workload.length_distributions import (
    LengthDistribution,
    sample_lengths,
)
from simkv.workload.listed_requests import RequestFields, shared_prefix
from simkv.workload.request_columns import Floats
from simkv.workload.workload_base import (
    MAX_REQUEST_COUNT,
    Count,
    Seed,
    StrictModel,
    make_random_stream,
)

Rate = Annotated[float, Field(ge=1e-9)]
FiniteRate = Annotated[float, Field(ge=1e-9, allow_inf_nan=False)]


class Diurnal(StrictModel):
    """Sinusoidal arrival rate: ``request_rate * (1 + amplitude * sin(2 pi t / period))``."""

    period: FiniteRate = 86_400.0
    """Period in seconds."""
    amplitude: Annotated[float, Field(ge=0, le=1)]
    """Amplitude as a fraction of the mean rate."""

    def times(self, counts: Floats, rate: float) -> Floats:
        """Return the times (s) at which the integral of the rate reaches ``counts``."""
        from scipy.optimize.elementwise import find_root

        swing = self.amplitude * self.period / (2 * math.pi)
        even = counts / rate

        def ahead(time: Floats, even: Floats) -> Floats:
            return time + swing * (1 - np.cos(2 * math.pi * time / self.period)) - even

        found = find_root(ahead, (even - 2 * swing, even), args=(even,))
        times: Floats = np.maximum(found.x, 0.0)
        return times


class ArrivalProcess(StrictModel):
    """Arrival process as in vLLM 0.33 (``vllm/benchmarks/serve_throughput.py``, ``get_request``).

    The gaps between arrivals have a gamma or Weibull distribution with the shape ``burstiness``. A
    ramp changes the rate from ``ramp_up_start_rps`` to ``ramp_up_end_rps``.
    """

    # The mean of a gap is 1 / rate. Unless ``rescale`` is false, all arrival times are then scaled
    # so that the last of n requests arrives exactly at n / rate; with a ramp, arrivals are not
    # scaled.

    request_rate: Rate | None = None
    """Requests (or sessions) per second; .inf sends all requests at once."""
    burstiness: Rate = 1.0
    """Shape parameter of the gaps between arrivals: 1 is a Poisson process, smaller values are
    burstier, .inf gives equal gaps."""
    gaps: Literal["gamma", "weibull"] = "gamma"
    """Distribution of the gaps between arrivals."""
    rescale: bool = True
    """Whether to scale arrival times so that the last arrival is exactly at n / rate, where n is
    the number of requests (or sessions)."""
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    """Shape of a ramp from a start rate to an end rate; replaces the constant rate."""
    ramp_up_start_rps: FiniteRate | None = None
    """Rate at the first request of the ramp."""
    ramp_up_end_rps: FiniteRate | None = None
    """Rate at the last request of the ramp."""
    diurnal: Diurnal | None = None
    """Sinusoidal variation of the rate, such as day and night."""

    @model_validator(mode="after")
    def _one_pace(self) -> Self:
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        if self.ramp_up_strategy is None:
            if start is not None or end is not None:
                raise ValueError("ramp_up_start_rps and ramp_up_end_rps require ramp_up_strategy")
            if self.request_rate is None:
                raise ValueError("missing; set request_rate or ramp_up_strategy")
        elif self.request_rate is not None or self.diurnal is not None:
            raise ValueError("ramp_up_strategy cannot be combined with request_rate or diurnal")
        elif start is None or end is None or start > end:
            raise ValueError(
                "ramp_up_strategy requires ramp_up_start_rps and ramp_up_end_rps, and the "
                f"start must not exceed the end; found {start} and {end}"
            )
        if self.gaps == "weibull" and self.burstiness < 0.01:
            raise ValueError(
                f"burstiness: must be at least 0.01 for weibull gaps, got {self.burstiness}"
            )
        if self.diurnal is not None and self.request_rate == math.inf:
            raise ValueError("diurnal requires a finite request_rate")
        return self

    def times(self, random: np.random.Generator, count: int) -> Floats:
        """Sample ``count`` arrival times in seconds, in ascending order."""
        if self.request_rate == math.inf:
            return np.zeros(count)
        gaps = self._unit_gaps(random, count)
        if self.ramp_up_strategy is not None:
            return np.cumsum(gaps / self._ramp(count))
        assert self.request_rate is not None
        counts = np.cumsum(gaps)
        if self.rescale and counts[-1] > 0:
            counts *= count / counts[-1]
        if self.diurnal is not None:
            return self.diurnal.times(counts, self.request_rate)
        return counts / self.request_rate

    def _unit_gaps(self, random: np.random.Generator, count: int) -> Floats:
        """Sample gaps with mean 1."""
        shape = self.burstiness
        if shape == math.inf:
            return np.ones(count)
        if self.gaps == "weibull":
            return random.weibull(shape, count) / math.gamma(1 + 1 / shape)
        return random.gamma(shape, 1 / shape, count)

    def _ramp(self, count: int) -> Floats:
        """Return the rate (1/s) at each request."""
        # The rate changes from the start rate to the end rate.
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        assert start is not None
        assert end is not None
        progress = np.arange(count) / max(count - 1, 1)
        if self.ramp_up_strategy == "linear":
            return start + (end - start) * progress
        return start * (end / start) ** progress


class SharedPrefixes(RequestFields):
    """Requests that may begin with a shared prefix, which is sampled for each request."""

    prefix_groups: Annotated[
        int | None,
        Field(
            gt=0,
            le=MAX_REQUEST_COUNT,
            description="Number of shared prefixes. Each request is assigned one of them at "
            "random.",
        ),
    ] = None
    prefix_zipf: Annotated[
        float,
        Field(
            ge=0,
            le=10,
            description="Zipf exponent: the k-th prefix is selected with the weight k ** "
            "-prefix_zipf.",
        ),
    ] = 0.0

    lora_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """LoRA adapters that are assigned to requests (or sessions). An adapter that is listed twice is
    used twice as often."""
    lora_assignment: Literal["random", "round-robin"] = "random"
    """Whether adapters are sampled at random or assigned in turn."""

    @model_validator(mode="after")
    def _one_adapter(self) -> Self:
        if self.lora is not None and self.lora_modules is not None:
            raise ValueError("lora and lora_modules: set at most one of the two")
        return self

    def sample_loras(self, random: np.random.Generator, count: int) -> list[str | None]:
        """Return the adapter of each request.

        Source: ``get_request`` in ``vllm/benchmarks/serve_throughput.py`` of vLLM 0.33.
        """
        names = self.lora_modules
        if names is None:
            return [self.lora] * count
        if self.lora_assignment == "round-robin":
            return [names[number % len(names)] for number in range(count)]
        return [names[drawn] for drawn in random.integers(len(names), size=count)]

    def check_prefix(self) -> None:
        if self.prefix_groups is None:
            super().check_prefix()
        elif self.prefix_group is not None or not self.prefix_tokens:
            raise ValueError(
                "prefix_groups requires prefix_tokens and cannot be combined with prefix_group"
            )

    def sample_groups(self, random: np.random.Generator, count: int) -> list[str] | None:
        """Sample the prefix group of each request. Return None without ``prefix_groups``."""
        if self.prefix_groups is None:
            return None
        weights = np.arange(1, self.prefix_groups + 1, dtype=np.float64) ** -self.prefix_zipf
        drawn = random.choice(self.prefix_groups, count, p=weights / weights.sum())
        return [str(group) for group in drawn]


class Arrivals(SharedPrefixes, ArrivalProcess):
    """Arrival process of ``num_prompts`` requests with sampled lengths."""

    num_prompts: Count
    """Number of requests."""
    prompt_tokens: LengthDistribution
    """Prompt length in tokens: a number or a distribution."""
    output_tokens: LengthDistribution
    """Output length in tokens: a number or a distribution. The scheduler does not see it."""
    seed: Seed = 0
    """Random seed for arrivals and lengths."""

    def requests(self, timeout: float | None) -> list[Request]:
        """Return the requests. ``timeout`` (s) is the timeout of the clients."""
        gaps, prompts, outputs, prefixes, adapters = (
            make_random_stream(self.seed, purpose) for purpose in range(5)
        )
        count = self.num_prompts
        groups = self.sample_groups(prefixes, count)
        return [
            self.request(
                number,
                time,
                prompt,
                output,
                timeout,
                shared_prefix(groups[number], self.prefix_tokens, number, prompt) if groups else (),
                lora,
            )
            for number, (time, prompt, output, lora) in enumerate(
                zip(
                    self.times(gaps, count).tolist(),
                    sample_lengths(self.prompt_tokens, prompts, count, "prompt_tokens"),
                    sample_lengths(self.output_tokens, outputs, count, "output_tokens"),
                    self.sample_loras(adapters, count),
                    strict=True,
                )
            )
        ]
