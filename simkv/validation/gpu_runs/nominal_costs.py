"""Nominal step costs from a data sheet, used to size validation cases.

They are independent of the evaluated profile, which could otherwise select favorable cases.
"""

from __future__ import annotations

from simkv.core.errors import InputError, spelling_hint
from simkv.costs.cost_profile import CostProfile, CostTerm
from simkv.costs.hardware.model_gpu_catalog import known_gpu
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.validation.gpu_runs.baseline_models import roofline

#: Attainable shares of a GPU's bandwidth and 16-bit FLOP/s, and host seconds per step. They affect
#: only loads and lengths of runs.
BANDWIDTH_SHARE, FLOPS_SHARE, HOST_S = 0.8, 0.6, 1e-3
#: Bytes/s, FLOP/s and host seconds of an unknown CPU core.
CPU_CORE = (1e10, 1e11, 2e-3)


def nominal_profile(profile: CostProfile) -> CostProfile:
    """Return unmeasured costs of the profile's model on its GPU.

    Raises InputError for a model of unknown shape.
    """
    shape = MODEL_SHAPES.get(profile.model)
    if shape is None:
        raise InputError(
            f"{profile.name}: model: {profile.model} is not one of the runner's"
            f"{spelling_hint(profile.model, MODEL_SHAPES)}; expected {', '.join(MODEL_SHAPES)}"
        )
    gpu = known_gpu(profile.gpu)
    if gpu is None:
        bandwidth, flops, host_s = CPU_CORE
        found = roofline(shape, 4, bandwidth, flops)
    else:
        host_s = HOST_S
        found = roofline(shape, 2, BANDWIDTH_SHARE * gpu.bandwidth, FLOPS_SHARE * gpu.flops)
    host = CostTerm(name="host", feature="steps", seconds=host_s)
    return found.model_copy(update={"name": "nominal", "terms": [*found.terms, host]})
