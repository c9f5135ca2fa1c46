"""Lines with the settings of engines on known hardware: given, or chosen by the launcher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from simkv.metrics.run_result import RunResult
from simkv.scenario.launch_defaults import EngineSettings, FieldPath
from simkv.scenario.scenario import Scenario


def settings_lines(results: Mapping[str, RunResult]) -> Iterator[str]:
    """Yield a line for each engine on known hardware; variants with equal settings share one."""
    by_line: dict[str, list[str]] = {}
    for name, result in results.items():
        for place, settings in result.scenario.origins.sections.items():
            line = _line(_config(result.scenario, place), settings)
            where = [str(part) for part in place[1:-1]]  # ("fleet", "replicas", 0, "engine")
            by_line.setdefault(line, []).append(" ".join([name, *where]))
    for line, names in by_line.items():
        whose = "" if len(by_line) == 1 else f" ({', '.join(names)})"
        yield f"Settings{whose}: {line}."


def _config(scenario: Scenario, place: FieldPath) -> Any:
    """Return the engine's config at a path of the scenario."""
    if place == ("engine",) or scenario.fleet is None:
        return scenario.engine
    group = scenario.fleet.groups[int(place[2])]
    return group.engine or scenario.engine


def _line(config: Any, settings: EngineSettings) -> str:
    parts = []
    if settings.default:
        chosen = ", ".join(_said(config, name) for name in settings.default)
        parts.append(f"{chosen} ({settings.source})")
    if settings.given:
        parts.append("given: " + ", ".join(_said(config, name) for name in settings.given))
    return "; ".join(parts) or f"{config.name} {config.variant}"


def _said(config: Any, name: str) -> str:
    value = getattr(config, name)
    if isinstance(value, bool):
        return f"{name} {str(value).lower()}"
    if isinstance(value, tuple):
        return f"{name} [{', '.join(map(str, value))}]"
    return f"{name} {value}"
