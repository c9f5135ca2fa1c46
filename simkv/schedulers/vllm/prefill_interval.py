"""vLLM's ``prefill_schedule_interval``: while others decode, prompts wait for their step."""

from __future__ import annotations

from collections.abc import Hashable

from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class PrefillInterval:
    """Counts the non-empty steps since one with prefill, up to ``steps``.

    ``backlog``: an admission phase has left requests behind, which allows prefills in the next step
    too.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._since = steps
        self._backlog = False

    def too_early(self) -> bool:
        """Whether it is too early for prefills in this step, if somebody decodes."""
        return not self._backlog and self._since + 1 < self.steps

    def admitted(self, *, left_behind: bool) -> None:
        """An admission phase that let prefills in is over."""
        self._backlog = left_behind

    def note_step(self, *, empty: bool, prefill: bool) -> None:
        """A step is decided."""
        self._since += not empty
        if prefill:
            self._since = 0

    def skipped(self, steps: int, *, waiting: bool) -> None:
        """So many steps of nothing but decodes are decided."""
        self._since += steps
        if self._backlog or self._since >= self.steps:
            self._backlog = waiting  # not all of these steps held prefills back

    def fingerprint(self) -> Hashable:
        """What decides later steps."""
        return min(self._since, self.steps), self._backlog
