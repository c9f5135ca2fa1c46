"""What a client sends: the part an engine may see, and the part only the model knows."""

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
    """The visible half of a request: all that a scheduler is ever told.

    ``arrival`` is the engine's timestamp of the request in seconds, ``prompt_tokens`` and
    ``max_tokens`` (the client's limit on emitted tokens) are token counts. A smaller ``priority``
    is more urgent, as in vLLM. Empty ``segments`` mean a prompt that shares nothing. ``lora`` names
    the adapter that is to answer, None is the model without one. ``routing_key`` says to whom the
    request belongs. Log probabilities are asked for of the tokens from ``logprobs_from`` on, -1 is
    of outputs alone, None of none.
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
    """A prompt and what will come of it.

    ``output_tokens`` is how many tokens the model really emits; schedulers take a ``Prompt`` and
    so cannot read it (the type checker holds them to that). ``timeout`` is how long the client
    waits for the last token, in seconds after ``arrival``; ``None`` waits for ever. ``acceptance``
    tells what becomes of drafts, where the engine has any; without it none is accepted.
    """

    output_tokens: int = 1
    timeout: float | None = None
    acceptance: DraftAcceptance | None = None
