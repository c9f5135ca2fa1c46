"""Client requests: the prompt that schedulers see, and the output that only the model knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from simkv.core.draft_acceptance import DraftAcceptance


class Segment(NamedTuple):
    """Tokens ``start`` (inclusive) to ``end`` (exclusive) of a named token stream.

    Two tokens are equal if and only if their stream and their offset are equal. A prompt is a
    concatenation of segments; the tokens that request ``i`` emits are the stream ``o<i>``.
    """

    stream: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """The part of a request that schedulers see.

    ``arrival`` is the engine's timestamp of the request in seconds. ``prompt_tokens`` and
    ``max_tokens`` (the client's limit on emitted tokens) are token counts. A smaller ``priority``
    is more urgent, as in vLLM. Empty ``segments`` mean a prompt that shares no tokens with others.
    ``lora`` is the name of the requested LoRA adapter; None is the base model. ``routing_key``
    identifies the owner of the request. ``logprobs_from`` is the first token for which log
    probabilities are requested: -1 requests them for output tokens only, None for no token.
    """

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


@dataclass(frozen=True, slots=True)
class Request(Prompt):
    """A prompt with its real output length, its client's timeout and its draft acceptance.

    ``output_tokens`` is the number of tokens that the model emits. Schedulers take a ``Prompt``, so
    the type checker prevents them from reading it. ``timeout`` is how long the client waits for the
    last token, in seconds after ``arrival``; None means without limit. ``acceptance`` decides which
    draft tokens the model accepts; None accepts none.
    """

    output_tokens: int = 1
    timeout: float | None = None
    acceptance: DraftAcceptance | None = None
