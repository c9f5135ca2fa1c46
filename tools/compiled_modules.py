"""Build hook: compile the modules that begin with ``# mypyc: compile``.

It gives hatch-mypyc the list of these modules; `make wheel` enables it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatch_mypyc.plugin import MypycBuildHook

MARKER = "# mypyc: compile\n"


def compiled_modules(root: Path) -> list[str]:
    """Return the paths of the marked modules, relative to ``root``."""
    found = []
    for path in sorted((root / "simkv").rglob("*.py")):
        with path.open(encoding="utf-8") as file:
            if file.readline() == MARKER:
                found.append(path.relative_to(root).as_posix())
    return found


class CompiledModules(MypycBuildHook):
    """Compile the marked modules."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config["include"] = [f"/{path}" for path in compiled_modules(Path(self.root))]


def get_build_hook() -> type[CompiledModules]:
    """Return the hook; hatchling calls this, because the module contains two hook classes."""
    return CompiledModules
