"""The specification of an engine: the facts and functions that the rest of simkv uses.

Each package in ``simkv/schedulers`` declares one, so that other code does not depend on the engine.
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

#: Block numbers by request, in order and starting at 1; they cover every token of the batch when
#: ``schedule`` returns. A list only grows; when blocks are replaced, a new list object replaces it.
BlockTables = Mapping[int, Sequence[int]]


#: Admission check of the server in front of an engine, given the number of unfinished requests and
#: the number of prompt tokens in requests without a first token. Returns the rejection, or None to
#: admit the request.
AdmissionCheck = Callable[[int, int], Refusal | None]


#: Return why an engine with a config rejects a request with this number of prompt tokens, or None
#: if the prompt is within all limits.
TooLong = Callable[[Any, int], str | None]


class EngineConfig(Protocol):
    """The settings of an engine under its own names: a frozen dataclass that validates itself.

    Field annotations are read by pydantic; ``name`` has the engine's name as its only value.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def name(self) -> str:
        """Name of the engine."""

    @property
    def variant(self) -> str:
        """Name of the scheduler variant: a version, a pull request, or a variant of simkv."""


class TabledScheduler(NamedTuple):
    """A scheduler that allocates numbered blocks, and its block tables.

    A simulation only needs block counts; a GPU needs the block numbers.
    """

    scheduler: Scheduler
    tables: BlockTables


