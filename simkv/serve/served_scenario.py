"""Load scenarios for serving. They need no workload, because clients send the requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from simkv.core.errors import InputError, spelling_hint
from simkv.scenario.packaged_scenarios import find_scenario, list_packaged_scenarios
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_costs import list_replica_costs
from simkv.scenario.scenario_loader import load, resolve_variants
from simkv.scenario.yaml_document import YamlDocument, read_document
from simkv.schedulers.engine_registry import ENGINES
from simkv.workload.length_distributions import LengthDistribution, sample_lengths

#: Function that samples the output length of a request.
SampleLength = Callable[[np.random.Generator], int]
#: Placeholder for a missing workload; its requests are never sent.
PLACEHOLDER = {"requests": [{"prompt_tokens": 1, "output_tokens": 1}]}


def load_served_scenario(path: Path, overrides: Sequence[str]) -> tuple[Path, dict[str, Scenario]]:
    """Load a scenario file, or a packaged scenario by name, with its variants.

    Raises InputError for the same errors as ``simkv run``.
    """
    path = find_scenario(path)
    document = read_document(path)
    if isinstance(document.tree, dict):
        document.tree.setdefault("workload", PLACEHOLDER)
    return path, resolve_variants(document, overrides)


def build_scenario(engine: str, model: str, gpu: str, overrides: Sequence[str]) -> Scenario:
    """Build a scenario with the engine's defaults for a model on a GPU.

    Raises InputError if the engine, model or GPU is unknown.
    """
    if engine not in ENGINES:
        raise InputError(
            f"--engine {engine}: unknown engine{spelling_hint(engine, ENGINES)}; expected one of "
            f"{', '.join(ENGINES)}"
        )
    tree = {
        "name": f"{engine}-server",
        "workload": PLACEHOLDER,
        "engine": {"name": engine, ENGINES[engine].memory: "auto"},
        "hardware": {"gpu": gpu, "model": model},
    }
    document = YamlDocument(Path(f"--engine {engine} --model {model} --gpu {gpu}"), tree)
    return resolve_variants(document, overrides)["run"]


def list_scenarios() -> list[str]:
    """Return one line per packaged scenario: name, engine and summary."""
    lines = []
    for name, path in list_packaged_scenarios().items():
        first = next(iter(load(path).values()))
        engine = f"{first.engine.name} {first.engine.variant}"
        lines.append(f"{name:<36} {engine:<24} {first.summary.split('. ')[0]}")
    return lines


def replicas_of(scenario: Scenario) -> list[Scenario]:
    """Return one scenario per replica of a fleet, to serve the replicas behind an external router.

    Raises InputError if the scenario has no fleet or if its replicas depend on each other.
    """
    fleet = scenario.fleet
    if fleet is None:
        raise InputError("--port-per-replica: requires a fleet, such as fleet: {replicas: 2}")
    if fleet.disaggregated or fleet.lockstep:
        raise InputError(
            "--port-per-replica: requires independent replicas, but these replicas depend on "
            "each other; use role both and no lockstep"
        )
    found = []
    for group, (_, costs) in zip(fleet.groups, list_replica_costs(scenario), strict=True):
        own = {"engine": costs.engine, "profile": costs.profile, "hardware": costs.hardware}
        found += [scenario.model_copy(update={**own, "fleet": None})] * group.count
    return found


def answer_lengths(scenario: Scenario) -> SampleLength | None:
    """Return a function that samples the output lengths of replies, or None.

    The lengths come from the section ``serve``, or else from a workload with known output lengths.
    Raises InputError if the lengths cannot be read.
    """
    workload = scenario.workload
    length = scenario.serve.output_tokens if scenario.serve else None
    if length is None and workload.trace is not None:
        served = workload.loaded.rows.output_tokens
        return lambda random: int(random.choice(served))
    drawn = workload.arrivals or workload.sessions or workload.burst
    if length is None and drawn:
        length = drawn.output_tokens
    return None if length is None else partial(_one, length)


def _one(length: LengthDistribution, random: np.random.Generator) -> int:
    return sample_lengths(length, random, 1, "output_tokens")[0]
