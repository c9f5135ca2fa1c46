"""Steps dearer or cheaper than a profile says, by what they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import hypot
from typing import Literal

import numpy as np

from simkv.costs.load import Executor, Floats, Load, wants_spread
from simkv.costs.profile import StepError
from simkv.costs.simulated import later

Side = Literal["cheaper", "dearer"]


StepKind = Literal["decode", "prefill", "mixed"]


#: A step cannot be cheaper than by this share, however wrong the profile is.
LARGEST = 0.9


def scales(
    errors: Mapping[str, StepError], side: Side, runs: float = 0.0, *, lasting: bool = False
) -> dict[StepKind, float]:
    """Factors on the cost of a step by its kind: 95 of 100 real steps lie within both sides.

    ``runs`` is how far other runs on other hosts are from the one that was measured. With
    ``lasting`` the mean of many steps lies within both sides.

    An error is the predicted time over the real one, less 1. A kind of step that was not measured
    takes the error of all, or the largest that there is.
    """
    worst = max(errors.values(), key=lambda error: error.p95)
    found: dict[StepKind, float] = {}
    kinds: tuple[StepKind, ...] = ("decode", "prefill", "mixed")
    for kind in kinds:
        error = errors.get(kind) or errors.get("all") or worst
        found[kind] = _factor(hypot(error.lasting if lasting else error.p95, runs), side)
    return found


def _factor(error: float, side: Side) -> float:
    return 1.0 / (1.0 + error) if side == "cheaper" else 1.0 / (1.0 - min(error, LARGEST))


def kind_of(load: Load) -> StepKind:
    """What a step does, from its load."""
    if not load.prefill_seqs:
        return "decode"
    return "mixed" if load.decode_seqs else "prefill"


class Erring:
    """An executor whose steps are cheaper or dearer than the one inside says, by kind of step.

    ``wider`` gives what a step's error has on top of that of its kind, outside of the range.
    """

    def __init__(
        self,
        inner: Executor,
        scale: Mapping[StepKind, float],
        wider: Callable[[Load], float] | None = None,
    ) -> None:
        self.inner = inner
        self._scale = scale
        self._wider = wider
        self.wants_spread = wants_spread(inner)

    def run(self, load: Load) -> float:
        return self.inner.run(load) * self._of(load)

    def foresee(self, load: Load, steps: int) -> Sequence[float] | Floats:
        found = np.asarray(self.inner.foresee(load, steps), np.float64)
        if self._wider is None:
            return found * self._scale["decode"]
        return found * [self._of(later(load, step)) for step in range(1, len(found) + 1)]

    def ran(self, load: Load, seconds: Sequence[float]) -> None:
        self.inner.ran(load, seconds)

    def idle(self) -> float:
        return self.inner.idle()

    def _of(self, load: Load) -> float:
        scale = self._scale[kind_of(load)]
        extra = self._wider(load) if self._wider else 0.0
        if not extra:
            return scale
        return _factor(hypot(1.0 - 1.0 / scale, extra), "cheaper" if scale < 1.0 else "dearer")
