"""The specification of an engine: the facts and functions that the rest of simkv uses.

Each package in ``simkv/schedulers`` declares one specification, so that the rest of simkv does not
depend on a particular engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from simkv.core.block_pool import BlockPool
from simkv.core.execution_settings import ExecutionSettings
from simkv.core.launcher_rules import LaunchRules
from simkv.core.policy_language import PolicyHook
from simkv.core.recording_format import RecordingFormat
from simkv.core.scheduler_protocol import (
    KvConnector,
    Refusal,
    Scheduler,
    Variant,
)
from simkv.core.server_options import LaunchOptions

#: The block numbers of each request in order; numbers start at 1. When ``schedule`` returns, the
#: blocks cover all tokens of the batch. A list only grows; if blocks are replaced, a new list is
#: created.
BlockTables = Mapping[int, Sequence[int]]


#: Admission check of the API server. Called with the number of unfinished requests and the number
#: of prompt tokens in requests without a first token; returns the rejection, or None to admit.
AdmissionCheck = Callable[[int, int], Refusal | None]


#: Called with a config and a number of prompt tokens. Returns the reason why the engine rejects
#: such a request, or None if the prompt is within all limits.
TooLong = Callable[[Any, int], str | None]


class EngineConfig(Protocol):
    """Settings of an engine, with the engine's own option names."""

    # An implementation is a frozen dataclass that validates its values when it is created. Pydantic
    # reads its field annotations. The only allowed value of ``name`` is the name of the engine.

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def name(self) -> str:
        """Name of the engine."""

    @property
    def variant(self) -> str:
        """Name of the scheduler variant, such as a release."""


class TabledScheduler(NamedTuple):
    """Scheduler with numbered KV blocks, and its block tables.

    A run on a GPU needs block numbers.
    """

    scheduler: Scheduler
    tables: BlockTables


@dataclass(frozen=True)
class KvTransferSpec:
    """KV transfer from prefill replicas to decode replicas of an engine.

    - ``variants``: variants that support the transfer.
    - ``in_role(config, role)``: config of a replica with the role ``prefill`` or ``decode``.
    - ``build(config)``: scheduler for the config.

    The functions raise ValueError if the config does not allow a transfer.
    """

    variants: tuple[str, ...]
    in_role: Callable[[Any, str], Any]
    build: Callable[[Any], KvConnector]


def _itself(name: str) -> str:
    return name


def _nothing(*_: Any) -> None:
    return None


def _always(_: Any) -> bool:
    return True


def _never(_: Any) -> bool:
    return False


def _no_knobs(_: int) -> Mapping[str, Any]:
    return {}


#: How a server determines the size of its KV cache. ``measured``: the server profiles its largest
#: step and uses the rest of a fraction of GPU memory, with the constants of the newest vLLM.
#: ``measured by release``: the same, with constants that depend on the release. ``static``: it uses
#: a fraction of GPU memory without profiling. ``rest``: it uses a fraction of the memory left after
#: profiling.
KvSizing = Literal["measured", "measured by release", "static", "rest"]


@dataclass(frozen=True)
class VariantNaming:
    """Conversion of the variant names that users write to keys of ``EngineSpec.variants``.

    - ``variant_of(name)``: key for a name, such as 0.27.0 for 0.27. Raises ValueError for an
      unknown name.
    - ``like(name)``: variant that represents all variants with the same rules.
    - ``assumed(name)``: note for the user if the rules are not recorded, else None.
    """

    variant_of: Callable[[str], str] = _itself
    like: Callable[[str], str] = _itself
    assumed: Callable[[str], str | None] = _nothing


