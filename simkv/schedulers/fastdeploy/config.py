"""Options of FastDeploy's scheduler and the revisions that read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from simkv.core.engine_flags import Env, KnobSource
from simkv.core.scheduler_protocol import MAX_BLOCK_SIZE, MAX_BLOCKS, Variant

VariantName = Literal[
    "fixed-reserve",
    "fixed-reserve-full-need",
    "ratio",
    "ratio-worker-faithful",
    "decode-only-preempt",
    "preempt-sync-minus1",
    "preempt-sync-sentinel",
]
VARIANTS: Mapping[str, Variant] = {
    "fixed-reserve": Variant(
        "PaddlePaddle/FastDeploy@4fd877ed4 (2026-03-26)",
        "after a preemption, 16 blocks per running request must stay free at admission; the "
        "number decreases with each call",
    ),
    "fixed-reserve-full-need": Variant(
        "PaddlePaddle/FastDeploy@74d0f1c01 (2026-01-14, in force until #6541)",
        "like fixed-reserve, but the whole prefill must fit while blocks are reserved, not "
        "only a chunk",
    ),
    "ratio": Variant(
        "Foriv/FastDeploy, PaddlePaddle/FastDeploy#7038 on 62ac1e543 (2026-02-10)",
        "reserves a decreasing share of max_tokens; decodes get no blocks while a request prefills",
    ),
    "ratio-worker-faithful": Variant(
        "Foriv/FastDeploy, PaddlePaddle/FastDeploy#7038 on 62ac1e543 (2026-02-10)",
        "like ratio, but a request that preempts itself is never acknowledged and hangs",
    ),
    "decode-only-preempt": Variant(
        "PaddlePaddle/FastDeploy@93ac61ec9 (2026-04-28, merged #7444)",
        "only decodes are preempted, and only for other decodes; each chunk must pass the "
        "admission test",
    ),
    "preempt-sync-minus1": Variant(
        "PaddlePaddle/FastDeploy@74d0f1c01^ (2026-01-14, before #5796)",
        "like fixed-reserve-full-need, but any -1 in a request's slot acknowledges its preemption",
    ),
    "preempt-sync-sentinel": Variant(
        "PaddlePaddle/FastDeploy@74d0f1c01 (2026-01-14, merged #5796)",
        "like fixed-reserve-full-need, but only a -9 in a request's slot acknowledges its "
        "preemption",
    ),
}


@dataclass(frozen=True)
class FastDeployConfig:
    """FastDeploy's options under their original names.

    Each variant reads only some of the options.
    """

    name: Literal["fastdeploy"] = "fastdeploy"
    variant: Annotated[VariantName, KnobSource("`simkv policies` lists the sources")] = (
        "fixed-reserve"
    )
    """Scheduling rules: a commit or pull request of FastDeploy."""
    block_size: Annotated[int, Gt(0), Le(MAX_BLOCK_SIZE), KnobSource("cache config, 64")] = 64
    """Tokens per KV block."""
    num_blocks: Annotated[int, Gt(0), Le(MAX_BLOCKS), KnobSource("logged as total_block_num")] = (
        1024
    )
    """Number of KV blocks. FastDeploy determines it by profiling; the default here is simkv's own.
    """
    max_num_seqs: Annotated[int, Gt(0), Le(MAX_BLOCKS), KnobSource("scheduler config, 8")] = 8
    """Number of slots, each held by a request from admission to its end."""
    max_num_batched_tokens: Annotated[int, Gt(0), KnobSource("scheduler config, 8192")] = 8192
    """Maximum number of tokens per scheduling call."""
    enc_dec_block_num: Annotated[int, Gt(0), KnobSource("cache config, 2")] = 2
    """Number of blocks that a decoding request receives when its block table is full."""
    prealloc_dec_block_slot_num_threshold: Annotated[int, Ge(0), KnobSource("cache config, 12")] = (
        12
    )
    """The block table of a decoding request counts as full when at most this number of tokens still
    fit into it."""
    reserve_init: Annotated[int, Ge(0), KnobSource("resource_manager_v1.py")] = 16
    """Number of blocks per running request that an admission must leave free after a preemption."""
    reserve_decay: Annotated[float, Ge(0), KnobSource("resource_manager_v1.py")] = 0.025
    """Amount by which each scheduling call with work reduces the block reserve."""
    reserve_min: Annotated[int, Ge(0), KnobSource("resource_manager_v1.py")] = 0
    """Lower bound of the block reserve, in blocks per running request."""
    use_new_token_ratio_reserve: Annotated[
        Literal[0, 1], Env("FD_USE_NEW_TOKEN_RATIO_RESERVE", "#7444")
    ] = 1
    """Kind of reserve: 1 reserves memory for a share of the remaining output tokens of each running
    request, 0 a fixed number of blocks per running request.
    """
    init_new_token_ratio: Annotated[float, Ge(0), Le(1), KnobSource("#7038, #7444")] = 0.7
    """Initial share of the remaining output tokens for which memory is reserved."""
    min_new_token_ratio: Annotated[float, Ge(0), Le(1), KnobSource("#7444")] = 0.1
    """Lower bound of the reserved share."""
    new_token_ratio_decay: Annotated[float, Ge(0), KnobSource("#7444")] = 0.001
    """Amount by which each scheduling call with work reduces the reserved share."""
    clip_max_new_tokens: Annotated[int, Gt(0), KnobSource("#7444")] = 4096
    """Maximum number of remaining output tokens of a request that count in the reserve."""
    min_new_token_ratio_factor: Annotated[float, Ge(0), Le(1), KnobSource("#7038, its text")] = 0.3
    """Lower bound of the reserved share, as a fraction of its initial value."""
    new_token_ratio_decay_steps: Annotated[int, Gt(0), KnobSource("#7038")] = 600
    """Number of decode calls after which the reserved share has reached its lower bound."""
    clip_max_new_tokens_estimation: Annotated[int, Gt(0), KnobSource("#7038")] = 4096
    """Maximum number of future output tokens per request for which memory is reserved."""
    chunked_prefill_size: Annotated[int, Gt(0), KnobSource("#7038")] = 8192
    """Maximum number of tokens per prompt chunk in a call."""
    rem_input_tokens: Annotated[int, Gt(0), KnobSource("#7038")] = 16384
    """Maximum number of prompt tokens per call."""
    retract_decode_steps: Annotated[int, Ge(0), KnobSource("#7038")] = 20
    """Approximate number of further output tokens of each remaining request that the reserve covers
    after a preemption."""
    idle_worker_sends_ack: Annotated[bool, KnobSource("#7633 (2026-04-30)")] = True
    """Whether a preemption that leaves the worker idle is acknowledged at once. Before FastDeploy
    #7633, the acknowledgment waited for the next step of another request."""

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} must be at least "
                f"max_num_seqs ({self.max_num_seqs}); FastDeploy requires this at start-up"
            )
