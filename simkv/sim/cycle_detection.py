"""A state that comes again: whoever works on without a token may be going round in a circle."""

from __future__ import annotations

from collections.abc import Callable, Hashable


class CycleDetector:
    """Notices that a state repeats although nothing came in between.

    Keeps one earlier state and replaces it at powers of two (R. P. Brent, BIT 20, 1980), so a
    cycle of any length is found and a long stretch without a token costs little. ``since`` is when
    it was taken (s).

    ``glance`` says something of the state that is cheap to have: only where it is what it was is
    the whole state looked at.
    """

    #: Steps without a token that are nothing unusual (chunks of a long prompt).
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
        """A token was delivered or something came from outside."""
        self._count = 0
        self._saved = None

    def repeats(self, working: bool, now: float) -> bool:
        """Whether the present state is one that was met before without progress since."""
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

    def quiet(self, alike: int) -> int:
        """How many looks at what comes next would neither find nor keep a state.

        The last ``alike`` states and those that come all differ from each other.
        """
        if self._saved is None or self._count - self._saved_at >= alike:
            return 0
        return (1 << self._count.bit_length()) - self._count - 1

    def skip(self, looks: int) -> None:
        """So many looks are left out."""
        self._count += looks
