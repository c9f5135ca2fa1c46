"""Requests that are drawn: arrival processes and sessions, with the words of ``vllm bench serve``.

Every purpose (gaps, prompts, outputs, ...) has a random stream of its own, so that changing one
thing leaves the others as they were.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from simkv.core.request import Request, Segment
from simkv.workload.clients import Dependency
from simkv.workload.length_distributions import (
    LengthDistribution,
    LengthField,
    TimeDistribution,
    sample_lengths,
    sample_times,
)
from simkv.workload.listed_requests import RequestFields, shared_prefix
from simkv.workload.request_columns import Floats
from simkv.workload.workload_base import (
    MAX_REQUEST_COUNT,
    Count,
    Seed,
    StrictModel,
    Tokens,
    make_random_stream,
)

Rate = Annotated[float, Field(ge=1e-9)]
FiniteRate = Annotated[float, Field(ge=1e-9, allow_inf_nan=False)]
#: A session has so many turns at most: each repeats all that was said before it.
MAX_TURNS = 1000


class Diurnal(StrictModel):
    """The rate goes up and down: ``request_rate * (1 + amplitude * sin(2 pi t / period))``."""

    period: FiniteRate = 86_400.0
    """Seconds from one peak of the rate to the next."""
    amplitude: Annotated[float, Field(ge=0, le=1)]
    """How far it swings, as a share of the mean rate."""

    def times(self, counts: Floats, rate: float) -> Floats:
        """When so many requests are to be expected: the integral of the rate is there then."""
        from scipy.optimize.elementwise import find_root

        swing = self.amplitude * self.period / (2 * math.pi)
        even = counts / rate

        def ahead(time: Floats, even: Floats) -> Floats:
            return time + swing * (1 - np.cos(2 * math.pi * time / self.period)) - even

        found = find_root(ahead, (even - 2 * swing, even), args=(even,))
        times: Floats = np.maximum(found.x, 0.0)
        return times


class ArrivalProcess(StrictModel):
    """When requests arrive, as in vLLM 0.33 (``vllm/benchmarks/serve_throughput.py``,
    ``get_request``).

    ``request_rate`` requests per second (``.inf``: all at once). Gaps are gamma distributed with
    shape ``burstiness`` and mean 1 / rate (1: Poisson, smaller: burstier, larger: smoother,
    ``.inf``: constant), or with ``gaps: weibull`` Weibull distributed with that shape. Arrivals are
    then scaled so that the last one is at exactly n / rate, unless ``rescale`` is false. With
    ``ramp_up_strategy`` the rate goes from ``ramp_up_start_rps`` to ``ramp_up_end_rps`` by the
    number of the request, linearly or exponentially, and nothing is scaled.
    """

    request_rate: Rate | None = None
    """Requests (or sessions) per second; .inf sends all at once."""
    burstiness: Rate = 1.0
    """Shape of the gaps: 1 is a Poisson process, smaller is burstier, .inf has equal gaps."""
    gaps: Literal["gamma", "weibull"] = "gamma"
    """Distribution of the gaps."""
    rescale: bool = True
    """Whether arrivals are stretched so that the last comes at exactly number / rate."""
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    """How the rate climbs, in place of a fixed one."""
    ramp_up_start_rps: FiniteRate | None = None
    """Rate at the first request, with a ramp."""
    ramp_up_end_rps: FiniteRate | None = None
    """Rate at the last request, with a ramp."""
    diurnal: Diurnal | None = None
    """A rate that swings about its mean like day and night."""

    @model_validator(mode="after")
    def _one_pace(self) -> Self:
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        if self.ramp_up_strategy is None:
            if start is not None or end is not None:
                raise ValueError("ramp_up_start_rps and ramp_up_end_rps need ramp_up_strategy")
            if self.request_rate is None:
                raise ValueError("request_rate or ramp_up_strategy is needed")
        elif self.request_rate is not None or self.diurnal is not None:
            raise ValueError("ramp_up_strategy goes without request_rate and diurnal")
        elif start is None or end is None or start > end:
            raise ValueError(
                "ramp_up_strategy needs ramp_up_start_rps, not above ramp_up_end_rps; "
                f"found {start} and {end}"
            )
        if self.gaps == "weibull" and self.burstiness < 0.01:
            raise ValueError(
                f"weibull gaps need a burstiness of 0.01 or more; found {self.burstiness}"
            )
        if self.diurnal is not None and self.request_rate == math.inf:
            raise ValueError("diurnal needs a finite request_rate")
        return self

    def times(self, random: np.random.Generator, count: int) -> Floats:
        """``count`` arrivals in s, in order."""
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
        """Gaps of mean 1."""
        shape = self.burstiness
        if shape == math.inf:
            return np.ones(count)
        if self.gaps == "weibull":
            return random.weibull(shape, count) / math.gamma(1 + 1 / shape)
        return random.gamma(shape, 1 / shape, count)

    def _ramp(self, count: int) -> Floats:
        """The rate at each request."""
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        assert start is not None
        assert end is not None
        progress = np.arange(count) / max(count - 1, 1)
        if self.ramp_up_strategy == "linear":
            return start + (end - start) * progress
        return start * (end / start) ** progress


class SharedPrefixes(RequestFields):
    """Requests of which each may begin with one of some shared prefixes, drawn by chance."""

    prefix_groups: Annotated[
        int | None,
        Field(
            gt=0, le=MAX_REQUEST_COUNT, description="Every request draws one of so many prefixes."
        ),
    ] = None
    prefix_zipf: Annotated[
        float,
        Field(ge=0, le=10, description="The k-th prefix has the weight k ** -prefix_zipf."),
    ] = 0.0

    lora_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Each request (or session) asks for one of these adapters; one named twice, twice as often."""
    lora_assignment: Literal["random", "round-robin"] = "random"
    """Whether they are drawn by chance or taken in turn."""

    @model_validator(mode="after")
    def _one_adapter(self) -> Self:
        if self.lora is not None and self.lora_modules is not None:
            raise ValueError("lora and lora_modules: at most one of the two")
        return self

    def sample_loras(self, random: np.random.Generator, count: int) -> list[str | None]:
        """The adapter of each, as in vLLM 0.33 (``vllm/benchmarks/serve_throughput.py``,
        ``get_request``)."""
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
            raise ValueError("prefix_groups needs prefix_tokens, and no prefix_group beside it")

    def sample_groups(self, random: np.random.Generator, count: int) -> list[str] | None:
        """The prefix group of each, or None if they share nothing by chance."""
        if self.prefix_groups is None:
            return None
        weights = np.arange(1, self.prefix_groups + 1, dtype=np.float64) ** -self.prefix_zipf
        drawn = random.choice(self.prefix_groups, count, p=weights / weights.sum())
        return [str(group) for group in drawn]


