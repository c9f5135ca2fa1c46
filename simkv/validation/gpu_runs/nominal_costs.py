"""What a step should about cost by a data sheet: cases are sized by this.

A judged profile that chose its own judges could choose what it is good at.
"""

from __future__ import annotations

from simkv.core.errors import InputError, spelling_hint
from simkv.costs.cost_profile import CostProfile, CostTerm
from simkv.costs.hardware.model_gpu_catalog import known_gpu
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.validation.gpu_runs.baseline_models import roofline

#: Shares of a GPU's bandwidth and 16-bit FLOP/s that steps reach, and the host's seconds a step.
#: Only loads and lengths of runs hang on them.
BANDWIDTH_SHARE, FLOPS_SHARE, HOST_S = 0.8, 0.6, 1e-3
#: Bytes/s, FLOP/s and seconds of a core of no known kind.
CPU_CORE = (1e10, 1e11, 2e-3)


def nominal_profile(profile: CostProfile) -> CostProfile:
    """Costs of the profile's model on its GPU, of which nothing was measured.

    Raises InputError for a model whose shape is not known.
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
