# mypyc: compile
"""Detection of repeated engine states, which indicate a deadlock or livelock."""

from __future__ import annotations

from collections.abc import Callable, Hashable


class CycleDetector:
    """Detector of repeated states of an engine. They indicate a deadlock or livelock.

    ``since`` is the time (s) at which the stored state occurred. The function ``glance`` returns a
    summary of the state that is cheap to compute. Source: R. P. Brent, BIT 20, 1980.
    """

    # The detector stores one earlier state and replaces it after 1, 2, 4, … calls. It finds cycles
    # of any length although it stores only one state, and it rarely computes a state. The whole
    # state is computed and compared only if the summary is unchanged.

    #: Number of steps without a token that is still normal, for example for the chunks of a long
    #: prompt.
    PATIENCE = 64

    def __init__(
        self, state: Callable[[], Hashable], glance: Callable[[], Hashable] = lambda: None
    ) -> None:
        self._state = state
        self._glance = glance
        self._count = self._saved_at = 0
        self._saved: Hashable = None
        self._glimpse: Hashable = None
        self.since = 0.0

    def progress(self) -> None:
        """Discard the stored state because of a token or an external event."""
        self._count = 0
        self._saved = None

    def repeats(self, working: bool, now: float) -> bool:
        """Return whether the present state equals the stored state.

        ``now`` is the present time in seconds.
        """
        # While the engine is ``working``, the first ``PATIENCE`` calls after a ``progress`` call
        # return False.
        self._count += 1
        if working and self._count < self.PATIENCE:
            return False
        glimpse = self._glance()
        if self._saved is not None and glimpse == self._glimpse and self._state() == self._saved:
            return True
        if self._saved is None or self._count & (self._count - 1) == 0:
            self._saved, self._glimpse, self.since = self._state(), glimpse, now
            self._saved_at = self._count
        return False

    def silent_calls(self, alike: int) -> int:
        """Return the number of next calls of ``repeats`` that would have no effect.

        The last ``alike`` states must differ from each other and from all following states.
        """
        # Such a call returns False and stores no state. The caller guarantees that the last
        # ``alike`` states and all following states differ from each other.
        if self._saved is None or self._count - self._saved_at >= alike:
            return 0
        return (1 << self._count.bit_length()) - self._count - 1

    def skip(self, looks: int) -> None:
        """Count ``looks`` calls of ``repeats`` that were left out."""
        self._count += looks
