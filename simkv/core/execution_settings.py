"""What of an engine's configuration decides how long its steps take and how much KV it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GraphMode = Literal["full and piecewise", "full", "full decode only", "piecewise", "eager"]


@dataclass(frozen=True)
class ExecutionSettings:
    """An engine and the knobs of it that a cost model looks at, under names of no engine.

    ``release`` is the version whose rules run (``0.19.0``), ``max_num_batched_tokens`` the tokens
    of a step, ``max_num_seqs`` the sequences. ``graph_sizes`` are the batch sizes for which CUDA
    graphs are captured, ``graph_mode`` which steps use them: all (``full`` over the whole model,
    ``piecewise`` between attentions, ``full and piecewise``: full for decodes, piecewise for the
    others), those of nothing but decodes, or none. ``asynchronous``: a step is scheduled while the
    one before it runs. ``block_size`` is in tokens, ``memory_share`` what the engine may take of
    the GPU's memory (None: not said).
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
