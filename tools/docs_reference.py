"""Write the reference pages of the site: ``python tools/docs_reference.py docs/reference``.

Commands come from the command-line parser, fields and settings from the schema and their
descriptions, metrics from their registry, and functions from their docstrings.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

import simkv
from simkv.cli import app, plan
from simkv.core.engine_flags import sources
from simkv.core.field_docs import read_field_docs
from simkv.core.figure_registry import FLEET_METRICS, METRICS
from simkv.scenario.scenario_schema import json_schema
from simkv.schedulers.engine_registry import ENGINES

NOTE = "<!-- Generated from the code by tools/docs_reference.py; do not edit. -->\n"


def pages() -> dict[str, str]:
    """Return the text of each page by file name."""
    return {
        "commands.md": commands(),
        "scenario.md": scenario(),
        "knobs.md": knobs(),
        "figures.md": figures(),
        "python.md": python(),
    }


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(_cell(one) for one in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def commands() -> str:
    """Return the page of commands with their arguments and options."""
    plan.select_options(all_of_them=True)
    parts = [NOTE, "# Commands\n\n", "`simkv COMMAND --help` prints the same text.\n"]
    for name, command in walk_commands(typer.main.get_command(app)):
        parts.append(f"\n## simkv {name}\n\n{_markdown(command.help or '')}\n\n")
        rows = [row for param in command.params if (row := _param(param))]
        if rows:
            parts.append(table(("argument or option", "description", "default"), rows))
    return "".join(parts)


def walk_commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each command of a group and its subgroups with its full name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from walk_commands(command, f"{before}{name} ")
        else:
            yield before + name, command


def _param(param: Any) -> tuple[str, str, str] | None:
    if "--help" in param.opts:
        return None
    if param.param_type_name == "argument":
        name = f"`{(param.metavar or param.name).strip('{}').upper()}`"
    else:
        value = "" if param.is_flag else f" {param.metavar or _kind(param)}"
        name = ", ".join(f"`{one}{value}`" for one in [*param.opts, *param.secondary_opts])
    default = param.default
    empty = default is None or default in ((), "") or callable(default)
    shown = "required" if param.required else "" if empty else f"`{_value(default)}`"
    return name, param.help or "", shown


def _kind(param: Any) -> str:
    """Return the placeholder for the value of an option."""
    kind = param.type_descriptor.annotation
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {Path: "PATH", int: "N", float: "X"}.get(kind, "TEXT")


def scenario() -> str:
    """Return the page of scenario fields, without the engines' settings."""
    schema = json_schema()
    configs = {spec.config.__name__ for spec in ENGINES.values()}
    parts = [
        NOTE,
        "# Scenario fields\n\n",
        "This page lists every field of a scenario file. [Scenario files](../scenario.md), "
        "[Workloads](../workloads.md) and [Fleets](../fleets.md) explain them with examples. "
        "[Engine settings](knobs.md) lists the fields of `engine`.\n",
    ]
    for path, section in _sections(schema):
        if section.get("title") in configs:
            continue
        parts.append(f"\n## {path}\n\n{_markdown(section.get('description', ''))}\n\n")
        rows = [
            (
                f"`{name}`",
                field["description"],
                _type(field, schema["$defs"]),
                _default(name, field, section),
            )
            for name, field in section["properties"].items()
            if "const" not in field
        ]
        if rows:
            parts.append(table(("field", "description", "value", "default"), rows))
    return "".join(parts)


