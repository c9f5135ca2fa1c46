"""Sample the points of a sweep at random instead of on a grid.

Example:

    axes = [parse_axis("engine.num_gpu_blocks=256..1024"), parse_axis("timeout=1.0..60.0:log")]
    sample_points(axes, SampleSpec("lhs", 100), seed=0)  # 100 points, evenly spread on each axis
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from simkv.core.errors import InputError
from simkv.study.sweep_axes import MAX_POINTS, Axis, KnobSettings


@dataclass(frozen=True)
class SampleSpec:
    """Number of sampled points; ``lhs`` is a Latin hypercube, ``random`` independent points."""

    kind: Literal["random", "lhs"]
    size: int


def parse_sample(text: str) -> SampleSpec:
    """Parse ``random:N`` or ``lhs:N``. Raises InputError for any other text."""
    kind, _, size = text.partition(":")
    if kind not in ("random", "lhs") or not size.isdecimal() or not 0 < int(size) <= MAX_POINTS:
        raise InputError(
            f"--sample {text}: expected random:N or lhs:N with N from 1 to {MAX_POINTS:,}"
        )
    return SampleSpec("lhs" if kind == "lhs" else "random", int(size))


def sample_points(axes: Sequence[Axis], sample: SampleSpec, seed: int) -> list[KnobSettings]:
    """Sample points from the axes, independently or as a Latin hypercube.

    Of n points of a Latin hypercube exactly one lies in each n-th part of every axis.
    """
    shares = _shares(len(axes), sample, seed)
    return [
        {axis.path: axis.at(share) for axis, share in zip(axes, row, strict=True)}
        for row in shares.tolist()
    ]


def _shares(dimensions: int, sample: SampleSpec, seed: int) -> npt.NDArray[np.float64]:
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    if sample.kind == "random" or not dimensions:
        return random.random((sample.size, dimensions))
    from scipy.stats.qmc import LatinHypercube

    # The upper end of a cell may round to 1 in floating point.
    drawn: npt.NDArray[np.float64] = LatinHypercube(dimensions, rng=random).random(sample.size)
    return np.minimum(drawn, np.nextafter(1.0, 0.0))
