"""Selection of the requests in a step: TensorRT-LLM's ``PyMicroBatchScheduler``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simkv.schedulers.trtllm.config import TrtllmConfig
from simkv.schedulers.trtllm.llm_request import LlmRequest


class ContextTooLong(Exception):
    """Raised if a prompt exceeds the token limit of a step and cannot be chunked."""

    # An assertion of TensorRT-LLM fails in this case.


class MicroBatch(NamedTuple):
    """Requests of a step: ``contexts`` prefill and ``generations`` decode."""

    contexts: list[LlmRequest]
    generations: list[LlmRequest]


def schedule_micro_batch(fits: Sequence[LlmRequest], config: TrtllmConfig) -> MicroBatch:
    """Add requests to the step in order, until the token limit of the step is reached.

    The first request that exceeds the limit blocks all later ones. Chunked prompts share the
    remaining tokens. Raises ContextTooLong if an unchunked prompt exceeds the limit by itself.
    """
    # Requests whose last token is in flight are not scheduled.
    batch, chunked, size = MicroBatch([], []), list[LlmRequest](), 0
    left = config.max_num_tokens
    for r in fits:
        if r.state == "to complete":
            continue
        if r.state == "context" and config.enable_chunked_prefill:
            r.chunk = r.remaining
            chunked.append(r)
        else:
            tokens = _whole(r, config.max_num_tokens)
            if tokens > left:
                break
            (batch.contexts if r.state == "context" else batch.generations).append(r)
            left -= tokens
        size += 1
        if size >= config.max_batch_size:
            break
    cut = sum(r.chunk for r in chunked) > left
    if cut:
        share(chunked, left, config)
    batch.contexts.extend(r for r in chunked if r.chunk)
    if cut:
        batch.contexts.sort(key=lambda r: r.last_chunk)
    return batch


def _whole(r: LlmRequest, most: int) -> int:
    """Return the number of tokens that a request computes in a step without chunking."""
    if r.state != "context":
        return 1
    if r.known > most:
        raise ContextTooLong(f"Context tokens ({r.known}) exceeds limit ({most})")
    r.chunk = r.remaining
    return r.chunk


def share(chunked: Sequence[LlmRequest], left: int, config: TrtllmConfig) -> None:
    """Limit the chunks of the prompts ``chunked`` to ``left`` tokens in total.

    A chunk that does not end its prompt contains only whole blocks.
    """
    unit = config.tokens_per_block
    for r in chunked:
        r.chunk = 0
    if config.context_chunking_policy == "EQUAL_PROGRESS":
        _by_turns(chunked, left, unit)
        return
    for r in chunked:
        tokens = min(r.remaining, left)
        r.chunk = tokens if tokens == r.remaining else tokens // unit * unit
        left -= r.chunk


def _by_turns(chunked: Sequence[LlmRequest], left: int, unit: int) -> None:
    """Give each prompt one more block in turn until the tokens are used up."""
    given = True
    while left > 0 and given:
        given = False
        for r in chunked:
            more = min(unit, r.remaining - r.chunk)
            if 0 < more <= left:
                r.chunk += more
                left -= more
                given = True
