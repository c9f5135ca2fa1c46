"""Step costs of a scenario's replicas: from a profile, or derived from hardware."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simkv.core.engine_spec import EngineConfig
from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, load_profile
from simkv.costs.hardware.execution_settings_lookup import find_execution_settings
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.scenario.fleet_section import ReplicaGroup
from simkv.scenario.hardware_section import HardwareSection, build_hardware
from simkv.scenario.scenario import Scenario


@dataclass(frozen=True)
class ReplicaCosts:
    """The engine of a replica and the source of its step costs: ``profile`` or ``hardware``."""

    engine: EngineConfig
    profile: str | None
    hardware: HardwareSection | None

    def load(self, folder: Path) -> CostProfile:
        """Return the cost profile. Paths are relative to ``folder``.

        Raises InputError if the profile is missing or the hardware is invalid.
        """
        if self.profile is not None:
            return load_profile(self.profile, folder)
        assert self.hardware is not None
        from simkv.costs.operators.profile_resolution import (
            resolve_profile,  # imported here because most runs do not need it
        )

        tables = [Path(self.hardware.tables)] if self.hardware.tables else []
        return resolve_profile(
            _on_one_node(self.hardware), find_execution_settings(self.engine), tables
        )

    def check(self, folder: Path) -> None:
        """Raise InputError if ``load`` would fail."""
        if self.hardware is None:
            self.load(folder)
        else:
            _on_one_node(self.hardware)

    def count_draft_layers(self) -> int:
        """Return the number of layers of the model if an additional layer proposes draft tokens, or
        else 0.

        The number is also 0 if the costs come from a profile, which does not state it.
        """
        if self.profile is not None or self.hardware is None:
            return 0
        drafts = find_execution_settings(self.engine).draft_layers
        return build_hardware(self.hardware).architecture.depth if drafts else 0

    @property
    def gpus(self) -> int:
        """Number of GPUs of one replica; 1 without hardware.

        Each data-parallel rank counts as a replica.
        """
        return self.hardware.tp if self.hardware else 1


def _on_one_node(section: HardwareSection) -> Hardware:
    """Return the hardware. Raises InputError if its GPUs need an interconnect of unknown speed.

    The data-parallel ranks of a dense model need no interconnect.
    """
    made = build_hardware(section)
    together = made.gpus if made.architecture.experts else made.tp
    if together > made.gpus_per_node and not made.interconnect.measured:
        raise InputError(
            f"hardware: gpus_per_node: the model needs {together} GPUs, but a node has "
            f"{made.gpus_per_node}, and the speed of the link between nodes is unknown; set "
            f"interconnect: {{latency_us: ..., bandwidth_gb_s: ...}} as measured between nodes, "
            f"or gpus_per_node: {together}"
        )
    return made


def find_replica_costs(scenario: Scenario, group: ReplicaGroup | None = None) -> ReplicaCosts:
    """Return the costs of a group of replicas, or of the scenario's engine without a fleet."""
    engine = (group and group.engine) or scenario.engine
    if group and (group.profile or group.hardware):
        return ReplicaCosts(engine, group.profile, group.hardware)
    return ReplicaCosts(engine, scenario.profile, scenario.hardware)


def list_replica_costs(scenario: Scenario) -> Iterator[tuple[tuple[str | int, ...], ReplicaCosts]]:
    """Yield the costs of all groups of replicas, with the path of the field."""
    if scenario.fleet is None:
        yield (_said_by(scenario),), find_replica_costs(scenario)
        return
    for index, group in enumerate(scenario.fleet.groups):
        own = group.profile or group.hardware
        at = ("fleet", "replicas", index, _said_by(group)) if own else (_said_by(scenario),)
        yield at, find_replica_costs(scenario, group)


def _said_by(one: Scenario | ReplicaGroup) -> str:
    return "hardware" if one.hardware else "profile"
