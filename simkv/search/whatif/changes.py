"""The changes that a what-if tries: one rule, one knob, or another variant, at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from simkv.core.errors import InputError
from simkv.scenario.engine import EngineConfig
from simkv.scenario.scenario import Scenario
from simkv.schedulers import variants
from simkv.schedulers.mistralrs import scheduler as mistralrs
from simkv.search.whatif.evaluate import Case, with_knobs
from simkv.search.whatif.shrink import MEMORY

Kind = Literal["rule", "knob", "variant", "memory"]
#: What is tried in place of a knob that is at 0, off or without a limit.
INSTEAD_OF_NOTHING = (1, 4, 16, 64, 256)
INSTEAD_OF_NO_SHARE = (0.01, 0.1, 0.5)


@dataclass(frozen=True)
class Change:
    """One change: ``field`` has the value ``after`` and not ``before``.

    A ``rule`` is one field of mistral.rs's ``Rules``, a ``knob`` one of the engine's config, and
    ``memory`` a knob that makes the cache larger or smaller, which is no change of the engine.
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
    for knob, values in _knobs(scenario.engine):
        before = getattr(scenario.engine, knob)
        for value in values:
            kind: Kind = "memory" if knob in MEMORY else "knob"
            values_now = {knob: value}
            if knob == "block_size":
                values_now |= _same_memory(scenario.engine, value)
            yield Change(kind, knob, before, value), _case(scenario, values_now)


def _case(scenario: Scenario, values: dict[str, Any]) -> Case | InputError:
    try:
        return Case(with_knobs(scenario, **values))
    except InputError as error:
        return error


def _variants(scenario: Scenario) -> Iterator[tuple[Change, Case | InputError]]:
    before = scenario.engine.variant
    for name in variants(scenario.engine.name):
        if name != before:
            change = Change("variant", "variant", before, name)
            yield change, _case(scenario, {"variant": name})


def _rules(scenario: Scenario) -> Iterator[tuple[Change, Case]]:
    """Single rules of mistral.rs, as far as the variant goes by them."""
    engine = scenario.engine
    if not isinstance(engine, mistralrs.MistralrsConfig) or engine.variant not in mistralrs.RULES:
        return
    rules = mistralrs.RULES[engine.variant]
    hints = get_type_hints(mistralrs.Rules)
    for rule in fields(rules):
        if engine.variant == "pr2034july" and rule.name not in mistralrs.JULY_RULES:
            continue
        before = getattr(rules, rule.name)
        options = (True, False) if hints[rule.name] is bool else get_args(hints[rule.name])
        for after in options:
            if after != before:
                changed = replace(rules, **{rule.name: after})
                yield Change("rule", rule.name, before, after), Case(scenario, changed)


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


def _same_memory(engine: EngineConfig, block_size: int) -> dict[str, int]:
    """As many blocks of another size as hold as many tokens."""
    for name in MEMORY[:2]:
        if hasattr(engine, name):
            tokens = getattr(engine, name) * getattr(engine, "block_size", 1)
            return {name: tokens // block_size}
    return {}


def _word(value: Any) -> str:
    if value is None:
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
