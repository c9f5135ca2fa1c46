"""Selection of requests from a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simkv.core.errors import InputError


@dataclass(frozen=True)
class Selection:
    """Selection of requests from a trace, and their replay speed. The steps are in this order:

    - Select the requests that arrive in the ``duration`` seconds from ``start`` on.
    - Sample ``sample`` of the requests, a fraction (float) or a number (int), with the random
      ``seed``.
    - Select the first ``limit`` requests.
    - Shift time so that ``start`` is 0, and divide arrival times by ``rate_scale``.

    ``skip_bad`` skips and counts unreadable rows instead of raising an error.
    """

    # ``start`` is on the trace's clock. ``seed`` is also the seed of a generated trace.

    start: float = 0.0
    duration: float | None = None
    rate_scale: float = 1.0
    limit: int | None = None
    sample: int | float | None = None
    seed: int = 0
    skip_bad: bool = False

    def __post_init__(self) -> None:
        checks = {
            "start": (np.isfinite(self.start) and self.start >= 0, "non-negative seconds"),
            "duration": (self.duration is None or self.duration > 0, "seconds greater than 0"),
            "rate_scale": (np.isfinite(self.rate_scale) and self.rate_scale > 0, "above 0"),
            "limit": (self.limit is None or self.limit > 0, "a number of requests of at least 1"),
            "seed": (self.seed >= 0, "a non-negative integer"),
            "sample": (
                self.sample is None
                or (self.sample >= 1 if isinstance(self.sample, int) else 0 < self.sample <= 1),
                "a fraction like 0.1, at most 1.0, or a number of requests like 1000",
            ),
        }
        for name, (fine, right) in checks.items():
            if not fine:
                raise InputError(f"{name}: should be {right}; found {getattr(self, name)}")
