"""Configuration of the simulated vLLM engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from simkv.core.engine_flags import Flag, KnobSource
from simkv.core.engine_version import is_since
from simkv.core.policy_language import parse_policy
from simkv.core.scheduler_protocol import MAX_BLOCK_SIZE, MAX_BLOCKS, blocks_for
from simkv.schedulers.rule_fields import described_rules
from simkv.schedulers.vllm.layer_group_parser import (
    CHUNKED,
    STATES,
    LayerKind,
    parse_layer_group,
)
from simkv.schedulers.vllm.policy_hooks import POLICY_HOOKS
from simkv.schedulers.vllm.release_knobs import ALL_GROUPS_SINCE
from simkv.schedulers.vllm.release_rules import NEWEST, VllmRules
from simkv.schedulers.vllm.versions import ReleaseNames, find_rules

#: Knobs that affect step costs and the number of blocks, but no scheduling decision.
COST_KNOBS = (
    "gpu_memory_utilization",
    "cudagraph_mode",
    "max_cudagraph_capture_size",
    "cudagraph_capture_sizes",
)

#: Name of a group of layers (see ``layer_group_parser.py``).
LayerGroup = Annotated[int, Ge(0)] | str
#: Upper limit of ``num_speculative_tokens``; larger values are rejected as typos.
MAX_DRAFTS = 1000

CudagraphMode = Literal["FULL_AND_PIECEWISE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"]


class AsTuple:
    """Pydantic annotation for a tuple field that also accepts a list."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        def taken(value: object) -> object:
            return tuple(value) if isinstance(value, list) else value

        check = {"type": "no-info", "function": taken}
        return {"type": "function-before", "function": check, "schema": handler(source)}


