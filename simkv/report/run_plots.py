"""Static plots of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from simkv.metrics.run_result import RunResult
from simkv.report.fleet_plot import draw_fleet, find_slowest_replica
from simkv.report.lanes_plot import MAX_LANES, draw_lanes
from simkv.report.latency_plot import draw_latency
from simkv.report.plot_style import plot_settings, save
from simkv.report.pressure_plot import draw_pressure
from simkv.sim.run_record import RunRecord

#: Time limit for rendering plots that were not requested, in seconds.
TIME_BUDGET_S = 1.0

Records = Mapping[str, RunRecord]
_DRAW: dict[str, Callable[[Records, str], Figure]] = {
    "lanes": draw_lanes,
    "latency": draw_latency,
    "pressure": draw_pressure,
}


def write_plots(
    records: Records, title: str, folder: Path, names: Collection[str] = tuple(_DRAW)
) -> list[Path]:
    """Write ``lanes.png``, ``latency.png`` and ``pressure.png`` to ``folder``, which must exist.

    ``records`` are the variants of one scenario by name, in panel order; ``names`` selects plots.
    The same records give the same bytes. Return the paths.
    """
    with plot_settings():
        return [
            save(draw(records, title), folder / f"{name}.png")
            for name, draw in _DRAW.items()
            if name in names
        ]


def write_run_plots(
    results: Mapping[str, RunResult], title: str, folder: Path, *, everything: bool
) -> list[str]:
    """Write the plots of a run; return the file names of omitted plots.

    Unless ``everything`` is set, only plots that render within ``TIME_BUDGET_S`` in total are
    written. A fleet also has ``fleet.png``, and its slowest replica represents it in the other
    plots.
    """
    fleets = {name: result.parts for name, result in results.items() if result.fleet}
    records = {}
    for name, result in results.items():
        if len(result.parts) > 1:
            worst = find_slowest_replica(result.parts)
            title_of = f"{name}: {worst}, the slowest of {len(result.parts)}"
            records[title_of] = result.parts[worst]
        else:
            records[name] = result.record
    wanted = list(_DRAW) if everything else _affordable(records, TIME_BUDGET_S - bool(fleets) * 0.4)
    write_plots(records, title, folder, wanted)
    if fleets:
        with plot_settings():
            save(draw_fleet(fleets, title), folder / "fleet.png")
    return [f"{name}.png" for name in _DRAW if name not in wanted]


def _affordable(records: Records, budget: float) -> list[str]:
    """Return the plots, in order, that render within ``budget`` seconds in total.

    Render times are estimated from the contents, so that the same run always has the same plots.
    """
    panels = len(records)
    lives = [life for record in records.values() for life in record.requests.values()]
    lanes = sum(min(len(record.requests), MAX_LANES) for record in records.values())
    stretches = sum(len(life.segments) for life in lives) * lanes / max(len(lives), 1)
    cost = {
        "lanes": 0.20 + 0.06 * panels + 1.2e-3 * lanes + 5e-5 * stretches,
        "latency": 0.15 + 0.035 * panels + 2e-4 * len(lives),
        "pressure": 0.20 + 0.11 * panels + 4e-6 * sum(len(r.steps) for r in records.values()),
    }
    chosen = []
    for name, seconds in cost.items():
        if seconds <= budget:
            chosen.append(name)
            budget -= seconds
    return chosen
