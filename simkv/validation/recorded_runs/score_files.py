"""Write scores as CSV files: metrics, requests, and error records.

``error_records.csv`` has the columns of a published comparison of simulators (see ``SHOWDOWN``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from simkv.core.atomic_files import atomic_file
from simkv.costs.hardware.model_gpu_catalog import known_gpu
from simkv.validation.figure_comparison import FigureComparison
from simkv.validation.recorded_runs.host_gaps import HostTimes, step_rows
from simkv.validation.recorded_runs.published_statistics import METRICS
from simkv.validation.recorded_runs.run_scores import Score
from simkv.validation.recorded_runs.sensitivity import SensitivityScore

#: Columns of error_records.csv (github.com/inference-sim/sim-to-real-accuracy-validation).
SHOWDOWN = (
    "simulator",
    "experiment_folder",
    "model",
    "workload",
    "stage_index",
    "metric_name",
    "predicted",
    "actual",
    "mape",
    "mpe",
    "absolute_error",
    "exp_id",
    "hardware",
    "dp",
    "cpu_offload",
    "gpu_mem_util",
    "precision",
    "tp",
    "max_num_batched_tokens",
)
_SHOWN = {"ttft_ms": "ttft", "tpot_ms": "itl", "e2e_ms": "e2e"}


def write_scores(
    folder: Path,
    scores: Sequence[Score],
    sensitivity: dict[str, list[SensitivityScore]],
    above: Sequence[HostTimes] = (),
) -> list[str]:
    """Write all tables to the existing directory ``folder``, and return the file names."""
    tables = {
        "figures.csv": figure_rows(scores),
        "requests.csv": pd.concat([request_rows(s) for s in scores], ignore_index=True),
        "error_records.csv": showdown_rows(scores),
    }
    if any(sensitivity.values()):
        tables["sensitivity.csv"] = sensitivity_rows(sensitivity)
    if above:
        tables["steps.csv"] = step_rows(above)
    for name in {"sensitivity.csv", "steps.csv"} - set(tables):
        (folder / name).unlink(missing_ok=True)
    for name, table in tables.items():
        with atomic_file(folder / name) as new:
            table.to_csv(new, index=False, float_format="%.6g", lineterminator="\n")
    return sorted(tables)


def figure_rows(scores: Sequence[Score]) -> pd.DataFrame:
    """Return one row per run, stage and metric. Rows for all scored requests have an empty
    ``stage``.
    """
    rows: list[dict[str, Any]] = []
    for s in scores:
        for stage, figures in {"": s.figures, **s.stages}.items():
            published = {} if stage else s.published
            rows += [
                {"case": s.case.name, "stage": stage, **_figure(f, published.get(f.name))}
                for f in figures
            ]
        for per in s.per_request:
            for name in ("mape", "median_ape", "mae_ms"):
                value = getattr(per, name)
                if value is not None:
                    origin = per.origin_mape if name == "mape" else None
                    rows.append(
                        {
                            "case": s.case.name,
                            "stage": "",
                            "metric": per.metric,
                            "statistic": f"per_request_{name}",
                            "error_pct": None if name == "mae_ms" else value,
                            "predicted": value if name == "mae_ms" else None,
                            "origin_error_pct": origin,
                        }
                    )
    return pd.DataFrame(rows)


def _figure(f: FigureComparison, published: float | None) -> dict[str, Any]:
    return {
        "metric": f.metric,
        "statistic": f.statistic,
        "measured": f.real,
        "predicted": f.predicted,
        "low": f.interval[0] if f.interval else None,
        "high": f.interval[1] if f.interval else None,
        "error_pct": f.error_pct,
        "origin_error_pct": published,
    }


def request_rows(s: Score) -> pd.DataFrame:
    """Return a row per request with its measured and predicted times (ms)."""
    there = s.case.requests
    table = pd.DataFrame(
        {
            "case": s.case.name,
            "id": there["id"] if "id" in there else range(len(there)),
            "stage": there.get("stage", ""),
            "scored": s.case.scored,
            "prompt_tokens": there["prompt_tokens"],
            "output_tokens": there["output_tokens"],
        }
    )
    for metric in METRICS:
        table[f"measured_{metric}"] = there[metric]
        table[f"predicted_{metric}"] = s.replayed.requests[metric]
    return table.assign(preemptions=s.replayed.requests["preemptions"])


def showdown_rows(scores: Sequence[Score]) -> pd.DataFrame:
    """Return the rows of ``error_records.csv``. ``stage_index`` -1 means all requests."""
    rows: list[dict[str, Any]] = []
    for s in scores:
        facts, setup = s.case.facts, s.case.facts.engine
        about = {
            "exp_id": facts.name,
            "hardware": known.name if (known := known_gpu(setup.gpu)) else setup.gpu,
            "dp": setup.data_parallel,
            "cpu_offload": False,
            "gpu_mem_util": setup.gpu_memory_utilization,
            "precision": setup.dtype or "",
            "tp": setup.tensor_parallel,
            "max_num_batched_tokens": setup.max_num_batched_tokens,
        }
        for index, figures in enumerate((s.figures, *s.stages.values()), start=-1):
            for f in figures:
                if f.metric in _SHOWN:
                    rows.append(
                        {
                            "simulator": "simkv",
                            "experiment_folder": s.case.folder.name,
                            "model": facts.model,
                            "workload": str(facts.workload.get("source", "")),
                            "stage_index": index,
                            "metric_name": f"{_SHOWN[f.metric]}_{f.statistic}",
                            "predicted": f.predicted,
                            "actual": f.real,
                            "mape": abs(f.error_pct),
                            "mpe": f.error_pct,
                            "absolute_error": abs(f.predicted - f.real),
                            **about,
                        }
                    )
    return pd.DataFrame(rows, columns=list(SHOWDOWN))


def sensitivity_rows(sensitivity: dict[str, list[SensitivityScore]]) -> pd.DataFrame:
    """Return one row per run, changed setting and metric, with the error (%)."""
    rows = [
        {"case": name, "change": found.change, **_figure(f, None)}
        for name, all_of in sensitivity.items()
        for found in all_of
        for f in found.score.figures
    ]
    return pd.DataFrame(rows).drop(columns="origin_error_pct")
