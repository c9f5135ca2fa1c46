"""The example of the documentation: which tier had the prompts of those who come back."""

from __future__ import annotations

import re
from pathlib import Path

from simkv.measure.metrics import summary
from simkv.measure.simulate import run_scenario
from simkv.scenario.load import load


def test_the_example_is_as_the_documentation_tells_it(root: Path) -> None:
    text = (root / "docs" / "vllm-versions.md").read_text(encoding="utf-8")
    told = re.search(r"^\| `host-and-disk` \| (.*)% \| (.*)% \| (.*)% \| (.*) ms \|$", text, re.M)
    assert told
    path = root / "examples" / "kv-tiers.yaml"
    scenario = load(path)["host-and-disk"]
    figures = summary(run_scenario(scenario, path.parent).record)
    tiers = figures["kv_tiers"]
    rates = [f"{tiers[f'{tier}_hit_rate']:.1f}" for tier in ("gpu", "host", "disk")]
    assert [*rates, f"{figures['ttft_ms']['mean']:.0f}"] == list(told.groups())
