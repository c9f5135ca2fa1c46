"""Tests of the order of packages: a package imports only packages before it. Also tests that module
names are unique.
"""

from __future__ import annotations

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.import_graph import (
    between,
    graph,
    modules,
    place,
)

#: Order of the packages: each imports only packages before it. "" is ``simkv/__init__.py``.
ORDER = [
    "core",
    "schedulers",
    "native",
    "costs",
    "workload",
    "scenario",
    "custom",
    "own",
    "sim",
    "explain",
    "metrics",
    "study",
    "report",
    "conformance",
    "validation",
    "incident",
    "gpu",
    "serve",
    "api",
    "",
    "cli",
    "__main__",
]
MOST_PLACES = 22
MOST_PAIRS = 116  # including simkv.own, the old name of simkv.custom, until 0.4
EDGES = graph(ROOT / "simkv")


def upward(edges: dict[str, set[str]], order: list[str]) -> list[tuple[str, str]]:
    """Return the imports of modules from packages that are not before the module's own package."""
    return [
        (module, other)
        for module, others in sorted(edges.items())
        for other in sorted(others)
        if order.index(place(other)) > order.index(place(module))
    ]


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Return modules or packages that import each other in a cycle; empty if there is no cycle."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_package_is_in_the_order() -> None:
    assert set(between(EDGES)) <= set(ORDER)


def test_imports_follow_package_order() -> None:
    assert upward(EDGES, ORDER) == []


def test_no_import_cycles() -> None:
    assert circle(EDGES) == []


def test_few_packages_and_dependencies() -> None:
    places = between(EDGES)
    assert len(places) <= MOST_PLACES
    assert sum(map(len, places.values())) <= MOST_PAIRS


def test_graph_matches_package() -> None:
    """A file that the graph lacks could import anything."""
    assert set(EDGES) == set(modules(ROOT / "simkv"))
    assert "simkv.core.request" in EDGES["simkv.workload.listed_requests"]
    assert "scenario" in between(EDGES)["sim"]


PLANTED = {
    "a name": "from house.upper.attic import thing",
    "a module": "import house.upper.attic",
    "a module of a room": "from house.upper import attic",
    "a relative name": "from ..upper.attic import thing",
    "a relative room": "from .. import upper",
    "inside a function": "def f():\n    from house.upper import attic\n    return attic",
    "for types": "import typing\nif typing.TYPE_CHECKING:\n    import house.upper.attic",
    "by a constant": "from importlib import import_module\nimport_module('house.upper.attic')",
    "by a pattern": "import importlib\nm = importlib.import_module(f'house.upper.{__name__}')",
}


@pytest.mark.parametrize("line", PLANTED.values(), ids=PLANTED.keys())
def test_detects_planted_import(tmp_path: Path, line: str) -> None:
    for room in ("lower", "upper"):
        (tmp_path / "house" / room).mkdir(parents=True)
        (tmp_path / "house" / room / "__init__.py").write_text("")
    (tmp_path / "house" / "__init__.py").write_text("")
    (tmp_path / "house" / "upper" / "attic.py").write_text("import house.lower.cellar\nthing = 1\n")
    cellar = tmp_path / "house" / "lower" / "cellar.py"
    order = ["", "lower", "upper"]
    cellar.write_text("")
    sound = graph(tmp_path / "house")
    assert (upward(sound, order), circle(between(sound))) == ([], [])
    cellar.write_text(line)
    edges = graph(tmp_path / "house")
    assert [module for module, _ in upward(edges, order)] == ["house.lower.cellar"]
    assert set(circle(between(edges))) == {"lower", "upper"}


def test_detects_planted_import_cycle(tmp_path: Path) -> None:
    house = tmp_path / "house"
    (house / "room").mkdir(parents=True)
    ring = ["a", "b", "c"]
    for name, following in zip(ring, [*ring[1:], "a"], strict=True):
        (house / "room" / f"{name}.py").write_text(f"def f():\n    from . import {following}\n")
    assert set(circle(graph(house))) == {f"house.room.{name}" for name in ring}


def is_of_engine(path: Path) -> bool:
    """Return whether a module belongs to the package of one engine."""
    return path.parts[1] == "schedulers" and len(path.parts) > 3


def shared_names(paths: list[Path]) -> dict[str, list[str]]:
    """Return duplicate module names, except parallel modules of engines and commands.

    Engines have modules with the same role, such as ``config.py``, and such a module may have the
    name of the module of ``core`` that it implements. A command may have the name of the module
    that it calls.
    """
    found: dict[str, list[str]] = defaultdict(list)
    of_engines = {path.stem for path in paths if is_of_engine(path)}
    for path in paths:
        name = path.stem
        parallel = is_of_engine(path) or (path.parts[1] == "core" and name in of_engines)
        if not (parallel or path.parts[1] == "cli" or name.startswith("__")):
            found[name].append(path.as_posix())
    for name in of_engines & found.keys():
        found[name].append("schedulers/*")
    return {name: files for name, files in found.items() if len(files) > 1}


def test_module_names_are_unique() -> None:
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / "simkv").rglob("*.py"))]
    assert shared_names(paths) == {}


def test_detects_duplicate_module_name() -> None:
    roles = ["simkv/schedulers/vllm/config.py", "simkv/schedulers/sglang/config.py"]
    commands = ["simkv/study/sweep/sweep.py", "simkv/cli/sweep.py"]
    twice = ["simkv/sim/lockstep.py", "simkv/conformance/lockstep.py"]
    mixed = ["simkv/schedulers/vllm/memory.py", "simkv/costs/memory.py"]
    paths = [Path(name) for name in [*roles, *commands, *twice, *mixed]]
    assert shared_names(paths) == {"lockstep": twice, "memory": [mixed[1], "schedulers/*"]}