@dataclass(frozen=True)
class KvTransferSpec:
    """The ``variants`` that can send KV to another replica, and how to build their scheduler.

    ``in_role`` returns the config for the role ``prefill`` or ``decode``, and ``build`` makes the
    scheduler from it. Raises ValueError if this is not possible.
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


def _no_knobs(_: int) -> Mapping[str, Any]:
    return {}


#: How a server sizes its KV cache. ``measured``: it profiles its largest step and uses the rest of
#: a share of memory, with the constants of the newest vLLM; ``measured by release``: the same, with
#: constants that depend on the release. ``static``: a share of memory without profiling. ``rest``:
#: a share of the memory left after profiling.
KvSizing = Literal["measured", "measured by release", "static", "rest"]


@dataclass(frozen=True)
class VariantNaming:
    """Names of the variants of an engine, where a variant has several.

    ``variant_of`` returns the key of a name in ``EngineSpec.variants`` and raises ValueError for an
    unknown name. ``like`` returns the first variant with the same rules. ``assumed`` returns the
    unverified assumption behind a name, or None.
    """

    variant_of: Callable[[str], str] = _itself
    like: Callable[[str], str] = _itself
    assumed: Callable[[str], str | None] = _nothing


@dataclass(frozen=True)
class EngineSpec:
    """The specification of an engine, for code that must not depend on a particular engine.

    ``build(config)`` makes its scheduler, ``build_with_tables(config)`` one with block tables for a
    GPU. ``recording`` is the format of its recorded decisions. ``setting(config)`` returns the
    settings that determine step durations and KV size. ``naming`` resolves the names of
    ``variants``.

    Fields that hold the name of a config field (a knob), or None where the engine has none:

    - ``seats``: limit on running requests
    - ``longest``: limit on the length of a request; the whole cache must hold one such request
    - ``memory``: size of the KV cache in blocks, or in tokens if ``memory_in_tokens``
    - ``block``: tokens per block
    - ``groups``: windows of layer groups that have blocks of their own
    - ``checkpoints``: whether kernels write states within a chunk
    - ``stream``: tokens per chunk sent to a client
    - ``ranks``: number of such engines that step together
    - ``lora``: whether requests may use LoRA adapters
    - ``drafts``: number of draft tokens per request and step
    - ``host_blocks``: number of blocks in host memory

    ``lacks`` lists, by variant, the knobs that the variant does not have; it rejects or ignores
    them.

    ``rules`` are the variants whose individual rules can be changed (fields of a frozen dataclass,
    of type bool or Literal): ``build(config, rules)`` uses the given rules instead of the
    variant's. ``rules_read`` names the fields that a variant reads, if not all.

    ``cache_lines`` are regular expressions for the log lines that report the cache size, with the
    groups ``blocks`` or ``tokens``, and ``size`` (tokens per block) where it is logged.
    ``cache_example`` is an example of such a line for messages.

    ``admission(config)`` is the check of its server before the scheduler sees a request, or None;
    rejections by the scheduler itself are in ``Batch.refused``. ``too_long(config, prompt_tokens)``
    names the limit that a prompt exceeds.

    ``host(config)`` is whether KV of prompts is copied to host memory (None: never). ``launch`` are
    the launcher's rules for missing settings on known hardware. ``transfer`` is
    None if KV cannot be sent to another replica. ``has_threads`` is whether its threads can run
    side by side, as the ``pipeline`` of a scenario specifies. ``policy_hooks`` are the decisions
    that its knob ``rule`` can replace.
    """

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
    """Whether the server turns a switch off with ``--no-SWITCH``."""
    logs_all_options: bool = False
    """Whether the log starts with the value of every option."""
    release_part: int = 1
    """Part of the version that a regular release increases: 1 for minor, 2 for patch releases."""
    sizing: KvSizing = "measured"
    """How the server determines the size of the KV cache."""
    states_in_blocks_since: str | None = None
    """First release that stores states of layers in blocks like KV; None: no release."""
    step_tokens: str = "max_num_batched_tokens"
    """Knob for the maximum tokens per step."""
    memory_share: str | None = None
    """Knob for the share of GPU memory, with its flag; None: not supported by ``simkv blocks``."""
    graph_sizes: Callable[[int], list[int]] = lambda _: []
    """Sizes in tokens of the CUDA graphs that a server with this number of seats captures."""
    unrecorded: str = ""
    """Behavior that no recording covers, though other decisions were recorded."""
    partly_recorded: str | None = None
    """The recorded part, for an engine whose decisions were recorded only in part."""
    rank_knobs: Callable[[int], Mapping[str, Any]] = _no_knobs
    """Knobs of a server with this number of data-parallel attention groups."""
    rank_router: Mapping[str, Any] = field(default_factory=lambda: {"router": "round_robin"})
    """Router in front of data-parallel ranks, as in ``fleet`` of a scenario."""
    ranks_in_lockstep: bool = False
    """Whether data-parallel ranks of a mixture-of-experts model step together."""
    disk: Callable[[Any], bool] | None = None
    """Whether KV in host memory is written to disk; None: never."""
    transfer_knobs: tuple[str, ...] = ()
    """Knobs of replicas that send KV to others or load it."""
    in_priority_order: Callable[[Any], bool] = _always
    """Whether a config observes the priorities of requests."""
    lora_slots: str | None = None
    """Knob for the number of LoRA adapters that run at once, where the engine reports their use."""
    lora_by_model: bool = False
    """Whether clients may name an adapter as ``model:adapter``."""
    published_cache: Callable[[Any], BlockPool | None] | None = None
    """Prefix cache of a scheduler whose changes the server publishes; None: none."""
    published_cache_knob: str | None = None
    """Knob that must be set for anything to be published."""

    def variant(self, name: str) -> Variant:
        """Return the variant that a config calls by this name."""
        return self.variants[self.naming.variant_of(name)]

    @property
    def distinct_variants(self) -> list[str]:
        """Names of the variants with distinct rules, one per set of rules."""
        return [name for name in self.variants if self.naming.like(name) == name]

    @property
    def sizes(self) -> tuple[str, ...]:
        """Knobs that limit the engine's capacity."""
        return tuple(knob for knob in (self.seats, self.longest, self.memory) if knob)

    def takes_loras(self, config: EngineConfig) -> bool:
        """Whether requests may use LoRA adapters."""
        return self.lora is not None and bool(getattr(config, self.lora))

    def offloads(self, config: EngineConfig) -> bool:
        """Whether the KV of prompts is copied to host memory."""
        return self.host is not None and self.host(config)

    def rule_of(self, config: EngineConfig) -> str | None:
        """Return the custom policy of a config, or None."""
        rule: str | None = getattr(config, "rule") if self.policy_hooks else None  # noqa: B009
        return rule

    def uses_disk(self, config: EngineConfig) -> bool:
        """Whether KV in host memory is written to disk."""
        return self.disk is not None and self.disk(config)

    def drafted_tokens(self, config: EngineConfig) -> int:
        """Return the number of draft tokens per request and step."""
        return self._number(config, self.drafts)

    def lora_capacity(self, config: EngineConfig) -> int:
        """Return the number of concurrent LoRA adapters; 0 if the engine does not report them."""
        return self._number(config, self.lora_slots)

    def tokens_per_chunk(self, config: EngineConfig) -> int:
        """Return the number of tokens sent to a client at a time."""
        return self._number(config, self.stream) or 1

    def length_limit(self, config: EngineConfig) -> int | None:
        """Return the maximum tokens of a request, or None if the engine has no such limit."""
        return self._number(config, self.longest) or None

    def _number(self, config: EngineConfig, knob: str | None) -> int:
        """Return the value of a knob; 0 if the engine lacks it or it is not set."""
        value: int | None = getattr(config, knob) if knob else None
        return value or 0

    def block_size(self, config: EngineConfig) -> int:
        """Return the number of tokens per KV block."""
        size: int = getattr(config, self.block)
        return size
