"""Packaged scenarios by name, and packaged incidents that replay a public report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from simkv.core.errors import InputError, spelling_hint
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load


def find_scenarios_directory() -> Path:
    """Return the directory of the packaged scenarios."""
    package = Path(__file__).parents[1]
    return next(
        (path for path in (package / "scenarios", package.parent / "scenarios") if path.is_dir()),
        package / "scenarios",
    )


def list_packaged_scenarios() -> dict[str, Path]:
    """Return the packaged scenario files by name."""
    return {path.stem: path for path in sorted(find_scenarios_directory().glob("*.yaml"))}


def find_scenario(scenario: Path) -> Path:
    """Return the path ``scenario`` if it is a file, or the path of the packaged scenario of this
    name.

    Raises InputError if there is neither.
    """
    if scenario.exists():
        return scenario
    known = list_packaged_scenarios()
    if str(scenario) in known:
        return known[str(scenario)]
    raise InputError(
        f"{scenario}: neither a file nor a packaged scenario"
        f"{spelling_hint(str(scenario), known)}; packaged scenarios: {', '.join(known)}"
    )


@dataclass(frozen=True)
class PackagedIncident:
    """Scenario file that reproduces a publicly reported incident and states the expected
    results.
    """

    path: Path
    variants: dict[str, Scenario]

    @property
    def _scenario(self) -> Scenario:
        return next(iter(self.variants.values()))

    @property
    def name(self) -> str:
        return self._scenario.name

    @property
    def engine(self) -> str:
        return self._scenario.engine.name

    @property
    def what(self) -> str:
        """First sentence of the scenario's summary."""
        return self._scenario.summary.split(". ")[0].rstrip(".")

    @property
    def report(self) -> str:
        return self._scenario.report or ""


def find_incidents(names: Iterable[str] = ()) -> list[PackagedIncident]:
    """Return the packaged incidents with the given names, or all.

    An incident is a packaged scenario with a report and expected results. Raises InputError for an
    unknown name.
    """
    zoo = [PackagedIncident(path, load(path)) for path in list_packaged_scenarios().values()]
    known = {
        incident.name: incident
        for incident in zoo
        if incident.report and any(variant.expect for variant in incident.variants.values())
    }
    for name in names:
        if name not in known:
            raise InputError(
                f"{name}: unknown incident{spelling_hint(name, known)}; expected one of "
                f"{', '.join(known)}"
            )
    return [known[name] for name in dict.fromkeys(names) or known]
