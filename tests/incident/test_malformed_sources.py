"""Tests of imperfect sources: several engines, different clocks and truncated files are read or
rejected.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from simkv.core.errors import InputError
from simkv.incident import diagnose_stages
from simkv.incident.emit.emitted_files import emit
from simkv.incident.evidence import Evidence
from simkv.incident.server_setup import UserSettings, infer_setup
from simkv.incident.source_join import join
from simkv.incident.source_reader import read_source
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.packaged_scenarios import find_scenario
from simkv.scenario.scenario_loader import load
from simkv.schedulers.engine_registry import ENGINES

HOUR = 3600


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with log and spans of a server that had an incident."""
    path = find_scenario(Path("vllm-31731-heavy-head"))
    result = run_scenario(load(path, [])["before"], path.parent, intervals=False)
    folder = tmp_path_factory.mktemp("server")
    return emit(folder, {"run": result}, ("vllm-log", "otel"))[0].parent


def shifted(server: Path, seconds: int, target: Path) -> Path:
    """Write the spans of a client whose clock differs by ``seconds``."""
    documents = [json.loads(line) for line in (server / "spans.jsonl").read_text().splitlines()]
    for document in documents:
        span = document["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
        span["startTimeUnixNano"] = str(int(span["startTimeUnixNano"]) + seconds * 10**9)
    target.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    return target


@pytest.mark.parametrize("off", [0, -8 * HOUR, 5 * HOUR + HOUR // 2, -7 * HOUR + 30])
def test_time_zones_and_skew(server: Path, tmp_path: Path, off: int) -> None:
    spans = shifted(server, off, tmp_path / "spans.jsonl")
    found = join([read_source(server / "vllm.log"), read_source(spans)])
    assert found.series is not None
    assert found.requests is not None
    busy = found.series[found.series["running"] + found.series["waiting"] > 0]["t_s"]
    begin = found.requests["t_s"].min()
    end = (found.requests["t_s"] + found.requests["e2e_ms"] / 1e3).max()
    # The log has one line in ten seconds, so a smaller clock difference cannot be determined.
    assert begin - 11 <= busy.min()
    assert busy.max() <= end + 11


def test_truncated_span_is_skipped_and_reported(server: Path, tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    path.write_text((server / "spans.jsonl").read_text()[:-200])
    found = read_source(path)
    assert found.requests is not None
    assert len(found.requests) == 3
    assert any("1 of" in note and "bad rows" in note for note in found.notes)


def test_two_engines_are_rejected(server: Path, tmp_path: Path) -> None:
    other = tmp_path / "sglang.log"
    other.write_text("[2026-02-10 08:13:54] Decode batch, #running-req: 1, #queue-req: 9\n")
    with pytest.raises(InputError, match=r"vllm.log was written by vllm, but sglang.log by sglang"):
        join([read_source(server / "vllm.log"), read_source(other)])


def test_several_ranks_are_summed(server: Path, tmp_path: Path) -> None:
    text = (server / "vllm.log").read_text()
    path = tmp_path / "vllm.log"
    other = [line.replace("Engine 000", "Engine 001") for line in text.splitlines()]
    path.write_text(text + "".join(f"{line}\n" for line in other if "Engine 001" in line))
    found = read_source(path).series
    assert found is not None
    assert set(found["engine"]) == {0, 1}


def test_missing_settings_are_requested_by_name(server: Path, tmp_path: Path) -> None:
    diagnose_stages.read_stage([server / "spans.jsonl"], tmp_path / "out")
    with pytest.raises(InputError, match=r"--engine: the inputs do not identify the engine"):
        diagnose_stages.rebuild_stage(tmp_path / "out", UserSettings())
    _, setup = diagnose_stages.rebuild_stage(tmp_path / "out", UserSettings(engine="vllm"))
    assert any("--version" in one for one in setup.assumed)
    assert any("num_gpu_blocks" in one and "--set" in one for one in setup.assumed)


def test_unsupported_version_becomes_the_nearest(server: Path, tmp_path: Path) -> None:
    diagnose_stages.read_stage([server / "spans.jsonl"], tmp_path / "out")
    _, setup = diagnose_stages.rebuild_stage(
        tmp_path / "out", UserSettings(engine="vllm", version="0.2.7")
    )
    assert setup.engine["variant"] != "0.2.7"
    assert any("0.2.7 is not modelled" in one for one in setup.assumed)


@pytest.mark.parametrize("version", [None, "1.2.1"])
@pytest.mark.parametrize("engine", ["trtllm", "fastdeploy", "mistralrs"])
def test_engine_without_releases_uses_its_default(engine: str, version: str | None) -> None:
    setup = infer_setup(Evidence("spans.jsonl"), UserSettings(engine=engine, version=version))
    assert setup.engine["variant"] == ENGINES[engine].config().variant
    told = f"{engine} 1.2.1 is not modelled" if version else f"the version of {engine} is unknown"
    assert any(told in one for one in setup.assumed)


def test_log_without_computed_tokens_cannot_be_rebuilt(server: Path, tmp_path: Path) -> None:
    lines = (server / "vllm.log").read_text().splitlines()
    path = tmp_path / "vllm.log"
    path.write_text("".join(f"{line}\n" for line in lines if "throughput" not in line))
    diagnose_stages.read_stage([path], tmp_path / "out")
    with pytest.raises(InputError, match="contains no data on single requests; add spans"):
        diagnose_stages.rebuild_stage(tmp_path / "out", UserSettings())


def test_edited_workload_of_other_size_is_rejected(server: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    diagnose_stages.read_stage([server / "spans.jsonl"], folder)
    (folder / "evidence.json").write_text("{}")
    with pytest.raises(InputError, match=r"evidence.json: is not an evidence file"):
        diagnose_stages.rebuild_stage(folder, UserSettings(engine="vllm"))


def test_unanswered_requests_of_a_client_are_added(server: Path, tmp_path: Path) -> None:
    spans = read_source(server / "spans.jsonl")
    assert spans.requests is not None
    extra = pd.DataFrame(
        {
            "arrival_s": [0.0, 2.5],
            "prompt_tokens": [640, 70],
            "output_tokens": [100, 0],
            "t_s": spans.requests["t_s"].iloc[0] + pd.Series([0.0, 2.5]),
            "e2e_ms": [100e3, None],
            "queue_ms": [None, None],
        }
    )
    client = type(spans)("bench.json", wall=True, requests=extra)
    both = join([spans, client]).requests
    assert both is not None
    assert (both["output_tokens"] == 0).sum() == 1
    assert len(both) == 5