@dataclass(frozen=True)
class VllmConfig:
    """Engine settings of vLLM, with vLLM's names and defaults.

    Raises ValueError if vLLM would refuse to start, or if the release does not have a setting.
    """

    # Without `hardware`, the GPU- and model-dependent defaults are as in ``vllm serve``
    # on a GPU with less than 70 GiB; with `hardware`, ``launcher_defaults.py`` derives them.

    name: Literal["vllm"] = "vllm"
    variant: Annotated[str, ReleaseNames(), KnobSource("`simkv policies` lists the sources")] = (
        NEWEST
    )
    """vLLM release to simulate, or a release with a named change. Releases with the same scheduling
    rules are interchangeable (such as 0.27, 0.27.0 and 0.27.1)."""
    block_size: Annotated[int, Gt(0), Le(MAX_BLOCK_SIZE), Flag("--block-size")] = 16
    """Tokens per KV block."""
    num_gpu_blocks: Annotated[int, Gt(1), Le(MAX_BLOCKS), Flag("--num-gpu-blocks-override")] = 1024
    """Number of KV blocks, including the null block. Default: computed from GPU memory with
    `hardware`, otherwise 1024 (simkv's own default)."""
    max_num_seqs: Annotated[int, Gt(0), Flag("--max-num-seqs")] = 256
    """Maximum number of running requests. Default: with `hardware`, the default of `vllm serve` for
    the GPU; otherwise 256."""
    max_num_batched_tokens: Annotated[int, Gt(0), Flag("--max-num-batched-tokens")] = 2048
    """Maximum number of tokens per step. Default: with `hardware`, the default of `vllm serve` for
    the GPU; otherwise 2048."""
    max_num_scheduled_tokens: Annotated[
        Annotated[int, Gt(0)] | None, Flag("--max-num-scheduled-tokens")
    ] = None
    """Token budget of a step, if set. Before vLLM 0.28, it replaces max_num_batched_tokens. Since
    0.28, the lower of the two limits applies."""
    max_num_active_seqs: Annotated[Annotated[int, Gt(0)] | None, Flag("--max-num-active-seqs")] = (
        None
    )
    """If set, no request is admitted while this number of requests is running. Replaces the limit
    max_num_seqs at admission.
    """
    max_num_queued_reqs: Annotated[Annotated[int, Ge(0)] | None, Flag("--max-num-queued-reqs")] = (
        None
    )
    """If set, limit on the number of waiting and running requests together. At the limit, new
    requests are rejected with HTTP 503. Each replica of a `fleet` counts its own requests;
    data-parallel ranks in lockstep count all of their requests together."""
    max_num_queued_tokens: Annotated[
        Annotated[int, Ge(0)] | None, Flag("--max-num-queued-tokens")
    ] = None
    """If set, limit on the total prompt tokens of all requests that have no output token yet. At or
    above the limit, new requests are rejected with HTTP 503.
    """
    max_model_len: Annotated[int, Gt(1), Flag("--max-model-len")] = 8192
    """Maximum sequence length (prompt and output) in tokens. Default: with `hardware`, the maximum
    of the model; otherwise 8192 (simkv's own default)."""
    policy: Annotated[
        Literal["fcfs", "priority", "vtc"], Flag("--scheduling-policy", unreleased=("vtc",))
    ] = "fcfs"
    """Order of the waiting queue: by arrival, by request priority (smaller is first), or by the
    service that each client has received (`vtc`, virtual token counters of arXiv 2401.00588; no
    release has this policy)."""
    enable_chunked_prefill: Annotated[bool, Flag("--enable-chunked-prefill")] = True
    """Whether a prompt can be computed in several steps. If false, a prompt waits until one step
    has enough tokens for it."""
    enable_prefix_caching: Annotated[bool | None, Flag("--enable-prefix-caching")] = None
    """Whether requests share the KV blocks of equal prompt prefixes. On by default, except before
    0.26 for models with recurrent states (Mamba)."""
    long_prefill_token_threshold: Annotated[int, Ge(0), Flag("--long-prefill-token-threshold")] = 0
    """Maximum number of prompt tokens per request and step; 0 means no limit."""
    long_prefill_token_threshold_adaptive: Annotated[
        bool, Flag("--long-prefill-token-threshold-adaptive")
    ] = False
    """Whether long_prefill_token_threshold is raised to max_num_batched_tokens divided by the
    number of requests, if this is larger.
    """
    scheduler_reserve_full_isl: Annotated[
        bool | None, Flag("--scheduler-reserve-full-isl", "#37307")
    ] = None
    """Whether a request is admitted only if enough blocks are free for all its known tokens,
    instead of only for its first chunk. Default: on since 0.19.
    """
    watermark: Annotated[float, Ge(0), Lt(1), Flag("--watermark")] = 0.0
    """Share of all blocks that must stay free after an admission. The limit does not apply if no
    request is running."""
    prefill_schedule_interval: Annotated[int, Gt(0), Flag("--prefill-schedule-interval")] = 1
    """While requests decode, prompts are computed only in every n-th step."""
    async_scheduling: Annotated[bool | None, Flag("--async-scheduling")] = None
    """Whether a step is scheduled before the tokens of the previous step are known. Default: on
    since 0.14."""
    enable_lora: Annotated[bool, Flag("--enable-lora")] = False
    """Whether requests can use LoRA adapters."""
    max_loras: Annotated[int, Gt(0), Flag("--max-loras")] = 1
    """Maximum number of LoRA adapters in a step; the base model does not count."""
    max_cpu_loras: Annotated[Annotated[int, Gt(0)] | None, Flag("--max-cpu-loras")] = None
    """Maximum number of LoRA adapters in host memory. Default: max_loras."""
    num_speculative_tokens: Annotated[
        int,
        Ge(0),
        Le(MAX_DRAFTS),
        Flag("--speculative-config", key="num_speculative_tokens"),
    ] = 0
    """Number of draft tokens that are proposed per request and verified in the next step. 0 turns
    speculative decoding off. The workload defines how many draft tokens are accepted."""
    speculative_method: Annotated[
        Literal["eagle", "mtp", "ngram", "draft_model"],
        Flag("--speculative-config", '"method"', key="method"),
    ] = "eagle"
    """Source of draft tokens: a trained drafter on the model's hidden states (`eagle`, also for
    eagle3), the model's own multi-token prediction layer (`mtp`), the prompt (`ngram`), or a draft
    model."""
    num_cpu_blocks: Annotated[
        int, Ge(0), Le(MAX_BLOCKS), Flag("--kv-offloading-size", "in GiB", unit="GiB")
    ] = 0
    """Number of KV blocks in host memory. vLLM copies the KV of prompts to these blocks, and loads
    it from there instead of recomputing it."""
    eviction_policy: Annotated[
        Literal["lru", "arc"],
        Flag(
            "--kv-transfer-config",
            "kv_connector_extra_config",
            key="kv_connector_extra_config.eviction_policy",
        ),
    ] = "lru"
    """Eviction policy for host memory: least recently used, or ARC, which separates blocks used
    once from blocks used repeatedly."""
    secondary_tiers: Annotated[
        tuple[Literal["fs"], ...],
        AsTuple(),
        Flag(
            "--kv-transfer-config",
            "kv_connector_extra_config, spec_name TieringOffloadingSpec",
            key="kv_connector_extra_config.secondary_tiers",
        ),
    ] = ()
    """Storage tiers behind host memory. KV is written to them and read from them. `fs` stores files
    on a disk."""
    kv_connector: Annotated[
        Literal["NixlConnector"] | None, Flag("--kv-transfer-config", key="kv_connector")
    ] = None
    """Connector that transfers KV from prefill replicas to decode replicas. Default: NixlConnector
    in fleets with such replicas."""
    kv_role: Annotated[
        Literal["kv_producer", "kv_consumer", "kv_both"] | None,
        Flag("--kv-transfer-config", key="kv_role"),
    ] = None
    """Role of the replica for the KV connector. Replicas that can load KV free their blocks later
    than other replicas. Default: the role that follows from the replica's role in the fleet."""
    kv_cache_groups: Annotated[
        tuple[LayerGroup, ...],
        AsTuple(),
        KnobSource("vLLM groups layers by the model's config.json"),
    ] = (0,)
    """One entry for each group of layers that has its own blocks. An entry is the length of the
    sliding window in tokens, `0` for full attention, `chunked-8192` for attention to tokens since
    the last multiple of 8192 (Llama 4), or `mamba` for layers with a recurrent state (Mamba, linear
    attention). A suffix sets the block size of the group: `0/32` has blocks of 32 tokens even if
    block_size is 16. Models whose layers differ in KV size per token need such a suffix (Gemma 4).
    `simkv blocks` prints the groups of a model.
    """
    mamba_cache_mode: Annotated[Literal["align", "all"] | None, Flag("--mamba-cache-mode")] = None
    """States that the prefix cache stores. `align` (the default here) stores the states at the ends
    of chunks, which are aligned to blocks. `all` stores the state at the end of every block; it
    exists in 0.21 to 0.31, and up to 0.28 vLLM selects it for models that support it."""
    mamba_prefill_checkpoints: Annotated[bool, KnobSource("vLLM asks the model's layers")] = False
    """Whether kernels also write the state at the end of a block inside a chunk. The last chunk of
    a prompt can then extend beyond the end of a block. vLLM does this for Mamba2 since 0.32, and
    for gated delta nets with FlashInfer since 0.33."""
    prefix_cache_retention_interval: Annotated[
        Annotated[int, Ge(0)] | Literal["None"] | None, Flag("--prefix-cache-retention-interval")
    ] = None
    """Distance in tokens between the positions at which the prefix cache stores the blocks of
    sliding windows and recurrent states. With 0, it stores only the blocks that the same prompt can
    reuse, or a prompt that diverges where the hit of another group ended. `None` stores all blocks
    (in YAML the word `None`, not `null`). Default: the default of the release, which is 0.
    """
    gpu_memory_utilization: Annotated[
        Annotated[float, Gt(0), Le(1)] | None, Flag("--gpu-memory-utilization")
    ] = None
    """Share of GPU memory that vLLM uses. With `hardware`, it determines the number of blocks.
    Default: 0.92 (0.9 for vLLM 0.19 and older). The setting does not affect scheduling decisions.
    """
    cudagraph_mode: Annotated[
        CudagraphMode | None, Flag("--compilation-config", key="cudagraph_mode")
    ] = None
    """Kinds of steps that run as CUDA graphs, for the cost model. Default: the default of the
    release. The setting does not affect scheduling decisions."""
    max_cudagraph_capture_size: Annotated[
        Annotated[int, Gt(0)] | None, Flag("--max-cudagraph-capture-size")
    ] = None
    """Maximum number of tokens of a step that runs as a CUDA graph. Default: twice the tokens of
    max_num_seqs decoding requests, at most 512, or 1024 on B200 since 0.28. The setting does not
    affect scheduling decisions."""
    cudagraph_capture_sizes: Annotated[
        tuple[Annotated[int, Gt(0)], ...], AsTuple(), Flag("--cudagraph-capture-sizes")
    ] = ()
    """Numbers of tokens for which vLLM captures CUDA graphs. Default: small numbers, and multiples
    of 8 and 16 up to max_cudagraph_capture_size. The setting does not affect scheduling
    decisions."""
    rule: Annotated[str | None, KnobSource("simkv; docs/how-to/evolve.md")] = None
    """Custom policy: expressions that replace decisions of the variant, one `HOOK = EXPRESSION` per
    line."""
    request_retention: Annotated[bool, KnobSource("simkv; no release of vLLM has it")] = False
    """Setting of simkv, not of vLLM: whether the prefix cache retains the blocks of a request after
    its end, for the time `retention` of the request. During this time, other blocks are evicted
    before them; after this time, they are evicted first.
    """
    pin_priority: Annotated[int | None, KnobSource("simkv; no release of vLLM has it")] = None
    """Setting of simkv, not of vLLM: the blocks of requests whose `priority` value is at most this
    value stay in the prefix cache until no other block is left.
    """
    startup_check: Annotated[bool, KnobSource("vllm-project/vllm#39734")] = True
    """Whether a max_model_len that does not fit into the KV cache is rejected. With
    num_gpu_blocks_override, vLLM accepted such a value until #41069 and #47272."""

    def __post_init__(self) -> None:
        rules = find_rules(self.variant)
        rules.refuse(self.variant, self)
        self._check_order(rules)
        spare = 1 if rules.reserves_null_block else 0
        usable = (self.num_gpu_blocks - spare) * self.block_size
        if self.kv_cache_groups != (0,):
            self._check_groups(self.num_gpu_blocks - spare)
        elif self.startup_check and usable < self.max_model_len:
            raise ValueError(
                f"num_gpu_blocks: {self.num_gpu_blocks} blocks of {self.block_size} "
                f"tokens{', less the null block,' if spare else ''} hold {usable} tokens, less "
                f"than max_model_len ({self.max_model_len}); increase num_gpu_blocks or reduce "
                "max_model_len"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} must be at least "
                f"max_num_seqs {self.max_num_seqs}"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} must be at least "
                f"max_model_len {self.max_model_len} when enable_chunked_prefill is false"
            )
        if rules.checks_threshold and self.long_prefill_token_threshold > self.max_model_len:
            raise ValueError(
                f"long_prefill_token_threshold: {self.long_prefill_token_threshold} must be at "
                f"most max_model_len {self.max_model_len}"
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras: {self.max_cpu_loras} must be at least max_loras {self.max_loras}"
            )
        if self.num_speculative_tokens:
            self._check_drafts(rules)
        self._check_offloading(rules)
        self._check_transfer(rules)
        self._check_retention(rules)
        self._check_interval(rules)
        if (self.max_num_active_seqs or 0) > self.max_num_seqs:
            raise ValueError(
                f"max_num_active_seqs: {self.max_num_active_seqs} must be at most max_num_seqs "
                f"{self.max_num_seqs}"
            )

    @property
    def retains(self) -> bool:
        """Whether the prefix cache can retain the blocks of ended requests."""
        return self.request_retention or self.pin_priority is not None

    def _check_retention(self, rules: VllmRules) -> None:
        if not self.retains:
            return
        name = "request_retention" if self.request_retention else "pin_priority"
        if not self.caches(rules):
            raise ValueError(f"{name}: requires enable_prefix_caching")
        others = {
            "kv_cache_groups": self.kv_cache_groups != (0,),
            "num_cpu_blocks": self.offloads,
            "kv_connector": self.kv_connector is not None,
            "num_speculative_tokens": self.num_speculative_tokens > 0,
            "rule": self.rule is not None,
            "policy vtc": self.policy == "vtc",
        }
        if found := next((other for other, is_set in others.items() if is_set), None):
            raise ValueError(f"{name}: not supported with {found}; remove one of them")

    def _check_interval(self, rules: VllmRules) -> None:
        """Raise ValueError for an interval that vLLM refuses at start-up, or that is not modelled.

        Source: ``vllm/v1/core/kv_cache_coordinator.py``.
        """
        given = self.prefix_cache_retention_interval
        within = self.has_states and self.mamba_prefill_checkpoints
        if given and within and self.num_speculative_tokens:
            raise ValueError(
                f"prefix_cache_retention_interval: {given} is not modelled with "
                "num_speculative_tokens and mamba_prefill_checkpoints, because vLLM then fails an "
                "assertion (_get_partial_block_hash); use 0"
            )
        if not given or given == "None":
            return
        kinds = self.layer_kinds
        if not any(kind.window or kind.states for kind in kinds):
            raise ValueError(
                f"prefix_cache_retention_interval: {given} has no effect, because "
                f"kv_cache_groups {list(self.kv_cache_groups)} contain no sliding window and no "
                "recurrent state; use 0"
            )
        whole = self.states(rules) == "none"  # a block for states then has max_model_len tokens
        sizes = [self.max_model_len if kind.states and whole else kind.block_size for kind in kinds]
        if given % (unit := lcm(*sizes)):
            raise ValueError(
                f"prefix_cache_retention_interval: {given} must be a multiple of {unit}, the least "
                "common multiple of the block sizes of all layer groups"
            )

    def _check_order(self, rules: VllmRules) -> None:
        if self.policy == "vtc" and rules.skip_blocked:
            raise ValueError(f"policy: vtc is not modelled for variant {self.variant!r}; use fcfs")
        if self.rule is None:
            return
        if rules.skip_blocked:
            raise ValueError(
                f"rule: variant {self.variant!r} does not support custom policies; use a release"
            )
        if self.policy != "fcfs":
            raise ValueError(
                f"rule: a custom policy cannot be combined with policy {self.policy}; use "
                "policy fcfs"
            )
        parse_policy(self.rule, POLICY_HOOKS)

    def _check_drafts(self, rules: VllmRules) -> None:
        method, drafts = self.speculative_method, self.num_speculative_tokens
        if method not in rules.draft_methods:
            methods = described_rules(VllmRules)["draft_methods"].changes
            since = next(release for release, added in methods.items() if method in added)
            raise ValueError(
                f"speculative_method: vLLM {self.variant} does not have {method}, which was added "
                f"in {since}; expected {' or '.join(rules.draft_methods)}"
            )
        if self.async_scheduling and method not in rules.async_draft_methods:
            raise ValueError(
                f"async_scheduling: vLLM {self.variant} schedules asynchronously only with the "
                f"draft methods {' or '.join(rules.async_draft_methods)}, not with {method}; "
                "remove async_scheduling"
            )
        if self.rule is not None:
            raise ValueError("rule: custom policies are not supported with num_speculative_tokens")
        self._check_drafts_in_groups(rules)
        if rules.pads_admissions and 0 < self.long_prefill_token_threshold <= drafts:
            raise ValueError(
                f"long_prefill_token_threshold: {self.long_prefill_token_threshold} must be 0 or "
                f"above num_speculative_tokens {drafts}, because vLLM {self.variant} pads "
                f"admissions to {drafts + 1} tokens"
            )
        slots = self.draft_slots * (self.max_num_seqs if rules.reserves_draft_slots else 1)
        left = self.max_num_batched_tokens - slots
        if left <= 0 and (rules.reserves_draft_slots or rules.reserves_slots_by_request):
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} must exceed the {slots} "
                "tokens reserved for the draft model"
            )
        if rules.reserves_draft_slots and (self.max_num_scheduled_tokens or 0) > left:
            raise ValueError(
                f"max_num_scheduled_tokens: with num_speculative_tokens, vLLM {self.variant} "
                f"allows at most {left} (max_num_batched_tokens {self.max_num_batched_tokens} "
                f"minus {slots} tokens for the draft model), got {self.max_num_scheduled_tokens}"
            )

    def _check_drafts_in_groups(self, rules: VllmRules) -> None:
        sizes, method = {kind.block_size for kind in self.layer_kinds}, self.speculative_method
        drops, within = self.drops_block(rules), self.mamba_prefill_checkpoints
        refused = {
            STATES: ("0.26", self.has_states and not rules.drafts_with_states),
            "mamba_prefill_checkpoints": ("0.33", self.has_states and drops and within),
            "a second block size": ("0.33", len(sizes) > 1 and drops),
        }
        if self.has_states and self.mamba_cache_mode == "all":
            raise ValueError(
                "mamba_cache_mode: all is not modelled with num_speculative_tokens; remove "
                "mamba_cache_mode"
            )
        for what, (since, _) in ((what, why) for what, why in refused.items() if why[1]):
            raise ValueError(
                f"kv_cache_groups: {what} is not modelled with {method} for vLLM "
                f"{self.variant}; use [0], or vLLM {since} or later"
            )

    def _check_offloading(self, rules: VllmRules) -> None:
        if len(self.secondary_tiers) > 1:
            raise ValueError("secondary_tiers: more than one tier is not modelled; use [fs]")
        if not self.offloads:
            if self.secondary_tiers:
                raise ValueError("secondary_tiers: needs num_cpu_blocks of at least 1")
            return
        if self.block_size == 1:
            raise ValueError("block_size: 1 is not modelled with num_cpu_blocks; use 2 or more")
        for knob, fits, only in (
            ("enable_prefix_caching", self.caches(rules), "true"),
            ("kv_cache_groups", self.kv_cache_groups == (0,), "[0]"),
            ("num_speculative_tokens", not self.num_speculative_tokens, "0"),
            ("rule", self.rule is None, "null"),
            ("policy", self.policy != "vtc", "fcfs"),
        ):
            if not fits:
                raise ValueError(
                    f"{knob}: {getattr(self, knob)} is not modelled with num_cpu_blocks; use {only}"
                )

    def _check_transfer(self, rules: VllmRules) -> None:
        if self.kv_connector is None:
            return
        for knob, fits, only in (
            ("kv_cache_groups", self.kv_cache_groups == (0,), "[0]"),
            ("num_cpu_blocks", not self.num_cpu_blocks, "0"),
            ("num_speculative_tokens", not self.num_speculative_tokens, "0"),
            ("rule", self.rule is None, "null"),
            ("policy", self.policy != "vtc", "fcfs"),
        ):
            if not fits:
                raise ValueError(
                    f"{knob}: {getattr(self, knob)} is not modelled with kv_connector; use {only}"
                )
        if (
            self.kv_role != "kv_consumer"
            and self.depth > 1
            and not rules.skips_last_token_in_flight
        ):
            raise ValueError(
                f"async_scheduling: not modelled for vLLM {self.variant} with kv_connector, "
                "because a request whose KV is sent would end twice; use false"
            )

    def in_role(self, role: str) -> VllmConfig:
        """Return the config of a replica that only prefills or only decodes.

        ``role`` is ``prefill`` or ``decode``.
        """
        kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        if self.kv_role not in (None, "kv_both", kv_role):
            raise ValueError(
                f"kv_role: {self.kv_role} does not match the replica's role {role}; expected "
                f"{kv_role} or kv_both"
            )
        given: dict[str, Any] = {"kv_role": self.kv_role or kv_role}
        return replace(self, kv_connector="NixlConnector", **given)

    @property
    def offloads(self) -> bool:
        """Whether the KV of prompts is copied to host memory."""
        return self.num_cpu_blocks > 0

    @property
    def draft_slots(self) -> int:
        """Number of tokens that a step reserves for the drafter, per request."""
        return int(self.num_speculative_tokens > 0 and self.speculative_method == "draft_model")

    @property
    def drafts_from_states(self) -> bool:
        """Whether the drafter reads the model's hidden states and stores its own KV."""
        # vLLM schedules all such methods alike (``SpeculativeConfig.use_eagle``).
        return self.num_speculative_tokens > 0 and self.speculative_method in ("eagle", "mtp")

    def most_scheduled(self, rules: VllmRules) -> int:
        """Return ``max_num_scheduled_tokens`` as vLLM sets it at start-up.

        Source: ``VllmConfig._set_max_num_scheduled_tokens``.
        """
        # Releases with the rule ``reserves_draft_slots`` subtract the slots that a draft model may
        # use.
        slots = self.draft_slots * self.max_num_seqs if rules.reserves_draft_slots else 0
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens - slots

    @property
    def depth(self) -> int:
        """Maximum number of batches in flight: 2 with asynchronous scheduling, otherwise 1."""
        given, rules = self.async_scheduling, find_rules(self.variant)
        if given is None:
            given = rules.async_scheduling
            if self.num_speculative_tokens:
                given = given and self.speculative_method in rules.async_draft_methods
        return 2 if given else 1

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of the layer groups."""
        return tuple(parse_layer_group(group, self.block_size) for group in self.kv_cache_groups)

    @property
    def has_states(self) -> bool:
        """Whether some layers have a recurrent state instead of KV."""
        return STATES in self.kv_cache_groups

    def caches(self, rules: VllmRules) -> bool:
        """Return whether prefix caching is on."""
        if self.enable_prefix_caching is not None:
            return self.enable_prefix_caching
        return rules.caches_states if self.has_states else rules.enable_prefix_caching

    def drops_block(self, rules: VllmRules) -> bool:
        """Return whether a prefix-cache hit leaves out the last cached block (EAGLE)."""
        return self.drafts_from_states and not rules.keys_cover_next_token

    def retention_interval(self, rules: VllmRules) -> int | None:
        """Return the distance in tokens between the stored windows and states.

        0 means that only reusable ends of prompts are stored, and None that all are stored.
        """
        given = self.prefix_cache_retention_interval
        if given is not None:
            return None if given == "None" else given
        hybrid = self.has_states and len(self.kv_cache_groups) > 1
        dense = rules.stores_all_for_eagle and hybrid and self.drafts_from_states
        return 0 if rules.caches_boundaries_only and not dense else None

    def states(self, rules: VllmRules) -> Literal["none", "align", "all"]:
        """Return the recurrent states that the prefix cache stores."""
        return (self.mamba_cache_mode or "align") if self.caches(rules) else "none"

    def most_blocks(self, kind: LayerKind, length: int | None = None) -> int:
        """Return the maximum number of blocks that a sequence needs in a layer group.

        ``length`` is in tokens and defaults to ``max_model_len``.
        """
        tokens, rules, size = (
            length or self.max_model_len,
            find_rules(self.variant),
            kind.block_size,
        )
        if kind.states:
            mode = self.states(rules)
            aligned = 3 if self.mamba_prefill_checkpoints else 2
            kept = {"none": 1, "align": aligned, "all": blocks_for(tokens, size)}[mode]
            return kept + self.num_speculative_tokens
        under_way = (self.depth if rules.frees_after_steps else 1) * self.max_num_batched_tokens
        if kind.chunk or kind.window:
            tokens = min(max(kind.chunk, kind.window - 1) + under_way, tokens)
        return blocks_for(tokens, size) + (kind.window > 0)

    def _check_groups(self, usable: int) -> None:
        try:
            kinds = self.layer_kinds
        except ValueError:
            kinds = ()
        if not kinds:
            raise ValueError(
                f"kv_cache_groups: {list(self.kv_cache_groups)} must have at least one entry; "
                "each entry is 0, a window of at least 2 tokens, mamba or chunked-8192, with "
                "an optional block size as in 0/32"
            )
        if len(self.kv_cache_groups) > 1 and len({*kinds}) == 1:
            raise ValueError(
                f"kv_cache_groups: {list(self.kv_cache_groups)} describe layers of the same "
                f"kind, which form one group in vLLM; use [{self.kv_cache_groups[0]}]"
            )
        self._check_old_groups(kinds)
        self._check_sizes(kinds)
        for kind in kinds:
            self._check_chunk(kind.chunk)
        needed = sum(map(self.most_blocks, kinds))
        if self.has_states:
            self._check_states(find_rules(self.variant))
        if self.startup_check and usable < needed:
            raise ValueError(
                f"num_gpu_blocks: {usable} usable blocks, but a sequence of max_model_len "
                f"{self.max_model_len} needs {needed} in {len(kinds)} groups; increase "
                f"num_gpu_blocks or reduce max_model_len"
            )

    def _check_old_groups(self, kinds: tuple[LayerKind, ...]) -> None:
        if is_since(self.variant, ALL_GROUPS_SINCE):
            return
        plain = {kind for kind in kinds if not kind.window}
        windows = {kind for kind in kinds if kind.window}
        full = LayerKind(0, 0, states=False, block_size=self.block_size)
        sizes = {kind.block_size for kind in kinds}
        if plain != {full} or len(windows) != 1 or sizes != {self.block_size}:
            raise ValueError(
                f"kv_cache_groups: {list(self.kv_cache_groups)} is not modelled for vLLM "
                f"{self.variant}; use full attention together with one window, as in [0, 128], or "
                f"vLLM {ALL_GROUPS_SINCE} or later"
            )
        if self.num_speculative_tokens:
            raise ValueError(
                f"kv_cache_groups: not modelled with num_speculative_tokens for vLLM "
                f"{self.variant}; use [0], or vLLM {ALL_GROUPS_SINCE} or later"
            )

    def _check_sizes(self, kinds: tuple[LayerKind, ...]) -> None:
        size, sizes = self.block_size, {kind.block_size for kind in kinds}
        if min(sizes) != size or any(other % size for other in sizes):
            raise ValueError(
                f"kv_cache_groups: block sizes {sorted(sizes)} must be multiples of block_size "
                f"{size}, and the smallest must equal it"
            )
        if len(sizes) > 1 and any(kind.states or kind.chunk for kind in kinds):
            raise ValueError(
                "kv_cache_groups: different block sizes are modelled for sliding windows only, "
                "not with mamba or chunked attention; remove the sizes"
            )

    def _check_chunk(self, chunk: int) -> None:
        if chunk % self.block_size:
            raise ValueError(
                f"kv_cache_groups: {CHUNKED}{chunk} must be a multiple of block_size "
                f"{self.block_size}"
            )
        if chunk and self.drafts_from_states:
            raise ValueError(
                f"kv_cache_groups: with {self.speculative_method} vLLM has no separate group for "
                f"{CHUNKED}{chunk}; use [0]"
            )

    def _check_states(self, rules: VllmRules) -> None:
        if self.states(rules) != "align":
            return
        if not self.enable_chunked_prefill:
            raise ValueError(
                "enable_chunked_prefill: must be true with prefix caching of states (mamba in "
                "kv_cache_groups)"
            )
        if rules.allows_large_state_blocks:
            return
        threshold, most = self.long_prefill_token_threshold, self.max_num_batched_tokens
        for knob, tokens in (
            ("max_num_batched_tokens", most),
            ("long_prefill_token_threshold", threshold or most),
        ):
            if self.block_size > tokens:
                raise ValueError(
                    f"{knob}: {tokens} must be at least block_size {self.block_size} with "
                    f"prefix caching of states (mamba in kv_cache_groups) in vLLM {self.variant}"
                )
