"""The knobs of SGLang."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from simkv.core.engine_flags import Env, Flag, KnobSource
from simkv.core.scheduler_protocol import MAX_PASSES
from simkv.schedulers.sglang.versions import RULES

SchedulePolicy = Literal[
    "fcfs", "lpm", "hrrn", "lof", "dfs-weight", "routing-key", "shortest-prefill-first", "random"
]


@dataclass(frozen=True)
class SglangConfig:
    """SGLang's knobs under the names of its flags (environment variables in lower case).

    A running request is promised a share of the tokens that it may still emit. The share sinks
    with every decode step, and a retraction sets it anew.

    Raises ValueError if the pool or the chunk is not a whole number of pages, or for a knob that
    the variant does not have.
    """

    name: Literal["sglang"] = "sglang"
    variant: Annotated[
        Literal["0.5.23", "0.5.23-lpm-aging", "0.5.22", "0.5.20", "0.5.15"],
        KnobSource("`simkv policies` says where each is from"),
    ] = "0.5.23"
    """Whose rules decide: a release of SGLang, or one with a named change."""
    max_total_num_tokens: Annotated[int, Gt(0), Flag("--max-total-tokens")] = 16384
    """Tokens of KV in the pool; with `hardware` what its memory leaves, else 16384, a default of
    ours."""
    page_size: Annotated[int, Gt(0), Flag("--page-size")] = 1
    """Tokens in a page, the unit in which KV is handed out."""
    max_running_requests: Annotated[int, Gt(0), Flag("--max-running-requests")] = 2048
    """Most requests that hold a row at a time; with `hardware` 2048 to 4096 by the pool's size."""
    max_queued_requests: Annotated[Annotated[int, Ge(0)] | None, Flag("--max-queued-requests")] = (
        None
    )
    """If set, a request that comes, or comes back retracted, while so many wait is answered with
    503."""
    chunked_prefill_size: Annotated[int, Ge(-1), Flag("--chunked-prefill-size")] = 8192
    """Most prompt tokens in one prefill pass, after which a prompt is cut; -1 is no limit. With
    `hardware` 2048 to 16384 by GPU."""
    max_prefill_tokens: Annotated[int, Gt(0), Flag("--max-prefill-tokens")] = 16384
    """No further request joins a prefill pass that has reached so many tokens."""
    prefill_max_requests: Annotated[
        Annotated[int, Gt(0)] | None, Flag("--prefill-max-requests")
    ] = None
    """Most requests in one prefill pass; left out, any number."""
    schedule_policy: Annotated[SchedulePolicy, Flag("--schedule-policy")] = "fcfs"
    """Order of the waiting queue: by arrival, longest cached prefix first, by response ratio, by
    weight of the cached tree's branches, fewest uncached tokens first (these four need the radix
    cache), longest possible output first, or by the keys of those who run. random is refused: its
    numbers are the process's own."""
    enable_priority_scheduling: Annotated[bool, Flag("--enable-priority-scheduling")] = False
    """Whether `priority` goes before the order of arrival; a larger one is more urgent. Needs fcfs
    or lof."""
    schedule_low_priority_values_first: Annotated[
        bool, Flag("--schedule-low-priority-values-first")
    ] = False
    """Whether a smaller `priority` is the more urgent one."""
    disable_priority_preemption: Annotated[bool, Flag("--disable-priority-preemption")] = False
    """Whether a more urgent request never takes a running one's place."""
    priority_scheduling_preemption_threshold: Annotated[
        int, Flag("--priority-scheduling-preemption-threshold")
    ] = 10
    """By how much more urgent it must be for that."""
    retraction_policy: Annotated[Literal["length", "priority"], Flag("--retraction-policy")] = (
        "length"
    )
    """Whom a retraction takes first: the least output, or the least urgent."""
    min_free_slots_delay: Annotated[
        Annotated[int, Gt(0)] | None, Flag("--min-free-slots-delay")
    ] = None
    """While requests run, nobody new is taken before so many rows are free."""
    enable_prefill_delayer: Annotated[bool, Flag("--enable-prefill-delayer")] = False
    """Whether prompts wait until more of them can be computed together."""
    prefill_delayer_max_delay_passes: Annotated[
        int, Gt(0), Flag("--prefill-delayer-max-delay-passes")
    ] = 30
    """For so many passes at most (before 0.5.20: without end)."""
    prefill_delayer_token_usage_low_watermark: Annotated[
        Annotated[float, Ge(0)] | None, Flag("--prefill-delayer-token-usage-low-watermark")
    ] = None
    """Not while a smaller share of the pool is used."""
    prefill_delayer_queue_min_ratio: Annotated[
        Annotated[float, Ge(0)] | None, Flag("--prefill-delayer-queue-min-ratio")
    ] = None
    """If set, also while fewer wait than this share of those that run."""
    prefill_delayer_max_delay_ms: Annotated[
        Annotated[float, Ge(0)] | None, Flag("--prefill-delayer-max-delay-ms")
    ] = None
    """For that so many milliseconds at most; left out, 5000."""
    allow_auto_truncate: Annotated[bool, Flag("--allow-auto-truncate")] = False
    """Whether a prompt that is longer than the pool can hold is cut; else it is refused."""
    disable_radix_cache: Annotated[bool, Flag("--disable-radix-cache")] = False
    """Whether nothing is shared between prompts that begin alike."""
    disable_overlap_schedule: Annotated[bool, Flag("--disable-overlap-schedule")] = False
    """Whether a step is scheduled only when the tokens of the one before it are known."""
    enable_mixed_chunk: Annotated[bool, Flag("--enable-mixed-chunk")] = False
    """Whether running requests decode in the step of a prefill, too; else they wait for it."""
    prefill_decode_interval: Annotated[
        int, Ge(0), Le(MAX_PASSES), Flag("--prefill-decode-interval")
    ] = 0
    """After a prefill so many steps take none."""
    prefill_decode_interval_min_bs: Annotated[
        int, Ge(0), Flag("--prefill-decode-interval-min-bs")
    ] = 0
    """That pause holds only while at least so many requests run."""
    scheduler_recv_interval: Annotated[int, Gt(0), Flag("--scheduler-recv-interval")] = 1
    """While others decode, new requests are received every so many steps only, and after a
    prefill."""
    enable_lora: Annotated[bool, Flag("--enable-lora")] = False
    """Whether requests may ask for LoRA adapters."""
    max_loras_per_batch: Annotated[int, Gt(0), Flag("--max-loras-per-batch")] = 8
    """Most adapters that run beside each other, the model without one among them."""
    lora_drain_wait_threshold: Annotated[float, Ge(0), Flag("--lora-drain-wait-threshold")] = 0.0
    """Once a request has waited so many seconds for its adapter, one that runs takes in nobody new
    until it is done; 0 is never."""
    stream_interval: Annotated[int, Gt(0), Flag("--stream-interval")] = 1
    """Tokens go to a client by so many, the first and the last at once; no decision depends on
    it."""
    enable_dp_attention: Annotated[bool, Flag("--enable-dp-attention")] = False
    """Whether `dp_size` ranks attend to requests of their own and share the rest of the model."""
    dp_size: Annotated[int, Gt(0), Flag("--dp-size")] = 1
    """How many: with `fleet` as many replicas in lock-step, each with its share of
    `max_running_requests` and `chunked_prefill_size`."""
    schedule_conservativeness: Annotated[float, Ge(0), Flag("--schedule-conservativeness")] = 1.0
    """Factor on the share of its remaining tokens that a running request is promised; more
    means fewer retractions."""
    init_new_token_ratio: Annotated[float, Ge(0), Env("SGLANG_INIT_NEW_TOKEN_RATIO")] = 0.7
    """That share at the start, before the factor; at most 1 after it."""
    min_new_token_ratio_factor: Annotated[
        float, Ge(0), Env("SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR")
    ] = 0.14
    """The share sinks no lower than so much of where it began."""
    new_token_ratio_decay_steps: Annotated[
        int, Gt(0), Env("SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS")
    ] = 600
    """Decode steps in which it sinks that far."""
    retract_decode_steps: Annotated[int, Ge(0), Env("SGLANG_RETRACT_DECODE_STEPS")] = 20
    """After a retraction the others are given room for about so many steps."""
    clip_max_new_tokens_estimation: Annotated[
        int, Ge(0), Env("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION")
    ] = 4096
    """Of what a request may still emit no more than so many tokens are counted."""
    in_batch_prefix_caching_check_threshold: Annotated[
        int, Ge(-1), KnobSource("managers/schedule_policy.py")
    ] = 32
    """lpm and hrrn hold back a request with at most so many tokens in the cache, if another in
    the queue begins alike."""
    in_batch_prefix_caching_deprioritize_threshold: Annotated[
        int, Gt(0), KnobSource("managers/schedule_policy.py")
    ] = 32
    """Two requests begin alike in that sense if they share so many tokens."""
    lpm_aging_tokens_per_pass: Annotated[int, Ge(0), KnobSource("sgl-project/sglang#31723")] = 0
    """Under lpm each pass that a request has waited counts as so many cached tokens."""
    mem_fraction_static: Annotated[
        Annotated[float, Gt(0), Lt(1)] | None, Flag("--mem-fraction-static")
    ] = None
    """Share of the GPU's memory for weights and KV, of which with `hardware` the pool follows; left
    out it is derived as SGLang does. No decision depends on it."""

    def __post_init__(self) -> None:
        if self.enable_dp_attention != (self.dp_size > 1):
            raise ValueError(
                f"dp_size: {self.dp_size} beside enable_dp_attention: {self.enable_dp_attention}; "
                "ranks of dp attention are 2 or more, and other replicas are a fleet's"
            )
        if self.dp_size > 1 and self.scheduler_recv_interval > 1:
            raise ValueError(
                "scheduler_recv_interval: beside enable_dp_attention the ranks agree when they "
                "look, which is not modelled; expected 1"
            )
        if self.lpm_aging_tokens_per_pass and not RULES[self.variant].lpm_aging:
            raise ValueError(
                f"lpm_aging_tokens_per_pass: variant {self.variant!r} has no such flag; "
                "use '0.5.23-lpm-aging'"
            )
        self._check_order()
        self._check_delayer()
        if self.allow_auto_truncate and self.max_total_num_tokens <= 6:
            raise ValueError(
                f"allow_auto_truncate: a pool of {self.max_total_num_tokens} tokens leaves nothing "
                "of a prompt; expected max_total_num_tokens of 7 or more"
            )
        defaults = {field.name: field.default for field in fields(self)}
        for knob in RULES[self.variant].lacks:
            if getattr(self, knob) != defaults[knob]:
                raise ValueError(f"{knob}: SGLang {self.variant} does not have it; leave it out")
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
        """Raise ValueError for an order of the queue that there is not."""
        policies = RULES[self.variant].policies
        if self.schedule_policy == "random":
            raise ValueError(
                "schedule_policy: 'random' shuffles the queue in every pass by the random numbers "
                f"of SGLang's process, which nobody else has; expected one of {', '.join(policies)}"
            )
        if self.schedule_policy == "shortest-prefill-first" and self.disable_radix_cache:
            raise ValueError(
                "schedule_policy: SGLang has 'shortest-prefill-first' only with the radix cache; "
                "expected disable_radix_cache: false beside it"
            )
        if self.schedule_policy not in policies:
            raise ValueError(
                f"schedule_policy: SGLang {self.variant} does not have {self.schedule_policy!r}; "
                f"expected one of {', '.join(policies)}"
            )
        if self.enable_priority_scheduling and self.schedule_policy not in ("fcfs", "lof"):
            raise ValueError(
                f"schedule_policy: {self.schedule_policy!r} beside enable_priority_scheduling; "
                "expected fcfs or lof"
            )
        if self.enable_priority_scheduling and self.max_queued_requests == 0:
            raise ValueError(
                "max_queued_requests: with 0 beside enable_priority_scheduling SGLang dies of the "
                "first request; expected 1 or more"
            )
        if self.retraction_policy == "priority" and not self.enable_priority_scheduling:
            raise ValueError("retraction_policy: 'priority' needs enable_priority_scheduling")

    def _check_delayer(self) -> None:
        """Raise ValueError where the prefill delayer cannot be, or is not modelled."""
        if self.enable_prefill_delayer and self.disable_overlap_schedule:
            raise ValueError("enable_prefill_delayer: SGLang needs the overlap schedule for it")
        if self.enable_prefill_delayer and self.dp_size > 1:
            raise ValueError(
                "enable_prefill_delayer: beside enable_dp_attention the ranks agree when to "
                "prefill, which is not modelled; expected false"
            )

    # What one rank of dp attention takes of the server's flags: arg_groups/parallel_hook.py and
    # model_executor/pool_configurator.py of the wheel.

    @property
    def chunk(self) -> int:
        """Most prompt tokens in one prefill pass of a rank; -1 is no limit."""
        return self.chunked_prefill_size // self.dp_size

    @property
    def mixes(self) -> bool:
        """Whether running requests decode in the step of a prefill."""
        return self.enable_mixed_chunk and self.chunk > 0

    @property
    def preempts(self) -> bool:
        """Whether a request may take the place of less urgent ones."""
        return self.enable_priority_scheduling and not self.disable_priority_preemption

    @property
    def rows(self) -> int:
        """Most requests that hold a row of a rank at a time."""
        return max(1, self.max_running_requests // self.dp_size)

    @property
    def conservativeness(self) -> float:
        """Factor on promises; ranks of dp attention promise less."""
        return self.schedule_conservativeness * (0.3 if self.enable_dp_attention else 1.0)
