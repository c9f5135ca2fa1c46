"""Simple cost models for comparison. A good profile has smaller errors than these models.

    models = fit_baselines(training, profile)
    models["tokens only"].seconds(loads)

The models in this table are fitted to steps of the same calibration as the profile and evaluated on
the same runs:

constant step   the same time for every step
tokens only     a linear function of the number of tokens of a step
five prices     the sum of five costs: per step, prefill token, pair of prefill tokens, decode, and
                token of context
random forest   on the features of Vidur: tokens, decodes and their mean context, prefills

Two models are not fitted. ``roofline`` divides the bytes of weights and KV and the FLOPs by the
peak rates of the device. ``composed`` uses the costs that a scenario with ``hardware: {gpu,
model}`` gets from public operator tables.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, CostTerm, Feature, FitQuality, LinearPiece
from simkv.costs.cost_profile import StepCost as ProfileCost
from simkv.costs.cost_terms import compute_feature
from simkv.costs.hardware.model_shape import ModelShape
from simkv.costs.step_load import StepLoad

Floats = npt.NDArray[np.float64]
#: Features of each linear model.
LINEAR_MODELS: dict[str, tuple[Feature, ...]] = {
    "constant step": ("steps",),
    "tokens only": ("steps", "tokens"),
    "five prices": (
        "steps",
        "prefill_tokens",
        "prefill_pairs",
        "decode_seqs",
        "decode_context",
    ),
}
#: Features of the forest, the same as in Vidur's step-time predictors.
FOREST: tuple[Feature, ...] = (
    "tokens",
    "decode_seqs",
    "decode_mean",
    "prefill_tokens",
    "prefill_context",
    "prefill_pairs",
)
TREES, DEPTH = 250, 16


class TrainingStep(NamedTuple):
    """A measured step with its duration in seconds, for fits of the simple cost models."""

    load: StepLoad
    seconds: float


@dataclass(frozen=True)
class CostModel:
    """A function that predicts the durations of steps in seconds.

    ``profile`` is the cost model as a profile, or None if it cannot be used in a simulation.
    """

    seconds: Callable[[Sequence[StepLoad]], Sequence[float]]
    profile: CostProfile | None = None


def profile_model(profile: CostProfile) -> CostModel:
    """Return the cost model that predicts the step times of a profile."""
    cost = ProfileCost(profile)
    return CostModel(lambda loads: [cost(load) for load in loads], profile)


def fit_baselines(steps: Sequence[TrainingStep], profile: CostProfile) -> dict[str, CostModel]:
    """Return cost models by name, fitted to ``steps`` by least squares of relative errors.

    The result is empty without steps, and has no random forest without scikit-learn.
    """
    if not steps:
        return {}
    found = {
        name: profile_model(_linear(name, features, steps, profile))
        for name, features in LINEAR_MODELS.items()
    }
    if (forest := _forest(steps)) is not None:
        found["random forest"] = forest
    return found


def _linear(
    name: str, features: Sequence[Feature], steps: Sequence[TrainingStep], profile: CostProfile
) -> CostProfile:
    from scipy.optimize import nnls

    seconds = np.array([step.seconds for step in steps])
    rows = _columns([step.load for step in steps], features) / seconds[:, None]
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-30)
    solution = nnls(rows / scale, np.ones(len(seconds)))[0] / scale
    terms = [
        CostTerm(name=feature, feature=feature, seconds=max(float(price), 1e-12))
        for feature, price in zip(features, solution, strict=True)
    ]
    terms[0] = terms[0].model_copy(update={"seconds": max(float(solution[0]), 1e-9)})
    plain: dict[str, Any] = {"range": {}, "attention": None, "grid": None, "graph_sizes": []}
    plain |= {"floor": None, "fit": FitQuality(points=len(steps), note="a baseline")}
    return profile.model_copy(update={"name": name, "terms": terms, **plain})


def _forest(steps: Sequence[TrainingStep]) -> CostModel | None:
    try:
        from sklearn.ensemble import RandomForestRegressor
    except ImportError:
        return None
    # With logarithms, the squared errors are relative, as in the linear models.
    forest = RandomForestRegressor(TREES, max_depth=DEPTH, random_state=0)
    forest.fit(
        _columns([step.load for step in steps], FOREST), np.log([step.seconds for step in steps])
    )

    def predict(loads: Sequence[StepLoad]) -> Sequence[float]:
        found: list[float] = np.exp(forest.predict(_columns(loads, FOREST))).tolist()
        return found

    return CostModel(predict)


def _columns(loads: Iterable[StepLoad], features: Sequence[Feature]) -> Floats:
    return np.array(
        [[float(compute_feature(load, name)) for name in features] for load in loads],
        dtype=np.float64,
    )


def read_training(folder: Path, profile: CostProfile) -> list[TrainingStep]:
    """Return the measured steps of the calibration of ``profile``.

    The result is empty if the directory contains no calibration. Raises InputError if its files are
    damaged.
    """
    paths = folder / "passes.csv", folder / "samples.csv"
    if not all(path.is_file() for path in paths):
        return []
    fitted = "fitted-overlapped" if profile.floor else "fitted"
    try:
        real = [
            TrainingStep(parse_load(row, row["longest_context"]), float(row["seconds"]))
            for row in _rows(paths[0])
            if row["variant"] == fitted and row["kind"] != "idle"
        ]
        whole = [
            TrainingStep(parse_load(row, row["longest"]), float(row["median_s"]))
            for row in _rows(paths[1])
            if row["part"] == "step" and not row["key"].startswith("sentinel")
        ]
    except (KeyError, ValueError) as error:
        raise InputError(
            f"{folder}: not a directory written by `simkv gpu calibrate`: {error}"
        ) from error
    return [*real, *with_host(whole, profile)]


def with_host(steps: Sequence[TrainingStep], profile: CostProfile) -> list[TrainingStep]:
    """Return the steps with the host time of the profile included."""
    host = profile.floor or [term for term in profile.terms if term.name.startswith("host")]
    nothing = CostTerm(name="nothing", feature="steps", seconds=1e-9)
    cost = ProfileCost(profile.model_copy(update={"terms": [*host, nothing], "floor": None}))
    combine = max if profile.floor else sum
    return [TrainingStep(step.load, combine((step.seconds, cost(step.load)))) for step in steps]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def parse_load(row: Mapping[str, str], longest: str) -> StepLoad:
    """Return the load of a row of ``passes.csv`` or ``samples.csv``."""
    counts = {name: int(row[name]) for name in StepLoad._fields if row.get(name)}
    return StepLoad(**{**counts, "longest": int(longest)})


def roofline(
    shape: ModelShape,
    itemsize: int,
    bytes_per_s: float,
    flops_per_s: float,
) -> CostProfile:
    """Return the step costs of a device that reaches its peak bytes/s and FLOP/s.

    The time of a step is the sum of the times of the weights, the KV reads and prefill attention.
    """
    weights = shape.step_weights * itemsize / bytes_per_s
    multiplied = shape.step_weights - shape.vocab * shape.hidden  # without the output head
    per_token = 2 * multiplied / flops_per_s
    knee = max(floor(weights / per_token), 1)
    context = shape.kv_bytes_per_token(itemsize) / bytes_per_s
    pair = 4 * shape.layers * shape.heads * shape.head_dim / flops_per_s
    pieces = [LinearPiece(up_to=knee, base=weights), LinearPiece(base=0.0, slope=per_token)]
    return CostProfile(
        name="roofline",
        engine="none",
        model=shape.name,
        gpu=f"{bytes_per_s / 1e9:.4g} GB/s, {flops_per_s / 1e12:.4g} TFLOP/s",
        basis="assumed",
        terms=[
            CostTerm(name="weights or their FLOPs", feature="tokens", pieces=pieces),
            CostTerm(name="KV of the decodes", feature="decode_context", seconds=context),
            CostTerm(name="attention of the prefills", feature="prefill_pairs", seconds=pair),
        ],
        idle_pass_s=1e-5,
        range={},
        fit=FitQuality(points=0, note="not fitted: the two ceilings of the device"),
        source=["the larger of bytes and FLOPs of each part, over the ceilings of the device"],
    )


#: Models of the GPU runner, each with a model of the same shape that has operator tables.
SAME_SHAPE = {"llama-3-8b": "Llama-3.1-8B"}


@lru_cache(maxsize=4)
def composed(gpu: str, model: str) -> CostProfile | None:
    """Return the cost profile that a scenario with ``hardware: {gpu, model}`` uses.

    Returns None if the catalog does not contain the GPU or the model.
    """
    from simkv.costs.hardware.model_gpu_catalog import known_gpu
    from simkv.scenario.hardware_section import HardwareSection
    from simkv.scenario.scenario_costs import ReplicaCosts
    from simkv.schedulers.engine_registry import DEFAULT

    if known_gpu(gpu) is None:
        return None
    try:
        section = HardwareSection.model_validate(
            {"gpu": gpu, "model": SAME_SHAPE.get(model, model)}
        )
        return ReplicaCosts(DEFAULT.config(), None, section).load(Path())
    except (InputError, ValueError):
        return None
