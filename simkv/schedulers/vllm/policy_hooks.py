"""Decisions of vLLM that a custom policy can replace (see ``simkv.core.policy_language``)."""

from __future__ import annotations

from simkv.core.policy_language import PolicyHook

POLICY_HOOKS = (
    PolicyHook(
        "waiting_order",
        "order",
        "the queue is in this order",
        "as they came; whoever was preempted stands at the front",
    ),
    PolicyHook(
        "admit",
        "test",
        "while somebody runs, the head of the queue is taken in only where this is above 0",
        "always",
    ),
    PolicyHook(
        "victim",
        "order",
        "where blocks run out, who has the largest of this loses its own",
        "the last that was taken in",
    ),
    PolicyHook(
        "chunk",
        "tokens",
        "a request gets at most so many prompt tokens in a step, any number if not above 0",
        "long_prefill_token_threshold",
    ),
)
