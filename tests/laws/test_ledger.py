"""Tests that the wait ledger of a pipelined scheduler also sums exactly to every request's E2E."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.explain.computed_runs import RUN_KINDS, compute_runs, tabulate_runs
from simkv.explain.ledger_kinds import LedgerKind
from simkv.explain.wait_attribution import WaitAttribution, find_block_holdings
from simkv.explain.wait_ledger import build_ledger
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


@pytest.mark.parametrize("engine", ["mistralrs", "vllm", "sglang", "fastdeploy", "trtllm"])
@given(data=st.data())
def test_tables_of_all_requests_equal_the_forms_of_each(engine: str, data: st.DataObject) -> None:
    variant = [v for e, v in ENGINES if e == engine][-1]
    record = run_scenario(data.draw(scenarios(engine, variant)), Path()).record
    table = tabulate_runs(record)
    runs = [
        (owner, RUN_KINDS.index(run.kind), *run[1:])
        for owner, life in enumerate(record.requests.values())
        for run in compute_runs(life)
    ]
    assert list(zip(*(column.tolist() for column in table), strict=True)) == runs
    ledger = build_ledger(record)
    assert build_ledger(record, table=table) == ledger
    waits = WaitAttribution(record, ledger, 4, table)
    held = {i: find_block_holdings(record, life, 4) for i, life in record.requests.items()}
    changes = {at for rows in held.values() for start, end, _ in rows for at in (start, end)}
    for at in [time for change in changes for time in (change, change + 1e-3)]:
        expected = {i: n for i, rows in held.items() for first, end, n in rows if first < at <= end}
        assert waits.block_holders(at) == expected
