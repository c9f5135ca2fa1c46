"""What every replay needs: arrivals by step, the model's stop tokens, a watch for standstill."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from simkv.core.scheduler import Batch, Completion
from simkv.proof.conform.trace import Line


def arrivals_by_step(requests: list[Line]) -> dict[int, list[Line]]:
    """Recorded requests grouped by ``arrival_step``, in the order of the header."""
    steps: dict[int, list[Line]] = {}
    for request in requests:
        steps.setdefault(request["arrival_step"], []).append(request)
    return steps


class Emitted:
    """Tokens that each request still has to emit: the model's knowledge, not the scheduler's."""

    def __init__(self, requests: list[Line]) -> None:
        self._left = {request["id"]: request["output_tokens"] for request in requests}

    def ended(self, batch: Batch, members: Iterable[int] = ()) -> set[int]:
        """Ids of ``batch`` whose token of this step is the last that the model emits.

        ``members`` are those of its decode group.
        """
        return {i for i in (*batch.emits, *members) if self._left[i] == 1}

    def count(self, completion: Completion, members: Iterable[int] = ()) -> None:
        """Note the tokens that were delivered, to all of ``members`` too."""
        for i in (*completion.delivered, *members):
            self._left[i] -= 1


class Standstill:
    """Notices that a scheduler's state repeats while nothing comes from outside."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()

    def progress(self) -> None:
        """A request arrived or a token was delivered: what was seen before does not count."""
        self._seen.clear()

    def repeats(self, state: Hashable) -> bool:
        """Whether ``state`` was seen since the last progress; remembers it."""
        if state in self._seen:
            return True
        self._seen.add(state)
        return False
