"""The engine settings that determine step durations and KV-cache size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GraphMode = Literal["full and piecewise", "full", "full decode only", "piecewise", "eager"]


@dataclass(frozen=True)
class ExecutionSettings:
    """The settings of an engine that a cost model reads, under engine-independent names.

    ``release`` is the version whose rules are used (``0.19.0``). ``max_num_batched_tokens`` is the
    limit on tokens per step, ``max_num_seqs`` on sequences. ``graph_sizes`` are the batch sizes
    with captured CUDA graphs. ``graph_mode`` is the steps that use them: all (``full``: over the
    whole model; ``piecewise``: between attention layers; ``full and piecewise``: full for decodes,
    piecewise for other steps), decodes only (``full decode only``), or none (``eager``).
    ``asynchronous``: a step is scheduled while the previous one runs. ``block_size`` is in tokens.
    ``memory_share`` is the share of GPU memory that the engine may use (None: unknown).
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
