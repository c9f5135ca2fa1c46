"""Load scenario files: YAML to validated, typed scenarios, with the location of every error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from simkv.core.errors import InputError, spelling_hint
from simkv.scenario.launch_defaults import UnknownSetting, resolve_defaults
from simkv.scenario.native_engine import SourceError, resolve_sources
from simkv.scenario.overrides import merge, replace_form
from simkv.scenario.plan_section import PlanSection
from simkv.scenario.scenario import Scenario, ScenarioFile
from simkv.scenario.scenario_costs import list_replica_costs
from simkv.scenario.validation_messages import find_location, format_messages
from simkv.scenario.yaml_document import YamlDocument, read_document


def load(path: Path, overrides: Sequence[str] = ()) -> dict[str, Scenario]:
    """Return the variants of a scenario file by name. A file without variants has one, ``run``.

    ``overrides`` are assignments of the form ``path=value``, applied to the file before its
    variants. Raises InputError with the file, line and field of each error.
    """
    return resolve_variants(read_document(path), overrides)


def resolve_variants(
    document: YamlDocument,
    overrides: Sequence[str] = (),
    knobs: Sequence[str] = (),
    option: str = "--over",
) -> dict[str, Scenario]:
    """Return the variants of a scenario file that has been read.

    ``overrides`` are assignments as in ``load``. ``knobs`` are assignments from the command-line
    option ``option``, which are applied after ``overrides``.
    """
    for name, assignments in (("--set", overrides), (option, knobs)):
        for assignment in assignments:
            document.override(assignment, name)
            replace_form(document, assignment)
    # A file with variants may be incomplete, because each variant completes it.
    _check(document, document.tree, ScenarioFile, incomplete=bool(document.tree.get("variants")))
    base = {k: value for k, value in document.tree.items() if k in Scenario.model_fields}
    variants = document.tree.get("variants") or {"run": {}}
    scenarios: dict[str, Scenario] = {
        str(name): _check(document, merge(base, override), Scenario, ("variants", str(name)))
        for name, override in variants.items()
    }
    _check_costs(document, scenarios)
    _check_variants(document, scenarios)
    _check_requests(document, scenarios)
    return scenarios


def list_variant_names(document: YamlDocument) -> list[str]:
    """Return the names of the variants in a scenario file. The file may be invalid."""
    found = document.tree.get("variants")
    return [str(name) for name in found] if isinstance(found, dict) and found else ["run"]


def select_variant(document: YamlDocument, name: str) -> None:
    """Remove all variants except ``name`` from a scenario file. The file may be invalid."""
    for section in ("variants", "expect", "published"):
        found = document.tree.get(section)
        if isinstance(found, dict) and "variants" in document.tree:
            document.tree[section] = {key: found[key] for key in found if str(key) == name}


def variant_names(document: YamlDocument, overrides: Sequence[str] = ()) -> list[str]:
    """Return the names of the variants in a scenario file. Engine settings may be missing.

    Raises InputError for all other errors.
    """
    try:
        return list(resolve_variants(document, overrides))
    except UnknownSetting:
        return [str(name) for name in document.tree.get("variants") or ("run",)]


def read_plan_section(document: YamlDocument) -> PlanSection:
    """Return the ``plan`` section of a scenario file. Raises InputError if it is invalid."""
    checked: ScenarioFile = _check(document, document.tree, ScenarioFile, incomplete=True)
    return checked.plan or PlanSection()


def _check_costs(document: YamlDocument, scenarios: Mapping[str, Scenario]) -> None:
    """Raise InputError if a cost profile is missing or invalid, or if the hardware is invalid."""
    for name, scenario in scenarios.items():
        for field, costs in list_replica_costs(scenario):
            try:
                costs.check(document.path.parent)
            except InputError as error:
                own = ("variants", name, *field)
                location = own if find_location(document.tree, own) else field
                raise InputError(f"{document.place(location)}: {error}") from error


def _check_variants(document: YamlDocument, scenarios: Mapping[str, Scenario]) -> None:
    """Raise InputError if ``published`` or ``expect`` names an unknown variant."""
    named = [
        (field, name)
        for field in ("published", "expect")
        for scenario in scenarios.values()
        for name in getattr(scenario, field)
    ]
    for field, name in named:
        if name not in scenarios:
            raise InputError(
                f"{document.place((field, name))}: {field}.{name}: unknown variant"
                f"{spelling_hint(name, scenarios)}; expected one of {', '.join(scenarios)}"
            )


def _check_requests(document: YamlDocument, scenarios: Mapping[str, Scenario]) -> None:
    """Raise InputError if ``expect`` names an unknown request."""
    for scenario in scenarios.values():
        for name, expected in scenario.expect.items():
            size = scenarios[name].workload.size
            for number in expected.request:
                if number >= size:
                    place = document.place(("expect", name, "request", number))
                    raise InputError(
                        f"{place}: expect.{name}.request.{number}: this request does not exist; "
                        f"expected an id from 0 to {size - 1}"
                    )


def _check(
    document: YamlDocument,
    data: Any,
    model: type[Scenario],
    prefix: tuple[str, ...] = (),
    *,
    incomplete: bool = False,
) -> Any:
    folder = document.path.parent
    try:
        plain = _plain(data)
        resolve_sources(plain, folder)
        whole, origins = resolve_defaults(plain, folder, incomplete=incomplete)
        return model.model_validate(whole, context={"folder": folder}).with_origins(origins)
    except SourceError as error:
        raise InputError(f"{document.place(('engine', 'source'))}: engine.{error}") from error
    except UnknownSetting as error:
        own = (*prefix, *error.field)
        place = document.place(own if find_location(document.tree, own) else error.field)
        why = f"{place}: {'.'.join(map(str, error.field))}: {error}"
        raise UnknownSetting(error.field, why) from error
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise InputError("\n".join(format_messages(document, data, details, prefix))) from error


def _plain(node: Any) -> Any:
    """Return the data with plain Python types instead of the types of the YAML reader."""
    if isinstance(node, dict):
        return {_scalar(key): _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    return _scalar(node)


def _scalar(value: Any) -> Any:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value
