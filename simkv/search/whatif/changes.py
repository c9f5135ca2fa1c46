"""The changes that a what-if tries: one rule, one knob, or another variant, at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from simkv.core.engine import EngineConfig
from simkv.core.errors import InputError
from simkv.scenario.scenario import Scenario
from simkv.schedulers.registry import spec_of
from simkv.search.whatif.evaluate import Case, with_knobs

Kind = Literal["rule", "knob", "variant", "memory"]
#: What is tried in place of a knob that is at 0, off or without a limit.
INSTEAD_OF_NOTHING = (1, 4, 16, 64, 256)
INSTEAD_OF_NO_SHARE = (0.01, 0.1, 0.5)


@dataclass(frozen=True)
class Change:
    """One change: ``field`` has the value ``after`` and not ``before``.

    A ``rule`` is one field of the variant's rules (see ``EngineSpec``), a ``knob`` one of the
    engine's config, and ``memory`` the knob that makes the cache larger or smaller, which is no
    change of the engine.
    """

    kind: Kind
    field: str
    before: Any
    after: Any

    def __str__(self) -> str:
        same = ", in the same memory" if self.field == "block_size" else ""
        return f"{self.field}: {_word(self.before)} -> {_word(self.after)}{same}"


def changes(scenario: Scenario) -> Iterator[tuple[Change, Case | InputError]]:
    """Every change to try with its case, or with why the engine refuses it."""
    yield from _rules(scenario)
    yield from _variants(scenario)
    memory = spec_of(scenario.engine).memory
    for knob, values in _knobs(scenario.engine):
        before = getattr(scenario.engine, knob)
        for value in values:
            kind: Kind = "memory" if knob == memory else "knob"
            values_now = {knob: value} | _same_memory(scenario.engine, knob, value)
            yield Change(kind, knob, before, value), _case(scenario, values_now)


def _case(scenario: Scenario, values: dict[str, Any]) -> Case | InputError:
    try:
        return Case(with_knobs(scenario, **values))
    except InputError as error:
        return error


def _variants(scenario: Scenario) -> Iterator[tuple[Change, Case | InputError]]:
    before = scenario.engine.variant
    for name in spec_of(scenario.engine).variants:
        if name != before:
            change = Change("variant", "variant", before, name)
            yield change, _case(scenario, {"variant": name})


def _rules(scenario: Scenario) -> Iterator[tuple[Change, Case]]:
    """Single rules, as far as the variant goes by them."""
    variant, spec = scenario.engine.variant, spec_of(scenario.engine)
    if variant not in spec.rules:
        return
    rules = spec.rules[variant]
    hints = get_type_hints(type(rules))
    for name in spec.rules_read.get(variant, tuple(rule.name for rule in fields(rules))):
        before = getattr(rules, name)
        options = (True, False) if hints[name] is bool else get_args(hints[name])
        for after in options:
            if after != before:
                changed = replace(rules, **{name: after})
                yield Change("rule", name, before, after), Case(scenario, changed)


def _knobs(engine: EngineConfig) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The knobs of an engine, each with sensible other values than the present one."""
    hints = get_type_hints(type(engine))
    for knob in fields(engine):
        if knob.name not in ("name", "variant"):
            value = getattr(engine, knob.name)
            yield knob.name, tuple(v for v in _others(hints[knob.name], value) if v != value)


def _others(kind: Any, value: Any) -> tuple[Any, ...]:
    """Toggle it, halve and double it, or switch it on or off."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    if kind is bool or bool in get_args(kind):
        return (True, False)
    if value is None or (isinstance(value, int) and value <= 0):
        return INSTEAD_OF_NOTHING
    if value == 0:
        return INSTEAD_OF_NO_SHARE
    halved = max(value // 2, 1) if isinstance(value, int) else value / 2
    doubled = 1.0 if 0.5 < value < 1 else value * 2  # a share ends at 1
    return (halved, doubled, *((None,) if type(None) in get_args(kind) else ()))


def _same_memory(engine: EngineConfig, knob: str, value: int) -> dict[str, int]:
    """For another size of a block, as many as hold as many tokens."""
    spec = spec_of(engine)
    if knob != spec.block or spec.memory_in_tokens:
        return {}
    tokens = getattr(engine, spec.memory) * spec.block_size(engine)
    return {spec.memory: tokens // value}


def _word(value: Any) -> str:
    if value is None:
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
