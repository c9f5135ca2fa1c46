"""The knobs of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from simkv.core.engine_flags import Flag, KnobSource
from simkv.core.policy_language import parse_policy
from simkv.core.scheduler_protocol import MAX_BLOCK_SIZE, MAX_BLOCKS, blocks_for
from simkv.schedulers.vllm.layer_groups import (
    CHUNKED,
    STATES,
    LayerKind,
    parse_layer_group,
)
from simkv.schedulers.vllm.policy_hooks import POLICY_HOOKS
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.releases import RELEASES
from simkv.schedulers.vllm.versions import ReleaseNames, find_rules

#: Knobs that no decision depends on: what steps cost and how many blocks there are does.
COST_KNOBS = ("gpu_memory_utilization", "cudagraph_mode", "max_cudagraph_capture_size")

#: What a group of layers is called (groups.py).
LayerGroup = Annotated[int, Ge(0)] | str
#: More drafts in a step are refused as typos.
MAX_DRAFTS = 1000

CudagraphMode = Literal["FULL_AND_PIECEWISE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"]


class AsTuple:
    """Lets a tuple be written as a list, which is what files have: for pydantic, which asks."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        def taken(value: object) -> object:
            return tuple(value) if isinstance(value, list) else value

        check = {"type": "no-info", "function": taken}
        return {"type": "function-before", "function": check, "schema": handler(source)}


