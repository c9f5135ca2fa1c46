"""Configuration of the simulated vLLM engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from simkv.core.engine_flags import Flag, KnobSource
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
from simkv.schedulers.vllm.release_rules import NEWEST, VllmRules
from simkv.schedulers.vllm.versions import ReleaseNames, find_rules

#: Knobs that affect step costs and the number of blocks, but no scheduling decision.
COST_KNOBS = ("gpu_memory_utilization", "cudagraph_mode", "max_cudagraph_capture_size")

#: Name of a group of layers (see ``layer_group_parser.py``).
LayerGroup = Annotated[int, Ge(0)] | str
#: Upper limit of ``num_speculative_tokens``; larger values are rejected as typos.
MAX_DRAFTS = 1000

CudagraphMode = Literal["FULL_AND_PIECEWISE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"]


class AsTuple:
    """Pydantic annotation for a tuple field that also accepts a list, because YAML files contain
    lists.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        def taken(value: object) -> object:
            return tuple(value) if isinstance(value, list) else value

        check = {"type": "no-info", "function": taken}
        return {"type": "function-before", "function": check, "schema": handler(source)}


@dataclass(frozen=True)
class VllmConfig:
    """Engine settings of vLLM, with vLLM's names and defaults.

    Without `hardware`, defaults that depend on the GPU and the model are those of ``vllm serve`` on
    a GPU with less than 70 GiB; with `hardware`, ``launcher_defaults.py`` derives them. A knob that
    the selected release does not have cannot be set.

    Raises ValueError if vLLM would refuse to start.
    """

    name: Literal["vllm"] = "vllm"
    variant: Annotated[str, ReleaseNames(), KnobSource("`simkv policies` lists the sources")] = (
        NEWEST
    )
    """vLLM release to simulate, or a release with a named change. A minor or patch release can
    stand for its recorded equivalent (0.27, 0.27.0 and 0.27.1 have the same rules)."""
    block_size: Annotated[int, Gt(0), Le(MAX_BLOCK_SIZE), Flag("--block-size")] = 16
    """Tokens per KV block."""
    num_gpu_blocks: Annotated[int, Gt(1), Le(MAX_BLOCKS), Flag("--num-gpu-blocks-override")] = 1024
    """Number of KV blocks, including the null block; with `hardware` derived from GPU memory, else
    1024 (simkv's default)."""
    max_num_seqs: Annotated[int, Gt(0), Flag("--max-num-seqs")] = 256
    """Maximum number of running requests; with `hardware` the default of vllm serve for the GPU,
    else 256."""
    max_num_batched_tokens: Annotated[int, Gt(0), Flag("--max-num-batched-tokens")] = 2048
    """Maximum number of tokens per step; with `hardware` the default of vllm serve for the GPU,
    else 2048."""
    max_num_scheduled_tokens: Annotated[
        Annotated[int, Gt(0)] | None, Flag("--max-num-scheduled-tokens")
    ] = None
    """Token budget of a step, if set. Since 0.28 max_num_batched_tokens limits the step as well;
    before, this value replaces it."""
    max_num_active_seqs: Annotated[Annotated[int, Gt(0)] | None, Flag("--max-num-active-seqs")] = (
        None
    )
    """Number of running requests at which no further request is admitted, if set; replaces
    max_num_seqs."""
    max_num_queued_reqs: Annotated[Annotated[int, Ge(0)] | None, Flag("--max-num-queued-reqs")] = (
        None
    )
    """Limit on waiting plus running requests, if set; at the limit new requests are rejected with
    HTTP 503. Each replica of a `fleet` counts its own requests; ranks in lockstep count
    together."""
    max_num_queued_tokens: Annotated[
        Annotated[int, Ge(0)] | None, Flag("--max-num-queued-tokens")
    ] = None
    """Limit on the prompt tokens of all requests without a first token, if set; at or above it new
    requests are rejected with HTTP 503."""
    max_model_len: Annotated[int, Gt(1), Flag("--max-model-len")] = 8192
    """Maximum sequence length (prompt and output) in tokens; with `hardware` the model's, else 8192
    (simkv's default)."""
    policy: Annotated[
        Literal["fcfs", "priority", "vtc"], Flag("--scheduling-policy", unreleased=("vtc",))
    ] = "fcfs"
    """Order of the waiting queue: by arrival, by request priority (smaller is first), or by the
    service of each client (`vtc`, virtual token counters of arXiv 2401.00588, which no release
    has)."""
    enable_chunked_prefill: Annotated[bool, Flag("--enable-chunked-prefill")] = True
    """Whether a prompt can be computed in several steps; if false, it waits until it fits into
    one."""
    enable_prefix_caching: Annotated[bool | None, Flag("--enable-prefix-caching")] = None
    """Whether requests share KV blocks of equal prompt prefixes; on by default, except for models
    with states (mamba) before 0.26."""
    long_prefill_token_threshold: Annotated[int, Ge(0), Flag("--long-prefill-token-threshold")] = 0
    """Maximum number of prompt tokens per request and step; 0 means no limit."""
    long_prefill_token_threshold_adaptive: Annotated[
        bool, Flag("--long-prefill-token-threshold-adaptive")
    ] = False
    """Whether long_prefill_token_threshold is raised to an equal share of the batch."""
    scheduler_reserve_full_isl: Annotated[
        bool | None, Flag("--scheduler-reserve-full-isl", "#37307")
    ] = None
    """Whether the whole sequence must fit at admission, not only the first chunk; default:
    that of the release (on since 0.19)."""
    watermark: Annotated[float, Ge(0), Lt(1), Flag("--watermark")] = 0.0
    """Share of all blocks that must stay free at admission, unless no request is running."""
    prefill_schedule_interval: Annotated[int, Gt(0), Flag("--prefill-schedule-interval")] = 1
    """Compute prompts only in every n-th step while requests decode."""
    async_scheduling: Annotated[bool | None, Flag("--async-scheduling")] = None
    """Whether a step is scheduled before the tokens of the previous step are known; default: that
    of the release (on since 0.14)."""
    enable_lora: Annotated[bool, Flag("--enable-lora")] = False
    """Whether requests can use LoRA adapters."""
    max_loras: Annotated[int, Gt(0), Flag("--max-loras")] = 1
    """Maximum number of LoRA adapters in a step, not counting the base model."""
    max_cpu_loras: Annotated[Annotated[int, Gt(0)] | None, Flag("--max-cpu-loras")] = None
    """Number of LoRA adapters that host memory holds; default max_loras."""
    num_speculative_tokens: Annotated[
        int,
        Ge(0),
        Le(MAX_DRAFTS),
        Flag("--speculative-config", key="num_speculative_tokens"),
    ] = 0
    """Draft tokens proposed per request and verified in its next step; 0 turns speculative decoding
    off. The workload defines how many are accepted."""
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
    """Number of KV blocks in host memory. KV of prompts is copied there and loaded again instead of
    being recomputed."""
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
    """Storage tiers behind host memory that KV is written to and read from: `fs` for files on a
    disk."""
    kv_connector: Annotated[
        Literal["NixlConnector"] | None, Flag("--kv-transfer-config", key="kv_connector")
    ] = None
    """Connector that transfers KV from prefill replicas to decode replicas; default NixlConnector
    in fleets that have such replicas."""
    kv_role: Annotated[
        Literal["kv_producer", "kv_consumer", "kv_both"] | None,
        Flag("--kv-transfer-config", key="kv_role"),
    ] = None
    """Role of the replica for the KV connector; replicas that can load KV free blocks later.
    Default: derived from the replica's role in the fleet."""
    kv_cache_groups: Annotated[
        tuple[LayerGroup, ...],
        AsTuple(),
        KnobSource("vLLM groups layers by the model's config.json"),
    ] = (0,)
    """One entry for each group of layers with its own blocks: the sliding window in tokens, 0 for
    full attention, `chunked-8192` for attention to tokens since the last multiple of 8192 (Llama
    4), `mamba` for layers with a state (Mamba, linear attention). A suffix sets the block size:
    `0/32` has blocks of 32 tokens while block_size is 16, for layers with a different KV size per
    token (Gemma 4). `simkv blocks` prints the groups of a model."""
    mamba_cache_mode: Annotated[Literal["align", "all"] | None, Flag("--mamba-cache-mode")] = None
    """States that the prefix cache stores: at the ends of chunks, which are aligned to blocks
    (align, the default here), or of every block (all, in 0.21 to 0.31; up to 0.28 vLLM selects it
    for models that support it)."""
    mamba_prefill_checkpoints: Annotated[bool, KnobSource("vLLM asks the model's layers")] = False
    """Whether kernels also write the state at a block end inside a chunk, so that the last chunk of
    a prompt can extend past it: Mamba2 since 0.32, gated delta nets with FlashInfer since 0.33."""
    gpu_memory_utilization: Annotated[
        Annotated[float, Gt(0), Le(1)] | None, Flag("--gpu-memory-utilization")
    ] = None
    """Share of GPU memory that vLLM uses; with `hardware` it determines the number of blocks.
    Default 0.92, up to 0.19 0.9. Affects no scheduling decision."""
    cudagraph_mode: Annotated[
        CudagraphMode | None, Flag("--compilation-config", key="cudagraph_mode")
    ] = None
    """Kinds of steps that run as CUDA graphs, for the cost model; default: that of the release.
    Affects no scheduling decision."""
    max_cudagraph_capture_size: Annotated[
        Annotated[int, Gt(0)] | None, Flag("--max-cudagraph-capture-size")
    ] = None
    """Maximum number of tokens of a step that runs as a CUDA graph; default twice max_num_seqs, at
    most 512. Affects no scheduling decision."""
    rule: Annotated[str | None, KnobSource("simkv; docs/how-to/evolve.md")] = None
    """Custom policy: expressions that replace decisions of the variant, one `HOOK = EXPRESSION` per
    line."""
    startup_check: Annotated[bool, KnobSource("vllm-project/vllm#39734")] = True
    """Whether a max_model_len that the KV cache cannot hold is rejected; vLLM accepted it with
    num_gpu_blocks_override until #41069 and #47272."""

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
                f"num_gpu_blocks: {self.num_gpu_blocks} blocks of {self.block_size} tokens"
                f"{', less the null block,' if spare else ''} hold {usable} tokens; "
                f"max_model_len {self.max_model_len} must fit"
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
        if (self.max_num_active_seqs or 0) > self.max_num_seqs:
            raise ValueError(
                f"max_num_active_seqs: {self.max_num_active_seqs} must be at most max_num_seqs "
                f"{self.max_num_seqs}"
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
            raise ValueError(f"rule: a custom policy replaces policy {self.policy}; use fcfs")
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
                f"async_scheduling: vLLM {self.variant} schedules asynchronously with "
                f"{' or '.join(rules.async_draft_methods)} only, not with {method}; remove it"
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
                f"max_num_scheduled_tokens: {self.max_num_scheduled_tokens} must be at most {left} "
                f"(max_num_batched_tokens {self.max_num_batched_tokens} less {slots} for the "
                f"draft model) with num_speculative_tokens in vLLM {self.variant}"
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
                "mamba_cache_mode: all is not modelled with num_speculative_tokens; remove it"
            )
        for what, (since, _) in ((what, why) for what, why in refused.items() if why[1]):
            raise ValueError(
                f"kv_cache_groups: {what} is not modelled with {method} for vLLM "
                f"{self.variant}, only since {since}; use [0]"
            )

    def _check_offloading(self, rules: VllmRules) -> None:
        if len(self.secondary_tiers) > 1:
            raise ValueError("secondary_tiers: more than one is not modelled; use [fs]")
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
                f"async_scheduling: not modelled for vLLM {self.variant} with kv_connector, where "
                "a request whose KV is sent ends twice; use false"
            )

    def in_role(self, role: str) -> VllmConfig:
        """Return the config of a replica with one role in a fleet, ``prefill`` or ``decode``."""
        kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        if self.kv_role not in (None, "kv_both", kv_role):
            raise ValueError(
                f"kv_role: {self.kv_role} does not fit a replica with role {role}; "
                f"expected {kv_role} or kv_both"
            )
        given: dict[str, Any] = {"kv_role": self.kv_role or kv_role}
        return replace(self, kv_connector="NixlConnector", **given)

    @property
    def offloads(self) -> bool:
        """Whether the KV of prompts is copied to host memory."""
        return self.num_cpu_blocks > 0

    @property
    def draft_slots(self) -> int:
        """Number of tokens of a step that the drafter uses for each request."""
        return int(self.num_speculative_tokens > 0 and self.speculative_method == "draft_model")

    @property
    def drafts_from_states(self) -> bool:
        """Whether the drafter reads the model's hidden states and stores KV of its own.

        vLLM schedules all such methods alike (``SpeculativeConfig.use_eagle``).
        """
        return self.num_speculative_tokens > 0 and self.speculative_method in ("eagle", "mtp")

    def most_scheduled(self, rules: VllmRules) -> int:
        """Return ``max_num_scheduled_tokens`` as vLLM sets it at start-up.

        The default is ``max_num_batched_tokens``. Releases with ``reserves_draft_slots`` subtract
        the slots that a draft model may use (``VllmConfig._set_max_num_scheduled_tokens``).
        """
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
        """Whether some layers have a state instead of KV."""
        return STATES in self.kv_cache_groups

    def caches(self, rules: VllmRules) -> bool:
        """Return whether prefix caching is on; if it is not configured, the default of ``rules``
        applies.
        """
        if self.enable_prefix_caching is not None:
            return self.enable_prefix_caching
        return rules.caches_states if self.has_states else rules.enable_prefix_caching

    def drops_block(self, rules: VllmRules) -> bool:
        """Return whether a hit is one block shorter than the cached prefix, as EAGLE's KV
        requires."""
        return self.drafts_from_states and not rules.keys_cover_next_token

    def states(self, rules: VllmRules) -> Literal["none", "align", "all"]:
        """Return which states of ``mamba`` groups the prefix cache stores."""
        return (self.mamba_cache_mode or "align") if self.caches(rules) else "none"

    def most_blocks(self, kind: LayerKind, length: int | None = None) -> int:
        """Return the maximum number of blocks of a sequence in a layer group.

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
                f"kv_cache_groups: {list(self.kv_cache_groups)} must be one entry or more, each 0, "
                "a window of at least 2 tokens, mamba or chunked-8192; a suffix sets the block "
                "size, such as 0/32"
            )
        if len(self.kv_cache_groups) > 1 and len({*kinds}) == 1:
            raise ValueError(
                f"kv_cache_groups: {list(self.kv_cache_groups)} are layers of one kind, which form "
                f"one group in vLLM; use [{self.kv_cache_groups[0]}]"
            )
        self._check_sizes(kinds)
        for kind in kinds:
            self._check_chunk(kind.chunk)
        needed = sum(map(self.most_blocks, kinds))
        if self.has_states:
            self._check_states(find_rules(self.variant))
        if self.startup_check and usable < needed:
            raise ValueError(
                f"num_gpu_blocks: {usable} usable blocks, but a sequence of max_model_len "
                f"{self.max_model_len} needs {needed} in {len(kinds)} groups"
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
                "kv_cache_groups: several block sizes are modelled for windows only, not with "
                "mamba or chunked attention; remove the sizes"
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
