"""The knobs of FastDeploy, and the revisions that read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from simkv.core.scheduler import MOST_BLOCK_SIZE, MOST_BLOCKS, Variant

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
        "after a preemption admission keeps 16 blocks free per running request, decaying per call",
    ),
    "fixed-reserve-full-need": Variant(
        "PaddlePaddle/FastDeploy@74d0f1c01 (2026-01-14, in force until #6541)",
        "as fixed-reserve; while it reserves, the whole prefill must fit, not only the next chunk",
    ),
    "ratio": Variant(
        "Foriv/FastDeploy, PaddlePaddle/FastDeploy#7038 on 62ac1e543 (2026-02-10)",
        "reserves a decaying share of max_tokens; a prefill halts the growth of decodes",
    ),
    "ratio-worker-faithful": Variant(
        "Foriv/FastDeploy, PaddlePaddle/FastDeploy#7038 on 62ac1e543 (2026-02-10)",
        "as ratio; a request that retracts itself loses its acknowledgement and hangs",
    ),
    "decode-only-preempt": Variant(
        "PaddlePaddle/FastDeploy@93ac61ec9 (2026-04-28, merged #7444)",
        "only decodes are preempted and only for decodes; chunks pass the admission test too",
    ),
    "preempt-sync-minus1": Variant(
        "PaddlePaddle/FastDeploy@74d0f1c01^ (2026-01-14, before #5796)",
        "as fixed-reserve-full-need; any -1 in its slot acknowledges a preemption",
    ),
    "preempt-sync-sentinel": Variant(
        "PaddlePaddle/FastDeploy@74d0f1c01 (2026-01-14, merged #5796)",
        "as fixed-reserve-full-need; only a -9 in its slot acknowledges a preemption",
    ),
}


@dataclass(frozen=True)
class FastDeployConfig:
    """Knobs of the engine, under its own names; a variant ignores those that it does not read.

    All variants: ``block_size`` (tokens), ``num_blocks`` and ``max_num_seqs`` (slots).
    ``idle_worker_sends_ack``: whether a preemption that leaves the worker nothing to run is
    acknowledged (true since PR #7633 of 2026-04-30; before, it waited for somebody else's step).

    All but ``ratio…``: ``max_num_batched_tokens`` per call; a decode with at most
    ``prealloc_dec_block_slot_num_threshold`` free tokens in its table gets ``enc_dec_block_num``
    blocks. ``reserve_init`` (blocks per running request), ``reserve_decay`` (blocks per non-empty
    call) and ``reserve_min`` steer the fixed reserve.

    ``decode-only-preempt``: ``use_new_token_ratio_reserve`` 0 brings the fixed reserve back; with
    1 the share of ``max_tokens`` (at most ``clip_max_new_tokens``) kept free per running request
    starts at ``init_new_token_ratio`` and sinks by ``new_token_ratio_decay`` per non-empty call
    down to ``min_new_token_ratio``.

    ``ratio…``: the same with the floor ``init_new_token_ratio * min_new_token_ratio_factor``,
    reached in ``new_token_ratio_decay_steps`` decode calls, ``clip_max_new_tokens_estimation`` in
    place of the clip, at most ``chunked_prefill_size`` and ``rem_input_tokens`` prefill tokens per
    call, and ``retract_decode_steps`` tokens of headroom per request after a preemption.
    """

    name: Literal["fastdeploy"] = "fastdeploy"
    variant: VariantName = "fixed-reserve"
    block_size: Annotated[int, Gt(0), Le(MOST_BLOCK_SIZE)] = 64
    num_blocks: Annotated[int, Gt(0), Le(MOST_BLOCKS)] = 1024
    max_num_seqs: Annotated[int, Gt(0), Le(MOST_BLOCKS)] = 8
    max_num_batched_tokens: Annotated[int, Gt(0)] = 8192
    enc_dec_block_num: Annotated[int, Gt(0)] = 2
    prealloc_dec_block_slot_num_threshold: Annotated[int, Ge(0)] = 12
    reserve_init: Annotated[int, Ge(0)] = 16
    reserve_decay: Annotated[float, Ge(0)] = 0.025
    reserve_min: Annotated[int, Ge(0)] = 0
    use_new_token_ratio_reserve: Literal[0, 1] = 1
    init_new_token_ratio: Annotated[float, Ge(0), Le(1)] = 0.7
    min_new_token_ratio: Annotated[float, Ge(0), Le(1)] = 0.1
    new_token_ratio_decay: Annotated[float, Ge(0)] = 0.001
    clip_max_new_tokens: Annotated[int, Gt(0)] = 4096
    min_new_token_ratio_factor: Annotated[float, Ge(0), Le(1)] = 0.3
    new_token_ratio_decay_steps: Annotated[int, Gt(0)] = 600
    clip_max_new_tokens_estimation: Annotated[int, Gt(0)] = 4096
    chunked_prefill_size: Annotated[int, Gt(0)] = 8192
    rem_input_tokens: Annotated[int, Gt(0)] = 16384
    retract_decode_steps: Annotated[int, Ge(0)] = 20
    idle_worker_sends_ack: bool = True

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} must not be less than "
                f"max_num_seqs ({self.max_num_seqs}), as the engine asserts at start"
            )