@dataclass(frozen=True)
class VllmConfig:
    """Knobs of the engine, under its own names and with its defaults.

    Those that depend on GPU and model (``launcher_defaults.py``) are for scenarios without
    hardware: of ``vllm serve`` on a GPU with less than 70 GiB. Knobs that a version does not have
    cannot be set with it.

    Raises ValueError where vLLM refuses to start.
    """

    name: Literal["vllm"] = "vllm"
    variant: Annotated[
        str, ReleaseNames(), KnobSource("`simkv policies` says where each is from")
    ] = "0.33.0"
    """Whose rules decide: a release of vLLM (0.27, 0.27.0 and 0.27.1 go by the same), or one with a
    named change."""
    block_size: Annotated[int, Gt(0), Le(MAX_BLOCK_SIZE), Flag("--block-size")] = 16
    """Tokens in a block of KV."""
    num_gpu_blocks: Annotated[int, Gt(1), Le(MAX_BLOCKS), Flag("--num-gpu-blocks-override")] = 1024
    """Blocks of KV, the null block among them; with `hardware` what its memory leaves, else 1024, a
    default of ours."""
    max_num_seqs: Annotated[int, Gt(0), Flag("--max-num-seqs")] = 256
    """Most requests that run at a time; with `hardware` what vllm serve chooses for the GPU, else
    256."""
    max_num_batched_tokens: Annotated[int, Gt(0), Flag("--max-num-batched-tokens")] = 2048
    """Most tokens computed in a step; with `hardware` what vllm serve chooses for the GPU, else
    2048."""
    max_num_scheduled_tokens: Annotated[
        Annotated[int, Gt(0)] | None, Flag("--max-num-scheduled-tokens")
    ] = None
    """If set, a step is filled with at most so many tokens; since 0.28 max_num_batched_tokens
    limits it too, before it does not."""
    max_num_active_seqs: Annotated[Annotated[int, Gt(0)] | None, Flag("--max-num-active-seqs")] = (
        None
    )
    """If set, no request is admitted while so many run, in place of max_num_seqs."""
    max_num_queued_reqs: Annotated[Annotated[int, Ge(0)] | None, Flag("--max-num-queued-reqs")] = (
        None
    )
    """If set, a request that comes while so many wait or run is answered with 503; each replica of
    a `fleet` counts its own, ranks in lock-step all together."""
    max_num_queued_tokens: Annotated[
        Annotated[int, Ge(0)] | None, Flag("--max-num-queued-tokens")
    ] = None
    """If set, a request that comes while the prompts of those without a first token have so many
    tokens or more is answered with 503."""
    max_model_len: Annotated[int, Gt(1), Flag("--max-model-len")] = 8192
    """Longest sequence, prompt and output together, in tokens; with `hardware` the model's, else
    8192, a default of ours."""
    policy: Annotated[Literal["fcfs", "priority"], Flag("--scheduling-policy")] = "fcfs"
    """Order of the waiting queue: by arrival, or by the priority that requests bring (smaller
    goes first)."""
    enable_chunked_prefill: Annotated[bool, Flag("--enable-chunked-prefill")] = True
    """Whether a prompt may be computed in pieces; else it waits until it fits into one step."""
    enable_prefix_caching: Annotated[bool | None, Flag("--enable-prefix-caching")] = None
    """Whether blocks of equal prompts are shared; left out, they are."""
    long_prefill_token_threshold: Annotated[int, Ge(0), Flag("--long-prefill-token-threshold")] = 0
    """Most prompt tokens that one request gets in a step; 0 is no limit."""
    long_prefill_token_threshold_adaptive: Annotated[
        bool, Flag("--long-prefill-token-threshold-adaptive")
    ] = False
    """Whether that limit is raised to an equal share of the batch."""
    scheduler_reserve_full_isl: Annotated[
        bool | None, Flag("--scheduler-reserve-full-isl", "#37307")
    ] = None
    """Whether a request is admitted only if its whole sequence fits, not just its first chunk;
    left out, as the variant has it (on since 0.19)."""
    watermark: Annotated[float, Ge(0), Lt(1), Flag("--watermark")] = 0.0
    """Share of all blocks that an admission must leave free, unless nothing runs."""
    prefill_schedule_interval: Annotated[int, Gt(0), Flag("--prefill-schedule-interval")] = 1
    """While others decode, prompts are computed in every n-th step only."""
    async_scheduling: Annotated[bool | None, Flag("--async-scheduling")] = None
    """Whether a step is scheduled before the tokens of the one before it are known; left out,
    as the variant has it (off before 0.14)."""
    enable_lora: Annotated[bool, Flag("--enable-lora")] = False
    """Whether requests may ask for LoRA adapters."""
    max_loras: Annotated[int, Gt(0), Flag("--max-loras")] = 1
    """Most adapters that run beside each other, the model without one not counted."""
    max_cpu_loras: Annotated[Annotated[int, Gt(0)] | None, Flag("--max-cpu-loras")] = None
    """Adapters that have room in host memory; left out, max_loras."""
    num_speculative_tokens: Annotated[int, Ge(0), Le(MAX_DRAFTS), Flag("--speculative-config")] = 0
    """Tokens that are drafted for a request and verified in its next step; 0 is no speculative
    decoding. The workload says how many are accepted."""
    speculative_method: Annotated[
        Literal["eagle", "ngram", "draft_model"], Flag("--speculative-config", '"method"')
    ] = "eagle"
    """Who drafts: heads on the model (eagle3 and mtp of one module go by the same), the prompt, or
    a model of its own."""
    num_cpu_blocks: Annotated[
        int, Ge(0), Le(MAX_BLOCKS), Flag("--kv-offloading-size", "in GiB")
    ] = 0
    """Blocks in host memory: prompts' KV is copied there and loaded again instead of
    computed."""
    eviction_policy: Annotated[
        Literal["lru", "arc"], Flag("--kv-transfer-config", "kv_connector_extra_config")
    ] = "lru"
    """Which of these make room for others: those used longest ago, or by ARC, which tells those
    used more than once apart."""
    secondary_tiers: Annotated[
        tuple[Literal["fs"], ...],
        AsTuple(),
        Flag("--kv-transfer-config", "kv_connector_extra_config, spec_name TieringOffloadingSpec"),
    ] = ()
    """Where KV goes on to from host memory, and comes back to it from: `fs`, files on a disk."""
    kv_connector: Annotated[Literal["NixlConnector"] | None, Flag("--kv-transfer-config")] = None
    """How KV goes from a replica that prefills to one that decodes; left out NixlConnector where
    the fleet has such."""
    kv_role: Annotated[
        Literal["kv_producer", "kv_consumer", "kv_both"] | None, Flag("--kv-transfer-config")
    ] = None
    """What a replica is to the connector: who may load KV gives blocks back later; left out as its
    role in the fleet says."""
    kv_cache_groups: Annotated[
        tuple[LayerGroup, ...],
        AsTuple(),
        KnobSource("vLLM groups layers by the model's config.json"),
    ] = (0,)
    """For each group of layers with blocks of its own the tokens of their sliding window, 0 for
    layers that attend to everything, `chunked-8192` for those that attend to what follows the last
    multiple of 8192 (Llama 4), `mamba` for those with a state (Mamba, linear attention). `0/32` has
    blocks of 32 tokens where block_size is 16, as where layers have other bytes a token (Gemma 4);
    `simkv blocks` says those of a model."""
    mamba_cache_mode: Annotated[Literal["align", "all"] | None, Flag("--mamba-cache-mode")] = None
    """Of which states the prefix cache can start: those at the ends of chunks, which then end where
    blocks do (align, as is if left out), or of every block (all, in 0.21 to 0.31, which take it by
    themselves up to 0.28 for models that can)."""
    mamba_prefill_checkpoints: Annotated[bool, KnobSource("vLLM asks the model's layers")] = False
    """Whether kernels write the state at the end of a block from within a chunk, too, so that the
    last chunk of a prompt goes past it: Mamba2's since 0.32, gated delta nets' of FlashInfer since
    0.33."""
    gpu_memory_utilization: Annotated[
        Annotated[float, Gt(0), Le(1)] | None, Flag("--gpu-memory-utilization")
    ] = None
    """Share of the GPU's memory that vLLM takes, from which with `hardware` the blocks follow; left
    out 0.92, up to 0.19 0.9. No decision depends on it."""
    cudagraph_mode: Annotated[CudagraphMode | None, Flag("--compilation-config")] = None
    """Which steps are replayed from CUDA graphs, as far as costs ask; left out as the version has
    it. No decision depends on it."""
    max_cudagraph_capture_size: Annotated[
        Annotated[int, Gt(0)] | None, Flag("--max-cudagraph-capture-size")
    ] = None
    """Most tokens of a step that is a CUDA graph; left out twice the sequences, at most 512. No
    decision depends on it."""
    rule: Annotated[str | None, KnobSource("ours; docs/how-to/evolve.md")] = None
    """Decisions that expressions take in place of the variant, `SEAM = EXPRESSION` a line."""
    startup_check: Annotated[bool, KnobSource("vllm-project/vllm#39734")] = True
    """Whether a max_model_len that the cache cannot hold is refused; vLLM let it pass with
    num_gpu_blocks_override until #41069 and #47272."""

    def __post_init__(self) -> None:
        rules = find_rules(self.variant)
        rules.refuse(self.variant, self)
        if self.rule is not None:
            self._check_rule(rules)
        spare = 1 if rules.spares_null_block else 0
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

    def _check_rule(self, rules: VllmRules) -> None:
        if rules.skip_blocked:
            raise ValueError(
                f"rule: variant {self.variant!r} has no seams for rules; use a release"
            )
        if self.policy != "fcfs":
            raise ValueError(
                f"rule: policy is {self.policy}; a rule takes the place of it, use fcfs"
            )
        parse_policy(self.rule, POLICY_HOOKS)

    def _check_drafts(self, rules: VllmRules) -> None:
        method, drafts = self.speculative_method, self.num_speculative_tokens
        if method not in rules.draft_methods:
            since = min(
                n for n, r in RELEASES.items() if method in r.rules.get("draft_methods", ())
            )
            raise ValueError(
                f"speculative_method: {method} came with vLLM 0.{since}, {self.variant} does not "
                f"have it; expected "
                f"{' or '.join(rules.draft_methods)}"
            )
        if self.async_scheduling and method not in rules.async_drafts:
            raise ValueError(
                f"async_scheduling: vLLM {self.variant} schedules asynchronously with "
                f"{' or '.join(rules.async_drafts)} only, not with {method}; leave it out"
            )
        if self.rule is not None:
            raise ValueError("rule: there are no seams for rules with num_speculative_tokens")
        self._check_drafts_in_groups(rules)
        if rules.pads_drafts and 0 < self.long_prefill_token_threshold <= drafts:
            raise ValueError(
                f"long_prefill_token_threshold: {self.long_prefill_token_threshold} must be 0 or "
                f"above num_speculative_tokens {drafts}: vLLM {self.variant} pads to one more"
            )
        slots = self.draft_slots * (self.max_num_seqs if rules.slots_of_budget else 1)
        left = self.max_num_batched_tokens - slots
        if left <= 0 and (rules.slots_of_budget or rules.slots_by_request):
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} leaves nothing beside the "
                f"{slots} slots of the draft model"
            )
        if rules.slots_of_budget and (self.max_num_scheduled_tokens or 0) > left:
            raise ValueError(
                f"max_num_scheduled_tokens: {self.max_num_scheduled_tokens} must be at most {left} "
                f"(max_num_batched_tokens {self.max_num_batched_tokens} less {slots} slots of the "
                f"draft model) with num_speculative_tokens in vLLM {self.variant}"
            )

    def _check_drafts_in_groups(self, rules: VllmRules) -> None:
        sizes, method = {kind.block_size for kind in self.layer_kinds}, self.speculative_method
        drops, within = self.drops_block(rules), self.mamba_prefill_checkpoints
        refused = {
            STATES: ("0.26", self.has_states and not rules.drafts_in_states),
            "mamba_prefill_checkpoints": ("0.33", self.has_states and drops and within),
            "a block of another size": ("0.33", len(sizes) > 1 and drops),
        }
        if self.has_states and self.mamba_cache_mode == "all":
            raise ValueError(
                "mamba_cache_mode: all is not modelled with num_speculative_tokens; leave it out"
            )
        for what, (since, _) in ((what, why) for what, why in refused.items() if why[1]):
            raise ValueError(
                f"kv_cache_groups: {what} is modelled with {method} from vLLM {since} on, not for "
                f"{self.variant}; say [0]"
            )

    def _check_offloading(self, rules: VllmRules) -> None:
        if len(self.secondary_tiers) > 1:
            raise ValueError("secondary_tiers: more than one is not modelled; say [fs]")
        if not self.offloads:
            if self.secondary_tiers:
                raise ValueError("secondary_tiers: they are behind num_cpu_blocks; say 1 or more")
            return
        if self.block_size == 1:
            raise ValueError("block_size: 1 is not modelled with num_cpu_blocks; say 2 or more")
        for knob, fits, only in (
            ("enable_prefix_caching", self.caches(rules), "true"),
            ("kv_cache_groups", self.kv_cache_groups == (0,), "[0]"),
            ("num_speculative_tokens", not self.num_speculative_tokens, "0"),
            ("rule", self.rule is None, "nothing"),
        ):
            if not fits:
                raise ValueError(
                    f"{knob}: {getattr(self, knob)} is not modelled with num_cpu_blocks; say {only}"
                )

    def _check_transfer(self, rules: VllmRules) -> None:
        if self.kv_connector is None:
            return
        for knob, fits, only in (
            ("kv_cache_groups", self.kv_cache_groups == (0,), "[0]"),
            ("num_cpu_blocks", not self.num_cpu_blocks, "0"),
            ("num_speculative_tokens", not self.num_speculative_tokens, "0"),
            ("rule", self.rule is None, "nothing"),
        ):
            if not fits:
                raise ValueError(
                    f"{knob}: {getattr(self, knob)} is not modelled with kv_connector; say {only}"
                )
        if self.kv_role != "kv_consumer" and self.depth > 1 and not rules.sees_the_end:
            raise ValueError(
                f"async_scheduling: in vLLM {self.variant} a request whose KV is to be sent ends "
                "twice then, which is not modelled; leave it out"
            )

    def in_role(self, role: str) -> VllmConfig:
        """The same for a replica that does half of the work, ``prefill`` or ``decode``."""
        kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        if self.kv_role not in (None, "kv_both", kv_role):
            raise ValueError(
                f"kv_role: {self.kv_role} is not that of a replica with role: {role}; "
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
        """Tokens of a step that the drafter takes for each request."""
        return int(self.num_speculative_tokens > 0 and self.speculative_method == "draft_model")

    def most_scheduled(self, rules: VllmRules) -> int:
        """Return ``max_num_scheduled_tokens`` as start-up resolves it.

        By default it is ``max_num_batched_tokens``, less the slots that a draft model may take
        where releases with these rules take them off beforehand
        (``VllmConfig._set_max_num_scheduled_tokens`` of vLLM).
        """
        slots = self.draft_slots * self.max_num_seqs if rules.slots_of_budget else 0
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens - slots

    @property
    def depth(self) -> int:
        """Batches under way at a time."""
        given, rules = self.async_scheduling, find_rules(self.variant)
        if given is None:
            given = rules.async_scheduling
            if self.num_speculative_tokens:
                given = given and self.speculative_method in rules.async_drafts
        return 2 if given else 1

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """What the groups of layers are."""
        return tuple(parse_layer_group(group, self.block_size) for group in self.kv_cache_groups)

    @property
    def has_states(self) -> bool:
        """Whether some layers have a state in place of KV."""
        return STATES in self.kv_cache_groups

    def caches(self, rules: VllmRules) -> bool:
        """Whether blocks are shared, as releases with these rules have it if it is left out."""
        if self.enable_prefix_caching is not None:
            return self.enable_prefix_caching
        return rules.caches_states if self.has_states else rules.enable_prefix_caching

    def drops_block(self, rules: VllmRules) -> bool:
        """Whether a hit is a block shorter than what is found, as EAGLE's KV asks for."""
        eagle = self.num_speculative_tokens > 0 and self.speculative_method == "eagle"
        return eagle and not rules.keys_cover_next

    def states(self, rules: VllmRules) -> Literal["none", "align", "all"]:
        """Which states of layers in groups called mamba are kept for others."""
        return (self.mamba_cache_mode or "align") if self.caches(rules) else "none"

    def most_blocks(self, kind: LayerKind, length: int | None = None) -> int:
        """Blocks that a sequence of ``length`` tokens has at most in a group of layers.

        ``length`` is ``max_model_len`` if left out.
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
        under_way = (self.depth if rules.frees_processed else 1) * self.max_num_batched_tokens
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
                f"kv_cache_groups: {list(self.kv_cache_groups)} must be one number or more, each 0 "
                "or a window of at least 2 tokens, or mamba, or chunked-8192; or one of these with "
                "the tokens of its blocks, as 0/32"
            )
        if len(self.kv_cache_groups) > 1 and len({*kinds}) == 1:
            raise ValueError(
                f"kv_cache_groups: {list(self.kv_cache_groups)} are layers of one kind, which vLLM "
                f"has in one group; say [{self.kv_cache_groups[0]}]"
            )
        self._check_sizes(kinds)
        for kind in kinds:
            self._check_chunk(kind.chunk)
        needed = sum(map(self.most_blocks, kinds))
        if self.has_states:
            self._check_states(find_rules(self.variant))
        if self.startup_check and usable < needed:
            raise ValueError(
                f"num_gpu_blocks: {usable} blocks that can be used; a sequence of max_model_len "
                f"{self.max_model_len} takes {needed} in {len(kinds)} groups"
            )

    def _check_sizes(self, kinds: tuple[LayerKind, ...]) -> None:
        size, sizes = self.block_size, {kind.block_size for kind in kinds}
        if min(sizes) != size or any(other % size for other in sizes):
            raise ValueError(
                f"kv_cache_groups: blocks of {sorted(sizes)} tokens must be multiples of "
                f"block_size {size}, and some of just that"
            )
        if len(sizes) > 1 and any(kind.states or kind.chunk for kind in kinds):
            raise ValueError(
                "kv_cache_groups: blocks of several sizes are modelled for windows only, not "
                "beside mamba or chunks; say no sizes"
            )

    def _check_chunk(self, chunk: int) -> None:
        if chunk % self.block_size:
            raise ValueError(
                f"kv_cache_groups: {CHUNKED}{chunk} must be a multiple of block_size "
                f"{self.block_size}"
            )
        if chunk and self.num_speculative_tokens and self.speculative_method == "eagle":
            raise ValueError(
                f"kv_cache_groups: with eagle vLLM has no group of its own for {CHUNKED}{chunk}; "
                "say [0]"
            )

    def _check_states(self, rules: VllmRules) -> None:
        if self.states(rules) != "align":
            return
        if not self.enable_chunked_prefill:
            raise ValueError(
                "enable_chunked_prefill: must be true where the prefix cache keeps states (mamba "
                "in kv_cache_groups)"
            )
        if rules.wide_states:
            return
        threshold, most = self.long_prefill_token_threshold, self.max_num_batched_tokens
        for knob, tokens in (
            ("max_num_batched_tokens", most),
            ("long_prefill_token_threshold", threshold or most),
        ):
            if self.block_size > tokens:
                raise ValueError(
                    f"{knob}: {tokens} must be at least block_size {self.block_size} where the "
                    f"prefix cache keeps states (mamba in kv_cache_groups) in vLLM {self.variant}"
                )
