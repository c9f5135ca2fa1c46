"""Fit cost constants by kind of configuration and evaluate them on held-out points.

A kind of configuration is defined at a ``Level``, and a ladder is a list of levels from wide to
narrow kinds. The constants of a kind are regularized towards the constants of the wider kind that
contains it, so that a kind with few points changes them little. Each ladder in ``LADDERS`` is
evaluated in two ways: with configurations held out (new points of known pairs of model and GPU),
and with whole pairs held out (unseen pairs). Levels wider than a pair also apply to models outside
the fit; ``transfers`` decides whether a ladder may have such levels. Among the ladders that may,
the ladder with the fewest constants whose total error is close to the best is chosen.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from dev.serving_points.fit_samples import NONE, Residual
from simkv.costs.operators.configuration_kind import Configuration
from simkv.validation.serving_points.latency_gradients import FITTED_CONSTANTS, Floats

FOLDS = 5
#: Regularization scale of each constant. A difference of this size from the wider kind's value has
#: the same residual as a point whose error is two ``SCALE``.
REACH = np.array([0.5, 0.25, 0.01, 0.0005, 0.00002, 0.02])
#: Scale of log(measured / predicted) for TTFT and TPOT: the targets are 10 % and 5 %.
SCALE = np.array([0.10, 0.05])
LOW = np.array([0.3, 0.5, 0.0, 0.0, 0.0, 0.0])
HIGH = np.array([5.0, 2.5, 0.2, 0.02, 0.001, 0.5])
#: Maximum relative and absolute difference to the best total error (in units of ``SCALE``) at which
#: the ladder with fewer constants is preferred.
BETTER, WORTH = 0.02, 0.05

Values = dict[str, Floats]


@dataclass(frozen=True)
class Level:
    """A level of kinds, which are given by ``fields`` of a configuration, and the
    ``FITTED_CONSTANTS`` that the level may change.
    """

    fields: tuple[str, ...]
    free: tuple[str, ...] = FITTED_CONSTANTS

    def name(self, kind: Configuration) -> str:
        """Return the name of a configuration's kind at this level."""
        return ", ".join(f"{field} {getattr(kind, field)}" for field in self.fields)


Ladder = tuple[Level, ...]
STEPS = ("prefill", "decode")
ENGINE, MIXTURE = Level(("backend",)), Level(("backend", "mlp"))
FAMILY = Level(("backend", "mlp", "family"), STEPS)
KERNELS = Level(("backend", "family", "attention", "weights", "experts"), STEPS)
_OF_A_PAIR = ("backend", "gpu", "model", "weights", "experts")
PAIR, PAIR_STEPS = Level(_OF_A_PAIR), Level(_OF_A_PAIR, STEPS)
PAIR_PREFILLS = Level(_OF_A_PAIR, (*STEPS, "prefill_step_s"))
#: Times of the host and of the API server, without factors on whole steps.
HOST = ("prefill_step_s", "step_s", "seq_s", "front_s")
PAIR_HOST, MIXTURE_HOST = Level(_OF_A_PAIR, HOST), Level(("backend", "mlp"), HOST)
#: Ladders to evaluate, by name.
LADDERS: dict[str, Ladder] = {
    "none": (),
    "pair, two each": (PAIR_STEPS,),
    "pair, three each": (PAIR_PREFILLS,),
    "pair, host times": (PAIR_HOST,),
    "engine, dense or mixture, host times": (MIXTURE_HOST,),
    "engine": (ENGINE,),
    "engine, dense or mixture": (MIXTURE,),
    "and GPU family": (MIXTURE, FAMILY),
    "and kernels": (MIXTURE, KERNELS),
    "and pair, two each": (MIXTURE, PAIR_STEPS),
    "and pair, three each": (MIXTURE, PAIR_PREFILLS),
    "and pair, six each": (MIXTURE, PAIR),
}


def fit(samples: Sequence[Residual], ladder: Ladder) -> Values:
    """Fit the constants of every kind of a ladder; return them by the name of the kind."""
    found: Values = {}
    for depth, level in enumerate(ladder):
        parts: dict[str, list[Residual]] = {}
        for sample in samples:
            parts.setdefault(level.name(sample.kind), []).append(sample)
        for name, part in parts.items():
            towards = values_for(part[0].kind, found, ladder[:depth])
            found[name] = _fit_part(part, towards, level.free)
    return found


def values_for(kind: Configuration, found: Mapping[str, Floats], ladder: Ladder) -> Floats:
    """Return the constants of the narrowest level that has constants for this kind, or ``NONE`` if
    no level has.
    """
    for level in reversed(ladder):
        if (name := level.name(kind)) in found:
            return found[name]
    return NONE


