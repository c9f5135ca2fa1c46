"""Decisions of vLLM that a custom policy can replace (see ``simkv.core.policy_language``)."""

from __future__ import annotations

from simkv.core.policy_language import PolicyHook

POLICY_HOOKS = (
    PolicyHook(
        "waiting_order",
        "order",
        "the waiting queue has this order, smallest value first",
        "by arrival; preempted requests first",
    ),
    PolicyHook(
        "admit",
        "test",
        "while requests run, the head of the queue is admitted only if this is above 0",
        "always",
    ),
    PolicyHook(
        "victim",
        "order",
        "if blocks run out, the running request with the largest value is preempted",
        "the last admitted request",
    ),
    PolicyHook(
        "chunk",
        "tokens",
        "maximum number of prompt tokens per request and step; no limit if not above 0",
        "long_prefill_token_threshold",
    ),
)
