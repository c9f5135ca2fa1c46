"""The wait ledger also sums exactly to every request's E2E in a pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.explain.ledger_kinds import LedgerKind
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.thread_pacing import Pacing
from tests.laws.ledger_sums import assert_sums
from tests.laws.random_scenarios import ENGINES, scenarios


@pytest.mark.parametrize("variant", [v for e, v in ENGINES if e == "fastdeploy"])
@given(data=st.data())
def test_ledger_sums_in_pipeline(variant: str, data: st.DataObject) -> None:
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
    for i, life in record.requests.items():
        assert_sums(life, intervals[i])
        if not life.preempted_at:
            assert not {tile.kind for tile in intervals[i]} & {
                LedgerKind.PREEMPTED,
                LedgerKind.RECOMPUTE,
            }
