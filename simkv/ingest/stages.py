"""The four stages, each a function of an incident's folder: read, rebuild, calibrate, explain.

    evidence = read_stage([Path("server.log"), Path("spans.json")], folder)
    rebuild_stage(folder, Asked())
    calibrate_stage(folder, Asked())
    print(explain_stage(folder, Asked()).five)

Each reads the files that the one before has left there (see ``folder``), and leaves those alone
that are there already: a file that its user has changed stays, one that is deleted is made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pandas as pd

from simkv.core.errors import InputError
from simkv.core.files import disk_errors, write_text
from simkv.core.request import Request
from simkv.costs.profile import Profile, load_profile
from simkv.ingest import folder as files
from simkv.ingest.bounds import bounds
from simkv.ingest.calibrate import calibrate
from simkv.ingest.compare import Likeness, compare
from simkv.ingest.engine import Asked, ServerSetup, kv_memory, kv_tokens, set_up
from simkv.ingest.evidence import Evidence
from simkv.ingest.explain import Answer, answer, refuse
from simkv.ingest.from_steps import with_context
from simkv.ingest.join import join
from simkv.ingest.members import members, others, spread, write_members, write_rebuilt
from simkv.ingest.mend import mend, off_by_error
from simkv.ingest.picture import write_picture
from simkv.ingest.read import logs_iterations, read
from simkv.ingest.rebuild import Rebuilt, is_drawn, rebuild
from simkv.ingest.replay import times
from simkv.ingest.timeline import HEAD, rows, timeline
from simkv.ingest.waiting import is_well, waiting
from simkv.measure.result import Result
from simkv.measure.simulate import run_scenario
from simkv.report.html import PageSection, write_html
from simkv.scenario.load import load
from simkv.scenario.scenario import Scenario
from simkv.schedulers.registry import spec_of
from simkv.search.whatif.evaluate import Evaluator
from simkv.workload.source import Source
from simkv.workload.workload import clients

#: What stands in for step costs until they are known.
UNKNOWN = "unit-step"
STAGES = ("read", "rebuild", "calibrate", "explain")
Tell = Callable[[int, int], None]


def read_stage(
    inputs: Sequence[Path], folder: Path, advance: Callable[[int], None] | None = None
) -> Evidence:
    """All that the sources tell, joined; stage 1. Raises InputError if one cannot be used."""
    evidence = join([read(path, advance) for path in inputs])
    files.write_evidence(folder, evidence)
    return evidence


def rebuild_stage(folder: Path, asked: Asked) -> tuple[Rebuilt, ServerSetup]:
    """The workload and the server as they were; stage 2."""
    evidence = files.read_evidence(folder)
    setup = set_up(evidence, asked)
    source = Source(folder / files.WORKLOAD)
    rebuilt = rebuild(evidence, source, setup, _seed(folder))
    if not (folder / files.WORKLOAD).is_file():
        with disk_errors(folder / files.WORKLOAD, "written"):
            write_rebuilt(folder / files.WORKLOAD, rebuilt, source)
    if not (folder / files.SCENARIO).is_file():
        there = (folder / files.PROFILE).is_file()
        profile = files.PROFILE if there else UNKNOWN
        files.write_scenario(folder, setup, profile, rebuilt.notes)
    return rebuilt, setup


def _seed(folder: Path) -> int:
    """Which member of an ensemble the workload is, where requests are drawn."""
    if not (folder / files.ENSEMBLE).is_file():
        return 0
    return int(pd.read_csv(folder / files.ENSEMBLE)["seed"].iloc[0])


def calibrate_stage(folder: Path, asked: Asked, tell: Tell = lambda _done, _total: None) -> Profile:
    """What steps cost; stage 3."""
    if (folder / files.PROFILE).is_file():
        return load_profile(files.PROFILE, folder)
    rebuilt, setup = rebuild_stage(folder, asked)
    scenario, requests = _scenario(folder)
    _same(rebuilt, requests, folder)
    evidence = files.read_evidence(folder)
    steps = evidence.steps
    if not logs_iterations(evidence.engine) and evidence.requests is not None:
        steps = None  # its lines tell the time between two lines, whatever ran in it
    if steps is not None:
        steps = with_context(steps, evidence.series, kv_tokens(scenario.engine))
    if is_drawn(evidence):
        table, profiles = members(evidence, setup, scenario, steps, tell)
        profile = profiles[int(table["seed"].iloc[0])]
        write_members(folder, evidence, setup, table, profiles)
        with disk_errors(folder / files.ENSEMBLE, "written"):
            table.to_csv(folder / files.ENSEMBLE, index=False, lineterminator="\n")
        (folder / files.WORKLOAD).unlink()
        rebuild_stage(folder, asked)
        memory = int(table["memory"].iloc[0])
    else:
        profile, fitted = calibrate(scenario, requests, rebuilt.observed, setup, steps, tell)
        memory = kv_memory(fitted.engine)
    write_text(folder / files.PROFILE, profile.model_dump_json(indent=1, exclude_none=True) + "\n")
    knob = spec_of(scenario.engine).memory
    text = (folder / files.SCENARIO).read_text(encoding="utf-8")
    text = text.replace(f"profile: {UNKNOWN}", f"profile: {files.PROFILE}")
    guessed = f"  {knob}: {kv_memory(scenario.engine)}\n"
    write_text(folder / files.SCENARIO, text.replace(guessed, f"  {knob}: {memory}\n"))
    return profile


def explain_stage(
    folder: Path,
    asked: Asked,
    *,
    workers: int = 1,
    tell: Callable[[int, int | None], None] = lambda _done, _expected: None,
    try_flags: bool = True,
) -> Answer:
    """Simulate, compare, and say whom it hit, why, and what mends it; stage 4."""
    profile = calibrate_stage(folder, asked)
    rebuilt, setup = rebuild_stage(folder, asked)
    evidence = files.read_evidence(folder)
    scenario, requests = _scenario(folder)
    _same(rebuilt, requests, folder)
    result = run_scenario(scenario, folder)
    simulated = times(result.record, profile.front_s).reindex(range(len(requests)))
    observed = rebuilt.observed
    likeness = compare(
        list(result.parts.values()),
        simulated,
        observed,
        evidence.series,
        rebuilt.origin,
        died=evidence.died is not None,
    )
    _write_compared(folder, likeness.moments, observed, simulated)
    beside = timeline(likeness.moments, observed, simulated)
    notes = [*evidence.notes, *rebuilt.notes, *result.notes]
    if (folder / files.ENSEMBLE).is_file():
        notes += spread(pd.read_csv(folder / files.ENSEMBLE))
    if not likeness.reproduced:
        found = refuse(likeness, setup, evidence, notes, beside)
    else:
        mending = None
        if try_flags and not is_well(result):
            limits = bounds(result, waiting(result).lost)
            done = count(1)
            with Evaluator(
                folder, workers, tick=lambda: tell(next(done), evaluator.expected)
            ) as evaluator:
                mending = mend(scenario, evaluator, limits, _worlds(folder, scenario, profile))
        found = answer(result, observed, likeness, mending, setup, evidence, notes, beside)
        _write_report(folder, result, found, likeness, beside)
    write_text(folder / files.DIAGNOSIS, found.text)
    return found


def _worlds(folder: Path, scenario: Scenario, profile: Profile) -> list[list[Scenario]]:
    """Other scenarios that the incident may have been, each in several degrees."""
    if (folder / files.ENSEMBLE).is_file():
        return [[one] for one in others(folder, scenario)]
    return off_by_error(scenario, profile) if profile.fit.held_out else []


def _write_report(
    folder: Path, result: Result, found: Answer, likeness: Likeness, beside: pd.DataFrame
) -> None:
    """The report of the simulated incident, with what was observed beside it."""
    figures = [
        (line.name, f"{line.observed:.4g}", f"{line.simulated:.4g}", "yes" if line.agrees else "no")
        for line in likeness.lines
    ]
    section = PageSection(
        "Observed beside simulated",
        "What was observed is dark, what was simulated is blue; requests are by their arrival.",
        (folder / files.PICTURE).read_bytes(),
        [
            ("Figures", ("figure", "observed", "simulated", "agrees"), figures),
            ("Over time, observed / simulated", HEAD, rows(beside)),
        ],
    )
    shown = result.scenario.model_copy(update={"summary": " ".join(found.five)})
    result.__dict__["scenario"] = shown
    write_html(folder / files.REPORT, {"incident": result}, [found.five[3]], section=section)


def _scenario(folder: Path) -> tuple[Scenario, list[Request]]:
    scenario = next(iter(load(folder / files.SCENARIO, []).values()))
    return scenario, clients(scenario.workload, scenario.timeout).requests


def _same(rebuilt: Rebuilt, requests: Sequence[Request], folder: Path) -> None:
    """Raise InputError if the workload is no longer that of the evidence."""
    if len(requests) != len(rebuilt.observed):
        raise InputError(
            f"{folder / files.WORKLOAD}: has {len(requests)} requests where "
            f"{len(rebuilt.observed)} were observed; delete one of {files.WORKLOAD} and "
            f"{files.EVIDENCE}, or run it with `simkv run {folder / files.SCENARIO}`"
        )


def _write_compared(
    folder: Path, moments: pd.DataFrame, observed: pd.DataFrame, simulated: pd.DataFrame
) -> None:
    with disk_errors(folder / files.COMPARED, "written"):
        moments.to_csv(folder / files.COMPARED, index=False, lineterminator="\n")
    write_picture(folder / files.PICTURE, moments, observed, simulated)