@dataclass(frozen=True)
class EngineSpec:
    """Specification of an engine, for code that does not depend on a particular engine.

    - ``build(config)``: scheduler. ``build(config, rules)`` replaces its rules.
    - ``build_with_tables(config)``: scheduler with block tables, for runs on a GPU.
    - ``recording``: file format of recorded decisions.
    - ``setting(config)``: settings that determine step durations and the size of the KV cache.
    - ``naming``: mapping from variant names that users write to keys of ``variants``.
    - ``lacks``: settings that a variant does not support, by variant.
    - ``rules``: scheduling rules, by variant.
    - ``rules_read``: names of the rules that a variant uses, by variant; all rules if missing.
    - ``cache_lines``: regular expressions for log lines with the size of the KV cache. Their groups
      are ``blocks`` or ``tokens``, and ``size`` (tokens per block). ``cache_example``: an example.
    - ``admission(config)``: admission check of the API server, or None.
    - ``too_long(config, prompt_tokens)``: reason why a prompt exceeds a length limit, or None.
    - ``host(config)``: whether the KV of prompts is copied to host memory; None if the engine
      cannot copy KV.
    - ``launch``: defaults that the engine's launcher derives from the hardware.
    - ``transfer``: KV transfer between replicas; None if the engine cannot send KV.
    - ``has_threads``: whether scheduler, worker and token processor run in parallel threads.
    - ``policy_hooks``: decisions that a custom policy (the setting ``rule``) can replace.

    The following fields hold the name of a config field, or None if the engine has no such setting:

    - ``seats``: maximum number of running requests.
    - ``longest``: maximum length of a request in tokens.
    - ``memory``: size of the KV cache, in tokens if ``memory_in_tokens``, else in blocks.
    - ``block``: tokens per KV block.
    - ``groups``: sliding windows of the layer groups. ``all_groups_since`` is the first release for
      which all groups are modelled.
    - ``checkpoints``: whether kernels also save recurrent states inside a prefill chunk.
    - ``stream``: tokens per chunk that the server sends to a client.
    - ``ranks``: number of data-parallel ranks that step in lockstep.
    - ``lora``: whether requests may use LoRA adapters.
    - ``drafts``: number of draft tokens per request and step.
    - ``host_blocks``: number of KV blocks in host memory.
    """

    # The KV cache must hold at least one request of the length ``longest``. In releases before
    # ``all_groups_since``, layer groups that the config rejects are treated as one group. Rules are
    # a frozen dataclass whose fields have the type bool or Literal. Rejections by the scheduler are
    # in ``Batch.refused``. The timing of threads is specified by ``pipeline`` in a scenario.

    name: str
    config: type[Any]
    variants: Mapping[str, Variant]
    build: Callable[..., Scheduler]
    build_with_tables: Callable[[Any], TabledScheduler]
    recording: RecordingFormat
    setting: Callable[[Any], ExecutionSettings]
    cache_lines: tuple[str, ...]
    cache_example: str
    memory: str
    seats: str = "max_num_seqs"
    longest: str | None = None
    block: str = "block_size"
    memory_in_tokens: bool = False
    groups: str | None = None
    all_groups_since: str | None = None
    checkpoints: str | None = None
    lacks: Mapping[str, Collection[str]] = field(default_factory=dict)
    rules: Mapping[str, Any] = field(default_factory=dict)
    rules_read: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stream: str | None = None
    ranks: str | None = None
    admission: Callable[[Any], AdmissionCheck | None] = _nothing
    too_long: TooLong = _nothing
    lora: str | None = None
    drafts: str | None = None
    host: Callable[[Any], bool] | None = None
    host_blocks: str | None = None
    launch: LaunchRules = field(default=LaunchRules())
    transfer: KvTransferSpec | None = None
    naming: VariantNaming = VariantNaming()
    has_threads: bool = False
    policy_hooks: tuple[PolicyHook, ...] = ()
    has_negatable_flags: bool = False
    """Whether the server has a flag ``--no-X`` that turns the setting of a flag ``--X`` off."""
    logs_all_options: bool = False
    """Whether the log starts with the value of every option."""
    release_part: int = 1
    """Index of the version number that a regular release increases: 1 for minor, 2 for patch."""
    sizing: KvSizing = "measured"
    """How the server determines the size of the KV cache."""
    states_in_blocks_since: str | None = None
    """First release that stores recurrent states in KV blocks; None if no release does."""
    step_tokens: str = "max_num_batched_tokens"
    """Name of the setting for the maximum number of tokens per step."""
    memory_share: str | None = None
    """Name of the setting for the fraction of GPU memory; None if ``simkv blocks`` cannot use
    it."""
    graph_sizes: Callable[[int], list[int]] = lambda _: []
    """Function that returns the CUDA graph sizes in tokens, given the maximum number of running
    requests.
    """
    unrecorded: str = ""
    """Behavior that no recording covers, for engines whose other decisions were recorded."""
    partly_recorded: str | None = None
    """Decisions that were recorded; None if simkv has recordings of all kinds of decisions."""
    rank_knobs: Callable[[int], Mapping[str, Any]] = _no_knobs
    """Function that returns the settings of a server with the given number of data-parallel
    attention ranks.
    """
    rank_router: Mapping[str, Any] = field(default_factory=lambda: {"router": "round_robin"})
    """Load balancer in front of data-parallel ranks, in the format of ``fleet`` in a scenario."""
    ranks_in_lockstep: bool = False
    """Whether the data-parallel ranks of a mixture-of-experts model step in lockstep."""
    disk: Callable[[Any], bool] | None = None
    """Function that returns whether a config writes the KV in host memory to disk; None if the
    engine cannot do this.
    """
    transfer_knobs: tuple[str, ...] = ()
    """Names of the settings that only replicas which send or load KV use."""
    cost_knobs: tuple[str, ...] = ()
    """Names of the settings that affect step durations and the size of the KV cache, but no
    scheduling decision."""
    lora_knobs: tuple[str, ...] = ()
    """Names of the settings without effect if no request may use a LoRA adapter."""
    draft_knobs: tuple[str, ...] = ()
    """Names of the settings without effect if there are no draft tokens."""
    in_priority_order: Callable[[Any], bool] = _always
    """Function that returns whether the scheduler considers the priorities of requests, given a
    config.
    """
    lora_slots: str | None = None
    """Name of the setting for the number of LoRA adapters that run at once; None if the engine does
    not report it.
    """
    lora_by_model: bool = False
    """Whether a client may select a LoRA adapter with the model name ``model:adapter``."""
    caches_prefixes: Callable[[Any], bool] = _never
    """Function that returns whether a config reuses the KV of equal prefixes of prompts."""
    published_cache: Callable[[Any], BlockPool | None] | None = None
    """Function that returns the prefix cache whose changes the server publishes as KV events, given
    a scheduler; its result is None if the server publishes none.
    """
    published_cache_knob: str | None = None
    """Name of the setting that must be on for the server to publish KV events."""
    server_options: LaunchOptions | None = None
    """Options of the engine's server, for parsing launch commands; None if they are not known."""

    def variant(self, name: str) -> Variant:
        """Return the description of a variant. Raises ValueError for an unknown name."""
        return self.variants[self.naming.variant_of(name)]

    @property
    def distinct_variants(self) -> list[str]:
        """Names of variants, one for each set of rules."""
        # Variants with the same rules have one name in the result.
        return [name for name in self.variants if self.naming.like(name) == name]

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the settings for the number of requests, request length and KV cache size."""
        return tuple(knob for knob in (self.seats, self.longest, self.memory) if knob)

    def takes_loras(self, config: EngineConfig) -> bool:
        """Return whether requests may use LoRA adapters."""
        return self.lora is not None and bool(getattr(config, self.lora))

    def offloads(self, config: EngineConfig) -> bool:
        """Return whether the engine copies the KV of prompts to host memory."""
        return self.host is not None and self.host(config)

    def rule_of(self, config: EngineConfig) -> str | None:
        """Return the text of the custom policy in a config, or None."""
        rule: str | None = getattr(config, "rule") if self.policy_hooks else None  # noqa: B009
        return rule

    def uses_disk(self, config: EngineConfig) -> bool:
        """Return whether the engine writes the KV in host memory to disk."""
        return self.disk is not None and self.disk(config)

    def drafted_tokens(self, config: EngineConfig) -> int:
        """Return the number of draft tokens per request and step."""
        return self._number(config, self.drafts)

    def lora_capacity(self, config: EngineConfig) -> int:
        """Return the maximum number of concurrent LoRA adapters.

        The result is 0 if the engine does not report it.
        """
        return self._number(config, self.lora_slots)

    def tokens_per_chunk(self, config: EngineConfig) -> int:
        """Return the number of tokens that the server sends to a client at a time."""
        return self._number(config, self.stream) or 1

    def length_limit(self, config: EngineConfig) -> int | None:
        """Return the maximum number of tokens of a request, or None without a limit."""
        return self._number(config, self.longest) or None

    def _number(self, config: EngineConfig, knob: str | None) -> int:
        """Return the value of a setting; 0 if the engine lacks it or the config does not set it."""
        value: int | None = getattr(config, knob) if knob else None
        return value or 0

    def block_size(self, config: EngineConfig) -> int:
        """Return the number of tokens per KV block."""
        size: int = getattr(config, self.block)
        return size
