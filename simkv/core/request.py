"""Requests of clients: the prompt, and the output length that schedulers cannot see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from simkv.core.draft_acceptance import DraftAcceptance


class Segment(NamedTuple):
    """Tokens ``start`` to ``end`` (exclusive) of a token stream.

    Tokens are equal if their stream and offset are equal. The output of request ``i`` is the stream
    ``o<i>``.
    """

    stream: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """Fields of a request that schedulers can see.

    - ``arrival``: timestamp in seconds.
    - ``max_tokens``: client's limit on output tokens.
    - ``priority``: smaller is more urgent, as in vLLM.
    - ``segments``: tokens of the prompt. Without segments, the prompt shares no tokens with others.
    - ``lora``: LoRA adapter; None for the base model.
    - ``routing_key``: key for SGLang's policy ``routing-key``.
    - ``logprobs_from``: first token with log probabilities; -1 for output tokens only.
    - ``client``: client of the request, for policies that are fair to clients.
    - ``retention``: seconds to retain the cached KV after the end of the request.
    """

    # All requests without a client count as one client.

    id: int
    prompt_tokens: int
    max_tokens: int
    arrival: float = 0.0
    priority: int = 0
    has_images: bool = False
    ignore_eos: bool = False
    segments: tuple[Segment, ...] = ()
    lora: str | None = None
    routing_key: str | None = None
    logprobs_from: int | None = None
    client: str | None = None
    retention: float | None = None


@dataclass(frozen=True, slots=True)
class Request(Prompt):
    """Prompt with the fields that schedulers cannot see.

    - ``output_tokens``: number of tokens that the model emits.
    - ``timeout``: seconds after ``arrival`` that the client waits for the last token; None for no
      limit.
    - ``acceptance``: sampler of accepted draft tokens; None if none are accepted.
    """

    # Schedulers accept a ``Prompt``, so the type checker prevents them from reading these fields.

    output_tokens: int = 1
    timeout: float | None = None
    acceptance: DraftAcceptance | None = None
