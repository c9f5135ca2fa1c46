"""Tests of the roles of scenario fields, and of the fields that determine a run."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from simkv.scenario.field_roles import (
    AboutField,
    FieldRole,
    WorldField,
    find_field_names,
    roles,
)
from simkv.scenario.packaged_scenarios import list_packaged_scenarios
from simkv.scenario.run_fields import ABOUT_FIELDS, RUN_FIELDS, run_fields
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load


def test_every_field_has_one_role() -> None:
    assert {*ABOUT_FIELDS, *RUN_FIELDS} == set(Scenario.model_fields)
    assert not {*ABOUT_FIELDS} & {*RUN_FIELDS}


def test_rejects_fields_without_a_role() -> None:
    class Forgotten(BaseModel):
        said: AboutField[str]
        given: WorldField[int] = 3
        forgotten: int = 0

    with pytest.raises(TypeError, match=r"Forgotten\.forgotten: must have exactly one role"):
        roles(Forgotten)


def test_finds_field_names_by_role() -> None:
    assert find_field_names(Scenario, FieldRole.ENGINE) == ("engine", "pipeline", "fleet")


def test_fields_of_a_run_are_plain_data_with_engine_and_defaults() -> None:
    scenario = next(iter(load(list_packaged_scenarios()["mistralrs-six"]).values()))
    fields = run_fields(scenario)
    assert set(fields) == set(RUN_FIELDS)
    assert fields["engine"]["block_size"] == scenario.engine.block_size
    assert fields["engine_ready"] == 0.0
    assert set(run_fields(scenario, defaults=False)) == {"workload", "engine", "profile"}
