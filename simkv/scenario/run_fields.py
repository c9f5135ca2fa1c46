"""Fields that determine a run, as plain data, and differences between two scenarios."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from simkv.core.engine_spec import EngineConfig
from simkv.scenario.custom.code_source import CustomCode
from simkv.scenario.custom.custom_engine import find_custom_code
from simkv.scenario.field_roles import FieldRole, find_field_names
from simkv.scenario.scenario import Scenario

#: Fields that only describe a scenario; fields of the engine's environment; and all fields that
#: determine a run, the operator's choices first.
ABOUT_FIELDS = find_field_names(Scenario, FieldRole.ABOUT)
WORLD_FIELDS = find_field_names(Scenario, FieldRole.WORLD)
RUN_FIELDS = (*find_field_names(Scenario, FieldRole.ENGINE), *WORLD_FIELDS)


def run_fields(scenario: Scenario, *, defaults: bool = True) -> dict[str, Any]:
    """Return the fields that determine a run, as plain data.

    File contents are not included. Without ``defaults``, default values are left out.
    """
    return scenario.model_dump(include=set(RUN_FIELDS), exclude_defaults=not defaults)


def find_profiles(scenario: Scenario) -> dict[tuple[str | int, ...], str]:
    """Return the cost profiles of a scenario, by path of the field."""
    groups = scenario.fleet.groups if scenario.fleet else []
    found: dict[tuple[str | int, ...], str] = {}
    if scenario.profile is not None:
        found[("profile",)] = scenario.profile
    for index, group in enumerate(groups):
        if group.profile is not None:
            found["fleet", "replicas", index, "profile"] = group.profile
    return found


def find_custom_sources(scenario: Scenario) -> dict[tuple[str | int, ...], CustomCode]:
    """Return the code of a scenario's custom schedulers, by path of the field."""
    groups = scenario.fleet.groups if scenario.fleet else []
    engines: dict[tuple[str | int, ...], EngineConfig | None] = {("engine",): scenario.engine}
    for index, group in enumerate(groups):
        engines["fleet", "replicas", index, "engine"] = group.engine
    return {
        (*path, "file"): source
        for path, engine in engines.items()
        if engine is not None and (source := find_custom_code(engine)) is not None
    }


@dataclass(frozen=True)
class FieldDifference:
    """Field with different values in two scenarios. A value is None if the field is missing."""

    field: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.field}: {_word(self.before)} → {_word(self.after)}"


def find_differences(
    before: Scenario, after: Scenario, fields: Iterable[str] = RUN_FIELDS
) -> list[FieldDifference]:
    """Return the differences between two scenarios in the given fields.

    By default, all fields that determine a run are compared. Settings that the launcher chose in
    both scenarios are left out.
    """
    chosen = _chosen(before) & _chosen(after)
    names = [name for name in fields if getattr(before, name) != getattr(after, name)]
    whole = [one.model_dump(include=set(names)) for one in (before, after)]
    short = [one.model_dump(include=set(names), exclude_defaults=True) for one in (before, after)]
    return [
        found
        for name in names
        for found in _differences(
            (name,),
            (whole[0][name], whole[1][name]),
            (short[0].get(name), short[1].get(name)),
        )
        if found.field not in chosen
    ]


def _chosen(scenario: Scenario) -> set[str]:
    """Return the paths of the settings that the launchers of the engines chose."""
    return {
        ".".join(map(str, (*place, name)))
        for place, settings in scenario.origins.sections.items()
        for name in settings.default
    }


def _differences(
    path: tuple[Any, ...], values: tuple[Any, Any], short: tuple[Any, Any]
) -> Iterator[FieldDifference]:
    """Yield the innermost fields that differ. ``short`` contains the values without defaults."""
    a, b = values
    if a == b:
        return
    keys = _keys(a, b, short)
    if not keys:
        yield FieldDifference(".".join(map(str, path)), a, b)
    for key in keys or ():
        below = _item(a, key), _item(b, key)
        yield from _differences((*path, key), below, (_item(short[0], key), _item(short[1], key)))


def _keys(a: Any, b: Any, short: tuple[Any, Any]) -> Iterable[Any] | None:
    """Return the keys to compare in two values, or None to compare the whole values."""
    if isinstance(a, dict) and isinstance(b, dict):
        return dict.fromkeys([*a, *b])
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return range(len(a))
    if a is None or b is None:
        whole, said = (b, short[1]) if a is None else (a, short[0])
        if isinstance(whole, dict):
            return [key for key in whole if key in said] if said else list(whole)
    return None


def _item(node: Any, key: Any) -> Any:
    if isinstance(node, dict):
        return node.get(key)
    return node[key] if isinstance(node, list) and len(node) > key else None


def _word(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} entries"
    return "none" if value is None else str(value)
