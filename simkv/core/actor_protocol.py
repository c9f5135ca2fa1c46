"""Protocols for engines whose scheduler, worker and token processor are separate threads.

The engine's package implements the three protocols, and ``sim/actor_pipeline.py`` simulates the
threads concurrently. Only the engine's package interprets the tasks, parcels (serialized lists of
tasks) and work items.
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

#: Output of the worker after a step, with one entry per slot.
Message = list[int]
#: ``ends(request_id, k)`` returns whether the k-th output token of the request is its last.
IsLastToken = Callable[[int, int], bool]


class WorkerCrash(RuntimeError):
    """Raised for a task that crashes the worker of the real engine."""


@dataclass(slots=True)
class MessageEffects:
    """Effects of a worker's message on requests. Each field lists request ids in slot order.

    - ``delivered``: requests that received a token.
    - ``acked``: requests whose preemption was acknowledged.
    - ``finished``: requests that ended.
    """

    delivered: list[int] = field(default_factory=list)
    acked: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)


class ManagerThread(Protocol):
    """Thread of the scheduler, with the queues and slots."""

    waiting: deque[Any]
    slots: list[Any]
    pending: dict[int, Any]
    preempted: list[int]
    causes: list[PreemptionCause]

    def add(self, prompt: Prompt) -> None:
        """Append a new request to ``waiting``."""

    def schedule(self) -> list[Any]:
        """Make one scheduling decision and return its tasks for the worker."""

    def held(self) -> Held | None:
        """Return the first waiting request and the reason why it waits, or None."""

    def put(self, tasks: Iterable[Any]) -> Any:
        """Serialize the tasks of a decision for the worker."""

    def alive(self) -> list[Any]:
        """Return the engine's objects of all unfinished requests."""

    def fingerprint(self) -> Hashable:
        """Return the state that determines future calls."""


class WorkerThread(Protocol):
    """Thread of the worker. It runs the model, and each of its slots holds one request."""

    slots: dict[int, Any]

    def take(self, parcel: Any) -> None:
        """Execute serialized tasks.

        Raises WorkerCrash if the worker of the real engine would crash.
        """

    def work(self) -> list[Any]:
        """Return the work of the next step."""

    def stalled(self) -> list[int]:
        """Return the ids of the running requests that lack a block for their next token."""

    def step(self, ends: IsLastToken) -> Message | None:
        """Run one step and return a message with the new tokens.

        Returns None if there is no work.
        """

    def fingerprint(self) -> Hashable:
        """Return the state that determines future steps."""


class ProcessorThread(Protocol):
    """Thread of the token processor. It delivers tokens to clients."""

    def receive(self, message: Message) -> MessageEffects:
        """Process a message of the worker and return its effects."""


class Threads(ABC):
    """Engine whose scheduler, worker and token processor run in separate threads."""

    manager: ManagerThread
    worker: WorkerThread
    processor: ProcessorThread

    @abstractmethod
    def aside(self) -> dict[int, WaitReason]:
        """Return the running requests that lack a block, each with the reason why it waits."""

    @abstractmethod
    def batch_of(self, work: list[Any], prefills: int, preempted: list[int]) -> Batch:
        """Convert the work of a step to a batch.

        The first ``prefills`` items of ``work`` are prefills.
        """
