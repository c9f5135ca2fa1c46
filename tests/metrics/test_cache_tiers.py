"""Test of the documented example of cache tiers that serve returning prompts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simkv.metrics.run_metrics import summarize
from simkv.metrics.scenario_runner import run_scenario
from simkv.report.console_details import _block
from simkv.scenario.scenario_loader import load
from tests.sim.test_offload_copies import AGAIN, ON_DISK, scenario


def test_example_gives_the_documented_figures(root: Path) -> None:
    text = (root / "docs" / "vllm-versions.md").read_text(encoding="utf-8")
    told = re.search(r"^\| `host-and-disk` \| (.*)% \| (.*)% \| (.*)% \| (.*) ms \|$", text, re.M)
    assert told
    path = root / "examples" / "kv-tiers.yaml"
    figures = summarize(run_scenario(load(path)["host-and-disk"], path.parent).record)
    tiers = figures["kv_tiers"]
    rates = [f"{tiers[f'{tier}_hit_rate']:.1f}" for tier in ("gpu", "host", "disk")]
    assert [*rates, f"{figures['ttft_ms']['mean']:.0f}"] == list(told.groups())


@pytest.mark.parametrize("disk", [False, True])
def test_console_shows_the_tiers_of_a_run(disk: bool) -> None:
    result = run_scenario(scenario(*AGAIN, engine=ON_DISK if disk else {}), Path())
    said = "\n".join(_block("run", result))
    assert "Prompt tokens hit in host memory" in said
    assert ("Prompt tokens hit on disk" in said) == disk
