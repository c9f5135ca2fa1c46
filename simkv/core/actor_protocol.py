"""Protocols for engines whose scheduler, worker and token processor are separate threads.

The engine's package implements the three; ``sim/actor_pipeline.py`` runs them side by side. Tasks,
parcels of tasks and work items are opaque objects of the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import (
    Batch,
    Held,
    PreemptionCause,
    WaitReason,
)

#: Output of a worker for each slot after a step.
Message = list[int]
#: ``ends(request id, k)``: whether the k-th output token of the request is its last.
IsLastToken = Callable[[int, int], bool]


class WorkerCrash(RuntimeError):
    """A task that crashes the real worker."""


@dataclass(slots=True)
class MessageEffects:
    """Ids that received a token, were acknowledged or ended by a message, in slot order."""

    delivered: list[int] = field(default_factory=list)
    acked: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)


class ManagerThread(Protocol):
    """The scheduler's thread: queues and slots."""

    waiting: deque[Any]
    slots: list[Any]
    pending: dict[int, Any]
    preempted: list[int]
    causes: list[PreemptionCause]

    def add(self, prompt: Prompt) -> None:
        """Append a new request to ``waiting``."""

    def schedule(self) -> list[Any]:
        """Make one decision; return the planned tasks."""

    def held(self) -> Held | None:
        """Return the head of ``waiting`` and why the last ``schedule`` call skipped it."""

    def put(self, tasks: Iterable[Any]) -> Any:
        """Serialize the tasks of a decision into a parcel with ``tasks``."""

    def alive(self) -> list[Any]:
        """Return the requests that have not ended."""

    def fingerprint(self) -> Hashable:
        """Return all state that determines future calls."""


class WorkerThread(Protocol):
    """The worker's thread: slots, each with a request."""

    slots: dict[int, Any]

    def take(self, parcel: Any) -> None:
        """Execute the tasks of one parcel. Raises WorkerCrash."""

    def work(self) -> list[Any]:
        """Return the work of the next step."""

    def stalled(self) -> list[int]:
        """Return the ids of requests without a block for their next token."""

    def step(self, ends: IsLastToken) -> Message | None:
        """Run one step; return None if there was nothing to run."""

    def fingerprint(self) -> Hashable:
        """Return all state that determines future steps."""


class ProcessorThread(Protocol):
    """The token processor's thread."""

    def receive(self, message: Message) -> MessageEffects:
        """Deliver one message."""


class Threads(ABC):
    """A scheduler whose three threads can run side by side."""

    manager: ManagerThread
    worker: WorkerThread
    processor: ProcessorThread

    @abstractmethod
    def aside(self) -> dict[int, WaitReason]:
        """Return the requests without a block for their next token or chunk, and the reasons."""

    @abstractmethod
    def batch_of(self, work: list[Any], prefills: int, preempted: list[int]) -> Batch:
        """Return the worker's work of a step as a batch, with its ``prefills`` first."""
