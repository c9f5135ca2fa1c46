"""How the decisions of an engine are written down: a header, then a line per step (JSON objects).

A header has ``engine``, ``variant``, ``config`` and ``requests``. A line has ``step``,
``scheduled``, ``kind``, ``preempted``, ``ignored``, ``finished`` and the queues in any case; how
they are compared is said in ``simkv.conformance``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import Batch

RecordingLine = dict[str, Any]


def read_queues(scheduler: Any) -> RecordingLine:
    """Who waits, who runs and how many blocks are free."""
    return {
        "waiting": scheduler.waiting_ids(),
        "running": scheduler.running_ids(),
        "free_blocks": scheduler.free_blocks,
    }


def record_decision(scheduler: Any) -> tuple[Batch, RecordingLine]:
    """A ``schedule`` call of an engine whose recordings say nothing more of it."""
    return scheduler.schedule(), {}


def no_extra_fields(_: Any) -> RecordingLine:
    """No more fields."""
    return {}


@dataclass(frozen=True)
class TickFormat:
    """How threads that run side by side are recorded: a line per tick of the engine's thread.

    ``read_queues`` of what they share, a ``task`` as it is put, a ``token`` as it is sent.
    """

    queues: Callable[[Any], RecordingLine]
    task: Callable[[Any], list[Any]]
    token: Callable[[int], int]


@dataclass(frozen=True)
class RecordingFormat:
    """What the recordings of one engine look like.

    To replay one: ``config`` of its header and ``prompt`` of a request in it. To write one:
    ``knobs`` of a config and what else the engine is ``shown`` of a request.

    ``read_queues`` are read when a step is over, or with ``at_once`` right after the decision.
    ``record_decision`` makes a decision and tells what else is recorded of it, ``left`` what is
    recorded at the end of the step. ``crash_line``: there is a line for a batch that kills the
    engine. ``drains``: with batches under way a recording ends not with the last request but with
    the first step from there on that launches nothing. ``heeds_aborts``: a request whose client has
    gone leaves the engine.
    """

    config: Callable[[RecordingLine], Any]
    prompt: Callable[[RecordingLine], Prompt]
    knobs: Callable[[Any], RecordingLine]
    shown: Callable[[Prompt], RecordingLine]
    queues: Callable[[Any], RecordingLine] = read_queues
    reads_queues_early: bool = False
    decide: Callable[[Any], tuple[Batch, RecordingLine]] = record_decision
    left: Callable[[Any], RecordingLine] = no_extra_fields
    crash_line: bool = False
    drains: bool = False
    handles_aborts: bool = True
    ticks: TickFormat | None = None
