"""Write scenarios to a file that reproduces the same runs."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from simkv.scenario.launch_defaults import EngineSettings, FieldPath
from simkv.scenario.run_fields import (
    ABOUT_FIELDS,
    RUN_FIELDS,
    find_custom_sources,
    find_profiles,
)
from simkv.scenario.scenario import Scenario
from simkv.workload.workload_section import find_other_form_fields

#: Fields that the file must have even if variants set them.
REQUIRED_FIELDS = tuple(
    name for name, field in Scenario.model_fields.items() if field.is_required()
)


def to_yaml(scenarios: Mapping[str, Scenario]) -> str:
    """Return the text of a scenario file with the given variants.

    A comment marks each setting that an engine's launcher chose.
    """
    tree = build_resolved_scenario(scenarios)
    for number, (name, scenario) in enumerate(scenarios.items()):
        for place, settings in scenario.origins.sections.items():
            below = tree["variants"][name]
            for at in (below, tree) if number == 0 else (below,):
                _mark(at, place, settings)
    text = StringIO()
    YAML().dump(tree, text)
    return text.getvalue()


def _mark(tree: dict[str, Any], place: FieldPath, settings: EngineSettings) -> None:
    """Add a comment to each setting that the launcher chose in the engine section at ``place``, if
    any.
    """
    node: Any = tree
    for key in place[:-1]:
        node = _child(node, key)
    section = _child(node, place[-1])
    if not isinstance(section, dict):
        return
    marked = CommentedMap(section)
    for name in settings.default:
        if name in marked:
            marked.yaml_add_eol_comment(settings.source, name)
    node[place[-1]] = marked


def _child(node: Any, key: str | int) -> Any:
    if isinstance(node, list) and isinstance(key, int):
        return node[key] if key < len(node) else None
    return node.get(key) if isinstance(node, dict) else None


def build_resolved_scenario(scenarios: Mapping[str, Scenario]) -> dict[str, Any]:
    """Build a scenario file that reproduces the given runs, with overrides and engine defaults
    applied.

    Values that all variants share are written once at the top level. Profiles and custom schedulers
    must be in the directory of the scenario file.
    """
    trees = {name: _tree(scenario) for name, scenario in scenarios.items()}
    first, *others = trees.values()
    base = {
        field: value
        for field, value in first.items()
        if field in (*RUN_FIELDS, *REQUIRED_FIELDS)
        or all(field in o and o[field] == value for o in others)
    }
    variants = {}
    for name, tree in trees.items():
        own = {k: value for k, value in tree.items() if k not in base or base[k] != value}
        if "workload" in own:
            whole = scenarios[name].workload.model_dump()
            own["workload"] = _cover(base["workload"], own["workload"], whole)
        variants[name] = own
    return {**base, "variants": variants}


def _tree(scenario: Scenario) -> dict[str, Any]:
    """Return a scenario as plain data, with the defaults of the fields that determine its run.

    Defaults of the workload are left out, because they are invalid for other kinds of workload.
    """
    short = {"workload", *ABOUT_FIELDS}
    tree = scenario.model_dump(exclude=short)
    tree |= scenario.model_dump(include=short, exclude_defaults=True)
    if scenario.workload.trace is not None:
        tree["workload"]["trace"] = str(scenario.workload.path.resolve())
    files = {path: source.path for path, source in find_custom_sources(scenario).items()}
    for path, file in (find_profiles(scenario) | files).items():
        node: Any = tree
        for key in path[:-1]:
            node = node[key]
        if node.get(path[-1]) is not None:
            node[path[-1]] = Path(file).name
    return {name: tree[name] for name in Scenario.model_fields if name in tree}


def _cover(base: Any, given: Any, full: Any) -> Any:
    """Return ``given``, completed with the defaults of the fields that ``base`` sets."""
    if not isinstance(base, dict) or not isinstance(given, dict):
        return given
    gone = find_other_form_fields(given)
    covered = {k: full[k] for k in base if k not in given and k in full and k not in gone}
    return {k: _cover(base.get(k), value, full[k]) for k, value in given.items()} | covered
