"""Tests of profiles at a token budget outside their fit, compared with synthetic devices."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dev.token_budgets.budget_pairs import Pair, pairs_of, table
from dev.token_budgets.known_devices import of_tables, planted
from dev.token_budgets.made_loads import alone_on
from simkv.cli import app
from simkv.costs.step_load import StepLoad, count_attention_pairs
from tests.conftest import ROOT

TABLES = ROOT.parent / "shared" / "ground-truth" / "calibration"


def test_single_request_times_sum_steps() -> None:
    device = planted()[0]
    alone = alone_on(device, 256)
    prompt, output = int(alone.prompt[0]), int(alone.output[0])
    chunks = [(at, min(256, prompt - at)) for at in range(0, prompt, 256)]
    ends = [at + n == prompt for at, n in chunks]
    loads = [
        StepLoad(1, n, at, 0, 0, count_attention_pairs(n, at), int(end))
        for (at, n), end in zip(chunks, ends, strict=True)
    ]
    assert alone.prefill[0] == pytest.approx(sum(map(device.cost, loads)))
    first = device.cost(StepLoad(0, 0, 0, 1, prompt + 1, 0, 1))
    last = device.cost(StepLoad(0, 0, 0, 1, prompt + output - 1, 0, 1))
    assert alone.decode[0] == pytest.approx((first + last) / 2)


@pytest.mark.parametrize("device", planted(), ids=lambda device: device.name)
def test_profile_predicts_other_budget(device: object) -> None:
    """The error is at most 5 % between 256 and 4,096 tokens, where chunks separate token and step
    costs.
    """
    found = {(p.fitted, p.asked): p.error for p in pairs_of(device, (256, 1024, 4096))}  # type: ignore[arg-type]
    assert len(found) == 9
    assert max(map(abs, found.values())) < 0.05, found


def test_large_budget_predicts_small_chunks() -> None:
    found = {p.asked: p.error for p in pairs_of(planted()[0], (64, 4096)) if p.fitted == 4096}
    assert abs(found[64]) < 0.05  # a line without a floor predicts 26 % less


@pytest.mark.skipif(not TABLES.is_dir(), reason="the kernel tables are not shipped")
def test_profile_on_measured_tables() -> None:
    device = next(d for d in of_tables(TABLES) if "rtxpro6000-llama" in d.name)
    found = {(p.fitted, p.asked): p.error for p in pairs_of(device, (256, 1024))}
    assert max(map(abs, found.values())) < 0.055, found


def test_table_has_row_per_budget() -> None:
    made = [Pair("d", fitted, asked, 0.01) for asked in (64, 256) for fitted in (64, 256)]
    lines = table(made)
    assert lines[0] == "| device | asked for | fitted at 64 | fitted at 256 |"
    assert lines[2:] == ["| d | 64 | +1.0 | +1.0 |", "| d | 256 | +1.0 | +1.0 |"]


def test_reports_missing_tables() -> None:
    done = CliRunner().invoke(app, ["validate", "budgets", "--kernel-tables", "nowhere"])
    assert "there is no such directory" in str(done.exception)
