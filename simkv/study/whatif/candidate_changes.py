"""Generate the changes that a what-if analysis tries: one scheduling rule, setting or variant at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from simkv.core.engine_flags import Flag, sources
from simkv.core.engine_spec import EngineConfig
from simkv.core.errors import InputError
from simkv.core.request import Request
from simkv.core.scheduler_protocol import MAX_BLOCKS
from simkv.scenario.hardware_section import build_hardware
from simkv.scenario.launch_defaults import target_of_hardware
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.study.field_changes import with_knobs
from simkv.study.simulation_job import SimulationJob
from simkv.study.whatif.trial_evaluation import make_trial_job
from simkv.workload.workload_section import build_clients

ChangeKind = Literal["rule", "knob", "variant", "memory"]
#: Values to try for a setting that is 0, off or without a limit, and for a limit on tokens.
LIMIT_CANDIDATES = (1, 4, 16, 64, 256)
TOKEN_LIMIT_CANDIDATES = (64, 256, 1024)
#: Numbers of KV blocks in host memory to try, relative to the number of blocks on the GPU.
HOST_BLOCK_RATIOS = (1, 4)
SHARE_CANDIDATES = (0.01, 0.1, 0.5)
#: Values to try for a fraction that the engine chooses by default, such as the fraction of GPU
#: memory.
CHOSEN_SHARE_CANDIDATES = (0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Change:
    """A change of one field (``field``) from the value ``before`` to the value ``after``.

    ``kind`` is ``rule`` for a scheduling rule, ``knob`` for a setting of the engine, and ``memory``
    for the size of the KV cache.
    """

    kind: ChangeKind
    field: str
    before: Any
    after: Any

    @property
    def limits(self) -> bool:
        """Whether the change sets a limit that has no value in the scenario."""
        candidates = (*LIMIT_CANDIDATES, *TOKEN_LIMIT_CANDIDATES)
        among = type(self.after) is int and self.after in candidates
        return among and not self.before and self.kind != "rule"

    def __str__(self) -> str:
        same = " (same memory)" if self.field == "block_size" else ""
        return f"{self.field}: {_word(self.before)} -> {_word(self.after)}{same}"


def generate_changes(
    scenario: Scenario, folder: Path, wanted: Callable[[Change], bool] = lambda _: True
) -> Iterator[tuple[Change, SimulationJob | InputError]]:
    """Yield every change for which ``wanted`` returns true, with its job or its error.

    All changes affect the engine. Paths are relative to ``folder``.
    """
    for change, rules in _rules(scenario.engine):
        if wanted(change):
            yield change, make_trial_job(scenario, folder, rules)
    for change in filter(wanted, _knob_changes(scenario)):
        try:
            yield change, make_trial_job(apply_change(scenario, folder, change), folder)
        except InputError as error:
            yield change, error


def apply_change(scenario: Scenario, folder: Path, change: Change) -> Scenario:
    """Return the scenario with a change applied.

    The change must not be of the kind ``rule``. Raises InputError if the engine rejects the change.
    """
    values = {change.field: change.after}
    values |= _same_memory(scenario.engine, change.field, change.after)
    return with_knobs(scenario, folder, **values)


def _knob_changes(scenario: Scenario) -> Iterator[Change]:
    """Yield changes of the variant, then of the settings."""
    engine = scenario.engine
    spec = find_engine_spec(engine)
    for name in spec.distinct_variants:
        if name != spec.naming.like(engine.variant):
            yield Change("variant", "variant", engine.variant, name)
    kept = {"name", "variant", *_given(scenario)}
    for knob, values in _knobs(engine, kept):
        more = _admitting(scenario) if knob == spec.longest else _default(scenario, knob)
        values = (*values, *(value for value in more if value not in values))
        for value in values:
            kind: ChangeKind = "memory" if knob == spec.memory else "knob"
            yield Change(kind, knob, getattr(engine, knob), value)


def _too_long(scenario: Scenario) -> list[Request]:
    """Return the requests whose prompts exceed a limit of the engine."""
    engine, spec = scenario.engine, find_engine_spec(scenario.engine)
    requests = build_clients(scenario.workload, None).requests
    return [one for one in requests if spec.too_long(engine, one.prompt_tokens)]


def length_cause(scenario: Scenario) -> str | None:
    """Return a text about the limit that the longest prompt exceeds, or None. An example is
    ``prompt 20,000 > max_model_len 8,192``.
    """
    prompts = [request.prompt_tokens for request in _too_long(scenario)]
    engine = scenario.engine
    return find_engine_spec(engine).too_long(engine, max(prompts)) if prompts else None


def _admitting(scenario: Scenario) -> Iterator[int]:
    """Yield the smallest length limit that admits all requests whose prompts are too long.

    The limit includes the outputs of these requests. It is bounded by the model and the KV cache.
    """
    engine, spec = scenario.engine, find_engine_spec(scenario.engine)
    hold = spec.launch.longest
    if hold is None or spec.longest is None:
        return
    refused = _too_long(scenario)
    if not refused:
        return
    most = max(request.prompt_tokens + request.max_tokens for request in refused)
    section = asdict(engine)
    if scenario.hardware:
        machine = target_of_hardware(build_hardware(scenario.hardware))
        open_end = {**section, spec.memory: MAX_BLOCKS, spec.longest: None}
        most = min(most, spec.launch.after(open_end, machine)[spec.longest])
    value = hold(section, most)
    if value > getattr(engine, spec.longest):
        yield value


def _default(scenario: Scenario, knob: str) -> Iterator[int]:
    """Yield the number that the launcher chooses for a setting, if the scenario has another number.

    Without hardware, it is the default of the engine's config. Sizes of the cache are left out.
    """
    engine, spec = scenario.engine, find_engine_spec(scenario.engine)
    if knob in (spec.memory, spec.longest, spec.block):
        return
    value = next(one.default for one in fields(engine) if one.name == knob)
    if scenario.hardware and knob in spec.launch.fields:
        machine = target_of_hardware(build_hardware(scenario.hardware))
        others = {name: one for name, one in asdict(engine).items() if name != knob}
        chosen = spec.launch.before(others, machine)
        value = chosen.get(knob) or spec.launch.after({**others, knob: None}, machine).get(knob)
    if type(value) is int and value > 0 and value != getattr(engine, knob):
        yield value


def _rules(engine: EngineConfig) -> Iterator[tuple[Change, Any]]:
    """Yield changes of single scheduling rules that the variant uses."""
    variant, spec = engine.variant, find_engine_spec(engine)
    if variant not in spec.rules:
        return
    rules = spec.rules[variant]
    hints = get_type_hints(type(rules))
    for name in spec.rules_read.get(variant, tuple(rule.name for rule in fields(rules))):
        before = getattr(rules, name)
        options = (True, False) if hints[name] is bool else get_args(hints[name])
        for after in options:
            if after != before:
                yield Change("rule", name, before, after), replace(rules, **{name: after})


def _given(scenario: Scenario) -> Iterator[str | None]:
    """Yield settings that must not be changed, because the workload requires them.

    Requests with LoRA adapters need adapter support, and speculative decoding cannot be enabled
    unless the workload states an acceptance rate.
    """
    spec, workload = find_engine_spec(scenario.engine), scenario.workload
    yield spec.lora
    told = [workload.acceptance, *(row.acceptance for row in workload.requests or ())]
    if spec.drafts and not getattr(scenario.engine, spec.drafts) and not any(told):
        yield spec.drafts


def _knobs(
    engine: EngineConfig, kept: Collection[str | None]
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the settings of an engine except those in ``kept``, each with other values that are
    worth trying.
    """
    hints, named = get_type_hints(type(engine)), sources(type(engine))
    for knob in fields(engine):
        if knob.name not in kept:
            value, source = getattr(engine, knob.name), named.get(knob.name)
            omitted = {value, *(source.unreleased if isinstance(source, Flag) else ())}
            others = _others(hints[knob.name], value, _limits(engine, knob.name))
            yield knob.name, tuple(v for v in others if v not in omitted)


