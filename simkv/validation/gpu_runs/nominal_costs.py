"""Nominal step costs from a data sheet, used to size validation runs.

The costs do not depend on the evaluated profile, which could otherwise select favorable runs.
"""

from __future__ import annotations

import json
from pathlib import Path

from simkv.core.errors import InputError, spelling_hint
from simkv.costs.cost_profile import CostProfile, CostTerm
from simkv.costs.hardware.model_gpu_catalog import known_gpu
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.validation.gpu_runs.baseline_models import roofline

#: Attainable fractions of a GPU's data-sheet bandwidth and 16-bit FLOP/s, attainable fractions of
#: measured peak rates, and host seconds per step. These numbers affect only the loads and lengths
#: of runs.
SHEET_SHARES, MEASURED_SHARES, HOST_S = (0.8, 0.6), (0.9, 0.8), 1e-3


def nominal_profile(profile: CostProfile, campaign: Path | None = None) -> CostProfile:
    """Return the data-sheet costs of the profile's model on its GPU.

    ``campaign`` is an output directory of `simkv gpu calibrate`. Its measured peak rates are used
    for GPUs that are not in the catalog. Raises InputError if the model's shape or the GPU's peak
    rates are unknown.
    """
    shape = MODEL_SHAPES.get(profile.model)
    if shape is None:
        raise InputError(
            f"{profile.name}: model: the GPU runner does not support "
            f"{profile.model}{spelling_hint(profile.model, MODEL_SHAPES)}; expected "
            f"{', '.join(MODEL_SHAPES)}"
        )
    if gpu := known_gpu(profile.gpu):
        rates, shares, itemsize = (gpu.bandwidth, gpu.flops), SHEET_SHARES, 2
    else:
        rates, itemsize = _measured_ceilings(profile, campaign)
        shares = MEASURED_SHARES
    found = roofline(shape, itemsize, shares[0] * rates[0], shares[1] * rates[1])
    host = CostTerm(name="host", feature="steps", seconds=HOST_S)
    return found.model_copy(update={"name": "nominal", "terms": [*found.terms, host]})


def _measured_ceilings(
    profile: CostProfile, campaign: Path | None
) -> tuple[tuple[float, float], int]:
    """Return the measured peak bytes/s and FLOP/s, and the bytes per number."""
    path = (campaign or Path()) / "campaign.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        found = about["ceilings"]
        return (found["bytes_per_s"], found["flops_per_s"]), int(about["itemsize"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{profile.name}: gpu: {profile.gpu} is not in the catalog, and {path} contains no "
            "measured peak rates; pass the directory written by `simkv gpu calibrate` as "
            "--profile"
        ) from error
