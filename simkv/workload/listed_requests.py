"""Requests that a scenario spells out: listed one by one, or bursts of equal ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from simkv.core.draft_acceptance import DraftAcceptance
from simkv.core.request import Request, Segment
from simkv.core.scheduler_protocol import blocks_for
from simkv.workload.workload_base import (
    MAX_REQUEST_COUNT,
    MAX_TOKEN_COUNT,
    AcceptanceRates,
    Count,
    Seed,
    StrictModel,
    Time,
    Tokens,
)


class RequestFields(StrictModel):
    """What is common to the ways of describing requests.

    ``max_tokens`` is the limit that the client asks for; by default what will be emitted.
    """

    max_tokens: Tokens | None = None
    """Most output tokens, as the client asks for them; by default what will come."""
    priority: int = 0
    """Smaller is more urgent, where the engine's policy heeds it."""
    has_images: bool = False
    """Whether the prompt has images; mistral.rs batches such requests apart."""
    ignore_eos: bool = False
    """Whether the client asks that generation goes on past the end of text."""
    lora: Annotated[str, Field(min_length=1)] | None = None
    """Name of the LoRA adapter that is to answer; left out, the model without one."""
    routing_key: Annotated[str, Field(min_length=1)] | None = None
    """To whom it belongs; SGLang's policy routing-key keeps such requests together."""
    logprobs_from: Annotated[int, Field(ge=-1)] | None = None
    """Log probabilities are asked for from this token on (-1: of outputs alone); SGLang then mixes
    no batch, and takes no more than that of the cache."""
    prefix_group: Annotated[
        str | None, Field(description="Requests of one group begin with the same tokens.")
    ] = None
    prefix_tokens: Annotated[
        int, Field(ge=0, le=MAX_TOKEN_COUNT, description="How many; a shorter prompt has them all.")
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
        lora: str | None = None,
        acceptance: DraftAcceptance | None = None,
    ) -> Request:
        """Request ``number`` of this shape; ``segments`` are its prompt's if it shares any."""
        if self.prefix_group is not None and not segments:
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
            lora=lora or self.lora,
            routing_key=self.routing_key,
            logprobs_from=self.logprobs_from,
            output_tokens=min(output, self.max_tokens or output),
            timeout=timeout,
            acceptance=acceptance,
        )


def make_acceptance(rates: AcceptanceRates | None, seed: int) -> DraftAcceptance | None:
    """What a request with these rates does with drafts; None if nothing is said."""
    if rates is None:
        return None
    return DraftAcceptance(tuple(rates) if isinstance(rates, list) else rates, seed)


def acceptance_fields(request: Request) -> dict[str, Any]:
    """The fields of a listed request that does the same with drafts."""
    if request.acceptance is None:
        return {}
    rates, seed = request.acceptance.rates, request.acceptance.seed
    told = list(rates) if isinstance(rates, tuple) else rates
    return {"acceptance": told, "acceptance_seed": seed}


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


class ListedRequest(RequestFields):
    """One request: ``arrival`` and ``timeout`` in seconds.

    What its prompt shares with others is told by ``prefix_group``, ``hash_ids`` or ``segments``;
    without any of them it shares nothing.
    """

    arrival: Time = 0.0
    """When the request is sent (s)."""
    prompt_tokens: Tokens
    """Tokens of its prompt."""
    output_tokens: Tokens
    """Tokens that it will emit; no scheduler sees this."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds after which its client gives up, if not the scenario's."""
    acceptance: AcceptanceRates | None = None
    """Share of its drafts that the model accepts, if not the workload's."""
    acceptance_seed: Seed | None = None
    """Of the draw of how many; left out, its number."""
    hash_ids: Annotated[
        list[int] | None,
        Field(description="A name for each block of the prompt, as in Mooncake traces."),
    ] = None
    hash_block_size: Annotated[
        int, Field(gt=0, le=MAX_TOKEN_COUNT, description="Tokens in a block of hash_ids.")
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


class Burst(RequestFields):
    """``num_prompts`` equal requests, ``interval`` seconds apart; ``bursts`` times, ``every`` s."""

    num_prompts: Count
    """Requests in a burst."""
    prompt_tokens: Tokens
    """Tokens of each prompt."""
    output_tokens: Tokens
    """Tokens that each will emit; no scheduler sees this."""
    interval: Time = 0.0
    """Seconds from one request of a burst to the next."""
    bursts: Count = 1
    """How many bursts."""
    every: Time = 0.0
    """Seconds from the start of a burst to that of the next."""

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if self.size > MAX_REQUEST_COUNT:
            raise ValueError(f"at most {MAX_REQUEST_COUNT:,} requests; found {self.size:,}")
        return self

    @property
    def size(self) -> int:
        """Number of requests."""
        return self.num_prompts * self.bursts

    def requests(self, timeout: float | None) -> list[Request]:
        """The requests; ``timeout`` (s) is how long their clients wait."""
        return [
            self.request(
                number,
                number // self.num_prompts * self.every + number % self.num_prompts * self.interval,
                self.prompt_tokens,
                self.output_tokens,
                timeout,
            )
            for number in range(self.size)
        ]
