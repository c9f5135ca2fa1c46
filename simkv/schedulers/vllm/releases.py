"""Changes of the V1 scheduler in each release of vLLM, as data.

Source: the wheels on PyPI, 0.11.0 to 0.33.0: ``vllm/v1/core/sched/scheduler.py`` and
``async_scheduler.py``, ``vllm/v1/core/kv_cache_manager.py``, ``block_pool.py`` and
``single_type_kv_cache_manager.py``, ``vllm/config/scheduler.py`` and ``vllm/engine/arg_utils.py``.

All releases share the remaining rules: running requests are scheduled first, in order. Both loops
use one token budget. No request is admitted in a step with a preemption. Under fcfs the last
request is preempted and returns to the front of the queue. At least one token is recomputed after a
hit. Of equal blocks, a hit uses the one registered first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from simkv.schedulers.vllm.release_rules import FixedKnob


@dataclass(frozen=True)
class Release:
    """A minor release: the ``commit`` of its wheel, and a description of its changes (``brought``).

    ``rules`` apply from this release on. ``knobs`` can be set from this release on, with the values
    that earlier releases use. Knobs in ``without`` can be set only before this release. ``patch``
    is the recorded patch release.
    """

    commit: str
    brought: str = ""
    rules: Mapping[str, Any] = field(default_factory=dict)
    knobs: Mapping[str, object] = field(default_factory=dict)
    without: Mapping[str, FixedKnob] = field(default_factory=dict)
    patch: int = 0


#: Releases by minor version number, oldest first.
RELEASES: Mapping[int, Release] = {
    9: Release(
        "v0.9.2",
        "the first chunk of a prompt must fit at admission; synchronous; always chunked; fcfs only",
        patch=2,
    ),
    10: Release(
        "26b999c71",
        "asynchronous if asked; priority",
        knobs={"async_scheduling": False, "policy": "fcfs"},
        patch=2,
    ),
    11: Release(
        "f71952c1c",
        "KV from another replica (kv_connector)",
        knobs={"kv_connector": None, "kv_role": None},
    ),
    12: Release(
        "4fd9d6a85",
        "asynchronous, nothing is computed past the last token; priority: a victim leaves its "
        "batch, ties are broken; chunks can be off",
        {"sees_the_end": True, "drops_victims": True, "breaks_ties": True},
        {"enable_chunked_prefill": True, "num_speculative_tokens": 0},
    ),
    13: Release("72506c983"),
    14: Release(
        "b17039bcc",
        "asynchronous by default; LoRA: who is passed over for max_loras keeps its place",
        {"async_scheduling": True, "turns_skipped": False, "keeps_drafts": False},
    ),
    15: Release(
        "f17644344",
        "drafts of a model of its own",
        {"draft_methods": ("eagle", "ngram", "draft_model")},
    ),
    16: Release(
        "89a77b108",
        "no drafts for unfinished prompts; draft models asynchronously; blocks of an abandoned "
        "load are free when it is done",
        {
            "drafts_for_chunks": False,
            "async_drafts": ("eagle", "draft_model"),
            "keeps_for_loads": True,
        },
    ),
    17: Release(
        "b31e9326a",
        "slots of a draft model come out of the budget",
        {"slots_of_budget": True},
    ),
    18: Release(
        "bcf2be961",
        "LoRA: who is passed over for max_loras waits ahead of the preempted; of a prompt that is "
        "loaded the last block is cached, too",
        {"skipped_apart": True, "caches_loaded": True},
    ),
    19: Release(
        "2a69949bd",
        "the whole sequence must fit when it is admitted (scheduler_reserve_full_isl)",
        {"scheduler_reserve_full_isl": True},
        {"scheduler_reserve_full_isl": False},
    ),
    20: Release("b8160878f"),
    21: Release(
        "ad7125a43",
        "at admission a window counts at most what it ever has; groups of layers from here on",
        knobs={"kv_cache_groups": (0,), "mamba_cache_mode": None},
    ),
    22: Release(
        "0b3ba88f1",
        "of blocks of several sizes the cache keeps what a hit at a multiple of all could need",
        {"keeps_aligned": True},
    ),
    23: Release(
        "0fc695fc6",
        "lookahead slots for drafts from the first step on; blocks of windows that are not cached "
        "are taken again first; loads leave the blocks that prompts in the making need",
        {"lookahead_at_admission": True, "keyless_windows": True, "reserves_loads": True},
    ),
    24: Release(
        "ee0da84ab",
        "of freed blocks those that are not cached are taken again first; watermark; with states a "
        "first chunk ends at a junction; who may load gives blocks back when nothing writes them",
        {"keyless_first": True, "starts_at_junctions": True, "frees_when_done": True},
        {"watermark": 0.0, "num_cpu_blocks": 0, "eviction_policy": "lru"},
    ),
    25: Release(
        "dd10e03f9",
        "who has one token to compute is let in with as many places for drafts as the others",
        {"pads_drafts": True},
    ),
    26: Release(
        "ffd46bfab",
        "max_num_scheduled_tokens, which replaces the budget; blocks behind a window are given "
        "back when no step under way reads them; by default states are cached, at each junction",
        {
            "frees_processed": True,
            "caches_states": True,
            "keeps_junctions": True,
            "drafts_in_states": True,
            "stores_at_end": True,
            "keeps_stored": True,
        },
        {"max_num_scheduled_tokens": None},
    ),
    27: Release(
        "4bdc8a788",
        "start-up refuses a threshold above max_model_len, but no block larger than a chunk for "
        "states; who may send KV throws tokens under way of a victim away",
        {
            "checks_threshold": True,
            "wide_states": True,
            "counts_left": True,
            "keeps_ended": True,
            "drops_under_way": True,
        },
    ),
    28: Release(
        "2cf0a6915",
        "both budgets limit a step; priority: a victim that sat the step out passes nobody over",
        {
            "two_budgets": True,
            "finds_next": True,
            "slots_of_budget": False,
            "slots_by_request": True,
        },
    ),
    29: Release(
        "98dff2a81",
        "start-up asks whether the longest sequence fits beside the null block; queue limits; of "
        "windows the cache keeps only where a hit could end",
        {"spares_null_block": True, "keeps_boundaries": True, "pads_with_room": True},
        {"max_num_queued_reqs": None, "max_num_queued_tokens": None},
    ),
    30: Release(
        "ced6857af",
        "all states behind are given back; places for drafts also for a hit beside nobody; EAGLE: "
        "of windows the cache keeps what a hit a block less needs; where KV may be loaded nobody "
        "is preempted whose blocks a step under way writes to",
        {
            "frees_gaps": True,
            "pads_hits": True,
            "evicts_either": True,
            "spares_computing": True,
            "keeps_replays": True,
        },
    ),
    31: Release(
        "db9527a46",
        "the threshold spares a request that is alone; max_num_active_seqs, an adaptive threshold; "
        "one waiting queue for all but those who wait with blocks, who come first",
        {
            "threshold_spares_lone": True,
            "skipped_apart": False,
            "holds_apart": True,
            "uses_at_end": True,
        },
        {"max_num_active_seqs": None, "long_prefill_token_threshold_adaptive": False},
    ),
    32: Release(
        "5df63a720",
        "of a prompt that ends with a block the state before its last block is kept; with states "
        "who could start from the end of a prompt waits while a request that has it is under way; "
        "EAGLE: with groups the last block of a prompt is looked up",
        {"leaves_last": True, "marks_again": True, "peeks_at_last": True},
        {"mamba_prefill_checkpoints": False},
        without={
            "mamba_cache_mode": FixedKnob(
                "align", "ended with vLLM 0.31, in {version} it is always align; leave it out"
            )
        },
    ),
    33: Release(
        "4ba787ec9",
        "priority: those behind one that preempts itself go on; adapters of all who run count "
        "against max_loras; prefill_schedule_interval",
        {
            "goes_on": True,
            "counts_all_loras": True,
            "marks_again": False,
            "caches_accepted": True,
            "keys_cover_next": True,
            "async_drafts": ("eagle", "ngram", "draft_model"),
            "offers_again": True,
            "ranks_requests": True,
        },
        {"prefill_schedule_interval": 1, "secondary_tiers": ()},
    ),
}

#: Patch releases whose rules differ from the variant of their minor release, as changes to it.
PATCHED: Mapping[str, Release] = {
    "0.9.1": Release(
        "v0.9.1",
        "0.9.2, but LoRA: requests that are skipped for max_loras keep their order",
        {"turns_skipped": False},
    ),
    "0.10.1.1": Release(
        "1da94e673",
        "0.10.2 before its fix of priority: the engine dies of an assertion where it preempts a "
        "request that it has scheduled in the same step and then fewer run than it has scheduled",
        {"counts_victims": True},
    ),
    "0.11.2": Release(
        "275de3417",
        "0.11.0 with two rules of 0.12: asynchronous, nothing is computed past the last token; "
        "priority: a victim leaves its batch",
        {"sees_the_end": True, "drops_victims": True},
    ),
}

#: Recorded patch releases, and the variant that reproduces all their random cases.
RECORDED_PATCHES: Mapping[str, str] = {
    **dict.fromkeys(("0.9.0", "0.9.0.1", "0.9.1"), "0.9.1"),
    **dict.fromkeys(("0.10.0", "0.10.1", "0.10.1.1"), "0.10.1.1"),
    **dict.fromkeys(("0.11.1", "0.11.2"), "0.11.2"),
    "0.14.1": "0.14.0",
    "0.15.1": "0.15.0",
    "0.17.1": "0.17.0",
    "0.18.1": "0.18.0",
    "0.19.1": "0.19.0",
    **dict.fromkeys(("0.20.1", "0.20.2"), "0.20.0"),
    "0.22.1": "0.22.0",
    "0.25.1": "0.25.0",
    "0.27.1": "0.27.0",
}

#: Reason why a knob cannot be set before the release that introduced it.
NOT_YET_AVAILABLE = "came with vLLM {since}, {{version}} does not have it; leave it out"
UNAVAILABLE_REASONS = {
    "enable_chunked_prefill": "vLLM {{version}} always chunks prefills on a GPU, it can be off "
    "from {since} on; leave it out",
    "async_scheduling": "vLLM {{version}} schedules a step when the one before it is done; it "
    "is modelled from {since} on; leave it out",
    "policy": "under priority vLLM {{version}} dies of an assertion when it preempts a request "
    "that it has scheduled in the same step; priority is modelled from {since} on; say fcfs",
    "kv_cache_groups": "groups of layers are modelled from vLLM {since} on, not for {{version}}; "
    "leave it out",
    "mamba_cache_mode": "groups of layers are modelled from vLLM {since} on, not for {{version}}; "
    "leave it out",
    "num_speculative_tokens": "speculative decoding is modelled from vLLM {since} on, not for "
    "{{version}}; leave it out",
    "prefill_schedule_interval": "one engine goes by it since vLLM {since}; in {{version}} it is "
    "unknown or for data-parallel ranks only; leave it out",
    **dict.fromkeys(
        ("kv_connector", "kv_role"),
        "KV of other replicas is modelled from vLLM {since} on, not for {{version}}; leave it out",
    ),
    **dict.fromkeys(
        ("num_cpu_blocks", "eviction_policy"),
        "offloading is modelled from vLLM {since} on, not for {{version}}; leave it out",
    ),
    "secondary_tiers": "tiers behind host memory are modelled from vLLM {since} on, not for "
    "{{version}}; leave it out",
}
