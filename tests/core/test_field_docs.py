"""Tests that every field of a scenario has a description."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest
import simpy

from simkv.core.engine_flags import sources
from simkv.core.field_docs import read_field_docs
from simkv.core.request import Request
from simkv.costs.cost_profile import load_profile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.scenario.fleet_section import PowerOfTwoConfig
from simkv.scenario.scenario_schema import json_schema
from simkv.schedulers.engine_registry import ENGINES
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine

Field = tuple[str, str, dict[str, Any]]


def all_fields() -> list[Field]:
    """Return the section, name and schema of all fields of a scenario file."""
    schema = json_schema()
    sections = {"scenario": schema} | {
        name: part for name, part in schema["$defs"].items() if not name.startswith("Part")
    }
    return [
        (section, name, field)
        for section, part in sections.items()
        for name, field in part.get("properties", {}).items()
        if "const" not in field  # the field whose value selects the section
    ]


def says_nothing(name: str, line: str) -> bool:
    """Return whether a description is empty or only repeats the field's name."""
    said = re.findall(r"[a-z0-9]+", line.partition("[")[0].lower())
    return not set(said) - set(re.findall(r"[a-z0-9]+", name)) - {"the", "a", "of", "in", "s"}


def test_every_scenario_field_has_description() -> None:
    found = all_fields()
    assert len(found) > 300
    lines = {f"{section}.{name}": field.get("description", "") for section, name, field in found}
    assert [name for name, line in lines.items() if says_nothing(name.split(".", 1)[1], line)] == []


def test_description_must_not_repeat_field_name() -> None:
    assert says_nothing("max_num_seqs", "The max num seqs. [--max-num-seqs]")
    assert says_nothing("seed", "")
    assert not says_nothing("seed", "Of the draw.")


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_setting_declares_source(engine: str) -> None:
    config = ENGINES[engine].config
    assert [f.name for f in fields(config) if f.name not in ("name", *sources(config))] == []


LACKS = [
    (engine, variant, knob)
    for engine, spec in ENGINES.items()
    for variant, knobs in spec.lacks.items()
    for knob in knobs
]


def test_variant_rejects_or_ignores_missing_settings() -> None:
    heard: dict[tuple[str, str], set[str]] = {}
    for engine, variant, knob in LACKS:
        if not refused(engine, variant, knob):
            read = heard.setdefault((engine, variant), set()) or reads(engine, variant)
            heard[engine, variant] = read
            assert "block_size" in read
            assert knob not in read, (engine, variant)


def refused(engine: str, variant: str, knob: str) -> bool:
    """Return whether a variant rejects a non-default value of a setting."""
    plain = ENGINES[engine].config(variant=variant)
    value = getattr(plain, knob)
    by_kind = {bool: not value, str: "priority", float: 0.5, type(None): 3, tuple: (0, 8)}
    other = by_kind.get(type(value), value + 8 if type(value) is int else None)
    try:
        replace(plain, **{knob: other})
    except ValueError:
        return True
    return False


def reads(engine: str, variant: str) -> set[str]:
    """Return the settings that a variant's rules read while six requests compete for a small
    cache.
    """
    listening = Listening(ENGINES[engine].config(variant=variant, **{ENGINES[engine].memory: 12}))
    executor = SimulatedExecutor(load_profile("unit-step"))
    loop = Engine(simpy.Environment(), ENGINES[engine].build(listening), executor)
    run_clients(loop, [Request(i, 120, 90, output_tokens=90) for i in range(6)], horizon=2000.0)
    return listening.read


class Listening:
    """Config that records which of its settings were read."""

    def __init__(self, config: Any) -> None:
        self._config, self.read = config, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._config, name)


def test_reads_text_under_field() -> None:
    assert read_field_docs(ENGINES["vllm"].config)["block_size"] == "Tokens per KV block."


def test_reads_texts_of_base_class_fields() -> None:
    assert {"seed", "waiting_weight"} <= read_field_docs(PowerOfTwoConfig).keys()
