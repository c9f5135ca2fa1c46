"""What an engine is: all that other rooms ask of one, said once in its folder of schedulers/."""

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

#: For each request the numbers of its blocks, in order and from 1, which cover every token of the
#: batch when ``schedule`` returns it. A list only grows; where blocks are replaced, another list
#: object takes its place.
BlockTables = Mapping[int, Sequence[int]]


#: Why the server in front of an engine turns a request away that comes while so many others have
#: not ended, with so many prompt tokens in all of those without a first token; None lets it in.
AdmissionCheck = Callable[[int, int], Refusal | None]


#: Why an engine with a config rejects a request of so many prompt tokens, which are beyond a limit
#: of its; None if they are not.
TooLong = Callable[[Any, int], str | None]


class EngineConfig(Protocol):
    """An engine's knobs under its own names: a frozen dataclass that checks itself.

    Fields are annotated as pydantic reads them, ``name`` is the engine's and has no other value.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def name(self) -> str:
        """The engine."""

    @property
    def variant(self) -> str:
        """Whose rules: a version, a pull request, or a change of ours."""


class TabledScheduler(NamedTuple):
    """A scheduler that hands out numbered blocks, and its ``tables``.

    A simulation may only count blocks; a device has to know which they are.
    """

    scheduler: Scheduler
    tables: BlockTables


@dataclass(frozen=True)
class KvTransferSpec:
    """Which ``variants`` can send KV from one replica to another, and the scheduler that does.

    It is built of a config ``in_role``, ``prefill`` or ``decode``; a ValueError says that it cannot
    be.
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


#: A server measures its largest step and takes what a share of memory leaves, where constants
#: depend on the release or are those of the newest vLLM; or it takes a share of memory without a
#: measurement (``static``), or a share of what is left after one (``rest``).
KvSizing = Literal["measured", "measured by release", "static", "rest"]


@dataclass(frozen=True)
class VariantNaming:
    """What the variants of an engine are called, where one has more than one name.

    ``variant_of`` a name is the variant's key in ``EngineSpec.variants``; it raises ValueError if
    there is none. ``like`` it is the first of all that go by the same rules. ``assumed`` says what
    has to be taken on trust of a name, if anything.
    """

    variant_of: Callable[[str], str] = _itself
    like: Callable[[str], str] = _itself
    assumed: Callable[[str], str | None] = _nothing


