"""Tests of the allowed imports, and of the packages that may print."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import simkv
from tests.conftest import ROOT
from tests.import_graph import imported

PACKAGE = ROOT / "simkv"
MODULES = sorted(PACKAGE.rglob("*.py"))
#: Modules that schedulers may use: no clock, no I/O, no randomness, no external data.
PURE = {
    "array",
    "__future__",
    "annotated_types",
    "bisect",
    "collections",
    "copy",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "importlib",
    "itertools",
    "math",
    "mypy_extensions",  # how a class is compiled
    "operator",
    "typing",
}
OF_SCHEDULERS = {"core", "schedulers"}
#: Modules for building schedulers; the first two store columns of blocks with numpy.
SHARED = ("block_pool", "free_queue", "block_keys", "radix_tree", "request")


@pytest.mark.parametrize(
    "path",
    [
        *sorted((PACKAGE / "schedulers").rglob("*.py")),
        *(PACKAGE / "core" / f"{name}.py" for name in SHARED),
    ],
    ids=lambda path: path.stem,
)
def test_schedulers_are_pure(path: Path) -> None:
    for module in imported(path):
        first, _, rest = module.partition(".")
        if first == "simkv":
            assert rest.partition(".")[0] in OF_SCHEDULERS, module
        else:
            columns = path.stem in SHARED[:2]
            assert first in PURE | ({"numpy"} if columns else set()), module
    names = {
        node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)
    }
    assert not names & {"open", "input", "print", "eval", "exec"}


def prints(source: str) -> list[str]:
    """Return the expressions of a file that access the terminal directly."""
    named = {"print", "input", "echo", "Console", "get_console", "Progress", "track"}
    streams = {"sys.stdout", "sys.stderr"}
    found = []
    for node in ast.walk(ast.parse(source)):
        called = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in named
        if called or (isinstance(node, ast.Attribute) and ast.unparse(node) in streams):
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_cli_prints(path: Path) -> None:
    """Only commands create a console and print; other packages build lines and tables."""
    if not {"cli", "__main__.py"} & {*path.relative_to(PACKAGE).parts}:
        assert prints(path.read_text()) == []


def test_detects_planted_print() -> None:
    planted = (
        "print(1)",
        "sys.stdout.write('x')",
        "to = Console(width=3)",
        "typer.echo(1)",
        "to.print(1)",
    )
    assert [len(prints(f"def f():\n    {line}")) for line in planted] == [1] * len(planted)
    assert prints("lines(1)\nprint_rows(rows)") == []


def test_only_gpu_package_imports_torch() -> None:
    # SGLang's own scheduler, which the recorders run, stores its state in tensors.
    recorders = {PACKAGE / "conformance/record/sglang_recorder.py"}
    recorders |= {*(PACKAGE / "native/sglang").glob("*.py")}
    for path in set(MODULES) - recorders:
        if "gpu" not in path.parts and path != PACKAGE / "cli" / "gpu_options.py":
            assert not {m for m in imported(path) if m.split(".")[0] in ("torch", "triton")}, path


def test_importing_simkv_loads_no_heavy_packages() -> None:
    code = "import sys, simkv; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"numpy", "pandas", "matplotlib", "pydantic", "simpy", "torch", "typer", "rich"}
    assert not heavy & set(run.stdout.split())


def test_public_names_exist() -> None:
    for name in simkv.__all__:
        assert getattr(simkv, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = simkv.nothing


def test_every_module_has_docstring() -> None:
    missing = [
        str(path)
        for path in MODULES
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert missing == []


def test_class_names_are_unique() -> None:
    names = Counter(
        node.name
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == set()
