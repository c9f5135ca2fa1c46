"""Draws the picture of the README: the flagship's lanes before and after the fix."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from simkv.measure.result import parts_of
from simkv.measure.simulate import run_scenario
from simkv.report.plots import write_plots
from simkv.scenario.load import load

SCENARIO = Path("scenarios/mistralrs-forty.yaml")
VARIANTS = ("before-assumed", "after-assumed")


def main() -> None:
    variants = load(SCENARIO)
    results = {name: run_scenario(variants[name], SCENARIO.parent) for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        write_plots(parts_of(results), "Forty requests, sixteen at a time", Path(folder))
        shutil.copy(Path(folder) / "lanes.png", sys.argv[1])


if __name__ == "__main__":
    main()
