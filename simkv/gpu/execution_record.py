"""Setup and record of a scenario served on a device, and its output files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simkv.conformance.decision_recorder import Recorder, decision_hashes, write_decision_trace
from simkv.core.atomic_files import write_text
from simkv.core.request import Request
from simkv.core.version import __version__
from simkv.costs.hardware.model_shape import ModelShape
from simkv.gpu.machine_info import ceilings, machine_info
from simkv.gpu.torch_executor import Pass
from simkv.metrics.run_metrics import request_rows, summarize
from simkv.report.run_files import MARKER_FILE, atomic_run_folder
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_writer import to_yaml
from simkv.sim.run_record import RunRecord


@dataclass(frozen=True)
class GpuSetup:
    """Setup of a run: a model's shape and a device.

    ``graph_tokens`` is the size in tokens of the largest step that is captured as a CUDA graph; 0
    means none. ``warm_up`` is the time in seconds for which steps run before the measurement. With
    ``overlap``, the next step is prepared while the device runs the current step.
    """

    shape: ModelShape
    device: str = "cpu"
    graph_tokens: int = 2816
    warm_up: float = 0.0
    seed: int = 0
    overlap: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per number: 2 for bfloat16 on a GPU, 4 for float32 on a CPU."""
        return 2 if self.device.startswith("cuda") else 4


#: Reason that is recorded for unfinished requests in a run that ended early.
CUT_SHORT = "the run reached its horizon"


@dataclass(frozen=True)
class ExecutionRecord:
    """Record of a run, with ``requests`` in the order of their arrival.

    ``at_work`` is true if the engine had work at the end of the run and had not crashed.
    """

    scenario: Scenario
    requests: list[Request]
    record: RunRecord
    passes: list[Pass]
    recorder: Recorder
    summary: dict[str, Any]
    at_work: bool

    @property
    def stopped(self) -> str:
        """Reason why requests are unfinished, for the decision trace."""
        if stop := self.record.engine_halt:
            return f"no progress: {stop.why}"
        return (
            CUT_SHORT
            if self.cut_short
            else "no progress: the engine has no work, but requests are unfinished"
        )

    @property
    def cut_short(self) -> bool:
        """Whether the horizon ended the run while the engine had unfinished requests."""
        return bool(self.summary["cut_off"]) or (self.at_work and bool(self.leftover))

    @property
    def leftover(self) -> set[int]:
        """Ids of the requests that were still in the engine at the end."""
        return self.recorder.until_all_ended()[1]


def figures(record: RunRecord, passes: list[Pass]) -> dict[str, Any]:
    """Return the metrics of ``summary.json``, and the fraction of time spent on each activity."""
    found = summarize(record)
    del found["jain_index"]  # this would require the time of each request in isolation
    steps = [p for p in passes if p.timing]
    timings = [p.timing for p in steps if p.timing]
    wall = sum(p.seconds for p in steps)
    return found | {
        "device_share": sum(t.gpu_s for t in timings) / wall if wall else 0.0,
        "graph_share": sum(t.graph for t in timings) / len(steps) if steps else 0.0,
        "unbacked_tokens": sum(t.unbacked for t in timings),
        "premature_tokens": sum(t.premature for t in timings),
    }


def write_executions(folder: Path, runs: dict[str, ExecutionRecord], setup: GpuSetup) -> list[str]:
    """Write runs, by variant, to ``folder``, and return the names of the files.

    The files are ``summary.json``, ``requests.csv``, ``passes.csv`` (one line per iteration of the
    engine's loop), ``scenario.yaml``, and one decision trace per variant
    (``decisions-<variant>.jsonl.gz``).
    """
    import pandas as pd

    with atomic_run_folder(folder) as new:
        about = {
            "version": __version__,
            "setup": asdict(setup),
            "machine": machine_info(setup.device),
            "ceilings": ceilings(setup.device)._asdict(),
            "variants": {name: _summary(run) for name, run in runs.items()},
        }
        (new / MARKER_FILE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        requests = [row for name, run in runs.items() for row in request_rows(name, run.record)]
        pd.DataFrame(requests).to_csv(new / "requests.csv", index=False)
        passes = [row for name, run in runs.items() for row in pass_rows(name, run)]
        pd.DataFrame(passes).to_csv(new / "passes.csv", index=False)
        for name, run in runs.items():
            trace = new / f"decisions-{name}.jsonl.gz"
            write_decision_trace(trace, run.recorder, run.requests, run.stopped)
        nothing: dict[str, Any] = {"expect": {}, "published": {}}
        scenarios = {n: run.scenario.model_copy(update=nothing) for n, run in runs.items()}
        write_text(new / "scenario.yaml", to_yaml(scenarios))
        return sorted(path.name for path in new.iterdir())


def _summary(run: ExecutionRecord) -> dict[str, Any]:
    hashes = decision_hashes(run.recorder.lines)
    return {**run.summary, "decisions": len(hashes), "decisions_hash": hashes[-1] if hashes else ""}


def pass_rows(variant: str, run: ExecutionRecord) -> list[dict[str, Any]]:
    """Return one table row per iteration of the engine's loop, with times in seconds.

    The columns are the fields of ``Pass`` and ``Timing``.
    """
    rows = []
    for p in run.passes:
        row: dict[str, Any] = {"variant": variant, **p._asdict(), **p.load._asdict()}
        timing = row.pop("timing")
        del row["load"]
        if timing:
            row |= timing._asdict()
            row["size"] = "x".join(map(str, timing.size))
        rows.append(row)
    return rows
