"""The four stages of a diagnosis: read, rebuild, calibrate and explain.

    evidence = read_stage([Path("server.log"), Path("spans.json")], folder)
    rebuild_stage(folder, UserSettings())
    calibrate_stage(folder, UserSettings())
    print(explain_stage(folder, UserSettings()).summary_lines)

Each stage takes the directory of the diagnosis and reads the files of the previous stage (see
``incident_folder``). A stage uses files that the user edited, and writes deleted files again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from simkv.core.atomic_files import translate_disk_errors, write_text
from simkv.core.errors import InputError
from simkv.core.request import Request
from simkv.costs.cost_profile import CostProfile, load_profile
from simkv.incident import incident_folder as files
from simkv.incident.ensemble_fit import (
    describe_intervals,
    fit_members,
    other_members,
    write_members,
    write_rebuilt,
)
from simkv.incident.evidence import Evidence, UndeterminedError
from simkv.incident.incident_answer import explain_incident, refuse_explanation
from simkv.incident.incident_calibration import calibrate_incident
from simkv.incident.incident_simulation import request_times
from simkv.incident.incident_timeline import HEAD, timeline, timeline_cells
from simkv.incident.log_summary import summarize_log
from simkv.incident.logged_step_costs import with_context
from simkv.incident.measured_answer import (
    IncidentAnswer,
    check_age,
    read_inputs,
    summarize_measured,
    with_inferred,
)
from simkv.incident.observed_comparison import ObservedComparison, compare_observed
from simkv.incident.observed_simulated_plot import write_incident_plot
from simkv.incident.remedies import find_remedies, scenarios_within_error
from simkv.incident.server_setup import (
    ServerSetup,
    UserSettings,
    infer_setup,
    kv_memory,
    kv_tokens,
)
from simkv.incident.source_reader import logs_iterations
from simkv.incident.trial_bounds import bounds
from simkv.incident.wait_summary import is_healthy, summarize_waits
from simkv.incident.workload_rebuild import RebuiltWorkload, is_sampled, rebuild
from simkv.incident.worst_part import select_worst_part
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.report.html_page import PageSection, write_html
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.study.whatif.trial_evaluation import Evaluator
from simkv.workload.trace_source import TraceSource
from simkv.workload.workload_section import build_clients

#: Profile that is used until step costs are fitted.
PLACEHOLDER_PROFILE = "unit-step"
STAGES = ("read", "rebuild", "calibrate", "explain")
ReportProgress = Callable[[int, int], None]


def read_stage(
    inputs: Sequence[Path],
    folder: Path,
    advance: Callable[[int], None] | None = None,
    columns: Mapping[str, str] | None = None,
) -> Evidence:
    """Read and join all inputs, and write the evidence to ``folder``.

    ``advance`` receives the number of bytes read. ``columns`` is for custom request files (see
    ``mapped_records``). Raises InputError if an input cannot be used.
    """
    whole = read_inputs(inputs, advance, columns)
    evidence = select_worst_part(with_inferred(whole, summarize_log(whole)))
    files.write_evidence(folder, evidence)
    return evidence


def rebuild_stage(folder: Path, asked: UserSettings) -> tuple[RebuiltWorkload, ServerSetup]:
    """Reconstruct the workload and the server's configuration.

    ``asked`` contains the user's settings, which override the inputs.
    """
    evidence = files.read_evidence(folder)
    if asked.version is None:
        check_age(evidence)
    setup = infer_setup(evidence, asked)
    source = TraceSource(folder / files.WORKLOAD)
    rebuilt = rebuild(evidence, source, setup, _seed(folder))
    if not (folder / files.WORKLOAD).is_file():
        with translate_disk_errors(folder / files.WORKLOAD, "written"):
            write_rebuilt(folder / files.WORKLOAD, rebuilt, source)
    if not (folder / files.SCENARIO).is_file():
        there = (folder / files.PROFILE).is_file()
        profile = files.PROFILE if there else PLACEHOLDER_PROFILE
        files.write_scenario(folder, setup, profile, rebuilt.notes)
    return rebuilt, setup


def _seed(folder: Path) -> int:
    """Return the random seed of the requests in ``workload.csv``, or 0 if they were not sampled."""
    if not (folder / files.ENSEMBLE).is_file():
        return 0
    return int(pd.read_csv(folder / files.ENSEMBLE)["seed"].iloc[0])


def calibrate_stage(
    folder: Path, asked: UserSettings, tell: ReportProgress = lambda _done, _total: None
) -> CostProfile:
    """Fit the step costs to the measured times.

    ``tell`` receives the number of finished simulations and the expected number.
    """
    if (folder / files.PROFILE).is_file():
        return load_profile(files.PROFILE, folder)
    rebuilt, setup = rebuild_stage(folder, asked)
    scenario, requests = _scenario(folder)
    _same(rebuilt, requests, folder)
    evidence = files.read_evidence(folder)
    steps = evidence.steps
    if not logs_iterations(evidence.engine) and evidence.requests is not None:
        # the lines of these engines give the time between lines instead of the duration of a step
        steps = None
    if steps is not None:
        steps = with_context(steps, evidence.series, kv_tokens(scenario.engine))
    if is_sampled(evidence):
        table, profiles = fit_members(evidence, setup, scenario, steps, tell)
        profile = profiles[int(table["seed"].iloc[0])]
        write_members(folder, evidence, setup, table, profiles)
        with translate_disk_errors(folder / files.ENSEMBLE, "written"):
            table.to_csv(folder / files.ENSEMBLE, index=False, lineterminator="\n")
        (folder / files.WORKLOAD).unlink()
        rebuild_stage(folder, asked)
        memory = int(table["memory"].iloc[0])
    else:
        profile, fitted, _ = calibrate_incident(
            scenario, requests, rebuilt.observed, setup, steps, tell
        )
        memory = kv_memory(fitted.engine)
    write_text(folder / files.PROFILE, profile.model_dump_json(indent=1, exclude_none=True) + "\n")
    knob = find_engine_spec(scenario.engine).memory
    text = (folder / files.SCENARIO).read_text(encoding="utf-8")
    text = text.replace(f"profile: {PLACEHOLDER_PROFILE}", f"profile: {files.PROFILE}")
    guessed = f"  {knob}: {kv_memory(scenario.engine)}\n"
    write_text(folder / files.SCENARIO, text.replace(guessed, f"  {knob}: {memory}\n"))
    return profile


def fit_profile(
    inputs: Sequence[Path],
    asked: UserSettings,
    tell: ReportProgress = lambda _done, _total: None,
) -> tuple[CostProfile, bool]:
    """Return step costs fitted to the logs, spans and client results of one server, as a profile.

    The second value is true if the requests were sampled from log lines. Raises InputError if an
    input cannot be used or does not determine the costs.
    """
    with TemporaryDirectory(prefix="simkv-") as folder:
        sampled = is_sampled(read_stage(inputs, Path(folder)))
        return calibrate_stage(Path(folder), asked, tell), sampled


def explain_stage(
    folder: Path,
    asked: UserSettings,
    *,
    workers: int = 1,
    tell: Callable[[int, int | None], None] = lambda _done, _expected: None,
    try_flags: bool = True,
) -> IncidentAnswer:
    """Simulate the incident, compare it with the observation, and write the diagnosis.

    ``workers`` is the number of processes that try flags. ``tell`` receives the number of finished
    simulations and the expected number, or None.
    """
    profile = calibrate_stage(folder, asked)
    rebuilt, setup = rebuild_stage(folder, asked)
    evidence = files.read_evidence(folder)
    scenario, requests = _scenario(folder)
    _same(rebuilt, requests, folder)
    result = run_scenario(scenario, folder)
    simulated = request_times(result.record, profile.front_s).reindex(range(len(requests)))
    observed = rebuilt.observed
    likeness = compare_observed(
        list(result.parts.values()),
        simulated,
        observed,
        evidence.series,
        rebuilt.origin,
        died=evidence.died is not None,
        reconstructed=is_sampled(evidence),
    )
    _write_compared(folder, likeness.moments, observed, simulated)
    beside = timeline(likeness.moments, observed, simulated)
    notes = [*evidence.notes, *rebuilt.notes, *result.notes]
    ensemble = None
    if (folder / files.ENSEMBLE).is_file():
        ensemble = pd.read_csv(folder / files.ENSEMBLE)
        notes += describe_intervals(ensemble)
    if not likeness.reproduced:
        found = refuse_explanation(likeness, setup, evidence, notes, beside)
    else:
        mending = None
        if try_flags and not is_healthy(result):
            limits = bounds(result, summarize_waits(result).lost)
            done = count(1)
            with Evaluator(
                folder, workers, tick=lambda: tell(next(done), evaluator.expected)
            ) as evaluator:
                mending = find_remedies(
                    scenario, evaluator, limits, _worlds(folder, scenario, profile)
                )
        found = explain_incident(
            result, observed, likeness, mending, setup, evidence, notes, beside, ensemble
        )
        _write_report(folder, result, found, likeness, beside)
    write_text(folder / files.DIAGNOSIS, found.text)
    return found


def summarize_stage(folder: Path, reason: UndeterminedError) -> IncidentAnswer:
    """Return the answer from the measured metrics alone, for inputs that do not determine the
    workload.

    Raises ``reason`` if the inputs have no measured metrics.
    """
    evidence = files.read_evidence(folder)
    summary = summarize_log(evidence)
    if summary is None:
        raise reason
    found = summarize_measured(summary, evidence, str(reason))
    write_text(folder / files.DIAGNOSIS, found.text)
    return found


def _worlds(folder: Path, scenario: Scenario, profile: CostProfile) -> list[list[Scenario]]:
    """Return further scenarios that may also describe the incident, as lists of alternatives.

    The scenarios have other sampled workloads, or faster or slower steps within the profile's
    error. At most one alternative of a list is used. The alternative with the largest deviation
    comes first.
    """
    if (folder / files.ENSEMBLE).is_file():
        return [[one] for one in other_members(folder, scenario)]
    return scenarios_within_error(scenario, profile) if profile.fit.held_out else []


def _write_report(
    folder: Path,
    result: RunResult,
    found: IncidentAnswer,
    likeness: ObservedComparison,
    beside: pd.DataFrame,
) -> None:
    figures = [
        (line.name, f"{line.observed:.4g}", f"{line.simulated:.4g}", "yes" if line.agrees else "no")
        for line in likeness.lines
    ]
    section = PageSection(
        "Observed beside simulated",
        "Observed values are dark, simulated values are blue. Requests are sorted by arrival.",
        (folder / files.PICTURE).read_bytes(),
        [
            ("Figures", ("figure", "observed", "simulated", "agrees"), figures),
            ("Over time, observed / simulated", HEAD, timeline_cells(beside)),
        ],
    )
    shown = result.scenario.model_copy(update={"summary": " ".join(found.summary_lines)})
    result.__dict__["scenario"] = shown
    write_html(
        folder / files.REPORT,
        {"incident": result},
        [found.summary_lines[3].removeprefix("Fix: ")],
        section=section,
    )


def _scenario(folder: Path) -> tuple[Scenario, list[Request]]:
    scenario = next(iter(load(folder / files.SCENARIO, []).values()))
    return scenario, build_clients(scenario.workload, scenario.timeout).requests


def _same(rebuilt: RebuiltWorkload, requests: Sequence[Request], folder: Path) -> None:
    """Raise InputError unless the scenario has the same number of requests as the evidence."""
    if len(requests) != len(rebuilt.observed):
        raise InputError(
            f"{folder / files.WORKLOAD}: has {len(requests)} requests, but "
            f"{len(rebuilt.observed)} were observed; delete {files.WORKLOAD} or {files.EVIDENCE}, "
            f"or simulate the edited workload with `simkv run {folder / files.SCENARIO}`"
        )


def _write_compared(
    folder: Path, moments: pd.DataFrame, observed: pd.DataFrame, simulated: pd.DataFrame
) -> None:
    with translate_disk_errors(folder / files.COMPARED, "written"):
        moments.to_csv(folder / files.COMPARED, index=False, lineterminator="\n")
    write_incident_plot(folder / files.PICTURE, moments, observed, simulated)
