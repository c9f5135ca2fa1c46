"""``--prefill-decode-interval``: number of decode-only steps after a prefill."""

from __future__ import annotations

from simkv.schedulers.sglang.config import SglangConfig


class DecodeInterval:
    """Counter of the steps in which no prefill may start.

    No prefill starts in the next ``left`` steps, as long as at least ``least`` requests run.
    """

    def __init__(self, config: SglangConfig) -> None:
        self.steps = config.prefill_decode_interval
        self.least = config.prefill_decode_interval_min_bs
        self.left = 0

    def defers(self, running: int) -> bool:
        """Count a step and return True if it must not contain a prefill, given the number of
        ``running`` requests.
        """
        if self.left == 0:
            return False
        if running < self.least:
            self.left = 0
            return False
        self.left -= 1
        return True

    def begin(self) -> None:
        """Restart the interval after the launch of a prefill."""
        self.left = self.steps
