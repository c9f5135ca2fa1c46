# mypyc: compile
"""Work in flight of an engine: batches on the GPU, and leaps.

A leap simulates several equal steps as one event.
"""

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
    """A batch on the GPU.

    - ``row``: row of the batch in the step log.
    - ``end``: end time in seconds.
    - ``finishing_ids``: requests that receive their last token in the batch.
    - ``group``: requests that decode in every step. Empty if ``Engine.on_tokens`` is not set.
    """

    # ``finishing_ids`` does not contain members of the decode group.

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
    """Several equal steps in progress, simulated as one event.

    - ``load``: load of the step that was just launched.
    - ``ends``: end times of the steps in seconds.
    - ``moments``: end times of the engine loop's iterations. ``wake``: event at the last of these
      times.
    - ``own``: durations of the steps if the engine did not wait for slower engines in lockstep.
    """

    # ``ends`` begins with the step that was just launched; ``own`` is for the following steps.

    load: StepLoad
    ends: array[float]
    moments: array[float]
    wake: ExactTimeout
    own: list[float] | None = None


@dataclass(slots=True)
class IdleStretch:
    """Several idle passes in progress, simulated as one event.

    ``moments`` are the end times of the passes in seconds.
    """

    # The passes are only counted. After the last pass, the engine makes its next decision.

    moments: array[float]
    wake: ExactTimeout


def is_same_decision(oldest: InFlight, newest: InFlight) -> bool:
    """Return whether two batches in flight contain the same requests and work."""
    a, b = oldest.batch, newest.batch
    if a is b:
        return True
    same_group = a.decodes == b.decodes and not b.joined and not b.left
    return a.kind == b.kind and same_group and a.scheduled == b.scheduled


def step_ends(end: float, seconds: Sequence[float] | Floats) -> array[float]:
    """Return the end times of consecutive steps.

    ``end`` is the first end time. ``seconds`` are the durations of the following steps.
    """
    if len(seconds) < MIN_VECTOR_STEPS:
        return array("d", accumulate(seconds, initial=end))
    return array("d", np.cumsum(np.append(end, seconds)).tobytes())
