"""Detect fields that variants override."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from simkv.scenario.overrides import merge
from simkv.scenario.yaml_document import YamlDocument, find_key

_MARK = "set for all variants"


def find_overriding_variants(document: YamlDocument, path: str) -> dict[str, Any]:
    """Return the variants that override the field at ``path`` or its parents, with their values.

    The value is None if the variant replaces a parent without setting the field.
    """
    keys = path.split(".")
    if keys[0] == "variants":
        return {}
    marked = YamlDocument(document.path, deepcopy(document.tree))
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


def override_notes(
    document: YamlDocument, assignments: Sequence[str], option: str = "--set"
) -> list[str]:
    """Return a sentence for each assignment that a variant overrides."""
    notes = []
    for assignment in assignments:
        path = assignment.partition("=")[0].strip()
        for name, value in find_overriding_variants(document, path).items():
            shown = "its default" if value is None else f"to {value}"
            notes.append(
                f"{option} {assignment}: does not affect variant {name}, which sets {path} itself, "
                f"{shown}"
            )
    return notes
