"""Fields that a variant sets itself, so that what is set for all variants does not reach it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from simkv.scenario.document import Document, find_key
from simkv.scenario.merge import merge

_MARK = "set for all variants"


def overruling(document: Document, path: str) -> dict[str, Any]:
    """The variants that set the field at ``path`` themselves, or all around it: to what.

    None stands for the default of another engine, workload or router that a variant chooses.
    """
    keys = path.split(".")
    if keys[0] == "variants":
        return {}
    marked = Document(document.path, deepcopy(document.tree))
    marked.override(f"{path}={_MARK}")
    found = {}
    for name, override in (marked.tree.get("variants") or {}).items():
        value = merge({keys[0]: marked.tree[keys[0]]}, override)
        for key in keys:
            there = find_key(value, key)
            value = None if there is None else value[there]
        if value != _MARK:
            found[str(name)] = value
    return found


def notes_on_overruled(
    document: Document, assignments: Sequence[str], option: str = "--set"
) -> list[str]:
    """A sentence for each of the ``assignments`` that does not reach some variant."""
    notes = []
    for assignment in assignments:
        path = assignment.partition("=")[0].strip()
        for name, value in overruling(document, path).items():
            shown = "its default" if value is None else f"to {value}"
            notes.append(
                f"{option} {assignment}: does not reach variant {name}, which sets {path} itself, "
                f"{shown}"
            )
    return notes
