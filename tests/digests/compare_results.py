"""Compare the results of two source trees: a change of wording may change texts but no number.

    python -m tests.digests.write_digests --results before   # in one tree
    python -m tests.digests.write_digests --results after    # in the other
    python -m tests.digests.compare_results before after

Exits with 1 if a figure, a table's length or a field differs.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

IGNORED = ("version",)


@dataclass
class Comparison:
    """Number of equal values, and the places where numbers or texts differ."""

    figures: int = 0
    texts: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def add(self, place: str, before: object, after: object) -> None:
        """Compare one value of both trees."""
        if not (_is_figure(before) or _is_figure(after)):
            if before != after:
                self.texts.append(f"{place}: {before!r} -> {after!r}")
            return
        self.figures += 1
        if before != after:
            self.differences.append(f"{place}: {before!r} -> {after!r}")


def compare(before: Path, after: Path) -> Comparison:
    """Compare all JSON and CSV files of two folders of results."""
    result = Comparison()
    files = {file.relative_to(root) for root in (before, after) for file in root.rglob("*.*")}
    for file in sorted(files):
        if not (before / file).exists() or not (after / file).exists():
            result.differences.append(f"{file}: only in one folder")
            continue
        pair = [dict(_values(root / file)) for root in (before, after)]
        for place in sorted(pair[0].keys() | pair[1].keys()):
            if any(place not in values for values in pair):
                result.differences.append(f"{file}: {place}: only in one folder")
            else:
                result.add(f"{file}: {place}", pair[0][place], pair[1][place])
    return result


def _values(file: Path) -> Iterator[tuple[str, object]]:
    """Yield the place and the value of each leaf of a JSON file or cell of a CSV file."""
    if file.suffix == ".json":
        yield from _leaves(json.loads(file.read_text()), "")
        return
    with file.open(newline="") as table:
        head, *rows = csv.reader(table)
        for number, row in enumerate(rows, 2):
            for name, cell in zip_longest(head, row, fillvalue=""):
                yield f"line {number} {name}", cell


def _leaves(value: object, place: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for name, part in value.items():
            if place or name not in IGNORED:
                yield from _leaves(part, f"{place}/{name}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{place}/{number}")
    else:
        yield place, value


def _is_figure(value: object) -> bool:
    """Whether a value is a number, as such or as the text of a table cell."""
    if not isinstance(value, str):
        return True
    try:
        float(value)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    found = compare(Path(sys.argv[1]), Path(sys.argv[2]))
    for line in found.differences[:50]:
        print(line)
    print(
        f"{found.figures:,} figures compared, {len(found.differences)} differ; "
        f"{len(found.texts)} texts differ"
    )
    sys.exit(bool(found.differences))
