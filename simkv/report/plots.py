"""The static pictures of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from simkv.loop.record import Record
from simkv.report.lanes import draw_lanes
from simkv.report.latency import draw_latency
from simkv.report.pressure import draw_pressure
from simkv.report.style import house_style, save


def write_plots(records: Mapping[str, Record], title: str, folder: Path) -> list[Path]:
    """Write ``lanes.png``, ``latency.png`` and ``pressure.png`` into ``folder``, which must exist.

    ``records`` are the variants of one scenario by name, in the order of their panels. The same
    records give the same bytes. Returns the paths.
    """
    pictures = {"lanes": draw_lanes, "latency": draw_latency, "pressure": draw_pressure}
    with house_style():
        return [
            save(draw(records, title), folder / f"{name}.png") for name, draw in pictures.items()
        ]
