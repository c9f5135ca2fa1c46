"""What an engine offers whose scheduler, worker and token processor are threads of their own.

The engine's package has the three actors; ``sim/async_pipeline.py`` runs them side by side. Planned
tasks, parcels of them and work are passed on; they belong to the engine.
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

#: What a worker reports of each slot after a step.
Message = list[int]
#: ``ends(request id, k)``: whether the k-th output token of the request is its last.
IsLastToken = Callable[[int, int], bool]


class WorkerCrash(RuntimeError):
    """A task of which the real worker dies."""


@dataclass(slots=True)
class MessageEffects:
    """What one message brought: ids given a token, acknowledged, and ended, in slot order."""

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
        """Decide once; returns planned tasks."""

    def held(self) -> Held | None:
        """The head of ``waiting``, and why the last call left it there."""

    def put(self, tasks: Iterable[Any]) -> Any:
        """Serialise the tasks of a decision into a parcel with ``tasks``."""

    def alive(self) -> list[Any]:
        """Requests that have not ended."""

    def fingerprint(self) -> Hashable:
        """All state that decides the following calls."""


class WorkerThread(Protocol):
    """The worker's thread: slots, each with a request."""

    slots: dict[int, Any]

    def take(self, parcel: Any) -> None:
        """Carry out the tasks of one put. Raises WorkerCrash."""

    def work(self) -> list[Any]:
        """What the next step computes."""

    def stalled(self) -> list[int]:
        """Ids of requests that lack the block for their next token."""

    def step(self, ends: IsLastToken) -> Message | None:
        """Run one step; None if there was nothing to run."""

    def fingerprint(self) -> Hashable:
        """All state that decides the following steps."""


class ProcessorThread(Protocol):
    """The token processor's thread."""

    def receive(self, message: Message) -> MessageEffects:
        """Deliver one message."""


class Threads(ABC):
    """A scheduler of which the three actors can be run side by side."""

    manager: ManagerThread
    worker: WorkerThread
    processor: ProcessorThread

    @abstractmethod
    def aside(self) -> dict[int, WaitReason]:
        """Requests that lack the block for their next token or chunk, and why."""

    @abstractmethod
    def batch_of(self, work: list[Any], prefills: int, preempted: list[int]) -> Batch:
        """What the worker computes in a step, its ``prefills`` first, as a batch."""
