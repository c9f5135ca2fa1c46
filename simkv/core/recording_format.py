"""The format of recorded decisions: a header, then one JSON object per step.

The header has ``engine``, ``variant``, ``config`` and ``requests``. The object of a step always has
``step``, ``scheduled``, ``kind``, ``preempted``, ``ignored``, ``finished`` and the queues.
``simkv.conformance`` documents how recordings are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simkv.core.request import Prompt, Request
from simkv.core.scheduler_protocol import Batch

RecordingLine = dict[str, Any]


def read_queues(scheduler: Any) -> RecordingLine:
    """Return the ids of waiting and running requests and the number of free blocks."""
    return {
        "waiting": scheduler.waiting_ids(),
        "running": scheduler.running_ids(),
        "free_blocks": scheduler.free_blocks,
    }


def record_decision(scheduler: Any) -> tuple[Batch, RecordingLine]:
    """Call ``scheduler.schedule()``; return the batch, and an empty mapping because no extra
    fields are recorded.
    """
    return scheduler.schedule(), {}


def no_extra_fields(_: Any) -> RecordingLine:
    """Return an empty mapping, for an engine whose recordings have no extra fields."""
    return {}


@dataclass(frozen=True)
class TickFormat:
    """The recording format of an engine with concurrent threads; it has one line per tick, an
    iteration of the scheduler's thread.

    ``queues`` reads the state shared by the threads. ``task`` converts a task when the scheduler
    queues it, and ``token`` converts a token when it is sent.
    """

    queues: Callable[[Any], RecordingLine]
    task: Callable[[Any], list[Any]]
    token: Callable[[int], int]


@dataclass(frozen=True)
class RecordingFormat:
    """The recording format of one engine.

    For replay, ``config`` reads the config in the header, and ``prompt`` reads a request in the
    header. For recording, ``knobs`` returns the settings of a config, and ``shown`` returns the
    other fields of a request that are visible to the engine.

    ``queues`` reads the queues at the end of a step, or right after the decision if
    ``reads_queues_early`` is True. ``decide`` makes a decision and returns extra fields to record;
    ``left`` returns extra fields at the end of the step.

    ``crash_line`` is True if a recording has a line for a batch that crashes the engine. If
    ``drains`` is True and several batches can be in flight, a recording continues after the last
    request has ended, up to the first step that schedules nothing. ``handles_aborts`` is True if a
    request leaves the engine when its client disconnects.
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

    def request_line(self, request: Request, step: int) -> RecordingLine:
        """Return the recorded fields of a request that arrives before ``step``."""
        return {
            "id": request.id,
            "arrival_step": step,
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": request.output_tokens,
            **self.shown(request),
        }
