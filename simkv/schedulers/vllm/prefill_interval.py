# mypyc: compile
"""vLLM's ``prefill_schedule_interval``: while requests decode, only every n-th step may prefill."""

from __future__ import annotations

from collections.abc import Hashable

from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class PrefillInterval:
    """Counter of the non-empty steps since the last prefill.

    While requests decode, only every ``steps``-th step may prefill.
    """

    # If the last admission phase left requests in the queue (the backlog), the next step may also
    # contain prefills.

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._since = steps
        self._backlog = False

    def too_early(self) -> bool:
        """Return whether a step with decodes may not contain prefills yet."""
        return not self._backlog and self._since + 1 < self.steps

    def admitted(self, *, left_behind: bool) -> None:
        """Record the end of an admission phase.

        ``left_behind`` is true if requests stayed in the queue.
        """
        self._backlog = left_behind

    def note_step(self, *, empty: bool, prefill: bool) -> None:
        """Record a scheduled step."""
        self._since += not empty
        if prefill:
            self._since = 0

    def skipped(self, steps: int, *, waiting: bool) -> None:
        """Record ``steps`` decode-only steps.

        ``waiting`` is true if requests stay in the queue.
        """
        self._since += steps
        if self._backlog or self._since >= self.steps:
            self._backlog = waiting  # prefills were allowed in some of these steps

    def fingerprint(self) -> Hashable:
        """Return the state that determines later steps."""
        return min(self._since, self.steps), self._backlog
