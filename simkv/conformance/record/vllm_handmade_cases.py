"""Handmade workloads for vLLM's schedulers, with situations that random cases do not reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from simkv.conformance.record.recording_case import RecordingCase
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.release_rules import VllmRules


class HandmadeCase(NamedTuple):
    """A handmade workload, which ``make(version)`` builds.

    It exists for releases whose rules satisfy ``starts``.
    """

    make: Callable[[str], RecordingCase]
    starts: Callable[[VllmRules], bool]


def _asks(*rows: tuple[int, int, int, int]) -> list[dict[str, Any]]:
    """Return requests without common prefixes; each row is (arrival step, prompt, outputs,
    priority).
    """
    return [
        {
            "id": i,
            "arrival_step": step,
            "prompt_tokens": prompt,
            "output_tokens": outputs,
            "max_tokens": outputs,
            "priority": priority,
            "timestamp": float(i),
            "prompt_segments": [[f"u{i}", 0, prompt]],
        }
        for i, (step, prompt, outputs, priority) in enumerate(rows)
    ]


def _tight(
    version: str, budget: int, *rows: tuple[int, int, int, int], **knobs: Any
) -> RecordingCase:
    """Return a case with a KV cache of eight blocks of four tokens; ``rows`` have the format of
    ``_asks``.
    """
    blocks = {"block_size": 4, "num_gpu_blocks": 9, "max_model_len": 32, "max_num_seqs": 8}
    config = VllmConfig(variant=version, max_num_batched_tokens=budget, **{**blocks, **knobs})
    return RecordingCase(config, _asks(*rows))


def _victim_sat_out(version: str) -> RecordingCase:
    """Return a case in which a request is preempted while its last token is in flight (#49097)."""
    rows = (0, 15, 2, 9), (1, 8, 6, 0), (1, 5, 6, 0)
    return _tight(version, 64, *rows, policy="priority", async_scheduling=True)


def _victim_was_scheduled(version: str) -> RecordingCase:
    """Return a case in which a request preempts a request that is already part of the same step."""
    return _tight(version, 64, (0, 13, 6, 9), (1, 8, 6, 0), (1, 6, 6, 0), policy="priority")


def _outgrows_the_cache(version: str) -> RecordingCase:
    """Return a case whose request fits the KV cache by vLLM's check at start-up, but not with the
    null block (#47272).
    """
    return _tight(version, 8, (0, 27, 5, 0), num_gpu_blocks=8)


def _drafting(version: str, drafts: int, *rows: tuple[int, int, int]) -> RecordingCase:
    """Return a case whose prompts share a cached prefix; rows are (arrival step, prompt,
    outputs).
    """
    config = VllmConfig(
        variant=version,
        block_size=1,
        num_gpu_blocks=81,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=30,
        num_speculative_tokens=drafts,
        speculative_method="ngram",
        async_scheduling=False,
        enable_prefix_caching=True,
    )
    requests = _asks(*((step, prompt, outputs, 0) for step, prompt, outputs in rows))
    alike = [
        {**r, "prompt_segments": [["g0", 0, r["prompt_tokens"]]], "accepts": [1, 0, 2]}
        for r in requests
    ]
    return RecordingCase(config, alike)


def _hit_alone(version: str) -> RecordingCase:
    """Return a case with a single request whose prompt is cached except for its last token."""
    return _drafting(version, 2, (0, 8, 1), (3, 8, 4))


def _hit_at_the_end(version: str) -> RecordingCase:
    """Return a case like ``_hit_alone`` in which draft slots would exceed ``max_model_len``.

    Another request runs at the same time.
    """
    return _drafting(version, 4, (0, 27, 1), (1, 3, 20), (3, 27, 2))


def _adapter_comes_back(version: str) -> RecordingCase:
    """Return a case in which a skipped request returns with an adapter above the limit.

    The request is skipped in one step because its draft would reach ``max_model_len``.
    """
    case = _tight(
        version,
        16,
        *((0, 1, 3, 0), (0, 1, 2, 0)),
        max_model_len=4,
        enable_lora=True,
        num_speculative_tokens=1,
        async_scheduling=True,
    )
    both = zip(case.requests, ("a", "b"), strict=True)
    requests = [{**r, "max_tokens": 9, "lora": lora, "accepts": [0]} for r, lora in both]
    return case._replace(requests=requests)


def _shorter_hit(version: str) -> RecordingCase:
    """Return a case with a repeated prompt that ends at a block boundary.

    It has a layer group with a sliding window and a drafter with KV.
    """
    case = _drafting(version, 1, (0, 12, 1), (3, 12, 4))
    groups = {"block_size": 4, "num_gpu_blocks": 41, "kv_cache_groups": (0, 4)}
    return case._replace(config=replace(case.config, speculative_method="eagle", **groups))


def _slots_of_a_chunk(version: str) -> RecordingCase:
    """Return a case in which the tokens of a block with a state fit into a step, but not together
    with the draft model's slots.
    """
    config = VllmConfig(
        variant=version,
        block_size=8,
        num_gpu_blocks=41,
        max_num_seqs=3,
        max_num_batched_tokens=9,
        max_model_len=32,
        num_speculative_tokens=1,
        speculative_method="draft_model",
        async_scheduling=False,
        enable_prefix_caching=True,
        kv_cache_groups=(0, "mamba", "mamba", 7, 7),
    )
    requests = [{**r, "accepts": [1, 0]} for r in _asks((0, 17, 4, 0))]
    return RecordingCase(config, requests)


def _padding_is_cut(version: str) -> RecordingCase:
    """Return a case of a model with recurrent states in which a request is admitted with fewer
    draft slots, because its tokens would otherwise cross the end of a block.
    """
    case = _drafting(version, 1, (0, 1, 6), (2, 1, 3))
    config = replace(case.config, kv_cache_groups=(0, "mamba"))
    requests = [{**r, "prompt_segments": [[f"u{r['id']}", 0, 1]]} for r in case.requests]
    return RecordingCase(config, requests)


def _has_priority(rules: VllmRules) -> bool:
    return "policy" not in rules.fixed


def _has_drafts(rules: VllmRules) -> bool:
    return "num_speculative_tokens" not in rules.fixed


def _drafts_in_groups(rules: VllmRules) -> bool:
    return "kv_cache_groups" not in rules.fixed and not rules.reserves_whole_windows


def _fills_wide_states(rules: VllmRules) -> bool:
    return rules.allows_large_state_blocks and rules.drafts_with_states


HANDMADE_CASES = {
    "victim-sat-out": HandmadeCase(_victim_sat_out, _has_priority),
    "victim-was-scheduled": HandmadeCase(_victim_was_scheduled, _has_priority),
    "outgrows-the-cache": HandmadeCase(
        _outgrows_the_cache, lambda rules: not rules.reserves_null_block
    ),
    "adapter-comes-back": HandmadeCase(_adapter_comes_back, _has_drafts),
    "drafts-hit-alone": HandmadeCase(_hit_alone, _has_drafts),
    "drafts-hit-at-the-end": HandmadeCase(_hit_at_the_end, _has_drafts),
    "drafts-shorter-hit": HandmadeCase(_shorter_hit, _drafts_in_groups),
    "drafts-slots-of-a-chunk": HandmadeCase(_slots_of_a_chunk, _fills_wide_states),
    "drafts-padding-cut": HandmadeCase(_padding_is_cut, lambda rules: rules.drafts_with_states),
}