@dataclass(frozen=True)
class EngineSpec:
    """An engine, for those who must not know which one it is.

    ``build(config)`` makes its scheduler, ``with_tables(config)`` one that a device can follow.
    ``recording`` is how its decisions are written down and replayed, ``setting(config)`` what of
    its knobs decides seconds and KV.

    ``naming`` finds one of the ``variants`` by what a config calls it.

    Knobs by their names: ``seats`` limits the running requests, ``longest`` the length of each, for
    which the whole cache has to be enough (None if nothing does), ``memory`` is the size of the KV
    cache, in blocks or ``memory_in_tokens``, and ``block`` the tokens in a block. ``groups`` has
    the windows of groups of layers with blocks of their own, ``checkpoints`` says that kernels
    write states from within a chunk; None if nothing does.

    ``lacks`` are the knobs that a variant does not have, by variant: it refuses or ignores them.

    ``rules`` are the variants whose single rules can be changed (fields of a frozen dataclass, of
    type bool or Literal): ``build(config, rules)`` goes by others than the variant's.
    ``rules_read`` names the fields that a variant looks at, if not all.

    ``cache_lines`` are regular expressions for what the engine logs of its cache's size, with the
    groups ``blocks`` or ``tokens``, and ``size`` (of a block) where it is told; ``cache_example``
    shows them to the reader.

    ``stream`` is the knob that says how many tokens go to a client at a time, ``ranks`` the one
    that says how many such engines step together (None: the engine has none).

    ``admission(config)`` is what its server turns away before the scheduler hears of it, None if
    nothing; what the scheduler itself turns away is in ``Batch.refused``. ``too_long(config,
    prompt_tokens)`` names the limit that a prompt is beyond.

    ``lora`` is the knob that lets requests ask for LoRA adapters (None: they cannot), ``drafts``
    the one that says how many tokens are drafted.

    ``host(config)`` is whether KV of prompts is copied to host memory (None: it never is), and
    ``host_blocks`` the knob that says how many blocks are there.

    ``launch`` is how its launcher fills in settings that were not given, on known hardware.

    ``transfer`` is None where KV cannot go to another replica. ``has_threads``: they can run side
    by side, as the ``pipeline`` of a scenario has it. ``seams`` are the decisions that its knob
    ``rule`` can take.
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
    has_no_flags: bool = False
    """Whether its server turns a switch off with ``--no-SWITCH``."""
    logs_all_options: bool = False
    """Whether its log begins with the value of every option."""
    sizing: KvSizing = "measured"
    """How its server finds the size of the KV cache."""
    states_in_blocks_since: tuple[int, int] | None = None
    """Release from which on states of layers are kept in blocks like KV; None: never."""
    step_tokens: str = "max_num_batched_tokens"
    """Knob for the most tokens of a step, of those that have one."""
    memory_share: str | None = None
    """Knob for the share of the GPU's memory, with its flag; None: ``simkv blocks`` does not take
    the engine."""
    graph_sizes: Callable[[int], list[int]] = lambda _: []
    """Sizes in tokens of the CUDA graphs that a server with this number of seats captures."""
    unrecorded: str = ""
    """What of the engine no recording shows, though others of its decisions were recorded."""
    partly_recorded: str | None = None
    """What was recorded, of an engine of which it was less than all that decides."""
    rank_knobs: Callable[[int], Mapping[str, Any]] = _no_knobs
    """Knobs of a server with this number of data-parallel attention groups."""
    rank_router: Mapping[str, Any] = field(default_factory=lambda: {"router": "round_robin"})
    """Router in front of data-parallel ranks, as ``fleet`` of a scenario describes it."""
    ranks_in_lockstep: bool = False
    """Whether data-parallel ranks with a mixture of experts step together."""
    disk: Callable[[Any], bool] | None = None
    """Whether KV in host memory goes on to a disk; None: never."""
    transfer_knobs: tuple[str, ...] = ()
    """Knobs of replicas that send KV to others or load it."""
    in_priority_order: Callable[[Any], bool] = _always
    """Whether a config heeds the priorities of requests."""
    lora_slots: str | None = None
    """Knob for the number of LoRA adapters that run at once, where the engine reports their use."""
    lora_by_model: bool = False
    """Whether clients may name an adapter as ``model:adapter``."""
    published_cache: Callable[[Any], BlockPool | None] | None = None
    """Prefix cache of a scheduler whose changes its server publishes; None: it publishes none."""
    published_cache_knob: str | None = None
    """Knob without which nothing is published."""

    def variant(self, name: str) -> Variant:
        """The variant that a config calls by this name."""
        return self.variants[self.naming.variant_of(name)]

    @property
    def distinct_variants(self) -> list[str]:
        """Variants no two of which go by the same rules."""
        return [name for name in self.variants if self.naming.like(name) == name]

    @property
    def sizes(self) -> tuple[str, ...]:
        """The knobs that say how much the engine can hold."""
        return tuple(knob for knob in (self.seats, self.longest, self.memory) if knob)

    def takes_loras(self, config: EngineConfig) -> bool:
        """Whether requests may ask for LoRA adapters."""
        return self.lora is not None and bool(getattr(config, self.lora))

    def offloads(self, config: EngineConfig) -> bool:
        """Whether the KV of prompts is copied to host memory."""
        return self.host is not None and self.host(config)

    def rule_of(self, config: EngineConfig) -> str | None:
        """Decisions that expressions take in place of the variant, if any."""
        rule: str | None = getattr(config, "rule") if self.policy_hooks else None  # noqa: B009
        return rule

    def uses_disk(self, config: EngineConfig) -> bool:
        """Whether KV in host memory goes on to a disk."""
        return self.disk is not None and self.disk(config)

    def drafted_tokens(self, config: EngineConfig) -> int:
        """Tokens that are drafted for a request in a step."""
        return self._number(config, self.drafts)

    def lora_capacity(self, config: EngineConfig) -> int:
        """LoRA adapters that run at once; 0 if the engine does not report their use."""
        return self._number(config, self.lora_slots)

    def tokens_per_chunk(self, config: EngineConfig) -> int:
        """Tokens that are sent to a client at a time."""
        return self._number(config, self.stream) or 1

    def length_limit(self, config: EngineConfig) -> int | None:
        """Most tokens of a request; None if the engine has no such limit."""
        return self._number(config, self.longest) or None

    def _number(self, config: EngineConfig, knob: str | None) -> int:
        """Value of a knob; 0 if the engine has none or it is not set."""
        value: int | None = getattr(config, knob) if knob else None
        return value or 0

    def block_size(self, config: EngineConfig) -> int:
        """Tokens in a block of KV."""
        size: int = getattr(config, self.block)
        return size
