"""When SGLang's loop looks at what came in: ``scheduler_recv_skipper.py`` of the wheel.

Every turn of the loop adds a weight to a counter, by what the batch before was: 1 for a decode and
for none, 1000 for all others. At ``--scheduler-recv-interval`` the loop receives all that has come,
and counts from 0 again. Requests and aborts come by the same way.
"""

from __future__ import annotations

from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import BatchKind

#: Weight of a turn after a batch that was neither a decode nor none; after those it is 1.
PREFILL_WEIGHT = 1000


class Receiver:
    """What has come and was not received yet: prompts, and the ids of those whose clients left."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        #: Whether every turn receives, so that nothing stays unread.
        self.always = interval == 1
        self.counter = 0
        self.unread: list[Prompt | int] = []

    def receive(self, last: BatchKind | None) -> list[Prompt | int]:
        """A turn after a batch of that kind begins: what it receives, in the order it came."""
        self.counter += 1 if last in (None, "decode") else PREFILL_WEIGHT
        if self.counter < self.interval:
            return []
        self.counter = 0
        received, self.unread = self.unread, []
        return received

    @property
    def prompts(self) -> list[int]:
        """Ids of the requests that have not been received."""
        return [m.id for m in self.unread if isinstance(m, Prompt)] if self.unread else []

    def quiet(self, most: int) -> int:
        """Decode steps, of which one is decided, until something that has come is received."""
        return min(most, self.interval - self.counter) if self.unread else most

    def skip(self, steps: int) -> None:
        """So many turns after decodes go by, which find nothing."""
        self.counter = (self.counter + steps) % self.interval
