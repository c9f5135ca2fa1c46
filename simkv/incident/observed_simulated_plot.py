"""Plot observed and simulated values over time and per request."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from simkv.report.plot_style import (
    BLUE,
    DARK,
    WIDTH,
    plot_settings,
    save,
)

_PANELS = (("running", "running"), ("waiting", "waiting"), ("usage", "KV cache in use"))
_REQUESTS = (("ttft_ms", "TTFT (s)"), ("e2e_ms", "E2E (s)"))


def write_incident_plot(
    path: Path, moments: pd.DataFrame, observed: pd.DataFrame, simulated: pd.DataFrame
) -> None:
    """Plot the observed and the simulated values, and write the plot to ``path``."""
    with plot_settings():
        figure = Figure(figsize=(WIDTH, 8.8))
        axes = figure.subplots(len(_PANELS) + len(_REQUESTS), 1, sharex=True)
        for panel, (name, title) in zip(axes, _PANELS, strict=False):
            panel.plot(moments["t_s"], moments[f"simulated_{name}"], color=BLUE, lw=1.2)
            panel.plot(moments["t_s"], moments[f"observed_{name}"], color=DARK, lw=1.0, ls="--")
            panel.set_ylabel(title)
            panel.set_ylim(bottom=0)
        at = observed["t_s"] - observed["t_s"].iloc[0]
        for panel, (name, title) in zip(axes[len(_PANELS) :], _REQUESTS, strict=True):
            made, seen = simulated[name].to_numpy() / 1e3, observed[name] / 1e3
            panel.scatter(at, made, s=8, color=BLUE, label="simulated")
            panel.scatter(at, seen, s=10, facecolors="none", edgecolors=DARK, label="observed")
            panel.set_ylabel(title)
            panel.set_ylim(bottom=0)
        last = axes[-1]
        last.set_xlabel("seconds from the first request")
        last.legend(loc="upper right")
        save(figure, path)
