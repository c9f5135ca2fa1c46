"""Results directory of a plan: the answer, all evaluations, the cliff, and plots."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from simkv.core.atomic_files import make_folder, write_text
from simkv.core.version import __version__
from simkv.report.plan_plots import draw_answer, draw_cliff
from simkv.study.plan.capacity_plan import CapacityPlan
from simkv.study.plan.plan_tables import cliff_table, evaluations, to_json
from simkv.study.sweep.sweep_table import write_table


def write_plans(plans: Sequence[CapacityPlan], folder: Path) -> list[Path]:
    """Write ``plan.json``, tables and plots of the plans for all variants; return their paths.

    Each file is written completely or not at all.
    """
    make_folder(folder)
    answer = {"version": __version__, "plans": [to_json(plan) for plan in plans]}
    written = [folder / "plan.json"]
    text = json.dumps(answer, indent=1, allow_nan=False) + "\n"
    write_text(written[0], text)
    tables = {
        "evaluations": [evaluations(plan) for plan in plans],
        "cliff": [cliff_table(plan) for plan in plans if plan.points],
    }
    for name, frames in tables.items():
        if frames:
            written += write_table(pd.concat(frames, ignore_index=True), folder, name)
    for plan in plans:
        label = re.sub(r"[^\w.=-]+", "-", plan.prepared.label)
        end = f"-{label}.png" if label else ".png"
        written.append(draw_answer(plan, folder / f"answer{end}"))
        cliff = draw_cliff(plan, folder / f"cliff{end}")
        written += [] if cliff is None else [cliff]
    return written
