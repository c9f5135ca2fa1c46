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
    """Return the queues and the free memory of a scheduler.

    The result contains the ids of waiting and running requests, and the number of free blocks.
    """
    return {
        "waiting": scheduler.waiting_ids(),
        "running": scheduler.running_ids(),
        "free_blocks": scheduler.free_blocks,
    }


def record_decision(scheduler: Any) -> tuple[Batch, RecordingLine]:
    """Call ``schedule`` and return its batch. No extra fields are recorded."""
    return scheduler.schedule(), {}


def no_extra_fields(_: Any) -> RecordingLine:
    """Return an empty mapping. For recordings without extra fields."""
    return {}


@dataclass(frozen=True)
class TickFormat:
    """Recording format of an engine with threads.

    Each iteration of the scheduler's thread has one line.

    - ``queues``: reads the state that the threads share.
    - ``task``: converts a task that the scheduler queues.
    - ``token``: converts a token that the worker sends.
    """

    queues: Callable[[Any], RecordingLine]
    task: Callable[[Any], list[Any]]
    token: Callable[[int], int]


@dataclass(frozen=True)
class RecordingFormat:
    """Recording format of an engine.

    - ``config``: reads the config from the header. ``prompt``: reads a request from the header.
    - ``knobs``: returns the recorded fields of a config. ``shown``: returns the recorded fields of
      a request.
    - ``queues``: reads the queues at the end of a step. With ``reads_queues_early``, it reads them
      right after the decision.
    - ``decide``: makes a decision and returns extra fields to record.
    - ``left``: returns extra fields at the end of a step.
    - ``crash_line``: whether the recording has a line for a batch that crashes the engine.
    - ``drains``: whether the recording continues after the last request until a step is empty.
    - ``handles_aborts``: whether a request leaves the engine when its client disconnects.
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
        """Return the recorded fields of a request. The request arrives before ``step``."""
        return {
            "id": request.id,
            "arrival_step": step,
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": request.output_tokens,
            **self.shown(request),
        }
