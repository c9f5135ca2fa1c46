"""Relative errors of step times, summarized by kind of step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import log2

import numpy as np

from simkv.costs.attention_table import AttentionTable
from simkv.costs.cost_profile import (
    CostProfile,
    Feature,
    StepCost,
    StepError,
)
from simkv.costs.interpolation import lerp
from simkv.costs.scaled_executor import classify_step
from simkv.costs.step_load import StepLoad, count_attention_pairs

AttentionPoint = tuple[int, int, int, int]


def add_error_estimates(profile: CostProfile) -> CostProfile:
    """Return the profile with errors (``held_out``, ``beyond``) computed from its attention
    table.
    """
    table = profile.attention
    assert table is not None
    rest = StepCost(profile.model_copy(update={"attention": None}))
    found = {
        "held_out": compute_held_out_errors(table, rest),
        "beyond": compute_extrapolation_errors(table, rest),
    }
    fit = profile.fit.model_copy(update=found)
    return profile.model_copy(update={"fit": fit})


def compute_held_out_errors(
    table: AttentionTable, rest: Callable[[StepLoad], float]
) -> dict[str, StepError]:
    """Return the relative errors of step times, by kind of step (decode, prefill or mixed).

    Each measured batch is predicted from its two neighbors in the table. ``rest`` returns the time
    (s) of a step, excluding its attention. The result is empty if no batch has two neighbors.
    """
    measured = _measured(table)

    def named() -> Iterator[tuple[str, float]]:
        for point, line in _lines(measured):
            load = _load(point)
            own = rest(load)
            yield classify_step(load), (own + line) / (own + measured[point]) - 1

    return summarize_errors_by_kind(named())


#: Features of a step that correspond to each axis of an attention table.
_AXES: tuple[tuple[Feature, ...], ...] = (
    ("prefill_tokens",),
    ("prefill_context",),
    ("decode_seqs", "mixed_decode_seqs"),
    ("decode_mean",),
)


def compute_extrapolation_errors(
    table: AttentionTable, rest: Callable[[StepLoad], float]
) -> dict[Feature, float]:
    """Return the relative step error for each doubling of a feature outside the range, by feature.

    The last measured values are predicted by extrapolation. The result is the 90th percentile of
    these errors. ``rest`` returns the time (s) of a step, excluding its attention.
    """
    measured = _measured(table)
    found: dict[Feature, float] = {}
    for axis, features in enumerate(_AXES):
        errors = []
        for key, values in _axis(measured, axis).items():
            if len(values) < 3 or not values[-2]:
                continue
            a, b, c = (measured[_at(key, axis, value)] for value in values[-3:])
            share = (values[-1] - values[-3]) / (values[-2] - values[-3])
            own = rest(_load(_at(key, axis, values[-1])))
            off = (own + lerp(a, b, share)) / (own + c) - 1
            errors.append(abs(off) / log2(values[-1] / values[-2]))
        if errors:
            found |= dict.fromkeys(features, float(np.quantile(errors, 0.9)))
    return found


def _measured(table: AttentionTable) -> dict[AttentionPoint, float]:
    return {
        (part.prefill_tokens, row.prefill_context, part.decode_seqs, context): seconds
        for part in table.slices
        for row in part.rows
        for context, seconds in zip(row.decode_context, row.seconds, strict=True)
    }


def _axis(measured: Iterable[AttentionPoint], axis: int) -> dict[tuple[int, ...], list[int]]:
    """Return the sorted values on one axis, for each combination of values on the other axes."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for point in measured:
        groups.setdefault((*point[:axis], *point[axis + 1 :]), []).append(point[axis])
    return {key: sorted(values) for key, values in groups.items()}


def summarize_errors_by_kind(errors: Iterable[tuple[str, float]]) -> dict[str, StepError]:
    """Summarize pairs of a step kind and a relative error (0.01 is 1 %), by kind."""
    kinds: dict[str, list[float]] = {}
    for kind, error in errors:
        kinds.setdefault(kind, []).append(error)
    return {kind: _summed(found) for kind, found in sorted(kinds.items())}


def _summed(errors: list[float]) -> StepError:
    size = np.abs(errors)
    return StepError(
        points=len(errors),
        median=float(np.median(size)),
        p95=float(np.quantile(size, 0.95)),
        bias=float(np.mean(errors)),
    )


def _lines(measured: dict[AttentionPoint, float]) -> Iterator[tuple[AttentionPoint, float]]:
    """Yield measured batches with the time (s) interpolated between the two neighbors."""
    for axis in range(4):
        for key, values in _axis(measured, axis).items():
            for low, x, high in zip(values, values[1:], values[2:], strict=False):
                a, b, c = (_at(key, axis, value) for value in (low, x, high))
                # Counts of zero and one run different kernels, so the code does not interpolate
                # between these counts.
                if low or axis in (1, 3):
                    yield b, lerp(measured[a], measured[c], (x - low) / (high - low))


def _at(key: tuple[int, ...], axis: int, value: int) -> AttentionPoint:
    whole = (*key[:axis], value, *key[axis:])
    return whole[0], whole[1], whole[2], whole[3]


def _load(point: AttentionPoint) -> StepLoad:
    tokens, before, seqs, context = point
    prefills = 1 if tokens else 0
    return StepLoad(
        prefills,
        tokens,
        before,
        seqs,
        seqs * context,
        count_attention_pairs(tokens, before),
        prefills + seqs,
        context,
        context,
    )