def _limits(engine: EngineConfig, knob: str) -> tuple[int, ...]:
    """Return the values to try for a setting that is 0, off or without a limit."""
    spec = find_engine_spec(engine)
    if knob == spec.host_blocks:
        return tuple(ratio * getattr(engine, spec.memory) for ratio in HOST_BLOCK_RATIOS)
    if knob != spec.drafts and ("tokens" in knob or knob.endswith("_token_threshold")):
        return TOKEN_LIMIT_CANDIDATES
    return LIMIT_CANDIDATES


def has_no_effect(scenario: Scenario, change: Change) -> bool:
    """Return whether a change cannot have an effect, because the scenario does not use the setting.

    Without ``hardware``, step durations do not depend on settings. Settings of LoRA adapters have
    no effect if the engine does not support adapters. Settings of draft tokens have no effect if
    the engine drafts no tokens.
    """
    engine, spec = scenario.engine, find_engine_spec(scenario.engine)
    if change.kind != "knob" or scenario.hardware or scenario.fleet:
        return False
    off: list[str] = list(spec.cost_knobs)
    if spec.lora and not getattr(engine, spec.lora):
        off += spec.lora_knobs
    if spec.drafts and not getattr(engine, spec.drafts):
        off += spec.draft_knobs
    return change.field in off


def _others(kind: Any, value: Any, limits: tuple[int, ...]) -> tuple[Any, ...]:
    """Return other values for a setting: toggled, halved, doubled, enabled or disabled.

    ``limits`` contains the values for a setting that is 0, off or without a limit.
    """
    if get_origin(kind) is Literal:
        return get_args(kind)
    if value is None and get_args(kind):
        return _values_of_unset([one for one in get_args(kind) if one is not type(None)], limits)
    if kind is bool or bool in get_args(kind):
        return (True, False)
    if isinstance(value, str | tuple):
        return ()
    if isinstance(value, int) and value <= 0:
        return limits
    if value == 0:
        return SHARE_CANDIDATES
    halved = max(value // 2, 1) if isinstance(value, int) else value / 2
    doubled = 1.0 if 0.5 < value < 1 else value * 2  # the maximum of a fraction is 1
    return (halved, doubled, *((None,) if type(None) in get_args(kind) else ()))


def _values_of_unset(kinds: Sequence[Any], limits: tuple[int, ...]) -> tuple[Any, ...]:
    """Return values for a setting that is not set, based on its possible types."""
    found: list[Any] = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            found += get_args(kind)
        elif kind is not str:
            found += {
                bool: (True, False),
                int: limits,
                float: CHOSEN_SHARE_CANDIDATES,
            }.get(kind, ())
    return tuple(found)


def _same_memory(engine: EngineConfig, knob: str, value: int) -> dict[str, int]:
    """If the setting ``knob`` is the block size, return the number of blocks that keeps the
    capacity of the cache in tokens.

    The result is a mapping of setting names to values; it is empty for any other setting.
    """
    spec = find_engine_spec(engine)
    if knob != spec.block or spec.memory_in_tokens:
        return {}
    tokens = getattr(engine, spec.memory) * spec.block_size(engine)
    return {spec.memory: tokens // value}


def _word(value: Any) -> str:
    if value is None:
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
