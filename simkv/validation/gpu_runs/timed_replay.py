"""Check that a simulation with the recorded step times of a run makes the same decisions as the
run.

A difference means a bug in the loop, in a scheduler, or in the recording. This module does not need
torch.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import simpy

from simkv.conformance.decision_recorder import Recorder, decision_hashes
from simkv.conformance.decision_trace import TraceError, read_trace
from simkv.core.errors import InputError
from simkv.core.recording_format import RecordingLine
from simkv.costs.recorded_executor import RecordedExecutor
from simkv.costs.step_load import StepLoad
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.schedulers.engine_registry import build_scheduler
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.sim.run_record import RunRecord
from simkv.validation.gpu_runs.stalled_steps import Stall, find_stalls
from simkv.workload.workload_section import build_clients


@dataclass(frozen=True)
class Agreement:
    """Comparison of the decisions of a run and its replay.

    ``decisions`` is the number of decisions in the run. ``step`` is the number of the first
    decision that differs, or None. ``recorded`` and ``replayed`` are the two versions of this
    decision.
    """

    decisions: int
    step: int | None = None
    recorded: RecordingLine | None = None
    replayed: RecordingLine | None = None


class Timed(Protocol):
    """An iteration of the engine's loop: an idle pass, or a step of some kind."""

    @property
    def kind(self) -> str: ...
    @property
    def seconds(self) -> float: ...


def replay_timed(
    scenario: Scenario, steps: Sequence[float], idles: Sequence[float]
) -> tuple[RunRecord, Recorder, str]:
    """Simulate a scenario with recorded durations (s) of steps and idle passes.

    Returns the record of the simulation, its decisions, and the reason for an early stop.
    """
    recorder = Recorder(build_scheduler(scenario.engine), scenario.engine)
    executor = RecordedExecutor(steps, idles)
    engine = Engine(simpy.Environment(), recorder, executor, scenario.engine_ready, leaping=False)
    why = ""
    try:
        run_clients(engine, build_clients(scenario.workload, scenario.timeout), scenario.horizon)
    except RuntimeError as error:
        why = str(error)
    recorder.close()
    return engine.record, recorder, why


def compare_decisions(
    recorded: Sequence[RecordingLine], replayed: Sequence[RecordingLine]
) -> Agreement:
    """Find the first decision that differs between a run and its replay."""
    count = len(recorded)
    for step in range(max(count, len(replayed))):
        ours = recorded[step] if step < count else None
        theirs = replayed[step] if step < len(replayed) else None
        if ours != theirs:
            return Agreement(count, step, ours, theirs)
    assert decision_hashes(recorded) == decision_hashes(replayed)
    return Agreement(count)


def check_agreement(scenario: Scenario, passes: Iterable[Timed], recorder: Recorder) -> Agreement:
    """Compare the decisions of a run with a simulation that uses the run's step times."""
    lengths = [(p.kind, p.seconds) for p in passes]
    _, again, _ = replay_timed(scenario, *_split(lengths))
    return compare_decisions(recorder.lines, again.lines)


@dataclass(frozen=True)
class GpuRun:
    """A stored run of one variant.

    ``steps`` are pairs (load, seconds). ``record`` is the record of the replay. ``verdict``
    compares the decisions of the run and the replay. ``about`` is the content of ``summary.json``.
    ``stalls`` are the unusually long steps.
    """

    scenario: Scenario
    steps: list[tuple[StepLoad, float]]
    preempting: list[bool]
    record: RunRecord
    verdict: Agreement
    about: dict[str, Any] = field(default_factory=dict)
    stalls: list[Stall] = field(default_factory=list)


def read_runs(folder: Path) -> dict[str, GpuRun]:
    """Read the output of `simkv gpu run` in ``folder``, and replay each variant.

    Raises InputError if the output cannot be used.
    """
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
        raise InputError(
            f"{folder}: not a directory written by `simkv gpu run`: {error}"
        ) from error


def _recorded(
    scenario: Scenario,
    about: dict[str, Any],
    rows: list[dict[str, str]],
    lines: list[RecordingLine],
) -> GpuRun:
    lengths = [(row["kind"], float(row["seconds"])) for row in rows]
    record, again, _ = replay_timed(scenario, *_split(lengths))
    steps = [row for row in rows if row["kind"] != "idle"]
    return GpuRun(
        scenario,
        [
            (
                StepLoad(**{f: int(row[f]) for f in StepLoad._fields if f in row})._replace(
                    longest=int(row["longest_context"])
                ),
                float(row["seconds"]),
            )
            for row in steps
        ],
        [int(row["preempted"]) > 0 for row in steps],
        record,
        compare_decisions(lines, again.until_all_ended()[0]),
        about,
        find_stalls(steps),
    )


def _split(passes: Sequence[tuple[str, float]]) -> tuple[list[float], list[float]]:
    """Return the durations of the steps and the durations of the idle passes, in seconds."""
    steps = [seconds for kind, seconds in passes if kind != "idle"]
    return steps, [seconds for kind, seconds in passes if kind == "idle"]
