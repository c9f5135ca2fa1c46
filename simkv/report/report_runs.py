"""Find the runs of a report by directory, scenario file or name, and simulate them again.

Runs are deterministic, so the scenario in a results directory reproduces the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from simkv.core.errors import InputError
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.packaged_scenarios import find_scenario
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.study.whatif.trial_evaluation import Evaluator
from simkv.study.whatif.whatif import run_whatif
from simkv.study.worker_pool import cores

#: Maximum number of single changes in a report.
MAX_NAMED_CHANGES = 4
#: Maximum number of requests for which all changes can be tried within seconds.
MAX_QUICK_REQUESTS = 1_000


@dataclass(frozen=True)
class PlannedRun:
    """A variant to run. The path of its profile is relative to ``folder``."""

    scenario: Scenario
    folder: Path


def find_runs(runs: Iterable[Path]) -> dict[str, PlannedRun]:
    """Return all variants of the given runs, by name.

    A run is a results directory, a scenario file or the name of a packaged scenario. With several
    runs, the names of variants begin with the name of the run. Raises InputError for an unknown run
    or for two variants with the same name.
    """
    files = [(run, find_scenario_file(run)) for run in runs]
    planned: dict[str, PlannedRun] = {}
    for run, path in files:
        variants = load(path)
        own = run.resolve().name if run.is_dir() else next(iter(variants.values())).name
        for variant, scenario in variants.items():
            name = variant
            if len(files) > 1:
                name = own if list(variants) == ["run"] else f"{own}/{variant}"
            if name in planned:
                raise InputError(
                    f"{run}: duplicate name {name}; expected runs with different names"
                )
            planned[name] = PlannedRun(scenario, path.parent)
    return planned


def find_scenario_file(run: Path) -> Path:
    """Return the scenario file of a results directory, a file or a packaged name."""
    if not run.is_dir():
        return find_scenario(run)
    path = run / "scenario.yaml"
    if not path.is_file():
        raise InputError(
            f"{run}: has no scenario.yaml; expected a results directory of `simkv run`"
        )
    return path


def find_report_path(runs: Sequence[Path]) -> Path:
    """Return the default path of the report: in the results directory, or under ``runs``."""
    if len(runs) == 1 and runs[0].is_dir():
        return runs[0] / "report.html"
    names = [run.resolve().name if run.is_dir() else run.stem for run in runs]
    return Path("runs") / f"{'-'.join(names)[:100]}.html"


def run_all(planned: dict[str, PlannedRun], resolved: Callable[[], None]) -> dict[str, RunResult]:
    """Run the variants. ``resolved`` is called whenever a request ends."""
    return {
        name: run_scenario(variant.scenario, variant.folder, resolved)
        for name, variant in planned.items()
    }


def remedies(variant: PlannedRun, tick: Callable[[], None] = lambda: None) -> list[str]:
    """Find single changes that improve a variant. Return a sentence per change, the best first.

    ``tick`` is called after each run.
    """
    with Evaluator(variant.folder, workers=cores(), tick=tick) as evaluator:
        found = run_whatif(variant.scenario, evaluator)
    best = found.with_judgement("fixes", "helps")[:MAX_NAMED_CHANGES]
    return [effect.sentence.replace(" -> ", " → ") for effect in best]
