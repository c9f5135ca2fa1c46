"""The interface between the process that runs an engine's code and the driver of this engine."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from simkv.core.engine_version import find_version, parse_version
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import Batch, Completion

#: State after a call of the driver: numbers of waiting requests, of running requests, of free
#: blocks and of writes to disk that no batch lists yet.
Counts = tuple[int, int, int, int]


class NativeDriver(Protocol):
    """Adapter that runs the real scheduler of an engine, similar to ``Scheduler``.

    ``num_blocks`` are the blocks that requests can use. ``pipeline_depth`` is the maximum number of
    batches in flight. ``scheduler`` is the engine's own object, for the debugger. Drivers of
    engines that transfer KV also have ``sent``, ``loaded`` and ``finish_disk_transfers``.
    """

    num_blocks: int
    pipeline_depth: int
    scheduler: Any

    def add(self, prompt: Prompt) -> None:
        """Add a request."""

    def abort(self, number: int) -> None:
        """Abort a request, unless it has ended."""

    def schedule(self) -> Batch:
        """Make a scheduling decision and return its batch."""

    def complete(
        self, accepted: Mapping[int, int], ended: Sequence[int], copied: Sequence[int]
    ) -> Completion:
        """Deliver the oldest batch: accepted drafts, requests that end, and finished copies."""

    def counts(self) -> Counts:
        """Return the lengths of the queues and the number of free blocks."""

    def waiting_ids(self) -> list[int]:
        """Return the ids of the waiting requests, the head of the queue first."""

    def running_ids(self) -> list[int]:
        """Return the ids of the running requests, in the engine's order."""

    def blocks_held(self) -> dict[int, int]:
        """Return the number of blocks of each running request."""
        return {i: len(blocks) for i, blocks in self.block_tables().items()}

    def block_tables(self) -> dict[int, list[int]]:
        """Return the block ids of each running request."""

    def fingerprint(self) -> Hashable:
        """Return the state that determines future decisions."""


@dataclass(frozen=True)
class NativeEngine:
    """An engine whose own scheduler code can be run.

    ``package`` is its Python package, in one of the ``subfolders`` of a checkout. The modules and
    packages ``deciding`` affect decisions. ``stub_imports`` returns a context in which the modules
    ``loaded`` are imported, and ``build`` builds a driver. ``options`` maps each option to the
    class that declares it. ``refused`` returns the name of an unsupported setting, or None.
    ``variant_of`` returns the simulated release with the nearest rules. ``stubbed`` describes the
    stubs that affect decisions. ``entry`` is the function of the engine that decides a step.
    """

    title: str
    package: str
    deciding: Sequence[str]
    loaded: Sequence[str]
    stub_imports: Callable[[Path], AbstractContextManager[None]]
    build: Callable[[Mapping[str, Any], Mapping[str, Mapping[str, Any]]], NativeDriver]
    variant_of: Callable[[str | None], str]
    refused: Callable[[Any], str | None] = lambda _: None
    options: Callable[[Path], Mapping[str, str]] = lambda _: {}
    subfolders: tuple[str, ...] = (".",)
    stubbed: str = ""
    entry: str = "schedule"

    def load(self) -> None:
        """Import the scheduler; must be called in the context of ``stub_imports``."""
        for module in self.loaded:
            importlib.import_module(module)

    def files(self, folder: Path) -> list[Path]:
        """Return the files of a source that affect decisions."""
        paths = [folder.joinpath(*module.split(".")) for module in self.deciding]
        found = {file for path in paths for file in (*path.rglob("*.py"), path.with_suffix(".py"))}
        return sorted(file for file in found if file.is_file())


def newest_before(version: str | None, releases: Sequence[str]) -> str:
    """Return the newest of ``releases`` (newest first) up to ``version``; the first if unknown."""
    found = find_version(version or "")
    if found is None:
        return releases[0]
    return next((name for name in releases if parse_version(name) <= found), releases[-1])


def read_options(files: Sequence[Path], classes: Collection[str] | None) -> dict[str, str]:
    """Return the class that declares each field of these config classes (None: all classes)."""
    found: dict[str, str] = {}
    for path in files:
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and (classes is None or node.name in classes):
                for line in node.body:
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                        found.setdefault(line.target.id, node.name)
    return found
