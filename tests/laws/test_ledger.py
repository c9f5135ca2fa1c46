"""The wait ledger sums exactly to every request's E2E in a pipeline, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.measure.simulate import run_scenario
from simkv.scenario.pacing import Pacing
from simkv.why.ledger import Kind
from tests.laws.scenarios import ENGINES, scenarios
from tests.laws.sums import assert_sums


@pytest.mark.parametrize("variant", [v for e, v in ENGINES if e == "fastdeploy"])
@given(data=st.data())
def test_the_ledger_sums_in_a_pipeline_too(variant: str, data: st.DataObject) -> None:
    scenario = data.draw(scenarios("fastdeploy", variant))
    delay = st.sampled_from([0.0, 0.25, 1.5])
    pacing = Pacing(
        schedule_interval=0.25,
        queue_interval=0.25,
        put_gap=data.draw(delay),
        step_gap=data.draw(delay),
        token_processor_lag=data.draw(delay),
    )
    result = run_scenario(scenario.model_copy(update={"pipeline": pacing}), Path())
    record, intervals = result.record, result.diagnosis.ledger
    for i, life in record.lives.items():
        assert_sums(life, intervals[i])
        if not life.preempted_at:
            assert not {tile.kind for tile in intervals[i]} & {Kind.PREEMPTED, Kind.RECOMPUTE}
