"""Host time of steps, which no table of kernels has.

A step that runs as a CUDA graph takes as long as its kernels: on two hosts decodes were off by 0.4
ms at most (``simkv validate CASE --host-times``, docs/validation.md). One that is over the largest
graph is launched kernel by kernel, and what that takes longer is the host's: 5.9 ms (standard error
0.2) whatever its tokens and decodes on that of an RTX PRO 6000, nothing on that of an RTX 4090,
where such steps took 1 % less than their kernels in the tables (both vLLM 0.19.0 and Llama-3.1-8B,
from LLMServingSim's records). Any other host is taken to be like the first: 881 published points of
others say 7.1 ms for a step with prefill (``operators/constants.json``).
"""

from __future__ import annotations

from collections.abc import Sequence

from simkv.costs.cost_profile import CostProfile, CostTerm, LinearPiece
from simkv.costs.hardware.model_gpu_catalog import known_gpu

#: What terms of host time are called.
HOST_TERM = "host"
#: Seconds that a step over the largest CUDA graph takes above its kernels, where nobody measured.
DEFAULT_LAUNCH_S = 5.9e-3
#: The same by the GPU of the host that it was measured on.
LAUNCH_S_BY_GPU = {
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 5.9e-3,
    "NVIDIA GeForce RTX 4090": 0.0,
}
#: The records that these were measured in, of which they are no prediction.
MEASURED_IN = ("lss-rtxpro6000-llama3.1-8b", "lss-rtx4090-llama3.1-8b")


def launch_time(gpu: str) -> float:
    """Seconds that a step over the largest CUDA graph takes longer on the host of a ``gpu``."""
    known = known_gpu(gpu)
    return LAUNCH_S_BY_GPU.get(known.name, DEFAULT_LAUNCH_S) if known else DEFAULT_LAUNCH_S


def make_launch_term(graph_sizes: Sequence[int], seconds: float) -> CostTerm:
    """What a step takes that is launched kernel by kernel, by the CUDA graphs that there are."""
    pieces = [LinearPiece(up_to=graph_sizes[-1], base=0.0), LinearPiece(base=seconds)]
    return CostTerm(
        name=f"{HOST_TERM}, over the largest CUDA graph", feature="tokens", pieces=pieces
    )


def without_host(profile: CostProfile) -> CostProfile:
    """The profile with its kernels only."""
    kept = [term for term in profile.terms if not term.name.startswith(HOST_TERM)]
    return (
        profile if len(kept) == len(profile.terms) else profile.model_copy(update={"terms": kept})
    )
