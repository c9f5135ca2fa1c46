"""Committed recordings: one file per engine and release, with all cases of the release."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from simkv.conformance.decision_replay import check_trace
from simkv.conformance.decision_trace import (
    DecisionTrace,
    Recording,
    TraceError,
    split_recordings,
)

TRACES = Path(__file__).parent / "traces"
FILES = sorted(TRACES.glob("*/*.jsonl.gz"))


class Committed(NamedTuple):
    """A committed recording of ``release``.

    ``variant`` may name a configuration of that release, such as ``lpm``.
    """

    engine: str
    release: str
    variant: str
    text: Recording

    @property
    def name(self) -> str:
        return f"{self.engine}/{self.variant}/{self.text.case}"

    @property
    def case(self) -> str:
        return self.text.case

    @property
    def kind(self) -> str:
        """Kind of the case, such as ``gone`` in ``gone-224``."""
        return self.case.rpartition("-")[0]

    @property
    def size(self) -> int:
        """Length of the text in characters."""
        return sum(map(len, self.text.rows))

    def trace(self) -> DecisionTrace:
        return self.text.parse()

    def lines(self) -> list[Any]:
        return [json.loads(row) for row in self.text.rows]

    def write(self, path: Path, change: Callable[[list[Any]], Any] = lambda _: None) -> Path:
        """Write only this recording to ``path``, after ``change`` was applied to its lines."""
        lines = self.lines()
        change(lines)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def differs(self) -> bool:
        """Whether the simulation differs from the recording or cannot replay it."""
        try:
            return check_trace(self.trace()).difference is not None
        except (TraceError, KeyError, AssertionError):
            return True


@cache
def committed(engine: str, release: str) -> tuple[Committed, ...]:
    """Return the recordings of a release, in the order of the file."""
    texts = split_recordings(TRACES / engine / f"{release}.jsonl.gz")
    return tuple(
        Committed(engine, release, json.loads(text.rows[0])["variant"], text) for text in texts
    )


def of_kind(engine: str, release: str, *kinds: str) -> list[Committed]:
    """Return the recordings of a release of the given kinds, in order of size."""
    found = [r for r in committed(engine, release) if r.case.startswith(kinds)]
    return sorted(found, key=lambda recording: recording.size)


def all_committed() -> list[Committed]:
    """Return all committed recordings, by engine and release."""
    names = [(path.parent.name, path.name.removesuffix(".jsonl.gz")) for path in FILES]
    return [recording for engine, release in names for recording in committed(engine, release)]
