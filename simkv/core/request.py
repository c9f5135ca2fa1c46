"""Requests of clients: the prompt, and the output length that schedulers cannot see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from simkv.core.draft_acceptance import DraftAcceptance


class Segment(NamedTuple):
    """Tokens ``start`` to ``end`` (exclusive) of a token stream.

    Two tokens are equal if they have the same stream and the same offset in it. The output of
    request ``i`` is the stream ``o<i>``.
    """

    stream: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """Fields of a request that schedulers can see.

    - ``arrival``: timestamp in seconds.
    - ``max_tokens``: client's limit on output tokens.
    - ``priority``: smaller values are more urgent, as in vLLM.
    - ``segments``: tokens of the prompt. Without segments, the prompt shares no tokens with others.
    - ``lora``: LoRA adapter; None for the base model.
    - ``routing_key``: key for SGLang's policy ``routing-key``.
    - ``logprobs_from``: index of the first token whose log probability is requested; -1 for output
      tokens only.
    - ``client``: name of the client, for policies that are fair to clients.
    - ``retention``: seconds for which the cached KV is retained after the end of the request.
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
    """A request, including the fields that schedulers cannot see.

    - ``output_tokens``: number of tokens that the model emits.
    - ``timeout``: time in seconds, from ``arrival`` on, for which the client waits for the last
      token; None for no limit.
    - ``acceptance``: sampler of accepted draft tokens; None if none are accepted.
    """

    # Schedulers accept a ``Prompt``, so the type checker prevents them from reading these fields.

    output_tokens: int = 1
    timeout: float | None = None
    acceptance: DraftAcceptance | None = None
