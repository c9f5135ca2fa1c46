"""Compute a digest of everything that affects the result of a run, and of nothing else.

The digest covers the scenario's fields that affect a run, the contents of its profiles, its trace
and its custom schedulers, and the source code that a run uses.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from simkv.costs.cost_profile import PACKAGED, CostProfile, profile_path
from simkv.scenario.run_fields import find_custom_sources as of_own
from simkv.scenario.run_fields import run_fields
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_costs import ReplicaCosts, list_replica_costs
from simkv.workload.workload_section import Workload

PACKAGE = Path(__file__).parent.parent
#: Packages that a run uses. They import no other packages of simkv.
RUN_PACKAGES = (
    "core",
    "schedulers",
    "costs",
    "workload",
    "scenario",
    "sim",
    "explain",
    "metrics",
    "native",
)
#: Module of ``simkv.study`` that a run uses, with all its imports.
ENTRY = "simkv.study.simulation_job"
PROFILES = PACKAGED.relative_to(PACKAGE)


def compute_digest(scenario: Scenario, folder: Path, **more: Any) -> str:
    """Return the digest of a run of ``scenario`` with the additional settings ``more``.

    Paths in the scenario are relative to ``folder``. Raises InputError if a profile or the trace is
    unusable.
    """
    whole = {
        "code": hash_code(),
        "scenario": run_fields(scenario),
        "profiles": [_costs(costs, folder) for _, costs in list_replica_costs(scenario)],
        "trace": _trace(scenario.workload),
        "own": [source.digest for source in of_own(scenario).values()],
        **more,
    }
    text = json.dumps(whole, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def hash_code() -> str:
    """Return a hash of the source code that a run uses."""
    digest = hashlib.sha256()
    for path in list_source_files(PACKAGE):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def list_source_files(package: Path) -> list[Path]:
    """Return the files of ``package`` that affect a run: modules and data, but not profiles."""
    in_rooms = {
        path
        for room in RUN_PACKAGES
        for path in (package / room).rglob("[!.]*.*")
        if path.suffix != ".pyc" and path.parent != package / PROFILES and path.is_file()
    }
    return sorted(in_rooms | _used(package, ENTRY))


def _used(package: Path, module: str) -> set[Path]:
    """Return the file of a module and, recursively, the files in ``package`` that it imports."""
    found, left = set[Path](), [module]
    while left:
        path = package.parent.joinpath(*left.pop().split(".")).with_suffix(".py")
        if path not in found and path.is_file():
            found.add(path)
            left += [name for name in _imports(path) if name.startswith("simkv.study.")]
    return found


def _imports(path: Path) -> Iterator[str]:
    """Yield the names of all imports in a file; for ``from a import b``, yield ``a`` and
    ``a.b``.
    """
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _costs(costs: ReplicaCosts, folder: Path) -> str:
    """Return a hash of a cost profile, from its file or from the profile composed for the
    hardware.
    """
    if costs.profile is not None:
        return _contents(profile_path(costs.profile, folder))
    return _made(_Same(costs.load(folder)))


class _Same:
    """Cache key for a composed profile. Two keys are equal if they hold the same object."""

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile

    def __hash__(self) -> int:
        return id(self.profile)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.profile is other.profile


@lru_cache(maxsize=64)
def _made(same: _Same) -> str:
    return hashlib.sha256(same.profile.model_dump_json().encode()).hexdigest()


def _trace(workload: Workload) -> str | None:
    """Return a hash of the trace file, if the workload has one."""
    return None if workload.trace is None else _contents(workload.loaded.path)


def _contents(path: Path) -> str:
    status = path.stat()
    return _hash(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=256)
def _hash(path: Path, _changed: int, _size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
