"""Executor that scales step times by kind of step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp, hypot, log1p
from typing import Literal

import numpy as np

from simkv.costs.simulated_executor import advance_load
from simkv.costs.step_load import (
    Executor,
    Floats,
    StepLoad,
    wants_spread,
)

ErrorSide = Literal["faster", "slower"]


StepKind = Literal["decode", "prefill", "mixed"]


#: Largest possible underestimate of a step time, as a fraction of the real step time.
MAX_ERROR = 0.9


def error_end(error: float, side: ErrorSide) -> float:
    """Return one end of the interval of log(real / predicted): the lower end if ``side`` is
    ``faster``, and the upper end otherwise.

    ``error`` is the relative error: predicted time / real time - 1.
    """
    return -log1p(error if side == "faster" else -min(error, MAX_ERROR))


def classify_step(load: StepLoad) -> StepKind:
    """Return whether a step has decodes only, prefills only, or both (``mixed``)."""
    if not load.prefill_seqs:
        return "decode"
    return "mixed" if load.decode_seqs else "prefill"


class ScaledExecutor:
    """Executor that multiplies the step times of another executor by a factor per kind of step.

    ``wider`` returns the additional relative error of a step outside the profile's range.
    """

    def __init__(
        self,
        inner: Executor,
        scale: Mapping[StepKind, float],
        wider: Callable[[StepLoad], float] | None = None,
    ) -> None:
        self.inner = inner
        self._scale = scale
        self._wider = wider
        self.needs_decode_range = wants_spread(inner)

    def run(self, load: StepLoad) -> float:
        return self.inner.run(load) * self._of(load)

    def forecast_steps(self, load: StepLoad, steps: int) -> Sequence[float] | Floats:
        found = np.asarray(self.inner.forecast_steps(load, steps), np.float64)
        return found * self._decode_factors(load, len(found))

    def ran(self, load: StepLoad, seconds: Sequence[float]) -> None:
        # The inner executor counts its own step times, as ``run`` does.
        factors = self._decode_factors(load, len(seconds))
        self.inner.ran(load, (np.asarray(seconds, np.float64) / factors).tolist())

    def _decode_factors(self, load: StepLoad, steps: int) -> float | list[float]:
        """Return the factors of the decode steps after ``load``."""
        if self._wider is None:
            return self._scale["decode"]
        return [self._of(advance_load(load, step)) for step in range(1, steps + 1)]

    def idle(self) -> float:
        return self.inner.idle()

    def _of(self, load: StepLoad) -> float:
        scale = self._scale[classify_step(load)]
        extra = self._wider(load) if self._wider else 0.0
        if not extra:
            return scale
        side: ErrorSide = "faster" if scale < 1.0 else "slower"
        return exp(error_end(hypot(1.0 - 1.0 / scale, extra), side))
