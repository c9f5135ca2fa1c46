"""The members of an ensemble, calibrated and simulated: which are likely, and how they differ."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd

from simkv.core.errors import InputError
from simkv.costs.profile import Profile
from simkv.ingest.calibrate import calibrate
from simkv.ingest.engine import ServerSetup, kv_memory
from simkv.ingest.ensemble import MEMBERS, interval, likely_half
from simkv.ingest.evidence import Evidence
from simkv.ingest.rebuild import Rebuilt, rebuild
from simkv.ingest.replay import simulate, times
from simkv.scenario.scenario import Scenario
from simkv.workload.source import Source
from simkv.workload.trace import read_trace
from simkv.workload.traces.own import used_columns, write_file

#: Figures of the members, and the columns that they are means of.
FIGURES = {"e2e": "e2e_ms", "ttft": "ttft_ms", "tpot": "tpot_ms", "queue": "queue_ms"}


def members(
    evidence: Evidence,
    setup: ServerSetup,
    scenario: Scenario,
    tell: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[pd.DataFrame, Profile]:
    """The likely members, the likeliest first: seed and figures (s); and the profile of the first.

    Raises InputError if none can be simulated.
    """
    rows, profiles = [], {}
    for seed in range(MEMBERS):
        row, profile = _member(evidence, setup, scenario, seed)
        rows.append(row)
        profiles[seed] = profile
        tell(seed + 1, MEMBERS)
    table = likely_half(pd.DataFrame(rows).dropna(subset=["e2e", "ttft"]))
    if table.empty:
        raise InputError("no workload that agrees with the sums could be served")
    return table, profiles[int(table["seed"].iloc[0])]


def _member(
    evidence: Evidence, setup: ServerSetup, scenario: Scenario, seed: int
) -> tuple[dict[str, float], Profile]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.csv"
        source = Source(path)
        rebuilt = rebuild(evidence, source, seed=seed)
        write_rebuilt(path, rebuilt, source)
        requests = read_trace(path).requests()
    # Which size of an unknown cache fits would be asked of each: the spread has more in it.
    told = replace(setup, guessed=False)
    profile, fitted = calibrate(scenario, requests, rebuilt.observed, told)
    made = times(simulate(fitted, profile, requests), profile.front_s)
    row: dict[str, float] = {"seed": seed, "memory": kv_memory(fitted.engine)}
    for name, column in FIGURES.items():
        row[name] = float(made[column].mean()) / 1e3
        row[f"{name}_observed"] = float(rebuilt.observed[column].mean()) / 1e3
    return row, profile


def write_rebuilt(path: Path, rebuilt: Rebuilt, source: Source) -> None:
    """Write the requests as a trace of ours."""
    write_file(path, [rebuilt.rows], used_columns(rebuilt.rows, ["arrival"]), source)


def spread(table: pd.DataFrame) -> list[str]:
    """The figures and where they lie with nine chances in ten, a line each."""
    lines = []
    for name in FIGURES:
        low, high = interval(table[name].tolist(), float(table[f"{name}_observed"].mean()))
        mean = table[name].mean()
        ends = f"90 % interval {max(low, 0):.4g} to {high:.4g} s"
        lines.append(f"over the ensemble {name.upper()} mean is {mean:.4g} s, {ends}")
    return lines
