# mypyc: compile
"""Requests that vLLM's API server rejects with an HTTP error before the scheduler sees them.

Source of the queue limits (HTTP 503): ``AsyncLLM.check_admission``
(``vllm/v1/engine/async_llm.py``) and ``vllm/exceptions.py`` of the releases since 0.29.0. All
tokens of a prompt count towards the limit until its first output token, including computed and
cached tokens. A server with several data-parallel ranks adds up the requests of all ranks.
"""

from __future__ import annotations

from simkv.core.engine_spec import AdmissionCheck
from simkv.core.scheduler_protocol import Refusal
from simkv.schedulers.vllm.config import VllmConfig

BUSY = Refusal(
    "max_num_queued_reqs",
    "The engine is currently busy and cannot accept new requests. "
    "Please try again later or on a different instance.",
)
BACKLOG = Refusal(
    "max_num_queued_tokens",
    "The engine has reached its prefill token backlog limit. "
    "Please try again later or on a different instance.",
)


def too_long(config: VllmConfig, prompt_tokens: int) -> str | None:
    """Return why the server rejects a prompt with HTTP 400, or None if it accepts the prompt.

    Source: ``_validate_input`` of ``vllm/entrypoints/openai``.
    """
    most = config.max_model_len
    if prompt_tokens < most:
        return None
    compared = ">" if prompt_tokens > most else "="
    return f"prompt {prompt_tokens:,} {compared} max_model_len {most:,}"


def build_admission_check(config: VllmConfig) -> AdmissionCheck | None:
    """Build the check for the queue limits of a server, or return None if there are no limits."""
    most, most_tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
    if most is None and most_tokens is None:
        return None

    def check(unfinished: int, in_prefill: int) -> Refusal | None:
        if most is not None and unfinished >= most:
            return BUSY
        if most_tokens is not None and in_prefill >= most_tokens:
            return BACKLOG
        return None

    return check
