"""Tests of recordings outside the repository: thousands of files in the shared directory.

Every third file is tested, to save time; ``simkv conform ../shared/golden`` compares all files.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from simkv.conformance.decision_replay import check_trace
from simkv.conformance.decision_trace import read_trace
from tests.conftest import SHARED

VARIANTS = sorted(path for path in (SHARED / "golden").glob("*/*") if path.is_dir())


@pytest.mark.parametrize("folder", VARIANTS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_simulation_reproduces_every_third_recording(folder: Path) -> None:
    files = sorted(folder.glob("*.jsonl.gz"))[::3]
    assert files
    results = [check_trace(read_trace(path)) for path in files]
    assert [r.name for r in results if r.difference] == []


def test_recordings_of_four_engines_are_present(shared: Path) -> None:
    engines = {folder.parent.name for folder in VARIANTS}
    assert engines == {"fastdeploy", "mistralrs", "sglang", "vllm"}
