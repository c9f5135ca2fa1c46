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

from simkv.costs.hardware.catalog import known_gpu
from simkv.costs.profile import Piece, Profile, Term

#: What terms of host time are called.
NAME = "host"
#: Seconds that a step over the largest CUDA graph takes above its kernels, where nobody measured.
LAUNCHED = 5.9e-3
#: The same by the GPU of the host that it was measured on.
HOSTS = {
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 5.9e-3,
    "NVIDIA GeForce RTX 4090": 0.0,
}
#: The records that these were measured in, of which they are no prediction.
MEASURED_IN = ("lss-rtxpro6000-llama3.1-8b", "lss-rtx4090-llama3.1-8b")


def launch_time(gpu: str) -> float:
    """Seconds that a step over the largest CUDA graph takes longer on the host of a ``gpu``."""
    known = known_gpu(gpu)
    return HOSTS.get(known.name, LAUNCHED) if known else LAUNCHED


def launched(graph_sizes: Sequence[int], seconds: float) -> Term:
    """What a step takes that is launched kernel by kernel, by the CUDA graphs that there are."""
    pieces = [Piece(up_to=graph_sizes[-1], base=0.0), Piece(base=seconds)]
    return Term(name=f"{NAME}, over the largest CUDA graph", feature="tokens", pieces=pieces)


def without_host(profile: Profile) -> Profile:
    """The profile with its kernels only."""
    kept = [term for term in profile.terms if not term.name.startswith(NAME)]
    return (
        profile if len(kept) == len(profile.terms) else profile.model_copy(update={"terms": kept})
    )
