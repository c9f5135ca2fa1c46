"""The engine settings that determine step durations and KV-cache size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GraphMode = Literal["full and piecewise", "full", "full decode only", "piecewise", "eager"]


@dataclass(frozen=True)
class ExecutionSettings:
    """The settings of an engine that a cost model reads, under engine-independent names.

    ``release`` is the version whose rules are used (``0.19.0``). ``max_num_batched_tokens`` is the
    maximum number of tokens per step and ``max_num_seqs`` the maximum number of running sequences.
    ``graph_sizes`` are the numbers of tokens for which CUDA graphs are captured; larger steps run
    without graphs.

    ``graph_mode`` states which graphs steps up to the largest size use. A full graph covers the
    whole model; piecewise graphs cover all of it except attention.

    - ``full``, ``piecewise``: all steps use this kind of graph.
    - ``full and piecewise``: steps that only decode use full graphs, other steps piecewise graphs.
    - ``full decode only``: steps that only decode use full graphs, other steps none.
    - ``eager``: no step uses a graph.

    With ``asynchronous``, the engine schedules a step while the previous step runs. ``block_size``
    is in tokens. ``memory_share`` is the fraction of GPU memory that the engine may use, or None if
    it is unknown. ``draft_layers`` is the number of additional layers of the model that propose
    draft tokens (multi-token prediction).
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
