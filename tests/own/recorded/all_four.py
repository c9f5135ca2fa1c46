"""A rule that takes all four decisions."""

from collections.abc import Sequence
from dataclasses import dataclass

from simkv.own import RuleView, VllmKnobs, VllmRule


@dataclass(frozen=True)
class Knobs(VllmKnobs):
    alike: int = 8
    """Prompts that differ by fewer tokens than this count as equally long."""
    few: int = 3
    """So many may run in any case."""


class AllFour(VllmRule):
    """Short prompts first, few at a time and in small pieces; the preempted are spared."""

    config: Knobs

    def waiting_order(self, r: RuleView) -> float:
        return r.prompt_tokens // self.config.alike

    def running_order(self, r: RuleView) -> tuple[int, int]:
        return -r.preemptions, r.max_tokens - r.emitted

    def most_running(self, waiting: Sequence[RuleView], running: Sequence[RuleView]) -> int | None:
        return None if len(waiting) < 4 else max(len(running), self.config.few)

    def chunk(self, waiting: Sequence[RuleView], running: Sequence[RuleView]) -> int | None:
        return 7 if len(waiting) > 2 and running else None