class Arrivals(SharedPrefixes, ArrivalProcess):
    """``num_prompts`` requests at a pace, with drawn lengths."""

    num_prompts: Count
    """How many requests."""
    prompt_tokens: LengthDistribution
    """Tokens of a prompt: a number or a distribution."""
    output_tokens: LengthDistribution
    """Tokens that a request will emit: a number or a distribution; no scheduler sees this."""
    seed: Seed = 0
    """Of all that is drawn here."""

    def requests(self, timeout: float | None) -> list[Request]:
        """The requests; ``timeout`` (s) is how long their clients wait."""
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


class Sessions(SharedPrefixes, ArrivalProcess):
    """Conversations: each turn's prompt is all that was said before it, and something new.

    Sessions start at a pace; a turn comes ``think_time`` seconds after the answer to the one before
    it. The first prompt is the shared prefix, if there is one, and ``prompt_tokens`` new tokens;
    each later one the prompt before it, the answer to that, and ``prompt_tokens`` new tokens. A
    session ends early where prompt and answer would exceed ``max_model_len``.
    """

    num_sessions: Count
    """How many conversations."""
    turns: LengthDistribution
    """Turns of each: a number or a distribution."""
    prompt_tokens: LengthDistribution
    """New tokens in the prompt of each turn, after all that was said before."""
    output_tokens: LengthDistribution
    """Tokens that each turn will emit; no scheduler sees this."""
    think_time: TimeDistribution = 0.0
    """Seconds from an answer to the next turn: a number or a distribution."""
    max_model_len: Tokens | None = None
    """A session ends before prompt and answer exceed so many tokens."""
    seed: Seed = 0
    """Of all that is drawn here."""

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if sum(self._counts) > MAX_REQUEST_COUNT or max(self._counts) > MAX_TURNS:
            raise ValueError(
                f"at most {MAX_TURNS:,} turns in a session and {MAX_REQUEST_COUNT:,} in all; "
                f"found {max(self._counts):,} and {sum(self._counts):,}"
            )
        return self

    @cached_property
    def _counts(self) -> list[int]:
        """How many turns each session would have if it were not cut."""
        return sample_lengths(self.turns, make_random_stream(self.seed, 1), self.num_sessions)

    @cached_property
    def session_turns(self) -> list[list[tuple[int, int]]]:
        """New prompt tokens and output tokens of every turn of every session."""
        return [self._turns(session, count) for session, count in enumerate(self._counts)]

    def _turns(self, session: int, count: int) -> list[tuple[int, int]]:
        lengths: tuple[tuple[LengthDistribution, LengthField], ...] = (
            (self.prompt_tokens, "prompt_tokens"),
            (self.output_tokens, "output_tokens"),
        )
        prompts, outputs = (
            sample_lengths(
                length, make_random_stream(self.seed, 3 + purpose, session), count, which
            )
            for purpose, (length, which) in enumerate(lengths)
        )
        if self.max_tokens is not None:
            outputs = [min(output, self.max_tokens) for output in outputs]
        turns = list(zip(prompts, outputs, strict=True))
        if self.max_model_len is None:
            return turns
        said = self.prefix_tokens + np.cumsum([prompt + output for prompt, output in turns])
        return turns[: max(int((said <= self.max_model_len).sum()), 1)]

    @property
    def size(self) -> int:
        """Number of requests."""
        return sum(map(len, self.session_turns))

    def requests(self, timeout: float | None) -> tuple[list[Request], dict[int, Dependency]]:
        """The requests, and which of them come so many seconds after the end of which other.

        Numbered by their earliest arrivals: those of turns after the first would come true if every
        answer took no time.
        """
        starts = self.times(make_random_stream(self.seed, 0), self.num_sessions).tolist()
        groups = self.sample_groups(make_random_stream(self.seed, 2), self.num_sessions)
        loras = self.sample_loras(make_random_stream(self.seed, 6), self.num_sessions)
        thinks = [
            sample_times(self.think_time, make_random_stream(self.seed, 5, session), len(turns))
            for session, turns in enumerate(self.session_turns)
        ]
        arrivals = [
            np.cumsum([start, *think[1:]]) for start, think in zip(starts, thinks, strict=True)
        ]
        numbers = iter(np.argsort(np.argsort(np.concatenate(arrivals), kind="stable")).tolist())
        requests: list[Request] = []
        after: dict[int, Dependency] = {}
        for session, turns in enumerate(self.session_turns):
            group = groups[session] if groups else self.prefix_group
            said = [] if group is None else [Segment(f"g{group}", 0, self.prefix_tokens)]
            before = -1
            for turn, (new, output) in enumerate(turns):
                number = next(numbers)
                if turn:
                    after[number] = (before, thinks[session][turn])
                said.append(Segment(f"u{number}", 0, new))
                tokens = sum(end - start for _, start, end in said)
                arrival = float(arrivals[session][turn])
                asked = self.request(
                    number, arrival, tokens, output, timeout, tuple(said), loras[session]
                )
                requests.append(asked)
                said.append(Segment(f"o{number}", 0, output))
                before = number
        return sorted(requests, key=lambda request: request.id), after
