"""Merging of overrides from variants or ``--set`` into a scenario."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from simkv.scenario.yaml_document import YamlDocument
from simkv.workload.workload_section import find_other_form_fields

#: Fields that select the kind of an engine, router or distribution.
TAGS = ("name", "distribution")

#: Fields that exclude each other.
EXCLUSIVE = {"profile": "hardware", "hardware": "profile"}


def merge(base: Any, override: Any) -> Any:
    """Return ``base`` with ``override`` applied. Mappings are merged by key.

    Another kind of workload, engine, router or distribution replaces the old one completely.
    Hardware replaces a profile, and a profile replaces hardware.
    """
    if not isinstance(base, dict) or not isinstance(override, dict):
        return deepcopy(override)
    result = {key: deepcopy(value) for key, value in base.items()}
    for key in find_other_form_fields(override):
        result.pop(key, None)
    for key, other in EXCLUSIVE.items():
        if key in override and other not in override:
            result.pop(other, None)
    for key, value in override.items():
        former = result.get(key)
        result[key] = merge(None if _other_kind(former, value) else former, value)
    return result


def _other_kind(former: Any, new: Any) -> bool:
    if not isinstance(former, dict) or not isinstance(new, dict):
        return False
    return any(tag in new and new[tag] != former.get(tag) for tag in TAGS)


def replace_form(document: YamlDocument, assignment: str) -> None:
    """Remove the fields of a document that an assignment replaces.

    For example, ``workload.trace=FILE`` removes other kinds of workload, and an assignment to
    ``hardware`` removes a profile.
    """
    keys = assignment.partition("=")[0].strip().split(".")
    if keys[0] in EXCLUSIVE:
        document.tree.pop(EXCLUSIVE[keys[0]], None)
    workload = document.tree.get("workload")
    if keys[0] == "workload" and len(keys) == 2 and isinstance(workload, dict):
        for key in find_other_form_fields({keys[1]: None}):
            workload.pop(key, None)
