"""How a request can end, and how that is said."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended: exactly one of these."""

    FINISHED = "finished"
    STARVED = "starved"  # the client gave up, and waiting made the difference
    TIMED_OUT = "timed_out"  # it gave up, and would have alone, too, or never waited
    REJECTED = "rejected"  # the engine said no
    LOST = "lost"  # the engine forgot it
    STALLED = "stalled"  # it can never finish, or the engine died
    CUT_OFF = "cut_off"  # the horizon came first

    @property
    def word(self) -> str:
        """In a sentence: ``cut off``."""
        return humanize(self)

    @property
    def label(self) -> str:
        """With its reason, in a legend."""
        return _LABELS.get(self, self.word)

    @property
    def wasted_wait_label(self) -> str | None:
        """What all waiting of a request that ended so is called, if it was in vain.

        Not of one that the horizon cut off: it might yet have been served.
        """
        if self in (Outcome.STARVED, Outcome.TIMED_OUT):
            return str(self)
        return "failed" if self in (Outcome.STALLED, Outcome.LOST, Outcome.REJECTED) else None


_LABELS = {
    Outcome.STARVED: "starved: waited until client gave up",
    Outcome.TIMED_OUT: "timed out: too long for its timeout",
    Outcome.STALLED: "stalled: engine stood still",
    Outcome.LOST: "lost by the engine",
    Outcome.REJECTED: "rejected by the engine",
    Outcome.CUT_OFF: "cut off by the horizon",
}
#: All ways to end without an answer, the gravest first.
FAILURES = (
    Outcome.STALLED,
    Outcome.LOST,
    Outcome.STARVED,
    Outcome.REJECTED,
    Outcome.TIMED_OUT,
    Outcome.CUT_OFF,
)


def humanize(name: str) -> str:
    """A name of an outcome or a verdict in a sentence: ``cut off``."""
    return name.replace("_", " ")
