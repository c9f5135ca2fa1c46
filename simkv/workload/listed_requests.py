"""Requests that a scenario lists one by one, or as bursts of equal requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from simkv.core.draft_acceptance import DraftAcceptance
from simkv.core.request import Request, Segment
from simkv.core.scheduler_protocol import blocks_for
from simkv.workload.workload_base import (
    MAX_REQUEST_COUNT,
    MAX_SECONDS,
    MAX_TOKEN_COUNT,
    AcceptanceRates,
    Count,
    Seed,
    StrictModel,
    Time,
    Tokens,
)


class RequestFields(StrictModel):
    """Fields common to all kinds of requests in a scenario."""

    max_tokens: Tokens | None = None
    """Maximum number of output tokens that the client requests (default: the output length)."""
    priority: int = 0
    """Priority; smaller values are more urgent. It has an effect only if the scheduling policy of
    the engine uses priorities."""
    has_images: bool = False
    """Whether the prompt has images; mistral.rs batches such requests separately."""
    ignore_eos: bool = False
    """Whether the client asks to continue generation past the end-of-sequence token."""
    lora: Annotated[str, Field(min_length=1)] | None = None
    """Name of the LoRA adapter (default: the base model)."""
    routing_key: Annotated[str, Field(min_length=1)] | None = None
    """Routing key; SGLang's policy ``routing-key`` prefers keys common among running requests."""
    client: Annotated[str, Field(min_length=1)] | None = None
    """Name of the client, for the policy ``vtc`` of vLLM and SGLang, which is fair to clients;
    requests without a name belong to one client."""
    logprobs_from: Annotated[int, Field(ge=-1)] | None = None
    """Index of the first token for which the client requests log probabilities (-1: output tokens
    only). SGLang then runs no mixed batches, and reuses cached tokens only before this index."""
    retention: Annotated[float, Field(gt=0, le=MAX_SECONDS)] | None = None
    """Seconds for which the client asks to retain the cached KV of a request after its end, for
    engines with ``request_retention``. In ``sessions``, only requests whose prompt a later turn
    repeats ask for it."""
    prefix_group: Annotated[
        str | None,
        Field(description="Name of a group. All requests of the group start with the same tokens."),
    ] = None
    prefix_tokens: Annotated[
        int,
        Field(
            ge=0,
            le=MAX_TOKEN_COUNT,
            description="Number of leading tokens that the requests of the group share. Shorter "
            "prompts consist of shared tokens only.",
        ),
    ] = 0

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self.check_prefix()
        return self

    def check_prefix(self) -> None:
        """Raise ValueError if the fields for shared tokens contradict each other."""
        if (self.prefix_group is None) != (self.prefix_tokens == 0):
            raise ValueError("prefix_group and prefix_tokens must be set together")

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
        """Build the request with the id ``number``.

        ``segments`` describes a prompt that shares tokens with others.
        """
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
            client=self.client,
            logprobs_from=self.logprobs_from,
            retention=self.retention,
            output_tokens=min(output, self.max_tokens or output),
            timeout=timeout,
            acceptance=acceptance,
        )


def make_acceptance(rates: AcceptanceRates | None, seed: int) -> DraftAcceptance | None:
    """Build the draft acceptance of a request, or None without rates."""
    if rates is None:
        return None
    return DraftAcceptance(tuple(rates) if isinstance(rates, list) else rates, seed)


def acceptance_fields(request: Request) -> dict[str, Any]:
    """Return the draft acceptance of ``request`` as fields of a listed request."""
    if request.acceptance is None:
        return {}
    rates, seed = request.acceptance.rates, request.acceptance.seed
    told = list(rates) if isinstance(rates, tuple) else rates
    return {"acceptance": told, "acceptance_seed": seed}


def shared_prefix(group: str, tokens: int, number: int, prompt: int) -> tuple[Segment, ...]:
    """Return the segments of a prompt. Its first ``tokens`` tokens are shared by its group."""
    shared = min(tokens, prompt)
    return Segment(f"g{group}", 0, shared), Segment(f"u{number}", 0, prompt - shared)


def hashed_prompt(hash_ids: Sequence[int], block: int, prompt: int) -> tuple[Segment, ...]:
    """Return the segments of a prompt: one per block.

    ``hash_ids`` identify the blocks. ``block`` is the number of tokens per block.
    """
    return tuple(
        Segment(f"h{name}", 0, min(block, prompt - index * block))
        for index, name in enumerate(hash_ids)
    )


