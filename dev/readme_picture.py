"""Draw the picture of the README: request lanes of the flagship scenario before and after a fix."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from simkv.metrics.run_result import records_by_replica
from simkv.metrics.scenario_runner import run_scenario
from simkv.report.run_plots import write_plots
from simkv.scenario.scenario_loader import load

SCENARIO = Path("scenarios/mistralrs-forty.yaml")
VARIANTS = ("before-assumed", "after-assumed")


def main() -> None:
    variants = load(SCENARIO)
    results = {name: run_scenario(variants[name], SCENARIO.parent) for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        write_plots(records_by_replica(results), "Forty requests, sixteen at a time", Path(folder))
        shutil.copy(Path(folder) / "lanes.png", sys.argv[1])


if __name__ == "__main__":
    main()
