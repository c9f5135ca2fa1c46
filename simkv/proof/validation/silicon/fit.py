"""Constants for kinds of configurations, fitted to measured points and judged on others.

A kind's constants are drawn towards those of the wider kind that it belongs to, so that few points
move them little: engine, then the pair of model and GPU in its number formats. (Levels between the
two, by GPU family and by kernels, do worse on pairs left out as a whole.)
How fine they get is decided by the error on configurations that were left out (folds of them), as
coarse as does no worse. Pairs of model and GPU that are left out as a whole say what the error is
on those never seen.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from simkv.costs.operators.spreads import Configuration, Spread
from simkv.proof.validation.silicon.samples import NONE, Residual
from simkv.proof.validation.silicon.slopes import MOVED, Floats

FOLDS = 5
#: Names of the ends of ``Kind.levels``, from the widest: how fine constants may get.
FINENESS = ("none", "engine", "pair")
#: By how much a constant may differ from the wider kind's as easily as a point by its scale.
REACH = np.array([0.5, 0.25, 0.01, 0.0005, 0.00002, 0.02])
#: What a logarithm of measured over predicted counts: the targets are 10 and 5 per cent.
SCALE = np.array([0.10, 0.05])
LOW = np.array([0.3, 0.5, 0.0, 0.0, 0.0, 0.0])
HIGH = np.array([5.0, 2.5, 0.2, 0.02, 0.001, 0.5])
#: A finer fit must be better by this share.
BETTER = 0.02
#: Fewer left-out points than this say nothing of their own quantiles, and fewer pairs of model and
#: GPU nothing of one that was never seen.
ENOUGH, PAIRS = 20, 3

Values = dict[str, Floats]


def levels_of(kind: Configuration, fineness: int) -> list[str]:
    """Names of the kinds that a kind belongs to, from the widest, so many of them."""
    pair, *_, engine = kind.levels()
    return [engine, pair][:fineness]


def fit(samples: Sequence[Residual], fineness: int) -> Values:
    """Constants by the name of their level."""
    found: Values = {}
    for depth in range(1, fineness + 1):
        parts: dict[str, list[Residual]] = {}
        for sample in samples:
            parts.setdefault(levels_of(sample.kind, depth)[-1], []).append(sample)
        for name, part in parts.items():
            found[name] = _fit_part(part, values_for(part[0].kind, found, depth - 1))
    return found


def values_for(kind: Configuration, found: Mapping[str, Floats], fineness: int) -> Floats:
    """The constants of the nearest level that has any; without one, none."""
    for name in reversed(levels_of(kind, fineness)):
        if name in found:
            return found[name]
    return NONE


def _fit_part(samples: Sequence[Residual], towards: Floats) -> Floats:
    at = np.array([s.at for s in samples])
    slopes = np.array([s.slopes for s in samples])
    start = np.array([s.start for s in samples])
    real = np.log(np.array([s.real for s in samples]))

    def off(values: Floats) -> Floats:
        moved = at + np.einsum("nij,nj->ni", slopes, values - start)
        logs = np.log(np.maximum(moved, at / 5)) - real
        return np.concatenate([(logs / SCALE).ravel(), 2.0 * (values - towards) / REACH])

    def slope(values: Floats) -> Floats:
        moved = at + np.einsum("nij,nj->ni", slopes, values - start)
        moved = np.where(moved > at / 5, moved, np.inf)
        points = slopes / (moved * SCALE)[:, :, None]
        return np.concatenate([points.reshape(-1, len(MOVED)), np.diag(2.0 / REACH)])

    begin = np.clip(towards, LOW + 1e-9, HIGH - 1e-9)
    found = least_squares(
        off,
        begin,
        slope,
        bounds=(LOW, HIGH),
        loss="soft_l1",
        x_scale=REACH,
        ftol=1e-5,
        xtol=1e-5,
    )
    return np.asarray(found.x)


def residuals(samples: Sequence[Residual], values: Mapping[str, Floats], fineness: int) -> Floats:
    """Logarithms of measured over predicted, a row for each sample: TTFT and TPOT."""
    return np.array(
        [np.log(s.real / s.predicted(values_for(s.kind, values, fineness))) for s in samples]
    )


def left_out(
    samples: Sequence[Residual], fineness: int, part_of: Callable[[Residual], object]
) -> Floats:
    """The residuals of each sample under constants fitted without its part."""
    found = np.zeros((len(samples), 2))
    labels = [part_of(s) for s in samples]
    for label in set(labels):
        out = [i for i, other in enumerate(labels) if other == label]
        rest = [s for s, other in zip(samples, labels, strict=True) if other != label]
        found[out] = residuals([samples[i] for i in out], fit(rest, fineness), fineness)
    return found


def fold(sample: Residual) -> int:
    """The fold of its configuration, the same on every machine."""
    return zlib.crc32(repr(sample.configuration).encode()) % FOLDS


def mape(logs: Floats) -> Floats:
    """Mean absolute relative error of the prediction, from logarithms of measured over it."""
    return np.asarray(np.abs(np.exp(-logs) - 1.0).mean(axis=0))


@dataclass(frozen=True)
class Fineness:
    """How constants of that fineness do: their ``number``, and MAPE (TTFT, TPOT) on points left
    out by configuration, and by pair of model and GPU."""

    name: str
    number: int
    configurations: Floats
    groups: Floats


@dataclass(frozen=True)
class Fitted:
    """The constants that were chosen, and what the points that they did not see say of them."""

    values: Values
    fineness: int
    tried: list[Fineness]
    configurations: Floats
    groups: Floats


def choose(samples: Sequence[Residual]) -> Fitted:
    """The coarsest constants that do no worse on configurations left out."""
    tried: list[Fineness] = []
    logs: list[tuple[Floats, Floats]] = []
    for fineness, name in enumerate(FINENESS):
        by_fold = left_out(samples, fineness, fold)
        by_group = left_out(samples, fineness, lambda s: s.group)
        number = len(fit(samples, fineness)) * len(MOVED)
        tried.append(Fineness(name, number, mape(by_fold), mape(by_group)))
        logs.append((by_fold, by_group))
    totals = [float((t.configurations / SCALE).sum()) for t in tried]
    enough = min(totals) * (1 + BETTER) + BETTER
    best = next(i for i, total in enumerate(totals) if total <= enough)
    return Fitted(fit(samples, best), best, tried, *logs[best])


def spreads(
    samples: Sequence[Residual], fitted: Fitted
) -> tuple[dict[str, Spread], dict[str, Spread]]:
    """Spreads of the groups that were seen, and of kinds for those that were not."""
    seen, unseen = _pools(samples, fitted.configurations), _pools(samples, fitted.groups)
    groups = {}
    for kind in {s.kind for s in samples}:
        own = next((name for name in kind.levels() if len(seen[name]) >= ENOUGH), kind.levels()[-1])
        groups[kind.levels()[0]] = spread_of(seen[own])
    wider = {
        name: spread_of(unseen[name])
        for kind in {s.kind for s in samples}
        for name in kind.levels()[1:]
        if len({s.group for s in samples if name in s.kind.levels()}) >= PAIRS
    }
    return dict(sorted(groups.items())), dict(sorted(wider.items()))


def _pools(samples: Sequence[Residual], logs: Floats) -> dict[str, list[Floats]]:
    pools: dict[str, list[Floats]] = {}
    for sample, row in zip(samples, logs, strict=True):
        for name in sample.kind.levels():
            pools.setdefault(name, []).append(row)
    return pools


def spread_of(logs: Iterable[Floats]) -> Spread:
    """The quantiles between which a next one lies with 90 %, if it is like these."""
    rows = np.sort(np.array(list(logs)), axis=0)
    count = len(rows)
    # Of n alike the next lies below the k-th with k / (n + 1).
    below = max(int(0.05 * (count + 1)) - 1, 0)
    low, high = rows[below], rows[count - 1 - below]
    ttft, tpot = (
        (round(float(min(a, 0.0)), 4), round(float(max(b, 0.0)), 4))
        for a, b in zip(low, high, strict=True)
    )
    signed = np.exp(-rows) - 1.0
    median, bias = (
        (round(float(both[0]), 4), round(float(both[1]), 4))
        for both in (np.median(np.abs(signed), axis=0), signed.mean(axis=0))
    )
    return Spread(ttft, tpot, count, median, bias)


def ends(
    samples: Sequence[Residual], logs: Floats, part_of: Callable[[Residual], object], *, seen: bool
) -> Floats:
    """Ends of each sample's interval by the spreads of the other parts, as logarithms.

    Of shape (samples, 2 latencies, 2 ends); NaN where nothing is near. ``seen``: others of the same
    pair of model and GPU may tell; else at least ``PAIRS`` other pairs must.
    """
    found = np.full((len(samples), 2, 2), np.nan)
    labels = [part_of(s) for s in samples]
    for label in set(labels):
        known = [i for i, other in enumerate(labels) if other != label]
        pools = _pools([samples[i] for i in known], logs[known])
        pairs: dict[str, set[object]] = {}
        for sample in (samples[i] for i in known):
            for level in sample.kind.levels():
                pairs.setdefault(level, set()).add(sample.group)
        for i in (i for i, other in enumerate(labels) if other == label):
            for level in samples[i].kind.levels()[0 if seen else 1 :]:
                pool = pools.get(level, ())
                if len(pool) >= ENOUGH and (seen or len(pairs[level]) >= PAIRS):
                    spread = spread_of(pool)
                    found[i] = spread.ttft, spread.tpot
                    break
    return found


def coverage(samples: Sequence[Residual], fitted: Fitted) -> dict[str, tuple[float, float, int]]:
    """Shares of left-out points (TTFT, TPOT, how many) inside spreads made without their part."""
    found = {}
    for name, logs, sides in (
        ("configurations", fitted.configurations, fold_ends(samples, fitted)),
        ("groups", fitted.groups, pair_ends(samples, fitted)),
    ):
        told = ~np.isnan(sides[:, 0, 0])
        inside = (sides[told, :, 0] <= logs[told]) & (logs[told] <= sides[told, :, 1])
        shares = inside.mean(axis=0) if told.any() else (0.0, 0.0)
        found[name] = (float(shares[0]), float(shares[1]), int(told.sum()))
    return found


def fold_ends(samples: Sequence[Residual], fitted: Fitted) -> Floats:
    """Ends of intervals for configurations left out."""
    return ends(samples, fitted.configurations, fold, seen=True)


def pair_ends(samples: Sequence[Residual], fitted: Fitted) -> Floats:
    """Ends of intervals for pairs of model and GPU left out."""
    return ends(samples, fitted.groups, lambda s: s.group, seen=False)
