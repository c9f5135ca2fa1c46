"""Table of observed and simulated values over time, with about ten rows."""

from __future__ import annotations

import numpy as np
import pandas as pd

#: Number of rows of the table.
ROWS = 12
#: Metrics whose mean is computed for each interval; requests are assigned by their arrival (s).
TIMELINE_FIGURES = ("running", "waiting", "usage", "ttft_s", "e2e_s")
HEAD = ("from (s)", "running", "waiting", "KV cache in use", "TTFT (s)", "E2E (s)")


def timeline(
    moments: pd.DataFrame, observed: pd.DataFrame, simulated: pd.DataFrame
) -> pd.DataFrame:
    """Return a table of observed and simulated means per time interval.

    ``t_s`` is the start of an interval in seconds. The columns of each metric have the prefixes
    ``observed_`` and ``simulated_``. A value is NaN if the interval has no data.
    """
    arrivals = (observed["t_s"] - observed["t_s"].iloc[0]).to_numpy(np.float64)
    end = max(float(moments["t_s"].max()), float(arrivals.max()), 1e-3)
    edges = np.linspace(0.0, end, ROWS + 1)[:-1]
    table = pd.DataFrame({"t_s": edges})
    at = np.clip(np.searchsorted(edges, moments["t_s"], "right") - 1, 0, ROWS - 1)
    came = np.clip(np.searchsorted(edges, arrivals, "right") - 1, 0, ROWS - 1)
    for side, requests in (("observed", observed), ("simulated", simulated)):
        for name in TIMELINE_FIGURES[:3]:
            table[f"{side}_{name}"] = _means(moments[f"{side}_{name}"], at)
        for name in ("ttft", "e2e"):
            table[f"{side}_{name}_s"] = _means(requests[f"{name}_ms"] / 1e3, came)
    return table


def _means(values: pd.Series[float], row: np.ndarray) -> pd.Series[float]:
    return pd.Series(values.to_numpy()).groupby(row).mean().reindex(range(ROWS))


def timeline_cells(table: pd.DataFrame) -> list[tuple[str, ...]]:
    """Return the table as text, with ``observed / simulated`` in each cell."""
    return [
        (
            f"{row['t_s']:.4g}",
            *(
                f"{_told(row[f'observed_{name}'])} / {_told(row[f'simulated_{name}'])}"
                for name in TIMELINE_FIGURES
            ),
        )
        for _, row in table.iterrows()
    ]


def _told(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3g}"
