"""Observed beside simulated over time, and request by request."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from simkv.report.style import BLUE, DARK, WIDTH, house_style, save

_PANELS = (("running", "running"), ("waiting", "waiting"), ("usage", "KV cache in use"))


def write_picture(
    path: Path, moments: pd.DataFrame, observed: pd.DataFrame, simulated: pd.DataFrame
) -> None:
    """Running, waiting and the cache over time, and E2E of each request by its arrival."""
    with house_style():
        figure = Figure(figsize=(WIDTH, 7.2))
        axes = figure.subplots(len(_PANELS) + 1, 1, sharex=True)
        for panel, (name, title) in zip(axes, _PANELS, strict=False):
            panel.plot(moments["t_s"], moments[f"simulated_{name}"], color=BLUE, lw=1.2)
            panel.plot(moments["t_s"], moments[f"observed_{name}"], color=DARK, lw=1.0, ls="--")
            panel.set_ylabel(title)
            panel.set_ylim(bottom=0)
        at = observed["t_s"] - observed["t_s"].iloc[0]
        last = axes[-1]
        last.scatter(at, simulated["e2e_ms"].to_numpy() / 1e3, s=8, color=BLUE, label="simulated")
        last.scatter(
            at, observed["e2e_ms"] / 1e3, s=10, facecolors="none", edgecolors=DARK, label="observed"
        )
        last.set_ylabel("E2E (s)")
        last.set_ylim(bottom=0)
        last.set_xlabel("seconds from the first request")
        last.legend(loc="upper right")
        save(figure, path)
