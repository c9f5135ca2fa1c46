"""Requests of clients: the prompt, which schedulers see, and the output, which only the model
knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from simkv.core.draft_acceptance import DraftAcceptance


class Segment(NamedTuple):
    """Tokens ``start`` (inclusive) to ``end`` (exclusive) of a named token stream.

    Two tokens are equal if and only if their stream and their offset are equal. A prompt is a
    sequence of segments; the tokens that request ``i`` emits form the stream ``o<i>``.
    """

    stream: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """The fields of a request that schedulers see.

    ``arrival`` is the engine's timestamp of the request in seconds. ``prompt_tokens`` and
    ``max_tokens`` (the client's limit on output tokens) are token counts. A smaller ``priority`` is
    more urgent, as in vLLM. If ``segments`` is empty, the prompt shares no tokens with other
    prompts. ``lora`` is the name of the requested LoRA adapter, or None for the base model.
    ``routing_key`` is the request's key for SGLang's policy ``routing-key``. ``client`` is the name
    of the client that sends it, for policies that are fair to clients; all requests without a name
    count as one client. ``logprobs_from`` is the index of the first token for which log
    probabilities are requested; -1 means only output tokens, None means no token. ``retention`` is
    the time in seconds for which the client asks to retain the cached KV of the request after its
    end.
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
    client: str | None = None
    retention: float | None = None


@dataclass(frozen=True, slots=True)
class Request(Prompt):
    """A prompt with the real output length, the client's timeout and the draft acceptance.

    ``output_tokens`` is the number of tokens that the model emits. Schedulers accept a ``Prompt``,
    so the type checker prevents them from reading this number. ``timeout`` is the time that the
    client waits for the last token, in seconds after ``arrival``; None means no limit.
    ``acceptance`` determines the draft tokens that the model accepts; None means that it accepts no
    draft.
    """

    output_tokens: int = 1
    timeout: float | None = None
    acceptance: DraftAcceptance | None = None
