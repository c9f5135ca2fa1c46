"""The share of its remaining tokens that a running request is promised: NewTokenRatioTracker."""

from __future__ import annotations

from collections.abc import Sequence

from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.memory import Req


class NewTokenRatio:
    """``current`` sinks from ``init`` to ``least`` by ``decay`` a decode step."""

    def __init__(self, config: SglangConfig) -> None:
        self.init = min(config.init_new_token_ratio * config.conservativeness, 1.0)
        self.least = min(self.init * config.min_new_token_ratio_factor, 1.0)
        self.decay = (self.init - self.least) / config.new_token_ratio_decay_steps
        self.retract_steps = config.retract_decode_steps
        self.current = self.init

    def reset(self) -> None:
        """Nobody is here any more."""
        self.current = self.init

    def decay_step(self) -> None:
        """A decode step for which there was room goes by."""
        self.current = max(self.current - self.decay, self.least)

    def retracted(self, staying: Sequence[Req]) -> None:
        """What those who stay may need for some steps, of all that they may emit."""
        emitted, at_most = sum(r.out for r in staying), sum(r.max_new for r in staying)
        self.current = min(1.0, (emitted + self.retract_steps * len(staying)) / (at_most + 1))
