"""Options of SGLang's scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from simkv.core.engine_flags import Env, Flag, KnobSource
from simkv.core.engine_version import plain_release
from simkv.core.scheduler_protocol import MAX_PASSES
from simkv.schedulers.sglang.versions import RULES

SchedulePolicy = Literal[
    "fcfs",
    "lpm",
    "hrrn",
    "lof",
    "dfs-weight",
    "routing-key",
    "shortest-prefill-first",
    "vtc",
    "random",
]


class AsRelease:
    """Pydantic annotation that accepts other spellings of a release, such as v0.5.23."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        def named(name: object) -> object:
            return plain_release(name) or name if isinstance(name, str) else name

        check = {"type": "no-info", "function": named}
        return {"type": "function-before", "function": check, "schema": handler(source)}


@dataclass(frozen=True)
class SglangConfig:
    """Options of SGLang under the names of its flags (environment variables in lower case).

    Raises ValueError if a size is not a multiple of the page size, or if an option does not exist
    in the variant.
    """

    name: Literal["sglang"] = "sglang"
    variant: Annotated[
        Literal["0.5.23", "0.5.23-lpm-aging", "0.5.22", "0.5.20", "0.5.15"],
        AsRelease(),
        KnobSource("`simkv policies` lists the sources"),
    ] = "0.5.23"
    """Scheduling rules: a release of SGLang, or a release with a named change."""
    max_total_num_tokens: Annotated[int, Gt(0), Flag("--max-total-tokens")] = 16384
    """Size of the KV pool in tokens. Default: computed from GPU memory with `hardware`, otherwise
    16384 (simkv's own default)."""
    page_size: Annotated[int, Gt(0), Flag("--page-size")] = 1
    """Tokens per page, the allocation unit of the KV pool."""
    max_running_requests: Annotated[int, Gt(0), Flag("--max-running-requests")] = 2048
    """Maximum number of admitted requests that have not finished. With `hardware`, the default is
    2048 to 4096, depending on the size of the pool."""
    max_queued_requests: Annotated[Annotated[int, Ge(0)] | None, Flag("--max-queued-requests")] = (
        None
    )
    """Maximum length of the waiting queue. While the queue is full, requests that arrive or are
    retracted are rejected with HTTP status 503. Unlimited by default."""
    chunked_prefill_size: Annotated[int, Ge(-1), Flag("--chunked-prefill-size")] = 8192
    """Maximum number of prompt tokens per prefill pass; longer prompts are split. -1 means no
    limit. With `hardware`, the default is 2048 to 16384, depending on the GPU."""
    max_prefill_tokens: Annotated[int, Gt(0), Flag("--max-prefill-tokens")] = 16384
    """Token count at which a prefill pass stops adding requests."""
    prefill_max_requests: Annotated[
        Annotated[int, Gt(0)] | None, Flag("--prefill-max-requests")
    ] = None
    """Maximum number of requests per prefill pass. Unlimited by default."""
    schedule_policy: Annotated[SchedulePolicy, Flag("--schedule-policy", unreleased=("vtc",))] = (
        "fcfs"
    )
    """Order of the waiting queue: `fcfs` (arrival), `lpm` (longest cached prefix), `hrrn` (highest
    response ratio), `dfs-weight` (branch weight in the radix tree), `shortest-prefill-first`
    (fewest uncached tokens), `lof` (longest possible output) or `routing-key` (most frequent key
    among running requests). lpm, hrrn, dfs-weight and shortest-prefill-first need the radix cache.
    `vtc` orders requests by the service that their client has received (virtual token counters of
    arXiv 2401.00588); no release has this policy. `random` is not supported, because its order
    depends on random numbers inside SGLang's process.
    """
    enable_priority_scheduling: Annotated[bool, Flag("--enable-priority-scheduling")] = False
    """Whether `priority` comes before arrival order; larger values are more urgent. Requires the
    policy fcfs or lof."""
    schedule_low_priority_values_first: Annotated[
        bool, Flag("--schedule-low-priority-values-first")
    ] = False
    """Whether smaller `priority` values are more urgent."""
    disable_priority_preemption: Annotated[bool, Flag("--disable-priority-preemption")] = False
    """Whether urgent requests never preempt running requests."""
    priority_scheduling_preemption_threshold: Annotated[
        int, Flag("--priority-scheduling-preemption-threshold")
    ] = 10
    """A request preempts another only if its priority is more urgent by more than this value."""
    retraction_policy: Annotated[Literal["length", "priority"], Flag("--retraction-policy")] = (
        "length"
    )
    """Order in which running requests are retracted: fewest emitted tokens first, or least urgent
    first."""
    min_free_slots_delay: Annotated[
        Annotated[int, Gt(0)] | None, Flag("--min-free-slots-delay")
    ] = None
    """While requests run, new requests are admitted only if at least this number of request slots
    is free."""
    enable_prefill_delayer: Annotated[bool, Flag("--enable-prefill-delayer")] = False
    """Whether prompts wait until more of them can be prefilled together."""
    prefill_delayer_max_delay_passes: Annotated[
        int, Gt(0), Flag("--prefill-delayer-max-delay-passes")
    ] = 30
    """Maximum number of passes for which prompts are delayed (before 0.5.20: unlimited)."""
    prefill_delayer_token_usage_low_watermark: Annotated[
        Annotated[float, Ge(0)] | None, Flag("--prefill-delayer-token-usage-low-watermark")
    ] = None
    """Prompts are not delayed while the used share of the KV pool is below this value."""
    prefill_delayer_queue_min_ratio: Annotated[
        Annotated[float, Ge(0)] | None, Flag("--prefill-delayer-queue-min-ratio")
    ] = None
    """If set, prompts are also delayed while the number of waiting requests, divided by the number
    of running requests, is below this value."""
    prefill_delayer_max_delay_ms: Annotated[
        Annotated[float, Ge(0)] | None, Flag("--prefill-delayer-max-delay-ms")
    ] = None
    """Maximum delay due to a short queue, in milliseconds. Default: 5000."""
    allow_auto_truncate: Annotated[bool, Flag("--allow-auto-truncate")] = False
    """Whether a prompt that exceeds the KV pool is truncated. If false, the prompt is rejected."""
    disable_radix_cache: Annotated[bool, Flag("--disable-radix-cache")] = False
    """Whether to turn prefix caching off."""
    disable_overlap_schedule: Annotated[bool, Flag("--disable-overlap-schedule")] = False
    """Whether a step is scheduled only after the tokens of the previous step are known."""
    enable_mixed_chunk: Annotated[bool, Flag("--enable-mixed-chunk")] = False
    """Whether running requests also decode in steps with prefills. If false, they wait during these
    steps."""
    prefill_decode_interval: Annotated[
        int, Ge(0), Le(MAX_PASSES), Flag("--prefill-decode-interval")
    ] = 0
    """Number of steps after a prefill in which no other prefill starts."""
    prefill_decode_interval_min_bs: Annotated[
        int, Ge(0), Flag("--prefill-decode-interval-min-bs")
    ] = 0
    """Minimum number of running requests for which `prefill_decode_interval` applies."""
    scheduler_recv_interval: Annotated[int, Gt(0), Flag("--scheduler-recv-interval")] = 1
    """Interval, in decode steps, at which the scheduler receives new requests. It also receives
    them after each prefill."""
    enable_lora: Annotated[bool, Flag("--enable-lora")] = False
    """Whether requests may use LoRA adapters."""
    max_loras_per_batch: Annotated[int, Gt(0), Flag("--max-loras-per-batch")] = 8
    """Maximum number of adapters per batch; the base model counts as one."""
    lora_drain_wait_threshold: Annotated[float, Ge(0), Flag("--lora-drain-wait-threshold")] = 0.0
    """Time in seconds that a request waits for its adapter before a running adapter is drained: it
    then admits no new requests. 0 disables draining.
    """
    stream_interval: Annotated[int, Gt(0), Flag("--stream-interval")] = 1
    """Number of tokens per streamed chunk. The first and the last token are sent immediately. The
    setting does not affect scheduling decisions."""
    enable_dp_attention: Annotated[bool, Flag("--enable-dp-attention")] = False
    """Whether to use data-parallel attention: each of `dp_size` ranks computes attention for its
    own requests, and all ranks share the rest of the model."""
    dp_size: Annotated[int, Gt(0), Flag("--dp-size")] = 1
    """Number of ranks for data-parallel attention. With `fleet`, this is the number of replicas in
    lockstep. Each rank has an equal share of `max_running_requests` and `chunked_prefill_size`."""
    schedule_conservativeness: Annotated[float, Ge(0), Flag("--schedule-conservativeness")] = 1.0
    """Factor that multiplies the share of remaining output tokens for which memory is reserved.
    Higher values cause fewer retractions."""
    init_new_token_ratio: Annotated[float, Ge(0), Env("SGLANG_INIT_NEW_TOKEN_RATIO")] = 0.7
    """Initial share of the remaining output tokens of running requests for which memory is
    reserved. It is multiplied by `schedule_conservativeness` and then capped at 1."""
    min_new_token_ratio_factor: Annotated[
        float, Ge(0), Env("SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR")
    ] = 0.14
    """Lower bound of the reserved share, as a fraction of its initial value."""
    new_token_ratio_decay_steps: Annotated[
        int, Gt(0), Env("SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS")
    ] = 600
    """Number of decode steps after which the reserved share has reached its lower bound."""
    retract_decode_steps: Annotated[int, Ge(0), Env("SGLANG_RETRACT_DECODE_STEPS")] = 20
    """Approximate number of decode steps of each remaining request for which a retraction reserves
    memory."""
    clip_max_new_tokens_estimation: Annotated[
        int, Ge(0), Env("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION")
    ] = 4096
    """Maximum number of remaining output tokens of a request that count in memory estimates."""
    in_batch_prefix_caching_check_threshold: Annotated[
        int, Ge(-1), KnobSource("managers/schedule_policy.py")
    ] = 32
    """Maximum number of cached tokens of a deferred request. The policies lpm, hrrn and
    shortest-prefill-first defer such a request if another waiting request starts with the same
    tokens.
    """
    in_batch_prefix_caching_deprioritize_threshold: Annotated[
        int, Gt(0), KnobSource("managers/schedule_policy.py")
    ] = 32
    """Number of leading tokens that two waiting requests must share before one of them is deferred.
    """
    lpm_aging_tokens_per_pass: Annotated[int, Ge(0), KnobSource("sgl-project/sglang#31723")] = 0
    """Number of tokens that the policy lpm adds to the cached prefix of a request for each
    scheduling pass in the queue."""
    mem_fraction_static: Annotated[
        Annotated[float, Gt(0), Lt(1)] | None, Flag("--mem-fraction-static")
    ] = None
    """Share of GPU memory for weights and KV. With `hardware`, it determines the size of the KV
    pool. The default is computed as in SGLang. The setting does not affect scheduling decisions."""

    def __post_init__(self) -> None:
        if self.enable_dp_attention != (self.dp_size > 1):
            raise ValueError(
                f"dp_size: {self.dp_size} does not match enable_dp_attention: "
                f"{str(self.enable_dp_attention).lower()}; use 2 or more with "
                "enable_dp_attention, and 1 without it (`fleet` sets the number of replicas)"
            )
        if self.dp_size > 1 and self.scheduler_recv_interval > 1:
            raise ValueError(
                "scheduler_recv_interval: values above 1 are not modelled with "
                "enable_dp_attention; use 1"
            )
        if self.lpm_aging_tokens_per_pass and not RULES[self.variant].lpm_aging:
            raise ValueError(
                f"lpm_aging_tokens_per_pass: variant {self.variant!r} does not have this option; "
                "use variant '0.5.23-lpm-aging'"
            )
        self._check_order()
        self._check_delayer()
        if self.allow_auto_truncate and self.max_total_num_tokens <= 6:
            raise ValueError(
                "max_total_num_tokens: must be at least 7 with allow_auto_truncate, which "
                f"truncates prompts to the pool size minus 6; got {self.max_total_num_tokens}"
            )
        defaults = {field.name: field.default for field in fields(self)}
        for knob in RULES[self.variant].lacks:
            if getattr(self, knob) != defaults[knob]:
                raise ValueError(
                    f"{knob}: SGLang {self.variant} does not have this option; remove it"
                )
        if self.max_total_num_tokens % self.page_size:
            raise ValueError(
                f"max_total_num_tokens ({self.max_total_num_tokens}) must be a multiple of "
                f"page_size ({self.page_size})"
            )
        if self.chunk > 0 and self.chunk % self.page_size:
            each = f" / dp_size ({self.dp_size})" if self.dp_size > 1 else ""
            raise ValueError(
                f"chunked_prefill_size ({self.chunked_prefill_size}){each} must be a multiple of "
                f"page_size ({self.page_size})"
            )

    def _check_order(self) -> None:
        """Raise ValueError if the queue order is unknown or not supported."""
        policies = RULES[self.variant].policies
        if self.schedule_policy == "random":
            raise ValueError(
                "schedule_policy: 'random' cannot be simulated, because its random numbers are "
                f"unknown outside SGLang's process; expected one of {', '.join(policies)}"
            )
        if self.schedule_policy == "shortest-prefill-first" and self.disable_radix_cache:
            raise ValueError(
                "schedule_policy: 'shortest-prefill-first' needs the radix cache; "
                "set disable_radix_cache to false"
            )
        if self.schedule_policy not in (*policies, "vtc"):
            raise ValueError(
                f"schedule_policy: SGLang {self.variant} does not have {self.schedule_policy!r}; "
                f"expected one of {', '.join(policies)}"
            )
        if self.enable_priority_scheduling and self.schedule_policy not in ("fcfs", "lof"):
            raise ValueError(
                f"schedule_policy: {self.schedule_policy!r} cannot be combined with "
                "enable_priority_scheduling; use fcfs or lof"
            )
        if self.enable_priority_scheduling and self.max_queued_requests == 0:
            raise ValueError(
                "max_queued_requests: SGLang crashes at the first request if this is 0 and "
                "enable_priority_scheduling is on; use 1 or more"
            )
        if self.retraction_policy == "priority" and not self.enable_priority_scheduling:
            raise ValueError("retraction_policy: 'priority' needs enable_priority_scheduling")

    def _check_delayer(self) -> None:
        """Raise ValueError if the options of the prefill delayer are invalid or not modelled."""
        if self.enable_prefill_delayer and self.disable_overlap_schedule:
            raise ValueError(
                "enable_prefill_delayer: needs the overlap schedule; set disable_overlap_schedule "
                "to false"
            )
        if self.enable_prefill_delayer and self.dp_size > 1:
            raise ValueError(
                "enable_prefill_delayer: not modelled with enable_dp_attention, because the "
                "ranks decide together when to prefill; use false"
            )

    # Values for one rank of data-parallel attention, from arg_groups/parallel_hook.py and
    # model_executor/pool_configurator.py of the wheel.

    @property
    def chunk(self) -> int:
        """Maximum number of prompt tokens that a rank computes per pass; -1 means no limit."""
        return self.chunked_prefill_size // self.dp_size

    @property
    def mixes(self) -> bool:
        """Whether running requests decode in the same step as a prefill."""
        return self.enable_mixed_chunk and self.chunk > 0

    @property
    def preempts(self) -> bool:
        """Whether a request may preempt less urgent requests."""
        return self.enable_priority_scheduling and not self.disable_priority_preemption

    @property
    def rows(self) -> int:
        """Maximum number of requests that a rank admits at the same time."""
        return max(1, self.max_running_requests // self.dp_size)

    @property
    def conservativeness(self) -> float:
        """Factor that multiplies the share of remaining output tokens for which memory is reserved.

        With data-parallel attention, it is lower than ``schedule_conservativeness``.
        """
        return self.schedule_conservativeness * (0.3 if self.enable_dp_attention else 1.0)
