"""``--prefill-decode-interval``: steps without prefills after each prefill."""

from __future__ import annotations

from simkv.schedulers.sglang.config import SglangConfig


class DecodeInterval:
    """Counter of the steps in which no prefill may start.

    If fewer than ``least`` requests run, prefills may start in any step.
    """

    def __init__(self, config: SglangConfig) -> None:
        self.steps = config.prefill_decode_interval
        self.least = config.prefill_decode_interval_min_bs
        self.left = 0

    def defers(self, running: int) -> bool:
        """Count a step. Return True if no prefill may start in it."""
        if self.left == 0:
            return False
        if running < self.least:
            self.left = 0
            return False
        self.left -= 1
        return True

    def begin(self) -> None:
        """Restart the counter after the launch of a prefill."""
        self.left = self.steps
