"""Releases of vLLM, and the rules of its V1 scheduler that differ between them.

This module has all differences between releases: ``RELEASES`` lists the recorded releases, and each
field of ``VllmRules`` is a rule with its meaning, its source and the releases in which it applies.
A new release needs an entry in ``RELEASES``, and each rule that it changes needs a ``since`` or
``until`` (docs/how-to/follow-a-new-release.md).

Sources are files and names of vllm-project/vllm; a name without a file is in
``vllm/v1/core/sched/scheduler.py``. All sources refer to the released code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from simkv.schedulers.rule_fields import rule


class Release(NamedTuple):
    """A recorded release of vLLM.

    - ``commit``: commit from which the release was built.
    - ``alike``: patch releases with the same rules.
    - ``stands_for_minor``: whether the minor release, such as 0.27, means this release.
    """

    # ``alike`` was verified with recordings of random test cases.

    commit: str
    alike: tuple[str, ...] = ()
    stands_for_minor: bool = True


#: Recorded releases with the rules of each, oldest first.
RELEASES: Mapping[str, Release] = {
    "0.9.1": Release("v0.9.1", ("0.9.0", "0.9.0.1"), stands_for_minor=False),
    "0.9.2": Release("v0.9.2"),
    "0.10.1.1": Release("1da94e673", ("0.10.0", "0.10.1"), stands_for_minor=False),
    "0.10.2": Release("26b999c71"),
    "0.11.0": Release("f71952c1c"),
    "0.11.2": Release("275de3417", ("0.11.1",), stands_for_minor=False),
    "0.12.0": Release("4fd9d6a85"),
    "0.13.0": Release("72506c983"),
    "0.14.0": Release("b17039bcc", ("0.14.1",)),
    "0.15.0": Release("f17644344", ("0.15.1",)),
    "0.16.0": Release("89a77b108"),
    "0.17.0": Release("b31e9326a", ("0.17.1",)),
    "0.18.0": Release("bcf2be961", ("0.18.1",)),
    "0.19.0": Release("2a69949bd", ("0.19.1",)),
    "0.20.0": Release("b8160878f", ("0.20.1", "0.20.2")),
    "0.21.0": Release("ad7125a43"),
    "0.22.0": Release("0b3ba88f1", ("0.22.1",)),
    "0.23.0": Release("0fc695fc6"),
    "0.24.0": Release("ee0da84ab"),
    "0.25.0": Release("dd10e03f9", ("0.25.1",)),
    "0.26.0": Release("ffd46bfab"),
    "0.27.0": Release("4bdc8a788", ("0.27.1",)),
    "0.28.0": Release("2cf0a6915"),
    "0.29.0": Release("98dff2a81"),
    "0.30.0": Release("ced6857af"),
    "0.31.0": Release("db9527a46"),
    "0.32.0": Release("5df63a720"),
    "0.33.0": Release("4ba787ec9"),
}
NEWEST = list(RELEASES)[-1]


class FixedKnob(NamedTuple):
    """The only value that a release accepts for a setting.

    ``why`` is the error message for other values. In it, ``{version}`` stands for the release.
    """

    value: object
    why: str


_at_start = partial(rule, at_start=True)
_step = partial(rule, "Steps")
_priority = partial(rule, "Priority", knobs=("policy",))
_lora = partial(rule, "LoRA")
# Recordings of 0.10 to 0.19 have only groups with full attention and one window.
_window = partial(rule, "Sliding windows", knobs=("kv_cache_groups",), shown_since="0.21")
_state = partial(rule, "Layers with states", knobs=("kv_cache_groups",), shown_since="0.21")
_draft = partial(rule, "Speculative decoding", knobs=("num_speculative_tokens",))
_host = partial(rule, "KV in host memory", knobs=("num_cpu_blocks",))
_transfer = partial(rule, "KV from other replicas", knobs=("kv_connector",))


@dataclass(frozen=True)
class VllmRules:
    """Scheduling rules that differ between releases.

    The defaults are the rules of the oldest release. ``fixed`` contains the settings that a release
    does not support, each with its only accepted value.
    """

    fixed: Mapping[str, FixedKnob] = field(default_factory=dict)
    enable_prefix_caching: bool = True

    async_scheduling: bool = _at_start(
        "Start-up",
        "Asynchronous scheduling is on by default.",
        "It is off by default.",
        source="vllm/config/vllm.py",
        since="0.14",
    )
    scheduler_reserve_full_isl: bool = _at_start(
        "Start-up",
        "By default, a request is admitted only if enough blocks are free for all its known "
        "tokens.",
        "A request is admitted by default if the blocks for its first chunk are free.",
        source="#37307",
        since="0.19",
    )
    reserves_null_block: bool = _at_start(
        "Start-up",
        "The engine starts only if the KV cache can hold a sequence of `max_model_len` tokens "
        "in addition to the null block.",
        "A cache that is too small by one block is accepted.",
        source="#47272",
        since="0.29",
    )
    checks_threshold: bool = _at_start(
        "Start-up",
        "The engine does not start if `long_prefill_token_threshold` is larger than "
        "`max_model_len`.",
        source="SchedulerConfig.verify_max_model_len (vllm/config/scheduler.py)",
        since="0.27",
    )

    reuses_uncached_first: bool = _step(
        "Freed blocks that are not in the prefix cache go to the front of the free queue, so "
        "they are reused before all other blocks.",
        "All freed blocks go to the end of the free queue, beginning with the last block of a "
        "request.",
        source="#42656; BlockPool.free_blocks (vllm/v1/core/block_pool.py)",
        since="0.24",
    )
    exempts_single_request: bool = _step(
        "`long_prefill_token_threshold` does not apply while only one request is in the engine.",
        source="Scheduler.schedule",
        since="0.31",
    )
    applies_both_budgets: bool = _step(
        "Both `max_num_batched_tokens` and `max_num_scheduled_tokens` limit the tokens of a "
        "step, so the lower limit applies.",
        "`max_num_scheduled_tokens` replaces `max_num_batched_tokens`, even if it is the higher "
        "limit.",
        source="input_budget in Scheduler.schedule",
        since="0.28",
        knobs=("max_num_scheduled_tokens",),
    )
    skips_last_token_in_flight: bool = _step(
        "A request is not scheduled again while a step computes its last token (number "
        "`max_tokens`).",
        "The request computes one more token, which is discarded.",
        source="The first condition in the loop over running requests",
        since="0.11.1",
        knobs=("async_scheduling",),
    )
    skip_blocked: bool = _step(
        "If too few blocks are free for a waiting request, later requests can still be admitted.",
        source="#33499 (open)",
    )

    continues_after_self_preemption: bool = _priority(
        "If a running request lacks blocks and is preempted itself, the step continues with the "
        "next running request.",
        "The step skips all later running requests.",
        source="#26765",
        since="0.33",
    )
    keeps_position: bool = _priority(
        "If a step preempts an unscheduled request that precedes the current request in the "
        "running list, it skips no other request.",
        "The step then skips the request after the current one.",
        source="Issue #49097",
        since="0.28",
    )
    removes_victims: bool = _priority(
        "If a step preempts a request that it has already scheduled, the request is removed "
        "from the batch.",
        "The request stays in the batch and uses its share of the token budget. Its tokens "
        "count as computed although its blocks are freed. Another request is skipped.",
        source="Scheduler.schedule",
        since="0.11.1",
    )
    asserts_victims_run: bool = _priority(
        "The engine crashes if a step has scheduled more requests than are still running. This "
        "can happen if the step preempts requests that it has scheduled.",
        source="Assertion at the end of Scheduler.schedule",
        since="0.10",
        until="0.10.2",
        hidden_by=("removes_victims",),
    )
    breaks_ties_by_id: bool = _priority(
        "Requests of equal priority and equal arrival time are ordered by id.",
        "The engine crashes with a TypeError when it compares such requests.",
        source="Request.__lt__ (vllm/v1/request.py)",
        since="0.12",
    )

    counts_all_loras: bool = _lora(
        "The adapters of all running requests count towards `max_loras`.",
        "The adapters of running requests that the step skips do not count.",
        source="Scheduler.schedule",
        since="0.33",
        knobs=("async_scheduling",),
    )
    reverses_skipped: bool = _lora(
        "Waiting requests that were skipped because of `max_loras` return to the queue in "
        "reverse order.",
        "They keep their order.",
        source="RequestQueue.prepend_requests (vllm/v1/core/sched/request_queue.py)",
        since="0.9.2",
        until="0.14",
    )
    queues_skipped_apart: bool = _lora(
        "Requests that were skipped because of `max_loras` wait in a separate queue. The "
        "scheduler considers them before all other waiting requests, including preempted ones.",
        source="skipped_waiting",
        since="0.18",
        until="0.31",
    )

    reuses_uncached_windows_first: bool = _window(
        "Freed blocks that have left a sliding window go to the front of the free queue if they "
        "are not in the prefix cache, so they are reused first.",
        source="SlidingWindowManager.free (vllm/v1/core/single_type_kv_cache_manager.py)",
        since="0.23",
        hidden_by=("reuses_uncached_first",),
    )
    reserves_whole_windows: bool = _window(
        "If the whole sequence must fit at admission, a group with a window counts the blocks of "
        "the whole sequence.",
        "The group counts at most the blocks that a request holds at a time.",
        source="KVCacheManager.allocate_slots",
        until="0.20",
        shown_since="0.33",
    )
    frees_after_steps: bool = _window(
        "Blocks that have left the window are freed when no step in flight reads them.",
        "They are freed immediately.",
        source="vllm/v1/core/kv_cache_manager.py",
        since="0.26",
    )
    caches_boundaries_only: bool = _window(
        "In layer groups with a window, the prefix cache stores only the blocks that a later "
        "hit could need, unless `prefix_cache_retention_interval` is set.",
        "It stores all full blocks of these groups.",
        source="reachable_block_mask (vllm/v1/core/single_type_kv_cache_manager.py)",
        since="0.29",
    )
    caches_aligned_only: bool = _window(
        "If block sizes differ, a hit ends at a common multiple of the sizes. The prefix cache "
        "stores only blocks that such a hit needs.",
        "The prefix cache stores all full blocks.",
        source="cache_blocks in vllm/v1/core/kv_cache_coordinator.py",
        since="0.22",
    )

    caches_states: bool = _at_start(
        "Layers with states",
        "Prefix caching is on by default for models with recurrent states.",
        "It is off by default for these models.",
        source="vllm/config/vllm.py",
        since="0.26",
    )
    frees_states_behind_gaps: bool = _state(
        "The block table of a request can contain positions without a state. Old states before "
        "such a position are freed like other old states.",
        "Old states before such a position are kept until the request ends.",
        source="_num_retired_blocks (vllm/v1/core/single_type_kv_cache_manager.py)",
        since="0.30",
        needs=("frees_after_steps",),
    )
    splits_first_chunk_at_hits: bool = _state(
        "If the hit of one layer group is longer than the hit that all groups share, the first "
        "chunk of the prompt ends where the longer hit ends.",
        source="Scheduler._mamba_block_aligned_split",
        since="0.24",
        hidden_by=("splits_chunks_at_hits",),
    )
    splits_chunks_at_hits: bool = _state(
        "If the hit of one layer group is longer than the hit that all groups share, any chunk of "
        "the prompt that would cross the end of the longer hit ends there.",
        source="Scheduler._mamba_block_aligned_split",
        since="0.26",
    )
    allows_large_state_blocks: bool = _state(
        "A block may hold more tokens than a chunk. A chunk that reaches the end of a block "
        "ends there, unless it is the last chunk of the prompt.",
        "The engine does not start if a block is larger than the maximum chunk.",
        source="Scheduler._mamba_block_aligned_split",
        since="0.27",
    )
    stores_second_last_state: bool = _state(
        "If the length of a prompt is a multiple of `block_size`, the state one block before "
        "the end of the prompt is also stored.",
        source="get_mamba_prefill_checkpoint_position",
        since="0.32",
    )
    marks_end_state_again: bool = _state(
        "Each step of a request marks the state at the end of its prompt as new. Because of "
        "this bug, requests that could reuse the state wait longer.",
        source="_cache_partial_tail_block (vllm/v1/core/single_type_kv_cache_manager.py)",
        since="0.32",
        until="0.33",
    )

    draft_methods: tuple[str, ...] = _draft(
        "Values of `speculative_method` that the release supports",
        source="SpeculativeConfig.uses_draft_model",
        values={
            "0.9": ("eagle", "mtp", "ngram"),
            "0.15": ("eagle", "mtp", "ngram", "draft_model"),
        },
        at_start=True,
    )
    async_draft_methods: tuple[str, ...] = _draft(
        "Values of `speculative_method` that can be combined with asynchronous scheduling",
        source="vllm/config/vllm.py",
        values={
            "0.9": ("eagle", "mtp"),
            "0.16": ("eagle", "mtp", "draft_model"),
            "0.33": ("eagle", "mtp", "ngram", "draft_model"),
        },
        at_start=True,
    )
    drafts_with_states: bool = _draft(
        "simkv supports speculative decoding for models with recurrent states.",
        source="recordings of earlier releases, whose decisions differ from simkv's",
        since="0.26",
        at_start=True,
    )
    reserves_draft_slots: bool = _draft(
        "A draft model reserves `max_num_seqs` tokens of the budget of every step.",
        source="_set_max_num_scheduled_tokens (vllm/config/vllm.py)",
        since="0.17",
        until="0.28",
    )
    reserves_slots_by_request: bool = _draft(
        "A draft model reserves one token of the step's budget for each request in the step.",
        source="input_budget in Scheduler.schedule",
        since="0.28",
        hidden_by=("reserves_draft_slots",),
    )
    pads_admissions: bool = _draft(
        "A waiting request that has only one token to compute is admitted with as many draft "
        "slots as a running request has.",
        source="pad_spec_decode in Scheduler.schedule",
        since="0.25",
    )
    skips_padding_without_room: bool = _draft(
        "If the draft slots of a request would exceed `max_model_len` or the end of a block, "
        "the request is admitted without draft slots.",
        "The request waits in the first case. In the second case, the draft slots count, "
        "although no draft token is computed.",
        source="pad_spec_decode in Scheduler.schedule",
        since="0.29",
        needs=("pads_admissions",),
    )
    pads_lone_hits: bool = _draft(
        "A request with a prefix-cache hit is admitted with draft slots even if no other "
        "request runs.",
        source="num_computed_tokens > 0 in Scheduler.schedule",
        since="0.30",
        needs=("pads_admissions",),
    )
    lookahead_at_admission: bool = _draft(
        "A request receives lookahead slots at admission.",
        "It receives lookahead slots from its second step on.",
        source="effective_lookahead_tokens",
        since="0.23",
    )
    drafts_for_chunks: bool = _draft(
        "With synchronous scheduling, draft models also propose draft tokens for unfinished "
        "prompts. These draft tokens are discarded.",
        source="is_prefill_chunk",
        until="0.16",
    )
    keeps_preempted_drafts: bool = _draft(
        "Preempted requests keep their draft tokens.",
        source="vllm/v1/core/sched/scheduler.py",
        until="0.14",
    )
    caches_accepted_at_once: bool = _draft(
        "With synchronous scheduling, accepted draft tokens are added to the prefix cache "
        "immediately.",
        "They are added in the next step of the request.",
        source="vllm/v1/core/sched/scheduler.py",
        since="0.33",
    )
    keys_cover_next_token: bool = _draft(
        "With EAGLE, the cache key of a block also covers the first token after the block.",
        "A hit is one block shorter than the cached prefix.",
        source="use_eagle in vllm/v1/core/kv_cache_coordinator.py",
        since="0.33",
    )
    caches_shortened_hits: bool = _draft(
        "With EAGLE, a hit is one block shorter than the cached prefix. For layer groups with a "
        "window, the prefix cache stores the blocks that such a hit of the same prompt or of a "
        "longer prompt needs.",
        "It stores the blocks that a hit of the same prompt would need if hits were not one "
        "block shorter.",
        source="vllm/v1/core/single_type_kv_cache_manager.py",
        since="0.30",
    )
    stores_all_for_eagle: bool = _draft(
        "With EAGLE, `prefix_cache_retention_interval` is `None` by default for models with "
        "recurrent states.",
        source="EngineArgs.create_engine_config (vllm/engine/arg_utils.py)",
        since="0.29",
        until="0.30",
        at_start=True,
    )
    looks_up_last_block: bool = _draft(
        "With EAGLE and several layer groups, the last block of a prompt is also looked up in "
        "the prefix cache.",
        source="vllm/v1/core/kv_cache_coordinator.py",
        since="0.32",
    )

    queues_loads_apart: bool = _host(
        "Requests whose KV is being loaded wait in a separate queue, which the scheduler "
        "considers first.",
        source="Scheduler.schedule",
        since="0.31",
    )
    protects_in_flight: bool = _host(
        "With asynchronous scheduling, a request cannot be preempted while a step in flight "
        "computes its tokens.",
        source="Scheduler.schedule",
        since="0.30",
    )
    stores_at_end: bool = _host(
        "When a request ends, the blocks of its prompt that are not in host memory yet are "
        "offered for storage.",
        source="OffloadingConnectorScheduler",
        since="0.26",
    )
    stores_after_last_copy: bool = _host(
        "When a request ends, the blocks of its prompt that are not in host memory yet are "
        "offered for storage even if the last copy of the request has already completed.",
        source="OffloadingConnectorScheduler",
        since="0.27",
    )
    offers_computed_only: bool = _host(
        "After a client disconnects, only the computed tokens of its request are offered for "
        "storage.",
        "The whole prompt is offered for storage. If the request has no blocks, the engine "
        "crashes.",
        source="#49146, issue #49118",
        since="0.27",
    )
    remembers_offered: bool = _host(
        "After a preemption, blocks that were offered for storage before the preemption are not "
        "offered again.",
        "The blocks after the first chunk are offered again.",
        source="OffloadingConnectorScheduler",
        since="0.26",
    )
    offers_prompt_again: bool = _host(
        "After a preemption, all blocks of the prompt are offered for storage again.",
        source="OffloadingConnectorScheduler",
        since="0.33",
    )
    counts_uses_at_end: bool = _host(
        "Each block of a request counts as used once, when the request ends.",
        "Each lookup and each store of a request counts as a use of all its blocks.",
        source="vllm/v1/kv_offload/cpu/policies",
        since="0.31",
    )
    ranks_by_request: bool = _host(
        "With the eviction policy `lru`, all blocks of an unfinished request count as last used "
        "at the time when the request first used a block.",
        "Each of these blocks counts as last used at the time when it was written.",
        source="vllm/v1/kv_offload/cpu/policies/lru.py",
        since="0.33",
    )
    evicts_used_once: bool = _host(
        "With the eviction policy `arc`, blocks that were used once can be evicted if no other "
        "block can be evicted.",
        source="vllm/v1/kv_offload/cpu/policies/arc.py",
        since="0.30",
    )

    reserves_for_prompts: bool = _transfer(
        "A load starts only if enough other blocks stay free for the rest of all unfinished "
        "prompts.",
        source="_inflight_prefill_reserved_blocks",
        since="0.23",
    )
    caches_loaded_block: bool = _transfer(
        "After a load, the block that the last prompt token fills is also added to the prefix "
        "cache.",
        source="_update_waiting_for_remote_kv",
        since="0.18",
        knobs=("kv_connector", "watermark"),
    )
    frees_loads_when_done: bool = _transfer(
        "If a client disconnects during a load, the blocks of the load are freed when the load "
        "completes.",
        "They are freed immediately, although the load still writes to them.",
        source="delay_free_blocks",
        since="0.16",
    )
    frees_when_steps_end: bool = _transfer(
        "On replicas that can load KV, blocks that a step in flight writes to are freed when "
        "this step ends.",
        "They are freed immediately.",
        source="defer_block_free",
        since="0.24",
    )
    discards_victim_tokens: bool = _transfer(
        "On replicas that can send KV, the tokens in flight of a preempted request are discarded.",
        source="vllm/v1/core/sched/scheduler.py",
        since="0.27",
    )

    def refuse(self, version: str, config: object) -> None:
        """Raise ValueError if ``config`` has a value that ``version`` does not accept."""
        for knob, fixed in self.fixed.items():
            if getattr(config, knob) not in (fixed.value, None):
                raise ValueError(f"{knob}: {fixed.why.format(version=version)}")
