"""Change a field of a loaded scenario, given its path as in ``--set``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from simkv.core.errors import InputError, simplify_pydantic_message, spelling_hint
from simkv.scenario.launch_defaults import resolve_defaults
from simkv.scenario.run_fields import RUN_FIELDS
from simkv.scenario.scenario import Scenario


def with_knobs(scenario: Scenario, folder: Path | None = None, /, **knobs: Any) -> Scenario:
    """Return the scenario with some engine settings changed.

    Paths of profiles and traces are relative to ``folder``. Raises InputError if a value is
    invalid.
    """
    engine = {**asdict(scenario.engine), **knobs}
    return _with(scenario, "engine", engine, folder or Path())


class NoSuchField(InputError):
    """Raised if a path names a field that the scenario does not have."""


def with_field(scenario: Scenario, path: str, value: Any, folder: Path) -> Scenario:
    """Return the scenario with the field at ``path``, such as ``workload.burst.num_prompts``,
    changed.

    Raises NoSuchField if there is no such field. Raises InputError if the value is invalid.
    """
    head, *rest = path.split(".")
    if head not in RUN_FIELDS:
        raise NoSuchField(
            f"unknown field {head!r}{spelling_hint(head, RUN_FIELDS)}; {_one_of(RUN_FIELDS)}"
        )
    if not rest:
        return _with(scenario, head, value, folder)
    present = getattr(scenario, head)
    known_here, fields = _plain(present), _plain(present, only_set=True)
    node = fields
    for depth, key in enumerate(rest):
        here = ".".join([head, *rest[:depth]])
        names = _names(known_here)
        if key not in names:
            what = _one_of(names) if names else "it has no fields"
            raise NoSuchField(f"{here} has no field {key!r}{spelling_hint(key, names)}; {what}")
        place = int(key) if isinstance(node, list) else key
        known_here = known_here[place]
        if depth == len(rest) - 1:
            node[place] = value
        elif isinstance(node, dict):
            node = node.setdefault(place, {})
        else:
            node = node[place]
    return _with(scenario, head, fields, folder)


def _names(node: Any) -> list[str]:
    if isinstance(node, list):
        return [str(index) for index in range(len(node))]
    return list(node) if isinstance(node, dict) else []


def _one_of(names: Sequence[str]) -> str:
    shown = ", ".join(names[:30])
    return f"expected one of {shown}" + (", …" if len(names) > 30 else "")


def _plain(value: Any, *, only_set: bool = False) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=only_set)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _with(scenario: Scenario, name: str, value: Any, folder: Path) -> Scenario:
    """Return the validated scenario with a top-level field changed.

    If the hardware changes, the engine's defaults are computed again.
    """
    fields = {other: getattr(scenario, other) for other in Scenario.model_fields}
    if name != "engine":
        fields["engine"] = asdict(scenario.engine)
    fields, origins = {**fields, name: value}, scenario.origins
    try:
        if name == "hardware" and origins.engine:
            for chosen in origins.engine.default:
                del fields["engine"][chosen]
            fields, origins = resolve_defaults(fields, folder)
        changed = Scenario.model_validate(fields, context={"folder": folder})
        return changed.with_origins(origins)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        raise InputError(simplify_pydantic_message(message)) from error
