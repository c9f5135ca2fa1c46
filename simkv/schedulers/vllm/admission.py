"""What vLLM's API server turns away before the scheduler hears of it, with HTTP 503.

Source: the wheels 0.29.0 to 0.33.0, ``AsyncLLM.check_admission`` (``vllm/v1/engine/async_llm.py``)
and ``vllm/exceptions.py``. A prompt counts whole until its first token, however much of it is
computed or was cached. One server counts all data-parallel ranks that it feeds.
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
    """Why the API server answers 400: a prompt leaves no token of ``max_model_len``
    (``_validate_input`` of ``vllm/entrypoints/openai``)."""
    most = config.max_model_len
    if prompt_tokens < most:
        return None
    compared = ">" if prompt_tokens > most else "="
    return f"prompt {prompt_tokens:,} {compared} max_model_len {most:,}"


def build_admission_check(config: VllmConfig) -> AdmissionCheck | None:
    """What the knobs of a server turn away; None if nothing."""
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
