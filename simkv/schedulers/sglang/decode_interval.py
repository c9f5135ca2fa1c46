"""Steps reserved for decoding after a prefill: ``--prefill-decode-interval``."""

from __future__ import annotations

from simkv.schedulers.sglang.config import SglangConfig


class DecodeInterval:
    """Counter of the steps in which no prefill may start.

    After a prefill, ``left`` steps remain, as long as at least ``least`` requests run.
    """

    def __init__(self, config: SglangConfig) -> None:
        self.steps = config.prefill_decode_interval
        self.least = config.prefill_decode_interval_min_bs
        self.left = 0

    def defers(self, running: int) -> bool:
        """Count a step and return whether prefill is deferred in it, with ``running`` requests."""
        if self.left == 0:
            return False
        if running < self.least:
            self.left = 0
            return False
        self.left -= 1
        return True

    def begin(self) -> None:
        """Restart the interval after a prefill was launched."""
        self.left = self.steps
