"""Host time of steps, which no table of kernels has.

A step that runs as a CUDA graph takes as long as its kernels: on two hosts decodes were off by 0.4
ms at most (``simkv validate CASE --steps``, docs/validation.md). One that is over the largest graph
is launched kernel by kernel, and took 5.9 ms more (standard error 0.2) on the host of an RTX PRO
6000, whatever its tokens and decodes (vLLM 0.19.0, Llama-3.1-8B: ``lss-rtxpro6000-llama3.1-8b`` of
LLMServingSim's records). That is one figure for all hosts: a run of another model on the same host
was not looked at for it, and on the host of an RTX 4090 it does not show, where such steps took 1 %
less than their kernels in the tables. 881 published points of other hosts say 7.1 ms for a step
with prefill (``operators/constants.json``).
"""

from __future__ import annotations

from collections.abc import Sequence

from simkv.costs.profile import Piece, Profile, Term

#: What terms of host time are called.
NAME = "host"
#: Seconds that a step over the largest CUDA graph takes above its kernels.
LAUNCHED = 5.9e-3
#: The record that it was measured in, of which it is no prediction.
MEASURED_IN = "lss-rtxpro6000-llama3.1-8b"


def launched(graph_sizes: Sequence[int]) -> Term:
    """What a step takes that is launched kernel by kernel, by the CUDA graphs that there are."""
    pieces = [Piece(up_to=graph_sizes[-1], base=0.0), Piece(base=LAUNCHED)]
    return Term(name=f"{NAME}, over the largest CUDA graph", feature="tokens", pieces=pieces)


def without_host(profile: Profile) -> Profile:
    """The profile with its kernels only."""
    kept = [term for term in profile.terms if not term.name.startswith(NAME)]
    return (
        profile if len(kept) == len(profile.terms) else profile.model_copy(update={"terms": kept})
    )
