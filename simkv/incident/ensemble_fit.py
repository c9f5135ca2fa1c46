"""Calibrate and simulate sampled workloads, and select the likely ones.

The workloads were sampled with different seeds and form an ensemble. All match the evidence.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from simkv.core.atomic_files import atomic_file, translate_disk_errors, write_text
from simkv.costs.cost_profile import CostProfile
from simkv.incident.evidence import Evidence, UndeterminedError
from simkv.incident.incident_calibration import calibrate_incident
from simkv.incident.incident_folder import ENSEMBLE
from simkv.incident.incident_simulation import rank_records, request_times
from simkv.incident.observed_comparison import series_distance
from simkv.incident.server_setup import ServerSetup, kv_memory
from simkv.incident.workload_ensemble import MEMBERS, interval, select_likely_members
from simkv.incident.workload_rebuild import RebuiltWorkload, is_from_lines, rebuild
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.sim.simulation import simulate_with_profile
from simkv.study.field_changes import with_field, with_knobs
from simkv.workload.formats.simkv_csv import used_columns, write_file
from simkv.workload.trace_reader import read_trace
from simkv.workload.trace_source import TraceSource

#: Number of members, besides the first member, whose files are written.
MEMBERS_WRITTEN = 4


@dataclass(frozen=True)
class EnsembleFigure:
    """Metric of a sampled workload: the mean or a ``quantile`` of a column of request times."""

    column: str
    label: str
    quantile: float | None = None

    def of(self, table: pd.DataFrame) -> float:
        """Return the metric in seconds for a table of requests."""
        values = table[self.column]
        found = values.mean() if self.quantile is None else values.quantile(self.quantile)
        return float(found) / 1e3


FIGURES = {
    "e2e": EnsembleFigure("e2e_ms", "E2E mean"),
    "ttft": EnsembleFigure("ttft_ms", "TTFT mean"),
    "tpot": EnsembleFigure("tpot_ms", "TPOT mean"),
    "queue": EnsembleFigure("queue_ms", "mean time queued"),
    "e2e_p90": EnsembleFigure("e2e_ms", "E2E p90", 0.9),
}


def fit_members(
    evidence: Evidence,
    setup: ServerSetup,
    scenario: Scenario,
    steps: pd.DataFrame | None = None,
    tell: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[pd.DataFrame, dict[int, CostProfile]]:
    """Return a table of the likely sampled workloads, and their cost profiles by seed.

    The table has the seed and the metrics (s) of each workload, the likeliest first. ``tell``
    receives the number of finished workloads and the total. Raises UndeterminedError if no workload
    can be simulated.
    """
    rows, profiles = [], {}
    for seed in range(MEMBERS):
        row, profile = _member(evidence, setup, scenario, steps, seed)
        rows.append(row)
        profiles[seed] = profile
        tell(seed + 1, MEMBERS)
    table = select_likely_members(pd.DataFrame(rows).dropna(subset=["e2e", "ttft"]))
    if table.empty:
        raise UndeterminedError(
            "no sampled workload matches the totals in the metrics and can also be served"
        )
    return table, profiles


def _member(
    evidence: Evidence,
    setup: ServerSetup,
    scenario: Scenario,
    steps: pd.DataFrame | None,
    seed: int,
) -> tuple[dict[str, float], CostProfile]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.csv"
        source = TraceSource(path)
        rebuilt = rebuild(evidence, source, setup, seed)
        write_rebuilt(path, rebuilt, source)
        requests = read_trace(path).requests()
    # An unknown cache size is not fitted for each member, because the members differ by more than
    # its effect.
    told = replace(setup, guessed=False)
    only_lines = is_from_lines(evidence)
    profile, fitted, run = calibrate_incident(
        scenario, requests, rebuilt.observed, told, steps, of_lines=only_lines
    )
    if run is None:
        run = simulate_with_profile(fitted, profile, requests)
    made = request_times(run.record, profile.front_s).reindex(range(len(requests)))
    made = made[rebuilt.observed["e2e_ms"].notna()]  # requests before the log have no latency
    row: dict[str, float] = {"seed": seed, "memory": kv_memory(fitted.engine)}
    for name, wanted in FIGURES.items():
        row[name] = wanted.of(made)
        row[f"{name}_observed"] = wanted.of(rebuilt.observed)
    if only_lines and evidence.series is not None:
        row["apart"] = series_distance(rank_records(run), evidence.series, rebuilt.origin)
    return row, profile


def write_members(
    folder: Path,
    evidence: Evidence,
    setup: ServerSetup,
    table: pd.DataFrame,
    profiles: dict[int, CostProfile],
) -> None:
    """Write the likely sampled workloads except the first, with their profiles.

    The files are ``ensemble-SEED.csv`` and ``ensemble-SEED.json``.
    """
    for seed in table["seed"].astype(int).tolist()[1 : MEMBERS_WRITTEN + 1]:
        workload, profile = _files(folder, seed)
        source = TraceSource(workload)
        with translate_disk_errors(workload, "written"):
            write_rebuilt(workload, rebuild(evidence, source, setup, seed), source)
        told = profiles[seed].model_dump_json(indent=1, exclude_none=True)
        write_text(profile, told + "\n")


def other_members(folder: Path, scenario: Scenario) -> list[Scenario]:
    """Return a scenario for each likely sampled workload except the first."""
    table = pd.read_csv(folder / ENSEMBLE)
    first, knob = int(table["memory"].iloc[0]), find_engine_spec(scenario.engine).memory
    found = []
    for seed, memory in table[["seed", "memory"]].astype(int).itertuples(index=False):
        workload, profile = _files(folder, seed)
        if not (workload.is_file() and profile.is_file()):
            continue
        one = with_field(scenario, "workload", {"trace": workload.name}, folder)
        one = with_field(one, "profile", profile.name, folder)
        if kv_memory(scenario.engine) == first != memory:
            one = with_knobs(one, folder, **{knob: memory})
        found.append(one)
    return found


def _files(folder: Path, seed: int) -> tuple[Path, Path]:
    return folder / f"ensemble-{seed}.csv", folder / f"ensemble-{seed}.json"


def write_rebuilt(path: Path, rebuilt: RebuiltWorkload, source: TraceSource) -> None:
    """Write the reconstructed requests to ``path`` as a simkv trace."""
    with atomic_file(path) as new:
        write_file(new, [rebuilt.rows], used_columns(rebuilt.rows, ["arrival"]), source)


def describe_intervals(table: pd.DataFrame) -> list[str]:
    """Return one line of text per metric, with its 90 % interval."""
    lines = []
    for name, wanted in FIGURES.items():
        if table[name].isna().any():
            lines.append(f"over the ensemble {wanted.label} is not determined: a member has none")
            continue
        low, high = interval(table[name].tolist(), float(table[f"{name}_observed"].mean()))
        mean = table[name].mean()
        ends = f"90 % interval {max(low, 0):.4g} to {high:.4g} s"
        lines.append(f"over the ensemble {wanted.label} is {mean:.4g} s, {ends}")
    return lines
