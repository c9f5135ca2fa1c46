"""L0: a simulation that is fed a run's recorded times must make the very same decisions.

Needs no torch. Where it does not, something other than the lengths of the steps decided: a bug in
the loop, in a scheduler, or in what was recorded.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import simpy

from simkv.core.errors import InputError
from simkv.core.recording import Line
from simkv.costs.load import Load
from simkv.costs.recorded import RecordedExecutor
from simkv.loop.engine import Engine
from simkv.loop.record import Record
from simkv.loop.serve import serve
from simkv.proof.conform.recorder import Recorder, decision_hashes
from simkv.proof.conform.trace import TraceError, read_trace
from simkv.proof.validation.served.stalls import Stall, stalls_of
from simkv.scenario.load import load
from simkv.scenario.scenario import Scenario
from simkv.schedulers.registry import build
from simkv.workload.workload import clients


@dataclass(frozen=True)
class Agreement:
    """How many ``decisions`` the run made, and the first one (``step``) that a replay makes
    otherwise, with both sides; ``step`` is None if they are all equal."""

    decisions: int
    step: int | None = None
    recorded: Line | None = None
    replayed: Line | None = None


class Timed(Protocol):
    """An iteration of the engine's loop: an idle pass, or a step of another kind."""

    @property
    def kind(self) -> str: ...
    @property
    def seconds(self) -> float: ...


def replay(
    scenario: Scenario, steps: Sequence[float], idles: Sequence[float]
) -> tuple[Record, Recorder, str]:
    """Simulate with recorded lengths of steps and idle passes (s).

    Returns the record, the decisions, and why the replay had to stop early, if it had to.
    """
    recorder = Recorder(build(scenario.engine), scenario.engine)
    executor = RecordedExecutor(steps, idles)
    engine = Engine(simpy.Environment(), recorder, executor, scenario.engine_ready, leaping=False)
    why = ""
    try:
        serve(engine, clients(scenario.workload, scenario.timeout), scenario.horizon)
    except RuntimeError as error:
        why = str(error)
    recorder.close()
    return engine.record, recorder, why


def compare(recorded: Sequence[Line], replayed: Sequence[Line]) -> Agreement:
    """The first decision that differs between a run and its replay."""
    count = len(recorded)
    for step in range(max(count, len(replayed))):
        ours = recorded[step] if step < count else None
        theirs = replayed[step] if step < len(replayed) else None
        if ours != theirs:
            return Agreement(count, step, ours, theirs)
    assert decision_hashes(recorded) == decision_hashes(replayed)
    return Agreement(count)


def verdict_of_run(scenario: Scenario, passes: Iterable[Timed], recorder: Recorder) -> Agreement:
    """Whether a simulation that is fed the times of a run decides the same."""
    lengths = [(p.kind, p.seconds) for p in passes]
    _, again, _ = replay(scenario, *_split(lengths))
    return compare(recorder.lines, again.lines)


@dataclass(frozen=True)
class Recorded:
    """A run on disk, one variant: its steps as (load, seconds), the record that its replay gives,
    which is that of the run itself if the ``verdict`` is that all decisions are the same.

    ``about`` is the folder's ``summary.json``: setup, machine and ceilings among it; ``stalls`` are
    steps that took far longer than others of their size.
    """

    scenario: Scenario
    steps: list[tuple[Load, float]]
    preempting: list[bool]
    record: Record
    verdict: Agreement
    about: dict[str, Any] = field(default_factory=dict)
    stalls: list[Stall] = field(default_factory=list)


def read_runs(folder: Path) -> dict[str, Recorded]:
    """What `simkv gpu run` has left in ``folder``, by variant, replayed. Raises InputError."""
    try:
        with (folder / "passes.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        about = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return {
            name: _recorded(
                scenario,
                about,
                [row for row in rows if row["variant"] == name],
                read_trace(folder / f"decisions-{name}.jsonl.gz").steps,
            )
            for name, scenario in load(folder / "scenario.yaml").items()
        }
    except (OSError, KeyError, ValueError, TraceError) as error:
        raise InputError(f"{folder}: not a folder of `simkv gpu run`: {error}") from error


def _recorded(
    scenario: Scenario, about: dict[str, Any], rows: list[dict[str, str]], lines: list[Line]
) -> Recorded:
    lengths = [(row["kind"], float(row["seconds"])) for row in rows]
    record, again, _ = replay(scenario, *_split(lengths))
    steps = [row for row in rows if row["kind"] != "idle"]
    return Recorded(
        scenario,
        [
            (
                Load(**{f: int(row[f]) for f in Load._fields if f in row})._replace(
                    longest=int(row["longest_context"])
                ),
                float(row["seconds"]),
            )
            for row in steps
        ],
        [int(row["preempted"]) > 0 for row in steps],
        record,
        compare(lines, again.until_all_ended()[0]),
        about,
        stalls_of(steps),
    )


def _split(passes: Sequence[tuple[str, float]]) -> tuple[list[float], list[float]]:
    """Lengths of the steps, and of the idle passes."""
    steps = [seconds for kind, seconds in passes if kind != "idle"]
    return steps, [seconds for kind, seconds in passes if kind == "idle"]
