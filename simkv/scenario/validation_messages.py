"""Error messages for invalid scenario files: one line per error, with its location."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

from simkv.core.errors import simplify_pydantic_message, spelling_hint
from simkv.scenario.scenario_schema import known_fields
from simkv.scenario.yaml_document import YamlDocument, find_key

#: Pydantic errors about a missing or unknown field.
FIELD_NAME_ERRORS = (
    "neither",
    "missing",
    "missing_argument",
    "extra_forbidden",
    "unexpected_keyword_argument",
)


def format_messages(
    document: YamlDocument, data: Any, details: list[ErrorDetails], prefix: tuple[str, ...]
) -> list[str]:
    """Return one line per error: ``file:line: field: problem; expected value``.

    Errors at the same location share one line.
    """
    lines: dict[str, str] = {}
    for detail in details:
        location = _location(data, detail["loc"], detail["type"] in FIELD_NAME_ERRORS)
        if discriminator := detail.get("ctx", {}).get("discriminator"):
            name = discriminator.strip("'")
            location.append("distribution" if name.endswith("()") else name)
        place = document.place((*prefix, *location))
        if prefix and find_location(document.tree, (*prefix, *location)) is None:
            place = document.place(location)
        field = ".".join(str(part) for part in location) or "scenario"
        variant = f" (variant {prefix[1]})" if prefix else ""
        lines.setdefault(field, f"{place}: {field}{variant}: {_explain(detail, location, data)}")
    return list(lines.values())


def find_location(tree: Any, location: Sequence[str | int]) -> Any:
    node = tree
    for part in location:
        key = find_key(node, part)
        if key is None:
            return None
        node = node[key]
    return location


def _location(data: Any, loc: tuple[str | int, ...], names_a_field: bool) -> list[str | int]:
    """Return pydantic's location of an error without parts that do not exist in the file.

    With ``names_a_field``, the last part is the name of a field, which may be missing in the file.
    """
    location: list[str | int] = []
    node = data
    for index, part in enumerate(loc):
        key = find_key(node, part)
        if key is not None:
            location.append(part)
            node = node[key]
        elif names_a_field and index == len(loc) - 1:
            location.append(part)
    return location


def _explain(detail: ErrorDetails, location: list[str | int], data: Any) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    found = context.get("tag", detail.get("input"))
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        known = known_fields(location[:-1], data)
        if location[-1] in known_fields(location[:-2], data) and len(location) > 2:
            return f"this field belongs one level higher, in {'.'.join(map(str, location[:-2]))}"
        return (
            f"unknown field{spelling_hint(str(location[-1]), known)}; expected one of "
            f"{', '.join(known)}"
        )
    if kind in ("missing", "missing_argument", "union_tag_not_found"):
        return "missing; this field is required"
    if kind in ("value_error", "assertion_error", "neither", "own"):
        return re.sub(r"^(Value error|Assertion failed), ", "", detail["msg"])
    if kind in ("union_tag_invalid", "literal_error"):
        known = re.findall(r"'([^']*)'", str(context.get("expected", context.get("expected_tags"))))
        if location[-1] == "distribution":  # this excludes plain numbers
            known = [name for name in known if name != "number"]
            if find_key(detail.get("input"), "distribution") is None:
                return f"missing; expected one of {', '.join(known)}"
        hint = spelling_hint(str(found), known)
        return f"unknown value {found!r}{hint}; expected {', '.join(known)}"
    if kind == "string_type" and isinstance(found, int | float):
        return f"YAML reads {found} as a number; put it in quotes"
    message = simplify_pydantic_message(detail["msg"])
    shown = type(found).__name__ if isinstance(found, dict | list) else repr(found)
    return f"{message}; found {shown if len(shown) <= 60 else shown[:57] + '...'}"
