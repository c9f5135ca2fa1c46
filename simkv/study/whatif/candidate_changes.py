"""The changes that a what-if tries: one rule, one knob, or another variant, at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

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
#: What is tried in place of a knob that is at 0, off or without a limit.
LIMIT_CANDIDATES = (1, 4, 16, 64, 256)
SHARE_CANDIDATES = (0.01, 0.1, 0.5)


@dataclass(frozen=True)
class Change:
    """One change: ``field`` has the value ``after`` and not ``before``.

    A ``rule`` is one field of the variant's rules (see ``EngineSpec``), a ``knob`` one of the
    engine's config, and ``memory`` the knob that makes the cache larger or smaller, which is no
    change of the engine.
    """

    kind: ChangeKind
    field: str
    before: Any
    after: Any

    @property
    def limits(self) -> bool:
        """Whether it is one of several limits on what has none, or is off."""
        among = type(self.after) is int and self.after in LIMIT_CANDIDATES
        return among and not self.before and self.kind != "rule"

    def __str__(self) -> str:
        same = ", in the same memory" if self.field == "block_size" else ""
        return f"{self.field}: {_word(self.before)} -> {_word(self.after)}{same}"


def generate_changes(
    scenario: Scenario, folder: Path, wanted: Callable[[Change], bool] = lambda _: True
) -> Iterator[tuple[Change, SimulationJob | InputError]]:
    """Every change that is ``wanted`` with its job, or with why the engine refuses it.

    Nothing but the engine is changed, for what it is given is no remedy. Files lie beside
    ``folder``.
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
    """The scenario with a change that is no rule. Raises InputError if the engine refuses it."""
    values = {change.field: change.after}
    values |= _same_memory(scenario.engine, change.field, change.after)
    return with_knobs(scenario, folder, **values)


def _knob_changes(scenario: Scenario) -> Iterator[Change]:
    """Other variants, then other knobs."""
    engine = scenario.engine
    spec = find_engine_spec(engine)
    for name in spec.distinct_variants:
        if name != spec.naming.like(engine.variant):
            yield Change("variant", "variant", engine.variant, name)
    kept = {"name", "variant", *_given(scenario)}
    for knob, values in _knobs(engine, kept):
        if knob == spec.longest:
            values = (*values, *(v for v in _admitting(scenario) if v not in values))
        for value in values:
            kind: ChangeKind = "memory" if knob == spec.memory else "knob"
            yield Change(kind, knob, getattr(engine, knob), value)


def _too_long(scenario: Scenario) -> list[Request]:
    """The requests whose prompts are beyond a limit of the engine."""
    engine, spec = scenario.engine, find_engine_spec(scenario.engine)
    requests = build_clients(scenario.workload, None).requests
    return [one for one in requests if spec.too_long(engine, one.prompt_tokens)]


def length_cause(scenario: Scenario) -> str | None:
    """The limit that the longest prompt is beyond (``prompt 20,000 > max_model_len 8,192``)."""
    prompts = [request.prompt_tokens for request in _too_long(scenario)]
    engine = scenario.engine
    return find_engine_spec(engine).too_long(engine, max(prompts)) if prompts else None


def _admitting(scenario: Scenario) -> Iterator[int]:
    """The limit on sequences that admits requests which are too long and leaves them their output,
    as far as the model and the KV cache allow."""
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


def _rules(engine: EngineConfig) -> Iterator[tuple[Change, Any]]:
    """Single rules, as far as the variant goes by them."""
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
    """Knobs that the workload has decided.

    Requests that ask for adapters cannot go without, and drafts are not begun where it does not say
    that any would be accepted.
    """
    spec, workload = find_engine_spec(scenario.engine), scenario.workload
    yield spec.lora
    told = [workload.acceptance, *(row.acceptance for row in workload.requests or ())]
    if spec.drafts and not getattr(scenario.engine, spec.drafts) and not any(told):
        yield spec.drafts


def _knobs(
    engine: EngineConfig, kept: Collection[str | None]
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The knobs of an engine but the ``kept``, each with sensible other values than it has."""
    hints = get_type_hints(type(engine))
    for knob in fields(engine):
        if knob.name not in kept:
            value = getattr(engine, knob.name)
            yield knob.name, tuple(v for v in _others(hints[knob.name], value) if v != value)


def _others(kind: Any, value: Any) -> tuple[Any, ...]:
    """Toggle it, halve and double it, or switch it on or off."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    if kind is bool or bool in get_args(kind):
        return (True, False)
    if isinstance(value, str | tuple):
        return ()
    if value is None or (isinstance(value, int) and value <= 0):
        return LIMIT_CANDIDATES
    if value == 0:
        return SHARE_CANDIDATES
    halved = max(value // 2, 1) if isinstance(value, int) else value / 2
    doubled = 1.0 if 0.5 < value < 1 else value * 2  # a share ends at 1
    return (halved, doubled, *((None,) if type(None) in get_args(kind) else ()))


def _same_memory(engine: EngineConfig, knob: str, value: int) -> dict[str, int]:
    """For another size of a block, as many as hold as many tokens."""
    spec = find_engine_spec(engine)
    if knob != spec.block or spec.memory_in_tokens:
        return {}
    tokens = getattr(engine, spec.memory) * spec.block_size(engine)
    return {spec.memory: tokens // value}


def _word(value: Any) -> str:
    if value is None:
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
