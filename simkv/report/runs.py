"""The runs that a report is about, found by folder, scenario file or name, and run again.

A run is deterministic: the scenario that it left in its folder gives it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from simkv.core.errors import InputError
from simkv.measure.result import Result
from simkv.measure.simulate import run_scenario
from simkv.scenario.load import load
from simkv.scenario.packaged import find
from simkv.scenario.scenario import Scenario
from simkv.search.pool import cores
from simkv.search.whatif.evaluate import Evaluator
from simkv.search.whatif.whatif import whatif

#: Single changes that a report names.
NAMED = 4
#: Up to so many requests trying them all is a matter of seconds.
QUICK = 1_000


@dataclass(frozen=True)
class Rerun:
    """A variant to be run; its profile, if it is a file, lies beside ``folder``."""

    scenario: Scenario
    folder: Path


def reruns(runs: Iterable[Path]) -> dict[str, Rerun]:
    """The variants of ``runs`` by name: run folders, scenario files or names of packaged ones.

    Of several runs the name of each stands before that of its variant. Raises InputError for what
    is none of these, and if two variants would have the same name.
    """
    files = [(run, scenario_of(run)) for run in runs]
    planned: dict[str, Rerun] = {}
    for run, path in files:
        variants = load(path)
        own = run.resolve().name if run.is_dir() else next(iter(variants.values())).name
        for variant, scenario in variants.items():
            name = variant
            if len(files) > 1:
                name = own if list(variants) == ["run"] else f"{own}/{variant}"
            if name in planned:
                raise InputError(f"{run}: {name} stands twice; expected runs of different names")
            planned[name] = Rerun(scenario, path.parent)
    return planned


def scenario_of(run: Path) -> Path:
    """The scenario file of a run folder, or the one that ``run`` is or names."""
    if not run.is_dir():
        return find(run)
    path = run / "scenario.yaml"
    if not path.is_file():
        raise InputError(f"{run}: holds no scenario.yaml; expected a folder that simkv run wrote")
    return path


def page_of(runs: Sequence[Path]) -> Path:
    """Where the report goes if nothing is said: into the run folder, or beside the run folders."""
    if len(runs) == 1 and runs[0].is_dir():
        return runs[0] / "report.html"
    names = [run.resolve().name if run.is_dir() else run.stem for run in runs]
    return Path("runs") / f"{'-'.join(names)[:100]}.html"


def run_all(planned: dict[str, Rerun], resolved: Callable[[], None]) -> dict[str, Result]:
    """Run the variants; ``resolved`` is called whenever a request ends."""
    return {
        name: run_scenario(variant.scenario, variant.folder, resolved)
        for name, variant in planned.items()
    }


def remedies(variant: Rerun, tick: Callable[[], None] = lambda: None) -> list[str]:
    """Single changes that would have helped a variant, the best first, as sentences.

    ``tick`` is called after each of the runs that this takes, some tens.
    """
    with Evaluator(variant.folder, workers=cores(), tick=tick) as evaluator:
        found = whatif(variant.scenario, evaluator)
    best = found.judged("fixes", "helps")[:NAMED]
    return [effect.sentence.replace(" -> ", " → ") for effect in best]