def _sections(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each section of the schema with the first path to it."""
    seen, queue = set[str](), [("the file", "", schema)]
    while queue:
        path, below, section = queue.pop(0)
        yield path, section
        for name, field in section.get("properties", {}).items():
            for reference in _references(field):
                target = schema["$defs"][reference]
                if reference in seen or "properties" not in target:
                    continue
                seen.add(reference)
                place = "expect.FIGURE" if reference == "Bound" else f"{below}{name}"
                consts = [f["const"] for f in target["properties"].values() if "const" in f]
                shown = f"{place}: {consts[0]}" if consts else place
                queue.append((shown, f"{place}.", target))


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if "$ref" in node and not node["$ref"].startswith("#/$defs/Part"):
            yield node["$ref"].rsplit("/", 1)[1]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def knobs() -> str:
    """Return the page of engine settings."""
    parts = [
        NOTE,
        "# Engine settings\n\n",
        "Fields of the `engine` section of a scenario, under the engine's own names. The column "
        "*variants* lists the variants that support a setting; others reject or ignore it. "
        "`simkv policies` lists the source of each variant.\n",
    ]
    schema = json_schema()["$defs"]
    for engine, spec in ENGINES.items():
        section = schema[spec.config.__name__]
        texts, origins = read_field_docs(spec.config), sources(spec.config)
        rows = [
            (
                f"`{field.name}`",
                texts[field.name],
                _or([f"`{name}`" for name in spec.variants])
                if field.name == "variant"
                else _type(section["properties"][field.name], schema),
                _default(field.name, section["properties"][field.name], section),
                _having(engine, field.name),
                str(origins[field.name]),
            )
            for field in fields(spec.config)
            if field.name != "name"
        ]
        parts.append(f"\n## {engine}\n\n{_markdown(section.get('description', ''))}\n\n")
        parts.append(
            table(("setting", "description", "value", "default", "variants", "source"), rows)
        )
    return "".join(parts)


def _having(engine: str, knob: str) -> str:
    """Return the variants that support a knob: ``all``, ``from 0.26.0 on``, ``all but seed``."""
    spec = ENGINES[engine]
    having = [name for name in spec.variants if knob not in spec.lacks.get(name, ())]
    lacking = [name for name in spec.variants if name not in having]
    if not lacking:
        return "all"
    releases = sorted(filter(_RELEASE.fullmatch, spec.variants), key=_number)
    without = [name for name in releases if name in lacking]
    if without and len(without) < len(releases) and without == releases[: len(without)]:
        named = [name for name in lacking if name not in releases]
        return f"from {releases[len(without)]} on" + "".join(f", not {name}" for name in named)
    short = having if len(having) <= len(lacking) else lacking
    return ("" if short is having else "all but ") + ", ".join(short)


_RELEASE = re.compile(r"[0-9]+(\.[0-9]+)+")


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def figures() -> str:
    """Return the page of metrics in ``summary.json``."""
    rows = [
        (
            f"`{one.key}`",
            one.label,
            one.unit or "number",
            "higher" if one.more_is_better else "lower",
            one.description,
        )
        for one in [*METRICS.values(), *FLEET_METRICS.values()]
    ]
    return (
        f"{NOTE}# Metrics\n\nMetrics of a variant in `summary.json`. Use the same names in "
        "`expect`, `--slo`, `--plot` and `--pareto`. Metrics of `fleet` exist only for fleets.\n\n"
        + table(("figure", "name", "unit", "better", "note"), rows)
    )


def python() -> str:
    """Return the page of public Python names."""
    parts = [NOTE, "# Python\n\n```python\nimport simkv\n```\n"]
    for name in simkv.__all__:
        one = getattr(simkv, name)
        if name.startswith("__"):
            continue
        parts.append(f"\n## simkv.{name}\n\n")
        if inspect.isfunction(one):
            parts.append(f"```python\n{_signature(name, one)}\n```\n\n")
        parts.append(f"{_markdown(inspect.getdoc(one) or '')}\n")
    parts.append("\n## Return types\n")
    for name in ("RunOutcome", "Plans"):
        kind = getattr(sys.modules["simkv.api"], name)
        parts.append(f"\n### {name}\n\n{_markdown(inspect.getdoc(kind) or '')}\n\n")
        members = [
            (f"`{key}`", (inspect.getdoc(member) or "").partition("\n\n")[0])
            for key, member in vars(kind).items()
            if not key.startswith("_") and inspect.getdoc(member)
        ]
        parts.append(table(("member", "description"), members))
    return "".join(parts)


def _signature(name: str, function: Any) -> str:
    parameters = list(inspect.signature(function).parameters.values())
    shown = [str(one.replace(annotation=inspect.Parameter.empty)) for one in parameters]
    kinds = [one.kind for one in parameters]
    if (only := inspect.Parameter.KEYWORD_ONLY) in kinds and (
        inspect.Parameter.VAR_POSITIONAL not in kinds
    ):
        shown.insert(kinds.index(only), "*")
    whole = f"simkv.{name}({', '.join(shown)})"
    return whole if len(whole) < 90 else f"simkv.{name}(\n    " + ",\n    ".join(shown) + ",\n)"


def _type(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Describe the valid values: ``number from 0 to 1``, ``fcfs or priority``, ``mapping``."""
    if "$ref" in field:
        return _type(definitions[field["$ref"].rsplit("/", 1)[1]], definitions)
    if "enum" in field:
        return _or([f"`{_value(one)}`" for one in field["enum"]])
    if "const" in field:
        return f"`{field['const']}`"
    if options := field.get("anyOf") or field.get("oneOf"):
        kinds = [_type(one, definitions) for one in options if one.get("type") != "null"]
        return _or(list(dict.fromkeys(kinds)))
    kind = {
        "integer": "whole number",
        "number": "number",
        "boolean": "`true` or `false`",
        "string": "text",
        "array": "list",
        "object": "mapping",
    }.get(field.get("type", ""), "mapping")
    bounds = [
        f"{word} {field[key]:,}"
        for key, word in (
            ("minimum", "from"),
            ("exclusiveMinimum", "above"),
            ("maximum", "to"),
            ("exclusiveMaximum", "below"),
        )
        if key in field
    ]
    return " ".join([kind, *bounds])


def _or(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _default(name: str, field: Mapping[str, Any], section: Mapping[str, Any]) -> str:
    if name in section.get("required", ()):
        return "required"
    default = field.get("default")
    if isinstance(default, dict):  # A section; its own fields have defaults.
        default = default.get("name")
    return "" if default in (None, [], "") else f"`{_value(default)}`"


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _markdown(text: str) -> str:
    """Return a docstring as Markdown, with single instead of double backticks."""
    return re.sub(r"``([^`]+)``", r"`\1`", inspect.cleandoc(text))


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
