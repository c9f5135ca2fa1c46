"""Handmade workloads for vLLM's schedulers, with situations that random cases do not reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from simkv.core.recording_format import RecordingLine
from simkv.schedulers.vllm.release_rules import VllmRules


class HandmadeCase(NamedTuple):
    """Settings and requests of a case, for releases whose rules satisfy ``exists``."""

    settings: Mapping[str, Any]
    requests: Sequence[RecordingLine]
    exists: Callable[[VllmRules], bool]


def _asks(*rows: tuple[int, int, int, int], stream: str = "", **more: Any) -> list[RecordingLine]:
    """Return requests with the fields in ``more``; rows are (step, prompt, outputs, priority)."""
    return [
        {
            "id": i,
            "arrival_step": step,
            "prompt_tokens": prompt,
            "output_tokens": outputs,
            "max_tokens": outputs,
            "priority": priority,
            "timestamp": float(i),
            "prompt_segments": [[stream or f"u{i}", 0, prompt]],
            **more,
        }
        for i, (step, prompt, outputs, priority) in enumerate(rows)
    ]


def _has(knob: str) -> Callable[[VllmRules], bool]:
    """Return a function that returns whether a release has a setting."""
    return lambda rules: knob not in rules.fixed


#: Settings with a KV cache of eight blocks of four tokens.
TIGHT = {
    "block_size": 4,
    "num_gpu_blocks": 9,
    "max_model_len": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
PRIORITY = TIGHT | {"policy": "priority"}
#: Settings with drafts and a prefix cache.
DRAFTS = {
    "block_size": 1,
    "num_gpu_blocks": 81,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 30,
    "num_speculative_tokens": 1,
    "speculative_method": "ngram",
    "async_scheduling": False,
    "enable_prefix_caching": True,
}
_ACCEPTS = [1, 0, 2]

HANDMADE_CASES = {
    # A request is preempted while its last token is in flight (#49097).
    "victim-sat-out": HandmadeCase(
        PRIORITY | {"async_scheduling": True},
        _asks((0, 15, 2, 9), (1, 8, 6, 0), (1, 5, 6, 0)),
        _has("policy"),
    ),
    # A request preempts a request that is already part of the same step.
    "victim-was-scheduled": HandmadeCase(
        PRIORITY, _asks((0, 13, 6, 9), (1, 8, 6, 0), (1, 6, 6, 0)), _has("policy")
    ),
    # A request fits the KV cache by vLLM's check at start-up, but not with the null block (#47272).
    "outgrows-the-cache": HandmadeCase(
        TIGHT | {"num_gpu_blocks": 8, "max_num_batched_tokens": 8},
        _asks((0, 27, 5, 0)),
        lambda rules: not rules.reserves_null_block,
    ),
    # A request is skipped because its draft would reach max_model_len. It returns with an adapter
    # above the limit.
    "adapter-comes-back": HandmadeCase(
        TIGHT
        | {"max_num_batched_tokens": 16, "max_model_len": 4, "async_scheduling": True}
        | {"enable_lora": True, "num_speculative_tokens": 1},
        [
            {**request, "max_tokens": 9, "lora": "ab"[request["id"]]}
            for request in _asks((0, 1, 3, 0), (0, 1, 2, 0), accepts=[0])
        ],
        _has("num_speculative_tokens"),
    ),
    # The prompt of a single request is cached except for its last token.
    "drafts-hit-alone": HandmadeCase(
        DRAFTS | {"num_speculative_tokens": 2},
        _asks((0, 8, 1, 0), (3, 8, 4, 0), stream="g0", accepts=_ACCEPTS),
        _has("num_speculative_tokens"),
    ),
    # Draft slots would exceed max_model_len after a hit, while another request runs.
    "drafts-hit-at-the-end": HandmadeCase(
        DRAFTS | {"num_speculative_tokens": 4},
        _asks((0, 27, 1, 0), (1, 3, 20, 0), (3, 27, 2, 0), stream="g0", accepts=_ACCEPTS),
        _has("num_speculative_tokens"),
    ),
    # A repeated prompt ends at a block boundary. A layer group has a sliding window, and the
    # drafter has KV.
    "drafts-shorter-hit": HandmadeCase(
        DRAFTS
        | {"block_size": 4, "num_gpu_blocks": 41, "kv_cache_groups": (0, 4)}
        | {"speculative_method": "eagle"},
        _asks((0, 12, 1, 0), (3, 12, 4, 0), stream="g0", accepts=_ACCEPTS),
        lambda rules: "kv_cache_groups" not in rules.fixed and not rules.reserves_whole_windows,
    ),
    # The tokens of a block with a state fit into a step, but not together with the draft model's
    # slots.
    "drafts-slots-of-a-chunk": HandmadeCase(
        DRAFTS
        | {"block_size": 8, "num_gpu_blocks": 41, "max_num_seqs": 3, "max_num_batched_tokens": 9}
        | {"max_model_len": 32, "speculative_method": "draft_model"}
        | {"kv_cache_groups": (0, "mamba", "mamba", 7, 7)},
        _asks((0, 17, 4, 0), accepts=[1, 0]),
        lambda rules: rules.allows_large_state_blocks and rules.drafts_with_states,
    ),
    # A request of a model with recurrent states is admitted with fewer draft slots, because its
    # tokens would otherwise cross the end of a block.
    "drafts-padding-cut": HandmadeCase(
        DRAFTS | {"kv_cache_groups": (0, "mamba")},
        _asks((0, 1, 6, 0), (2, 1, 3, 0), accepts=_ACCEPTS),
        lambda rules: rules.drafts_with_states,
    ),
}
