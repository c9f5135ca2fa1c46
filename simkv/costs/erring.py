"""Steps dearer or cheaper than a profile says, by what they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from simkv.costs.load import Executor, Load
from simkv.costs.profile import StepError

Side = Literal["cheaper", "dearer"]


StepKind = Literal["decode", "prefill", "mixed"]


#: A step cannot be cheaper than by this share, however wrong the profile is.
LARGEST = 0.9


def scales(errors: Mapping[str, StepError], side: Side) -> dict[StepKind, float]:
    """Factors on the cost of a step by its kind: 95 of 100 real steps lie within both sides.

    An error is the predicted time over the real one, less 1. A kind of step that was not measured
    takes the error of all, or the largest that there is.
    """
    worst = max(errors.values(), key=lambda error: error.p95)
    found: dict[StepKind, float] = {}
    kinds: tuple[StepKind, ...] = ("decode", "prefill", "mixed")
    for kind in kinds:
        error = errors.get(kind) or errors.get("all") or worst
        found[kind] = (
            1.0 / (1.0 + error.p95) if side == "cheaper" else 1.0 / (1.0 - min(error.p95, LARGEST))
        )
    return found


def kind_of(load: Load) -> StepKind:
    """What a step does, from its load."""
    if not load.prefill_seqs:
        return "decode"
    return "mixed" if load.decode_seqs else "prefill"


class Erring:
    """An executor whose steps are cheaper or dearer than the one inside says, by kind of step."""

    def __init__(self, inner: Executor, scale: Mapping[StepKind, float]) -> None:
        self.inner = inner
        self._scale = scale
        self.wants_spread: bool = getattr(inner, "wants_spread", False)

    def run(self, load: Load) -> float:
        return self.inner.run(load) * self._scale[kind_of(load)]

    def foresee(self, load: Load, steps: int) -> list[float]:
        scale = self._scale["decode"]
        return [seconds * scale for seconds in self.inner.foresee(load, steps)]

    def ran(self, load: Load, seconds: Sequence[float]) -> None:
        self.inner.ran(load, seconds)

    def idle(self) -> float:
        return self.inner.idle()
