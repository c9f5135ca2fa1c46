"""Decisions of mistral.rs that a custom policy may replace (see ``simkv.core.policy_language``)."""

from __future__ import annotations

from simkv.core.policy_language import PolicyHook

POLICY_HOOKS = (
    PolicyHook(
        "waiting_order",
        "order",
        "the queue is sorted by this before it is looked at",
        "as they came; whoever was preempted stands at the front",
    ),
    PolicyHook(
        "admit",
        "test",
        "while somebody runs, the head of the queue is taken in only where this is above 0",
        "always",
    ),
    PolicyHook(
        "running_order",
        "order",
        "those who decode get their blocks in this order, and the last lose theirs",
        "by arrival",
    ),
    PolicyHook(
        "alike", "group", "those for whom this is equal may decode in one step", "equal tokens"
    ),
    PolicyHook(
        "turn",
        "order",
        "of groups that cannot run in one step the one with the smallest of this runs",
        "the shortest",
    ),
    PolicyHook(
        "keep",
        "test",
        "whoever sits out because of its group keeps its blocks where this is above 0",
        "all lose theirs",
    ),
)
#: Defaults of the hooks that group decodes into steps: the rules of ``bucketed``.
GROUPING_DEFAULTS = {"alike": "tokens", "turn": "tokens", "keep": "0"}
#: Variants without these hooks, because their decisions are structured differently.
VARIANTS_WITHOUT_HOOKS = ("seed", "pr2034july")
