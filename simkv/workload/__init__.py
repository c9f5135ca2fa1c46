"""Workloads of a scenario: requests listed, a burst of equal ones, or a seeded arrival process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from simkv.request import Request, Segment
from simkv.schedulers.base import blocks_for

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
    """

    max_tokens: Tokens | None = None
    priority: int = 0
    has_images: bool = False
    ignore_eos: bool = False
    prefix_group: Annotated[
        str | None, Field(description="Requests of one group begin with the same tokens.")
    ] = None
    prefix_tokens: Annotated[
        int, Field(ge=0, le=MOST_TOKENS, description="How many; a shorter prompt has them all.")
    ] = 0

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self.check_prefix()
        return self

    def check_prefix(self) -> None:
        """Raise ValueError if the fields that tell of shared tokens do not go together."""
        if (self.prefix_group is None) != (self.prefix_tokens == 0):
            raise ValueError("prefix_group and prefix_tokens need each other")

    def request(
        self,
        number: int,
        arrival: float,
        prompt: int,
        output: int,
        timeout: float | None,
        segments: tuple[Segment, ...] = (),
    ) -> Request:
        """Request ``number`` of this shape; ``segments`` are its prompt's if it shares any."""
        if self.prefix_group is not None:
            segments = shared_prefix(self.prefix_group, self.prefix_tokens, number, prompt)
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


def shared_prefix(group: str, tokens: int, number: int, prompt: int) -> tuple[Segment, ...]:
    """A prompt that begins with ``tokens`` tokens of its group; the rest shares nothing."""
    shared = min(tokens, prompt)
    return Segment(f"g{group}", 0, shared), Segment(f"u{number}", 0, prompt - shared)


def hashed_prompt(hash_ids: Sequence[int], block: int, prompt: int) -> tuple[Segment, ...]:
    """A prompt of ``prompt`` tokens whose blocks of ``block`` tokens are known by ``hash_ids``."""
    return tuple(
        Segment(f"h{name}", 0, min(block, prompt - index * block))
        for index, name in enumerate(hash_ids)
    )


class Listed(Shape):
    """One request: ``arrival`` and ``timeout`` in seconds.

    What its prompt shares with others is told by ``prefix_group``, ``hash_ids`` or ``segments``;
    without any of them it shares nothing.
    """

    arrival: Time = 0.0
    prompt_tokens: Tokens
    output_tokens: Tokens
    timeout: Annotated[float, Field(gt=0)] | None = None
    hash_ids: Annotated[
        list[int] | None,
        Field(description="A name for each block of the prompt, as in Mooncake traces."),
    ] = None
    hash_block_size: Annotated[
        int, Field(gt=0, le=MOST_TOKENS, description="Tokens in a block of hash_ids.")
    ] = 512
    segments: Annotated[
        list[Annotated[tuple[str, int, int], Field(strict=False)]] | None,
        Field(
            description="The prompt as pieces [stream, start, end) of token streams: u<i> and o<i> "
            "are the own prompt and the output of request i, any other name is a stream by itself."
        ),
    ] = None

    def check_prefix(self) -> None:
        super().check_prefix()
        names = ("prefix_group", "hash_ids", "segments")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"one of {', '.join(names)} at most; found {' and '.join(given)}")
        blocks = blocks_for(self.prompt_tokens, self.hash_block_size)
        if self.hash_ids is not None and len(self.hash_ids) != blocks:
            raise ValueError(
                f"hash_ids: {self.prompt_tokens} tokens are {blocks} blocks of "
                f"{self.hash_block_size}; found {len(self.hash_ids)} ids"
            )
        for stream, start, end in self.segments or ():
            if not 0 <= start < end:
                raise ValueError(f"segments: 0 <= start < end; found {[stream, start, end]}")
        total = sum(end - start for _, start, end in self.segments or ())
        if self.segments is not None and total != self.prompt_tokens:
            raise ValueError(
                f"segments: they must add up to prompt_tokens {self.prompt_tokens}; found {total}"
            )

    @property
    def prompt(self) -> tuple[Segment, ...]:
        """The prompt's identity by ``hash_ids`` or ``segments``."""
        if self.hash_ids is not None:
            return hashed_prompt(self.hash_ids, self.hash_block_size, self.prompt_tokens)
        return tuple(Segment(*piece) for piece in self.segments or ())


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
    (1: Poisson, smaller: burstier, larger: smoother). Gaps, the two lengths and the shared
    prefixes have a random stream each, so that changing one leaves the others as they were.
    """

    num_prompts: Count
    request_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    burstiness: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    prompt_tokens: Length
    output_tokens: Length
    prefix_groups: Annotated[
        int | None,
        Field(gt=0, le=MOST_REQUESTS, description="Every request draws one of so many prefixes."),
    ] = None
    prefix_zipf: Annotated[
        float,
        Field(ge=0, le=10, description="The k-th prefix has the weight k ** -prefix_zipf."),
    ] = 0.0
    seed: Annotated[int, Field(ge=0)] = 0

    def check_prefix(self) -> None:
        if self.prefix_groups is None:
            super().check_prefix()
        elif self.prefix_group is not None or not self.prefix_tokens:
            raise ValueError("prefix_groups needs prefix_tokens, and no prefix_group beside it")

    def draw_groups(self, random: np.random.Generator) -> list[int] | None:
        """The prefix group of every request, or None if they share nothing by chance."""
        if self.prefix_groups is None:
            return None
        weights = np.arange(1, self.prefix_groups + 1, dtype=np.float64) ** -self.prefix_zipf
        drawn = random.choice(self.prefix_groups, self.num_prompts, p=weights / weights.sum())
        return [int(group) for group in drawn]


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
                row.prompt,
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
    gaps, prompts, outputs, prefixes = (
        np.random.Generator(np.random.PCG64(stream))
        for stream in np.random.SeedSequence(arrivals.seed).spawn(4)
    )
    count, shape = arrivals.num_prompts, arrivals.burstiness
    times = np.cumsum(gaps.gamma(shape, 1.0 / (arrivals.request_rate * shape), count))
    groups = arrivals.draw_groups(prefixes)
    return [
        arrivals.request(
            number,
            float(time),
            prompt,
            output,
            timeout,
            shared_prefix(str(groups[number]), arrivals.prefix_tokens, number, prompt)
            if groups
            else (),
        )
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
