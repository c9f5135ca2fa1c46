"""Host time of steps, which kernel tables do not include.

A step in a CUDA graph takes as long as its kernels: on two hosts, decode times differed by at most
0.4 ms (``simkv validate CASE --host-times``, docs/validation.md). In a larger step, the host
launches every kernel separately. On the host of an RTX PRO 6000, this takes 5.9 ms (standard error
0.2) for any number of tokens and decodes. On the host of an RTX 4090, the additional time is 0.
Both hosts were measured with vLLM 0.19.0 and Llama-3.1-8B. Another source reports 7.1 ms for a step
with prefill (``operators/constants.json``).
"""

from __future__ import annotations

from collections.abc import Sequence

from simkv.costs.cost_profile import CostProfile, CostTerm, LinearPiece
from simkv.costs.hardware.model_gpu_catalog import known_gpu

#: Prefix of the names of cost terms for host time.
HOST_TERM = "host"
#: Additional host time (s) of a step above the largest CUDA graph, on GPUs without a measurement.
DEFAULT_LAUNCH_S = 5.9e-3
#: Measured additional host time (s) of a step above the largest CUDA graph, by GPU.
LAUNCH_S_BY_GPU = {
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 5.9e-3,
    "NVIDIA GeForce RTX 4090": 0.0,
}
#: Validation cases that provided these values; comparisons with these cases are not independent.
MEASURED_IN = ("lss-rtxpro6000-llama3.1-8b", "lss-rtx4090-llama3.1-8b")


def launch_time(gpu: str) -> float:
    """Return the additional host time in seconds of a step above the largest CUDA graph."""
    known = known_gpu(gpu)
    return LAUNCH_S_BY_GPU.get(known.name, DEFAULT_LAUNCH_S) if known else DEFAULT_LAUNCH_S


def make_launch_term(graph_sizes: Sequence[int], seconds: float) -> CostTerm:
    """Return a cost term that adds ``seconds`` to steps larger than the largest CUDA graph."""
    pieces = [LinearPiece(up_to=graph_sizes[-1], base=0.0), LinearPiece(base=seconds)]
    return CostTerm(
        name=f"{HOST_TERM}, over the largest CUDA graph", feature="tokens", pieces=pieces
    )


def without_host(profile: CostProfile) -> CostProfile:
    """Return the profile without its terms for host time."""
    kept = [term for term in profile.terms if not term.name.startswith(HOST_TERM)]
    return (
        profile if len(kept) == len(profile.terms) else profile.model_copy(update={"terms": kept})
    )
