"""What the steps of a scenario's replicas cost: by a profile, or by what its hardware gives."""

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
    """Where the costs of a replica come from: ``profile`` or ``hardware``, and its ``engine``."""

    engine: EngineConfig
    profile: str | None
    hardware: HardwareSection | None

    def load(self, folder: Path) -> CostProfile:
        """The profile; what is a file lies beside ``folder``.

        Raises InputError if there is none, or if the hardware makes no sense.
        """
        if self.profile is not None:
            return load_profile(self.profile, folder)
        assert self.hardware is not None
        from simkv.costs.operators.profile_resolution import (
            resolve_profile,  # most runs need none of it
        )

        tables = [Path(self.hardware.tables)] if self.hardware.tables else []
        return resolve_profile(
            _on_one_node(self.hardware), find_execution_settings(self.engine), tables
        )

    def check(self, folder: Path) -> None:
        """Raise the InputError that loading would raise."""
        if self.hardware is None:
            self.load(folder)
        else:
            _on_one_node(self.hardware)

    @property
    def gpus(self) -> int:
        """GPUs of one replica, as far as that is said; else 1. Each of ``dp`` ranks is one."""
        return self.hardware.tp if self.hardware else 1


def _on_one_node(section: HardwareSection) -> Hardware:
    """The hardware, if what joins all GPUs that speak to each other is known.

    Ranks of a dense model share nothing; those of a mixture share its experts.
    """
    made = build_hardware(section)
    together = made.gpus if made.architecture.experts else made.tp
    if together > made.gpus_per_node and not made.interconnect.measured:
        raise InputError(
            f"hardware: gpus_per_node: {together} GPUs share the model and a node has "
            f"{made.gpus_per_node}; what joins nodes is in no data sheet: say "
            f"interconnect: {{latency_us: ..., bandwidth_gb_s: ...}} as measured between "
            f"them, or that gpus_per_node is {together}"
        )
    return made


def find_replica_costs(scenario: Scenario, group: ReplicaGroup | None = None) -> ReplicaCosts:
    """The costs of a group of replicas, or of the engine of a scenario without a fleet."""
    engine = (group and group.engine) or scenario.engine
    if group and (group.profile or group.hardware):
        return ReplicaCosts(engine, group.profile, group.hardware)
    return ReplicaCosts(engine, scenario.profile, scenario.hardware)


def list_replica_costs(scenario: Scenario) -> Iterator[tuple[tuple[str | int, ...], ReplicaCosts]]:
    """The costs of all groups of replicas, each with where the scenario says it."""
    if scenario.fleet is None:
        yield (_said_by(scenario),), find_replica_costs(scenario)
        return
    for index, group in enumerate(scenario.fleet.groups):
        own = group.profile or group.hardware
        at = ("fleet", "replicas", index, _said_by(group)) if own else (_said_by(scenario),)
        yield at, find_replica_costs(scenario, group)


def _said_by(one: Scenario | ReplicaGroup) -> str:
    return "hardware" if one.hardware else "profile"
