"""The engine settings that determine step durations and KV-cache size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GraphMode = Literal["full and piecewise", "full", "full decode only", "piecewise", "eager"]


@dataclass(frozen=True)
class ExecutionSettings:
    """Settings of an engine that determine step durations and the size of the KV cache.

    - ``release``: version whose rules apply.
    - ``max_num_batched_tokens``: maximum number of tokens per step.
    - ``max_num_seqs``: maximum number of running requests.
    - ``graph_sizes``: numbers of tokens for which CUDA graphs are captured. Larger steps run
      without graphs.
    - ``graph_mode``: kind of CUDA graphs. ``full`` graphs cover the whole model, and ``piecewise``
      graphs all of it except attention. ``full and piecewise`` uses full graphs for decode-only
      steps and piecewise graphs for other steps. ``full decode only`` uses graphs only for
      decode-only steps. ``eager`` uses no graphs.
    - ``asynchronous``: whether a step is scheduled while the previous step runs.
    - ``block_size``: tokens per KV block.
    - ``memory_share``: fraction of GPU memory that the engine may use; None if unknown.
    - ``draft_layers``: number of multi-token-prediction layers.
    """

    engine: str
    release: str
    max_num_batched_tokens: int
    max_num_seqs: int
    graph_sizes: tuple[int, ...] = ()
    graph_mode: GraphMode = "full and piecewise"
    asynchronous: bool = True
    block_size: int = 16
    memory_share: float | None = None
    draft_layers: int = 0
