"""A rule that takes all four decisions."""

from collections.abc import Sequence
from dataclasses import dataclass

from simkv.custom import CustomVllmConfig, CustomVllmScheduler, PolicyRequest


@dataclass(frozen=True)
class Knobs(CustomVllmConfig):
    alike: int = 8
    """Prompts that differ by fewer tokens than this count as equally long."""
    few: int = 3
    """So many may run in any case."""


class AllFour(CustomVllmScheduler):
    """Prefer short prompts, run few at a time with small chunks, and spare preempted requests."""

    config: Knobs

    def waiting_order(self, r: PolicyRequest) -> float:
        return r.prompt_tokens // self.config.alike

    def running_order(self, r: PolicyRequest) -> tuple[int, int]:
        return -r.preemptions, r.max_tokens - r.emitted

    def most_running(
        self, waiting: Sequence[PolicyRequest], running: Sequence[PolicyRequest]
    ) -> int | None:
        return None if len(waiting) < 4 else max(len(running), self.config.few)

    def chunk(
        self, waiting: Sequence[PolicyRequest], running: Sequence[PolicyRequest]
    ) -> int | None:
        return 7 if len(waiting) > 2 and running else None
