"""The import graph of a package, read from its sources without executing them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def modules(package: Path) -> dict[str, Path]:
    """Return the files of a package by dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if path.stem == "__init__" else parts)] = path
    return found


def imported(path: Path, module: str = "") -> set[str]:
    """Return the dotted names that a file imports anywhere; ``module`` is its own name.

    Imports in functions and under TYPE_CHECKING count, and ``import_module`` of a constant or of
    the constant prefix of an f-string.
    """
    package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            home = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{home}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args:
            found |= set(_by_name(node))
    return found


def _by_name(call: ast.Call) -> Iterator[str]:
    """Return the constant part of ``import_module("a.b")`` or ``import_module(f"a.b.{c}")``."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    if name not in ("import_module", "__import__"):
        return
    first = call.args[0]
    if isinstance(first, ast.JoinedStr):
        first = first.values[0]
    if isinstance(first, ast.Constant):
        yield first.value.rstrip(".")


def graph(package: Path) -> dict[str, set[str]]:
    """Return, for each module of a package, the modules of the package that it imports."""
    files = modules(package)

    def home(name: str) -> str:
        """Return the module that defines ``name``, or the module ``name`` itself."""
        while name and name not in files:
            name = name.rpartition(".")[0]
        return name

    return {
        module: {home(name) for name in imported(path, module)} - {module, ""}
        for module, path in files.items()
    }


def place(module: str) -> str:
    """Return the package of a module, or the module itself at the top level; "" is the root
    package."""
    return module.partition(".")[2].partition(".")[0]


def between(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return, for each package, the other packages that it imports."""
    found: dict[str, set[str]] = {place(module): set() for module in edges}
    for module, others in edges.items():
        found[place(module)] |= {place(other) for other in others} - {place(module)}
    return found
