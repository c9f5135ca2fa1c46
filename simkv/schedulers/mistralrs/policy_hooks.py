"""Decisions of mistral.rs that a custom policy may replace (see ``simkv.core.policy_language``)."""

from __future__ import annotations

from simkv.core.policy_language import PolicyHook

POLICY_HOOKS = (
    PolicyHook(
        "waiting_order",
        "order",
        "the queue is sorted by this before each admission, smallest value first",
        "by arrival; preempted requests first",
    ),
    PolicyHook(
        "admit",
        "test",
        "while requests run, the head of the queue is admitted only if this is above 0",
        "always",
    ),
    PolicyHook(
        "running_order",
        "order",
        "decoding requests get blocks in this order; the last are preempted",
        "by arrival",
    ),
    PolicyHook(
        "alike", "group", "requests with equal values may decode in the same step", "equal tokens"
    ),
    PolicyHook(
        "turn",
        "order",
        "of groups that cannot decode in the same step, the one with the smallest value runs",
        "the shortest",
    ),
    PolicyHook(
        "keep",
        "test",
        "a request whose group does not run keeps its blocks if this is above 0",
        "all are preempted",
    ),
)
#: Default expressions of the hooks that group decodes into steps; they equal the rules of
#: ``bucketed``.
GROUPING_DEFAULTS = {"alike": "tokens", "turn": "tokens", "keep": "0"}
#: Variants without these hooks, because their scheduling code has a different structure.
VARIANTS_WITHOUT_HOOKS = ("seed", "pr2034july")
