"""What each field of a scenario is for."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from simkv.scenario.fields import ABOUT, DECISIVE, run_fields
from simkv.scenario.load import load
from simkv.scenario.packaged import packaged
from simkv.scenario.roles import About, Role, World, names_of, roles
from simkv.scenario.scenario import Scenario


def test_every_field_has_one_role() -> None:
    assert {*ABOUT, *DECISIVE} == set(Scenario.model_fields)
    assert not {*ABOUT} & {*DECISIVE}


def test_a_field_without_a_role_is_an_error() -> None:
    class Forgotten(BaseModel):
        said: About[str]
        given: World[int] = 3
        forgotten: int = 0

    with pytest.raises(TypeError, match=r"Forgotten\.forgotten: one role is needed; found 0"):
        roles(Forgotten)


def test_names_by_role() -> None:
    assert names_of(Scenario, Role.ENGINE) == ("engine", "pipeline", "fleet")


def test_fields_of_a_run_are_plain_data_with_engine_and_defaults() -> None:
    scenario = next(iter(load(packaged()["mistralrs-six"]).values()))
    fields = run_fields(scenario)
    assert set(fields) == set(DECISIVE)
    assert fields["engine"]["block_size"] == scenario.engine.block_size
    assert fields["engine_ready"] == 0.0
    assert set(run_fields(scenario, defaults=False)) == {"workload", "engine", "profile"}
