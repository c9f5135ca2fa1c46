"""The decisions of mistral.rs that a rule may take (see ``simkv.core.rule``)."""

from __future__ import annotations

from simkv.core.rule import Seam

SEAMS = (
    Seam(
        "waiting_order",
        "order",
        "the queue is sorted by this before it is looked at",
        "as they came; whoever was preempted stands at the front",
    ),
    Seam(
        "admit",
        "test",
        "while somebody runs, the head of the queue is taken in only where this is above 0",
        "always",
    ),
    Seam(
        "running_order",
        "order",
        "those who decode get their blocks in this order, and the last lose theirs",
        "by arrival",
    ),
    Seam("alike", "group", "those for whom this is equal may decode in one step", "equal tokens"),
    Seam(
        "turn",
        "order",
        "of groups that cannot run in one step the one with the smallest of this runs",
        "the shortest",
    ),
    Seam(
        "keep",
        "test",
        "whoever sits out because of its group keeps its blocks where this is above 0",
        "all lose theirs",
    ),
)
#: Those that say which decodes run in one step; one that is not given is as ``bucketed`` has it.
GROUPING = {"alike": "tokens", "turn": "tokens", "keep": "0"}
#: Variants that have no such seams: their decisions have another shape.
WITHOUT = ("seed", "pr2034july")