class ListedRequest(RequestFields):
    """A single request.

    ``prefix_group``, ``hash_ids`` or ``segments`` identify the tokens that the prompt shares with
    other prompts. A request with ``wait_for`` is a turn of a session and has no ``arrival``.
    """

    arrival: Time = 0.0
    """Time in seconds at which the client sends the request."""
    prompt_tokens: Tokens
    """Prompt length in tokens."""
    output_tokens: Tokens
    """Output length in tokens. The scheduler does not see it."""
    wait_for: Annotated[list[Annotated[int, Field(ge=0)]] | None, Field(min_length=1)] = None
    """Numbers of the earlier requests whose answers the request waits for; the first request of the
    list has the number 0."""
    think_time: Time = 0.0
    """Seconds from the last of these answers to the request."""
    tool_time: Time = 0.0
    """Seconds of tool calls before the request, in addition to ``think_time``."""
    first_wins: bool = False
    """Whether the request waits only for the first of these answers. The other requests are
    cancelled at that time."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Client timeout in seconds (default: the timeout of the scenario)."""
    acceptance: AcceptanceRates | None = None
    """Acceptance rate of draft tokens (default: the rate of the workload)."""
    acceptance_seed: Seed | None = None
    """Random seed for the number of accepted draft tokens (default: the id of the request)."""
    hash_ids: Annotated[
        list[int] | None,
        Field(description="One id per block of the prompt, as in Mooncake traces."),
    ] = None
    hash_block_size: Annotated[
        int, Field(gt=0, le=MAX_TOKEN_COUNT, description="Tokens per block of hash_ids.")
    ] = 512
    segments: Annotated[
        list[Annotated[tuple[str, int, int], Field(strict=False)]] | None,
        Field(
            description="The prompt as pieces [stream, start, end) of token streams. Stream u<i> "
            "is the prompt of request i, and stream o<i> is its output. Any other "
            "name is a separate stream."
        ),
    ] = None

    @model_validator(mode="after")
    def _waits(self) -> Self:
        given = [name for name in ("think_time", "tool_time", "first_wins") if getattr(self, name)]
        if self.wait_for is None and given:
            raise ValueError(f"{given[0]} requires wait_for")
        if self.wait_for is not None and self.arrival:
            raise ValueError("set at most one of arrival and wait_for")
        return self

    def check_prefix(self) -> None:
        super().check_prefix()
        names = ("prefix_group", "hash_ids", "segments")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"set at most one of {', '.join(names)}; found {' and '.join(given)}")
        blocks = blocks_for(self.prompt_tokens, self.hash_block_size)
        if self.hash_ids is not None and len(self.hash_ids) != blocks:
            raise ValueError(
                f"hash_ids: {self.prompt_tokens} tokens require {blocks} blocks of "
                f"{self.hash_block_size}; found {len(self.hash_ids)} ids"
            )
        for stream, start, end in self.segments or ():
            if not 0 <= start < end:
                raise ValueError(
                    f"segments: must satisfy 0 <= start < end; found {[stream, start, end]}"
                )
        total = sum(end - start for _, start, end in self.segments or ())
        if self.segments is not None and total != self.prompt_tokens:
            raise ValueError(
                f"segments: must add up to prompt_tokens ({self.prompt_tokens}), got {total}"
            )

    @property
    def prompt(self) -> tuple[Segment, ...]:
        """Prompt as segments from ``hash_ids`` or ``segments``."""
        if self.hash_ids is not None:
            return hashed_prompt(self.hash_ids, self.hash_block_size, self.prompt_tokens)
        return tuple(Segment(*piece) for piece in self.segments or ())


class Burst(RequestFields):
    """Bursts of equal requests.

    Each burst has ``num_prompts`` requests, ``interval`` seconds apart. A burst starts every
    ``every`` seconds.
    """

    num_prompts: Count
    """Requests per burst."""
    prompt_tokens: Tokens
    """Prompt length in tokens."""
    output_tokens: Tokens
    """Output length in tokens. The scheduler does not see it."""
    interval: Time = 0.0
    """Seconds between the requests of a burst."""
    bursts: Count = 1
    """Number of bursts."""
    every: Time = 0.0
    """Seconds between the starts of successive bursts."""

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if self.size > MAX_REQUEST_COUNT:
            raise ValueError(
                f"too many requests: at most {MAX_REQUEST_COUNT:,}; found {self.size:,}"
            )
        return self

    @property
    def size(self) -> int:
        """Number of requests."""
        return self.num_prompts * self.bursts

    def requests(self, timeout: float | None) -> list[Request]:
        """Return the requests. ``timeout`` (s) is the timeout of the clients."""
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
