"""Options that an engine's config classes declare, read from the source code without running it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from pathlib import Path


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
