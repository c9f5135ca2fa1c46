"""What an engine has under way: batches on the GPU, and stretches of steps foreseen."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from simkv.core.scheduler_protocol import Batch
from simkv.costs.simulated_executor import MIN_VECTOR_STEPS
from simkv.costs.step_load import Floats, StepLoad
from simkv.sim.clock import ExactTimeout


class InFlight:
    """A batch on the GPU: its row in the step log, when it is done, and whose last token it has
    among the requests that it lists; ``group`` decodes in it, where somebody asks who."""

    def __init__(
        self,
        batch: Batch,
        row: int,
        end: float,
        last_of: frozenset[int],
        group: tuple[int, ...] = (),
    ) -> None:
        self.batch = batch
        self.row = row
        self.end = end
        self.finishing_ids = last_of
        self.group = group


@dataclass(slots=True)
class Leap:
    """A stretch of like steps under way.

    ``load`` is that of the step just launched, ``ends`` are its end and those of the steps that
    follow it. At ``moments`` one iteration of the loop would be over and the next begin. ``own``
    are the seconds of the steps that follow, where others make them longer.
    """

    load: StepLoad
    ends: array[float]
    moments: array[float]
    wake: ExactTimeout
    own: list[float] | None = None


@dataclass(slots=True)
class IdleStretch:
    """Idle passes under way of which each but counts: at ``moments`` one is over and the next
    begins, the last of them to be looked at again."""

    moments: array[float]
    wake: ExactTimeout


def is_same_decision(oldest: InFlight, newest: InFlight) -> bool:
    """Whether the batches in flight are the same decision made again."""
    a, b = oldest.batch, newest.batch
    if a is b:
        return True
    same_group = a.decodes == b.decodes and not b.joined and not b.left
    return a.kind == b.kind and same_group and a.scheduled == b.scheduled


def step_ends(end: float, seconds: Sequence[float] | Floats) -> array[float]:
    """``end`` and, one after the other, the ends of steps that take so many seconds after it."""
    if len(seconds) < MIN_VECTOR_STEPS:
        return array("d", accumulate(seconds, initial=end))
    return array("d", np.cumsum(np.append(end, seconds)).tobytes())
