"""How the decisions of an engine are written down: a header, then a line per step (JSON objects).

A header has ``engine``, ``variant``, ``config`` and ``requests``. A line has ``step``,
``scheduled``, ``kind``, ``preempted``, ``ignored``, ``finished`` and the queues in any case; how
they are compared is said in ``simkv.proof.conform``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simkv.core.request import Prompt
from simkv.core.scheduler import Batch

Line = dict[str, Any]


def queues(scheduler: Any) -> Line:
    """Who waits, who runs and how many blocks are free."""
    return {
        "waiting": scheduler.waiting_ids(),
        "running": scheduler.running_ids(),
        "free_blocks": scheduler.free_blocks,
    }


def decide(scheduler: Any) -> tuple[Batch, Line]:
    """A ``schedule`` call of an engine whose recordings say nothing more of it."""
    return scheduler.schedule(), {}


def nothing(_: Any) -> Line:
    """No more fields."""
    return {}


@dataclass(frozen=True)
class TickLines:
    """How threads that run side by side are recorded: a line per tick of the engine's thread.

    ``queues`` of what they share, a ``task`` as it is put, a ``token`` as it is sent.
    """

    queues: Callable[[Any], Line]
    task: Callable[[Any], list[Any]]
    token: Callable[[int], int]


@dataclass(frozen=True)
class Recording:
    """What the recordings of one engine look like.

    To replay one: ``config`` of its header and ``prompt`` of a request in it. To write one:
    ``knobs`` of a config and what else the engine is ``shown`` of a request.

    ``queues`` are read when a step is over, or with ``at_once`` right after the decision.
    ``decide`` makes a decision and tells what else is recorded of it, ``left`` what is recorded
    at the end of the step. ``crash_line``: there is a line for a batch that kills the engine.
    ``drains``: with batches under way a recording ends not with the last request but with the
    first step from there on that launches nothing. ``heeds_aborts``: a request whose client has
    gone leaves the engine.
    """

    config: Callable[[Line], Any]
    prompt: Callable[[Line], Prompt]
    knobs: Callable[[Any], Line]
    shown: Callable[[Prompt], Line]
    queues: Callable[[Any], Line] = queues
    at_once: bool = False
    decide: Callable[[Any], tuple[Batch, Line]] = decide
    left: Callable[[Any], Line] = nothing
    crash_line: bool = False
    drains: bool = False
    heeds_aborts: bool = True
    ticks: TickLines | None = None
