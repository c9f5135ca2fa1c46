"""The ratio of reserved tokens to the remaining output tokens of running requests.

Source: ``NewTokenRatioTracker``.
"""

from __future__ import annotations

from collections.abc import Sequence

from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.memory import Req


class NewTokenRatio:
    """Fraction of the remaining output tokens for which memory is reserved.

    ``current`` starts at ``init``. Each decode step reduces it by ``decay``, but not below
    ``least``.
    """

    def __init__(self, config: SglangConfig) -> None:
        self.init = min(config.init_new_token_ratio * config.conservativeness, 1.0)
        self.least = min(self.init * config.min_new_token_ratio_factor, 1.0)
        self.decay = (self.init - self.least) / config.new_token_ratio_decay_steps
        self.retract_steps = config.retract_decode_steps
        self.current = self.init

    def reset(self) -> None:
        """Reset the fraction to its initial value."""
        self.current = self.init

    def decay_step(self) -> None:
        """Decrease the fraction after a decode step without retraction."""
        self.current = max(self.current - self.decay, self.least)

    def retracted(self, staying: Sequence[Req]) -> None:
        """Set the fraction after a retraction."""
        # The fraction follows from the emitted tokens and output limits of the remaining requests.
        emitted, at_most = sum(r.out for r in staying), sum(r.max_new for r in staying)
        self.current = min(1.0, (emitted + self.retract_steps * len(staying)) / (at_most + 1))
