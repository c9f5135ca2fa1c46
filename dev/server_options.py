"""Collect the options of engines' servers: ``python -m dev.server_options WHEELS ENGINE FILE``.

Reads the sources of unpacked wheels without importing them. Options are the arguments that are
added to a parser, and the fields of certain classes.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import Version

#: Files with options, and the classes whose fields are options, by engine. If no class is given,
#: all classes are used whose fields have an annotation ``A[...]``.
SOURCES = {
    "vllm": (
        ("vllm/engine/arg_utils.py", "vllm/entrypoints/**/cli_args.py"),
        ("EngineArgs", "AsyncEngineArgs", "FrontendArgs", "BaseFrontendArgs"),
    ),
    "sglang": (("sglang/srt/server_args.py", "sglang/srt/arg_groups/fields/*.py"), ()),
}
#: Options with the special spelling ``-O3``.
_LIST = re.compile(r"\b(list|List|set)\[|'?tuple\[")


def _kind(annotation: str) -> str:
    plain = re.split(r", (?:Arg\(|['\"]|NS\()", annotation.removeprefix("A["))[0]
    core = plain.replace("Optional[", "").replace("| None", "").strip(" ]'")
    if core == "bool":
        return "switch"
    return "list" if _LIST.search(plain) else "value"


def _kind_of_call(words: dict[str, str], annotation: str | None) -> str:
    action = words.get("action", "")
    if re.search("store_true|StoreTrue|StoreConst|store_const|Boolean", action):
        return "switch"
    if action == "DeprecatedAction":
        return "switch"
    if words.get("nargs") in ("'+'", "'*'"):
        return "list"
    return _kind(annotation) if annotation and not action and "nargs" not in words else "value"


#: An option: name, kind and other spellings.
Option = tuple[str, str, list[str]]


def _options(source: Path, classes: tuple[str, ...]) -> Iterator[Option]:
    """Yield the options of a file."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    found = {
        str(ast.unparse(one.target)): one.annotation
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for one in node.body
        if isinstance(one, ast.AnnAssign) and _is_option(node.name, one, classes)
    }
    fields = {name: ast.unparse(one) for name, one in found.items()}
    derived = any(text.startswith("A[") for text in fields.values())
    if derived or source.name == "cli_args.py":
        for name, text in fields.items():
            if "no_cli=True" not in text and "Callable" not in text:
                yield f"--{name.replace('_', '-')}", _kind(text), _aliases(found[name])
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
            yield from _argument(node, fields)


def _is_option(owner: str, field: ast.AnnAssign, classes: tuple[str, ...]) -> bool:
    if classes:
        return owner in classes
    return owner == "ServerArgs" or ast.unparse(field.annotation).startswith("A[")


def _aliases(annotation: ast.expr) -> list[str]:
    return [
        alias
        for part in ast.walk(annotation)
        if isinstance(part, ast.keyword) and part.arg == "aliases"
        for alias in ast.literal_eval(part.value)
    ]


def _argument(call: ast.Call, fields: dict[str, str]) -> Iterator[Option]:
    """Yield the option that a call adds to a parser."""
    names = [str(one.value) for one in call.args if isinstance(one, ast.Constant)]
    long = next((name for name in names if name.startswith("--")), None)
    words = {one.arg: ast.unparse(one.value) for one in call.keywords if one.arg}
    if long:
        kind = _kind_of_call(words, fields.get(long[2:].replace("-", "_")))
        yield long, kind, [name for name in names if name != long]


def main(
    wheels: Annotated[Path, typer.Argument(help="Directory with one unpacked wheel per release.")],
    engine: Annotated[str, typer.Argument(help="Engine: vllm or sglang.")],
    file: Annotated[Path, typer.Argument(help="JSON file to write.")],
) -> None:
    """Write the options of all releases of an engine, by kind.

    Options that are already in the file are retained. For each option that some of the wheels do
    not have, ``spans`` states the first and the last wheel that has it.
    """
    patterns, classes = SOURCES[engine]
    kinds, aliases = _read(file)
    having: dict[str, list[str]] = {}
    folders = sorted(wheels.glob(f"{engine}-*"), key=lambda path: Version(_release(path)))
    for folder in folders:
        sources = [found for pattern in patterns for found in sorted(folder.glob(pattern))]
        for source in sources:
            for name, kind, others in _options(source, classes):
                # An option that takes a value in one release and a list in another accepts both
                # forms.
                kinds[name] = kind if kinds.get(name) != "list" else "list"
                aliases |= dict.fromkeys(others, name)
                for one in (name, *others):
                    having.setdefault(one, []).append(_release(folder))
    found: dict[str, object] = {
        plural: sorted(name for name, one in kinds.items() if one == kind)
        for kind, plural in PLURALS.items()
    }
    for name in aliases.keys() & kinds.keys():
        del aliases[name]
    found["aliases"] = dict(sorted(aliases.items()))
    releases = [_release(folder) for folder in folders]
    if len(releases) > 1:
        found["releases"] = releases
        found["spans"] = {
            name: f"{having[name][0]} {having[name][-1]}"
            for name in sorted(kinds)
            if name in having and set(having[name]) != set(releases)
        }
    file.write_text(json.dumps(found, indent=1) + "\n")


#: Keys of the file by kind of option.
PLURALS = {"switch": "switches", "value": "values", "list": "lists"}


def _release(folder: Path) -> str:
    return folder.name.rpartition("-")[2]


def _read(file: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the kinds and the aliases in a file; both are empty if the file does not exist."""
    if not file.is_file():
        return {}, {}
    data = json.loads(file.read_text(encoding="utf-8"))
    kinds = {name: kind for kind, plural in PLURALS.items() for name in data[plural]}
    return kinds, dict(data["aliases"])


if __name__ == "__main__":
    typer.run(main)
