"""How wrong straight lines between the points of an attention table are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from simkv.costs.attention import Table
from simkv.costs.erring import kind_of
from simkv.costs.load import Load, pairs
from simkv.costs.profile import StepError

Point = tuple[int, int, int, int]


def left_out(table: Table, rest: Callable[[Load], float]) -> dict[str, StepError]:
    """Errors of step times by kind of step, each measured point predicted from its neighbours.

    A point is left out and read off the line between the two beside it, along each axis on which
    it has two; ``rest`` is what a step costs besides attention (s). As that line spans two
    intervals, the error inside one is smaller. Empty where no point has two neighbours.
    """
    measured: dict[Point, float] = {
        (part.prefill_tokens, row.prefill_context, part.decode_seqs, context): seconds
        for part in table.slices
        for row in part.rows
        for context, seconds in zip(row.decode_context, row.seconds, strict=True)
    }
    found: dict[str, list[float]] = {}
    for point, line in _lines(measured):
        load = _load(point)
        own = rest(load)
        error = (own + line) / (own + measured[point]) - 1
        found.setdefault(kind_of(load), []).append(error)
    return {kind: step_error(np.array(errors)) for kind, errors in sorted(found.items())}


def step_error(errors: np.ndarray[tuple[int], np.dtype[np.float64]]) -> StepError:
    """Sum up relative errors (0.01 is one per cent)."""
    size = np.abs(errors)
    return StepError(
        points=len(errors),
        median=float(np.median(size)),
        p95=float(np.quantile(size, 0.95)),
        bias=float(errors.mean()),
    )


def _lines(measured: dict[Point, float]) -> Iterator[tuple[Point, float]]:
    """Points with their values on the lines between neighbours, axis by axis."""
    for axis in range(4):
        groups: dict[tuple[int, ...], list[int]] = {}
        for point in measured:
            groups.setdefault((*point[:axis], *point[axis + 1 :]), []).append(point[axis])
        for key, values in groups.items():
            values.sort()
            for low, x, high in zip(values, values[1:], values[2:], strict=False):
                a, b, c = (_at(key, axis, value) for value in (low, x, high))
                # Nothing is between none and one: another kernel runs then.
                if low or axis in (1, 3):
                    share = (x - low) / (high - low)
                    yield b, measured[a] + share * (measured[c] - measured[a])


def _at(key: tuple[int, ...], axis: int, value: int) -> Point:
    whole = (*key[:axis], value, *key[axis:])
    return whole[0], whole[1], whole[2], whole[3]


def _load(point: Point) -> Load:
    tokens, before, seqs, context = point
    prefills = 1 if tokens else 0
    return Load(
        prefills,
        tokens,
        before,
        seqs,
        seqs * context,
        pairs(tokens, before),
        prefills + seqs,
        context,
        context,
    )
