"""Tests that the package contains only code that users run: no import of dev, and no unused
module.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.import_graph import graph, imported, modules

#: Entry points: commands, the public API, modules for custom schedulers, and ``python -m simkv``.
ROOTS = ("simkv.__main__", "simkv", "simkv.api", "simkv.custom", "simkv.own")


def reachable(edges: dict[str, set[str]], roots: set[str]) -> set[str]:
    """Return the modules that ``roots`` import directly or indirectly; a module's packages count as
    imported.
    """
    found: set[str] = set()
    left = list(roots)
    while left:
        module = left.pop()
        if module in found:
            continue
        found.add(module)
        left += edges[module]
        if (package := module.rpartition(".")[0]) in edges:
            left.append(package)
    return found


def unreached(package: Path, roots: set[str]) -> set[str]:
    edges = graph(package)
    return edges.keys() - reachable(edges, roots)


def test_simkv_does_not_import_dev() -> None:
    for module, path in modules(ROOT / "simkv").items():
        wrong = [n for n in imported(path, module) if n.split(".")[0] in ("dev", "tests", "tools")]
        assert not wrong, f"{path}: imports {wrong}"


def test_every_module_is_imported() -> None:
    package = ROOT / "simkv"
    commands = {name for name in modules(package) if name.startswith("simkv.cli.")}
    roots = {root for root in ROOTS if root in modules(package)} | commands
    assert not unreached(package, roots)


def test_detects_unused_module(tmp_path: Path) -> None:
    package = tmp_path / "house"
    (package / "room").mkdir(parents=True)
    (package / "__init__.py").write_text("from house.room import used\n")
    for name in ("__init__", "used", "unused"):
        (package / "room" / f"{name}.py").write_text("")
    assert unreached(package, {"house"}) == {"house.room.unused"}


@pytest.mark.parametrize("module", sorted(modules(ROOT / "dev")))
def test_tools_are_importable(module: str) -> None:
    if not module.endswith("__main__"):
        pytest.importorskip(module, reason="", exc_type=ModuleNotFoundError)
