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
    """Raised for a task on which the real worker thread crashes."""


@dataclass(slots=True)
class MessageEffects:
    """Effects of a worker's message: the ids of the requests that received a token (``delivered``),
    whose preemption was acknowledged (``acked``), or that ended, each in slot order.
    """

    delivered: list[int] = field(default_factory=list)
    acked: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)


class ManagerThread(Protocol):
    """The scheduler's thread, which owns the queues and the slots of running requests."""

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
        """Return the head of ``waiting`` and the reason why the last ``schedule`` call skipped it,
        or None.
        """

    def put(self, tasks: Iterable[Any]) -> Any:
        """Serialize the tasks of a decision and return them as one parcel for the worker."""

    def alive(self) -> list[Any]:
        """Return the engine's objects for all requests that have not ended."""

    def fingerprint(self) -> Hashable:
        """Return a hashable value of all state that determines the results of future calls."""


class WorkerThread(Protocol):
    """The worker's thread, which runs the model; each of its slots holds one request."""

    slots: dict[int, Any]

    def take(self, parcel: Any) -> None:
        """Execute the tasks of one parcel. Raises WorkerCrash."""

    def work(self) -> list[Any]:
        """Return the work items that the next step will run."""

    def stalled(self) -> list[int]:
        """Return the ids of the running requests that lack a KV block for their next token."""

    def step(self, ends: IsLastToken) -> Message | None:
        """Run one step and return its message with the new tokens; None if there was no work."""

    def fingerprint(self) -> Hashable:
        """Return a hashable value of all state that determines future steps."""


class ProcessorThread(Protocol):
    """The token processor's thread, which turns the worker's messages into tokens for clients."""

    def receive(self, message: Message) -> MessageEffects:
        """Process one message of the worker and return the ids of the requests that it affects."""


class Threads(ABC):
    """A scheduler whose three threads can be simulated concurrently."""

    manager: ManagerThread
    worker: WorkerThread
    processor: ProcessorThread

    @abstractmethod
    def aside(self) -> dict[int, WaitReason]:
        """Return the requests that lack a block for their next token or chunk: a mapping from
        request id to the reason.
        """

    @abstractmethod
    def batch_of(self, work: list[Any], prefills: int, preempted: list[int]) -> Batch:
        """Convert the work items of a step to a batch; the first ``prefills`` items are
        prefills.
        """
