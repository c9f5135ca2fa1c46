"""Steps that SGLang keeps for decoding: ``--prefill-decode-interval``."""

from __future__ import annotations

from simkv.schedulers.sglang.config import SglangConfig


class DecodeInterval:
    """After a prefill, ``left`` is how many steps take none, while enough requests run."""

    def __init__(self, config: SglangConfig) -> None:
        self.steps = config.prefill_decode_interval
        self.least = config.prefill_decode_interval_min_bs
        self.left = 0

    def defers(self, running: int) -> bool:
        """Whether this step is one of them, with so many ``running``."""
        if self.left == 0:
            return False
        if running < self.least:
            self.left = 0
            return False
        self.left -= 1
        return True

    def begin(self) -> None:
        """A prefill was launched."""
        self.left = self.steps
