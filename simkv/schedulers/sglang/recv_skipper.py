"""Interval at which SGLang's loop receives arrivals: ``scheduler_recv_skipper.py`` of the wheel.

Every turn of the loop adds a weight to a counter: 1 if the previous batch was a decode or if there
was none, otherwise 1000. When the counter reaches ``--scheduler-recv-interval``, the loop receives
all arrivals and aborts, and the counter restarts from 0.
"""

from __future__ import annotations

from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import BatchKind

#: Weight of a turn after a batch other than a decode; after a decode or none it is 1.
PREFILL_WEIGHT = 1000


class Receiver:
    """Messages not received yet: prompts, and the ids of aborted requests."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        #: Whether every turn receives, so that no message stays unread.
        self.always = interval == 1
        self.counter = 0
        self.unread: list[Prompt | int] = []

    def receive(self, last: BatchKind | None) -> list[Prompt | int]:
        """Begin a turn after a batch of kind ``last``; return the received messages in arrival
        order."""
        self.counter += 1 if last in (None, "decode") else PREFILL_WEIGHT
        if self.counter < self.interval:
            return []
        self.counter = 0
        received, self.unread = self.unread, []
        return received

    @property
    def prompts(self) -> list[int]:
        """Ids of the requests not received yet."""
        return [m.id for m in self.unread if isinstance(m, Prompt)] if self.unread else []

    def quiet(self, most: int) -> int:
        """Return the number of decode steps, at most ``most``, before a message is received."""
        return min(most, self.interval - self.counter) if self.unread else most

    def skip(self, steps: int) -> None:
        """Count ``steps`` turns after decodes that receive nothing."""
        self.counter = (self.counter + steps) % self.interval
