"""Extract the Prometheus metrics of an engine's sources into simkv/metrics/exported/<engine>.json.

    python -m dev.engine_metrics vllm ~/vllm-0.33.0/vllm/v1/metrics
    python -m dev.engine_metrics sglang ~/sglang-0.5.23/sglang/srt/observability

The sources are parsed, not run. Each metric has a name, a type, labels beyond those common to its
class, and buckets (None if they depend on the model). By default, the file in simkv is rewritten
with the metrics that it already lists, and each metric keeps the quantity of simkv that it exports.
With ``--all``, every registered metric is printed instead.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILES = {"vllm": ("loggers.py", "buckets.py"), "sglang": ("metrics_collector.py",)}
KINDS = ("gauge", "counter", "histogram")


def texts(node: ast.AST | None) -> list[str]:
    """Return the string constants of an expression, in order."""
    if node is None:
        return []
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and type(n.value) is str]


def numbers(node: ast.AST | None) -> list[float] | None:
    """Return the values of a literal list or tuple of numbers, or None for any other expression."""
    try:
        values = ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None
    return list(values) if isinstance(values, list | tuple) else None


class Sources:
    """Parsed modules with an engine's metrics, and the lists of numbers that they name."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.trees = [ast.parse((folder / name).read_text()) for name in FILES[engine]]
        self.lists: dict[str, list[float]] = {}
        self.families: dict[str, str] = {}
        for tree in self.trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.Assign | ast.AnnAssign):
                    self._note(node)

    def _note(self, node: ast.Assign | ast.AnnAssign) -> None:
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if isinstance(target, ast.Name) and node.value is not None:
            if (values := numbers(node.value)) is not None:
                self.lists[target.id] = values
            elif isinstance(node.value, ast.Call) and "histogram_buckets" in ast.dump(node.value):
                self.families[target.id] = texts(node.value)[0]

    def buckets(self, node: ast.AST | None) -> list[float] | None:
        """Return the bounds of a histogram's buckets, or None if they depend on the model."""
        if (values := numbers(node)) is not None or node is None:
            return values
        names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
        for name in names:
            family = self.families.get(name, "").upper() + "_BUCKETS"
            if found := self.lists.get(name) or self.lists.get(family):
                return found
        return None

    def metrics(self, prefix: str) -> Iterator[dict[str, Any]]:
        """Yield a row for each registered metric whose name starts with ``prefix``."""
        for owner in (n for tree in self.trees for n in tree.body if isinstance(n, ast.ClassDef)):
            for node in ast.walk(owner):
                if not isinstance(node, ast.Call):
                    continue
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                called = ast.unparse(node.func).lower()
                kind = next((kind for kind in KINDS if kind in called), None)
                name = "".join(texts(given.get("name"))[:1])
                if kind and name.startswith(prefix):
                    labels = texts(given.get("labelnames"))
                    row: dict[str, Any] = {
                        "name": name,
                        "type": kind,
                        "of": owner.name,
                        "labels": labels,
                    }
                    if kind == "histogram":
                        row["buckets"] = self.buckets(given.get("buckets"))
                    yield row


def main() -> None:
    engine, folder = sys.argv[1], Path(sys.argv[2])
    ours = Path(__file__).parents[1] / "simkv" / "metrics" / "exported" / f"{engine}.json"
    known = json.loads(ours.read_text())
    wanted = {row["name"]: row["measure"] for row in known["metrics"]}
    rows = Sources(folder, engine).metrics(f"{engine}:")
    kept = {row["name"]: row for row in rows if "--all" in sys.argv or row["name"] in wanted}
    if "--all" in sys.argv:
        print("\n".join(json.dumps(row) for row in kept.values()))
        return
    said = [{**row, "measure": wanted.get(name)} for name, row in kept.items()]
    lines = ",\n    ".join(json.dumps(row) for row in said)
    head = [f'  "{key}": {json.dumps(value)},' for key, value in known.items() if key != "metrics"]
    ours.write_text("\n".join(["{", *head, '  "metrics": [', f"    {lines}", "  ]", "}"]) + "\n")


if __name__ == "__main__":
    main()
