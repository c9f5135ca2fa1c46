"""The outcomes of requests and their labels."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Protocol


class Outcome(StrEnum):
    """Outcome of a request."""

    FINISHED = "finished"
    # the client gave up; without other requests, the request would have finished in time
    STARVED = "starved"
    TIMED_OUT = "timed_out"  # the client gave up; waiting for other requests was not the cause
    REJECTED = "rejected"  # the engine refused the request
    LOST = "lost"  # the engine dropped the request from its queues
    STALLED = "stalled"  # the request can never finish, or the engine died
    CANCELLED = "cancelled"  # its client no longer needed the answer, and left
    CUT_OFF = "cut_off"  # the horizon ended the run first

    @property
    def word(self) -> str:
        """Name of the outcome for use in a sentence, such as ``cut off``."""
        return humanize(self)

    @property
    def label(self) -> str:
        """Label for the legend of a plot. It contains the reason for the outcome."""
        return _LABELS.get(self, self.word)

    @property
    def wasted_wait_label(self) -> str | None:
        """Label for the waiting time of failed requests; None for all other outcomes."""
        # The result is also None for requests that their clients cancelled and for requests that
        # the end of the simulation cut off, because they might still have been served.
        if self in (Outcome.STARVED, Outcome.TIMED_OUT):
            return str(self)
        return "failed" if self in (Outcome.STALLED, Outcome.LOST, Outcome.REJECTED) else None


_LABELS = {
    Outcome.STARVED: "starved: waited until the client gave up",
    Outcome.TIMED_OUT: "timed out: too slow for its timeout",
    Outcome.STALLED: "stalled: the engine halted",
    Outcome.LOST: "lost by the engine",
    Outcome.REJECTED: "rejected by the engine",
    Outcome.CANCELLED: "cancelled by the client",
    Outcome.CUT_OFF: "cut off by the horizon",
}
#: Outcomes of requests whose clients got all that they needed.
SERVED = (Outcome.FINISHED, Outcome.CANCELLED)
#: Outcomes without the complete answer that the client needed, most severe first.
FAILURES = (
    Outcome.STALLED,
    Outcome.LOST,
    Outcome.STARVED,
    Outcome.REJECTED,
    Outcome.TIMED_OUT,
    Outcome.CUT_OFF,
)


class _Figures(Protocol):
    def __getitem__(self, name: str, /) -> Any: ...


def count_served(figures: _Figures) -> float:
    """Return the number of requests whose outcome is in ``SERVED``."""
    count: float = sum(figures[outcome] for outcome in SERVED)
    return count


def humanize(name: str) -> str:
    """Return the name of an outcome or verdict for use in a sentence, such as ``cut off``."""
    return name.replace("_", " ")
