"""Tests that the counts shown by ``simkv policies`` agree with the recordings."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from typer.testing import CliRunner

from dev.recording_counts import count, variant_of
from simkv.cli import app
from simkv.conformance.decision_replay import Conformance, Mismatch, check_trace
from simkv.conformance.decision_trace import read_trace
from simkv.conformance.recording_counts import packaged_counts
from simkv.schedulers.engine_registry import ENGINES, list_variants
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.vllm.config import VllmConfig
from tests.conformance.recordings import all_committed, committed

#: Only every n-th recording is replayed here; ``test_shared_recordings`` replays every third.
EVERY = 20


def test_packaged_counts_agree_with_recordings(shared: Path) -> None:
    recorded: Counter[tuple[str, str]] = Counter()
    for folder in (shared / "golden").glob("*/*"):
        engine = folder.parent.name
        recorded[engine, variant_of(engine, folder.name)] += len(list(folder.glob("*.jsonl.gz")))
    # Recorded with `simkv record`.
    for recording in all_committed():
        if recording.variant[0].isdigit():
            recorded[recording.engine, variant_of(recording.engine, recording.variant)] += 1
    counts = packaged_counts()
    assert recorded == {
        (engine, variant): found["recorded"]
        for engine, entries in counts.items()
        for variant, found in entries.items()
    }
    sample = sorted((shared / "golden").glob("*/*/*.jsonl.gz"))[::EVERY]
    for engine, entries in count(check_trace(read_trace(path)) for path in sample).items():
        for variant, found in entries.items():
            unequal = found["recorded"] - found["equal"]
            claimed = counts[engine][variant]
            assert unequal <= claimed["recorded"] - claimed["equal"], f"{engine} {variant}"


def test_differing_traces_are_not_counted_as_equal() -> None:
    results = [
        Conformance("a", "mistralrs", "seed_wtinf", 3, None),
        Conformance("b", "mistralrs", "seed", 3, Mismatch("3", {}, {})),
        Conformance("c", "vllm", "v1-async", 3, None),
    ]
    counts = count(results)
    assert counts["mistralrs"] == {"seed": {"equal": 1, "recorded": 2}}
    assert counts["vllm"] == {"0.33.0": {"equal": 1, "recorded": 1}}
    assert counts["sglang"] == {}


def test_setups_of_an_engine_count_for_its_default_variant() -> None:
    assert variant_of("vllm", "v1-knobs") == VllmConfig().variant
    assert variant_of("sglang", "lpm-page16") == SglangConfig().variant


def test_policies_lists_every_variant() -> None:
    lines = CliRunner().invoke(app, ["policies"]).stdout.splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert [line.split()[:2] for line in heads] == [
        [engine, name] for engine in ENGINES for name in list_variants(engine)
    ]
    counts = packaged_counts()
    for line in heads:
        engine, name = line.split()[:2]
        found = counts[engine].get(name)
        shown = (
            f"reproduces {found['equal']} of {found['recorded']} " if found else "never recorded"
        )
        assert shown in line
        recorded = ENGINES[engine].partly_recorded or "recorded on the real code"
        assert (recorded if found else "read from source") in line
    unrecorded = [line.strip() for line in lines if "not covered by any recording of " in line]
    assert unrecorded == [
        f"not covered by any recording of {engine}, only read from its source: {spec.unrecorded}"
        for engine, spec in ENGINES.items()
    ]


def test_counts_equal_and_recorded_traces() -> None:
    found = committed("fastdeploy", "fixed-reserve")
    assert count(check_trace(recording.trace()) for recording in found)["fastdeploy"] == {
        "fixed-reserve": {"equal": len(found), "recorded": len(found)}
    }
