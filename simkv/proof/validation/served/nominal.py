"""What a step should about cost by a data sheet: cases are sized by this.

A judged profile that chose its own judges could choose what it is good at.
"""

from __future__ import annotations

from simkv.core.errors import InputError, nearest
from simkv.costs.hardware.catalog import known_gpu
from simkv.costs.hardware.shapes import MODELS
from simkv.costs.profile import Profile, Term
from simkv.proof.validation.served.baselines import roofline

#: Shares of a GPU's bandwidth and 16-bit FLOP/s that steps reach, and the host's seconds a step.
#: Only loads and lengths of runs hang on them.
BANDWIDTH, FLOPS, HOST_S = 0.8, 0.6, 1e-3
#: Bytes/s, FLOP/s and seconds of a core of no known kind.
CORE = (1e10, 1e11, 2e-3)


def nominal(profile: Profile) -> Profile:
    """Costs of the profile's model on its GPU, of which nothing was measured.

    Raises InputError for a model whose shape is not known.
    """
    shape = MODELS.get(profile.model)
    if shape is None:
        raise InputError(
            f"{profile.name}: model: {profile.model} is not one of the runner's"
            f"{nearest(profile.model, MODELS)}; expected {', '.join(MODELS)}"
        )
    gpu = known_gpu(profile.gpu)
    if gpu is None:
        bandwidth, flops, host_s = CORE
        found = roofline(shape, 4, bandwidth, flops)
    else:
        host_s = HOST_S
        found = roofline(shape, 2, BANDWIDTH * gpu.bandwidth, FLOPS * gpu.flops)
    host = Term(name="host", feature="steps", seconds=host_s)
    return found.model_copy(update={"name": "nominal", "terms": [*found.terms, host]})