def _fit_part(samples: Sequence[Residual], towards: Floats, names: Sequence[str]) -> Floats:
    free = np.array([FITTED_CONSTANTS.index(name) for name in names])
    at = np.array([s.at for s in samples])
    slopes = np.array([s.slopes for s in samples])
    start = np.array([s.start for s in samples])
    real = np.log(np.array([s.real for s in samples]))

    def moved(values: Floats) -> Floats:
        every = towards.copy()
        every[free] = values
        return np.asarray(at + np.einsum("nij,nj->ni", slopes, every - start))

    def off(values: Floats) -> Floats:
        logs = np.log(np.maximum(moved(values), at / 5)) - real
        return np.concatenate(
            [(logs / SCALE).ravel(), 2.0 * (values - towards[free]) / REACH[free]]
        )

    def slope(values: Floats) -> Floats:
        new = moved(values)
        new = np.where(new > at / 5, new, np.inf)
        points = slopes[:, :, free] / (new * SCALE)[:, :, None]
        return np.concatenate([points.reshape(-1, len(free)), np.diag(2.0 / REACH[free])])

    found = least_squares(
        off,
        np.clip(towards, LOW + 1e-9, HIGH - 1e-9)[free],
        slope,
        bounds=(LOW[free], HIGH[free]),
        loss="soft_l1",
        x_scale=REACH[free],
        ftol=1e-5,
        xtol=1e-5,
    )
    values = towards.copy()
    values[free] = found.x
    return values


def residuals(samples: Sequence[Residual], values: Mapping[str, Floats], ladder: Ladder) -> Floats:
    """Return log(measured / predicted), shape (samples, 2): TTFT and TPOT."""
    return np.array(
        [np.log(s.real / s.predicted(values_for(s.kind, values, ladder))) for s in samples]
    )


def left_out(
    samples: Sequence[Residual], ladder: Ladder, part_of: Callable[[Residual], object]
) -> Floats:
    """Return the residuals of each sample, with constants fitted to the samples of all other
    parts.
    """
    found = np.zeros((len(samples), 2))
    labels = [part_of(s) for s in samples]
    for label in set(labels):
        out = [i for i, other in enumerate(labels) if other == label]
        rest = [s for s, other in zip(samples, labels, strict=True) if other != label]
        found[out] = residuals([samples[i] for i in out], fit(rest, ladder), ladder)
    return found


def fold(sample: Residual) -> int:
    """Return the fold of a sample's configuration, which is the same on every machine."""
    return zlib.crc32(repr(sample.configuration).encode()) % FOLDS


def mape(logs: Floats) -> Floats:
    """Return the mean absolute relative error of predictions, given log(measured / predicted)."""
    return np.asarray(np.abs(np.exp(-logs) - 1.0).mean(axis=0))


@dataclass(frozen=True)
class LeftOut:
    """Held-out errors of a ladder with ``number`` constants.

    ``configurations`` is the MAPE (TTFT, TPOT) with configurations held out, and ``groups`` the
    MAPE with pairs of model and GPU held out.
    """

    name: str
    number: int
    configurations: Floats
    groups: Floats

    @property
    def total(self) -> float:
        """Sum of the two errors, in units of ``SCALE``."""
        return float(((self.configurations + self.groups) / SCALE).sum())


@dataclass(frozen=True)
class Fitted:
    """The chosen constants and the residuals of held-out points."""

    values: Values
    chosen: str
    tried: list[LeftOut]
    configurations: Floats
    groups: Floats

    @property
    def ladder(self) -> Ladder:
        """Levels of the chosen ladder."""
        return LADDERS[self.chosen]


def transfers(samples: Sequence[Residual], ladder: Ladder) -> bool:
    """Return whether the levels of a ladder that are wider than a pair transfer to other models.

    They transfer if they reduce the total error of each class (engine; dense model or mixture of
    experts) by more than ``BETTER``, both with one model and with one source left out at a time.
    """
    wide = tuple(level for level in ladder if level.fields != _OF_A_PAIR)
    if not wide:
        return True
    parts: tuple[Callable[[Residual], object], ...] = (lambda s: s.kind.model, lambda s: s.source)
    for part_of in parts:
        with_them, without = left_out(samples, wide, part_of), left_out(samples, (), part_of)
        for name in {MIXTURE.name(s.kind) for s in samples}:
            own = [MIXTURE.name(s.kind) == name for s in samples]
            errors = [float((mape(logs[own]) / SCALE).sum()) for logs in (with_them, without)]
            if errors[0] >= (1 - BETTER) * errors[1]:
                return False
    return True


def choose(samples: Sequence[Residual]) -> Fitted:
    """Fit the ladder with the fewest constants whose held-out error is close to the best, and
    return it.

    Only ladders whose levels transfer are considered (``transfers``).
    """
    tried: list[LeftOut] = []
    logs: dict[str, tuple[Floats, Floats]] = {}
    for name, ladder in LADDERS.items():
        by_fold = left_out(samples, ladder, fold)
        by_group = left_out(samples, ladder, lambda s: s.group)
        number = sum(
            len(level.free) * len({level.name(s.kind) for s in samples}) for level in ladder
        )
        tried.append(LeftOut(name, number, mape(by_fold), mape(by_group)))
        logs[name] = by_fold, by_group
    able = [t for t in tried if transfers(samples, LADDERS[t.name])]
    enough = min(t.total for t in able) * (1 + BETTER) + WORTH
    best = min((t for t in able if t.total <= enough), key=lambda t: t.number)
    return Fitted(fit(samples, LADDERS[best.name]), best.name, tried, *logs[best.name])
