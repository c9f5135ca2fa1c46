"""Tests of SGLang's log: quoted lines, requests as JSON, and the diagnosis of a dead engine from
its log alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from simkv.incident import diagnose_stages
from simkv.incident.emit.emitted_files import emit
from simkv.incident.emit.sglang_log_writer import sglang_log_lines
from simkv.incident.server_setup import UserSettings, infer_setup
from simkv.incident.source_reader import read_source
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.packaged_scenarios import find_scenario
from simkv.scenario.scenario_loader import load, resolve_variants
from simkv.scenario.yaml_document import YamlDocument
from simkv.schedulers.sglang.config import SglangConfig

#: Lines of real servers, and the issue or pull request that quotes them.
QUOTED = {
    "sgl-project/sglang#1612": (
        "[16:43:29 TP0] Prefill batch. #new-seq: 4, #new-token: 8192, #cached-token: 291, cache "
        "hit rate: 2.76%, token usage: 0.04, #running-req: 1, #queue-req: 38",
        (5, 38, 0.04),
    ),
    "sgl-project/sglang#3909": (
        "[2025-02-27 04:46:39 TP0] Decode batch. #running-req: 8, #token: 62531, token usage: "
        "0.12, gen throughput (token/s): 186.64, #queue-req: 0",
        (8, 0, 0.12),
    ),
    "sgl-project/sglang#22166": (
        "[2026-04-05 20:02:51] Prefill batch, #new-seq: 1, #new-token: 158, #cached-token: 0, "
        "token usage: 0.08, #running-req: 31, #queue-req: 0, cuda graph: True, input throughput "
        "(token/s): 559.53",
        (32, 0, 0.08),
    ),
}


@pytest.mark.parametrize("source", QUOTED)
def test_lines_of_public_issues(tmp_path: Path, source: str) -> None:
    line, told = QUOTED[source]
    path = tmp_path / "sglang.log"
    path.write_text(f"{line}\n[2026-04-05 20:02:52] INFO: 127.0.0.1:40090 - 200 OK\n")
    found = read_source(path)
    assert found.engine == "sglang"
    assert found.series is not None
    row = found.series.iloc[0]
    assert (row["running"], row["waiting"], row["usage"]) == told


def test_duration_of_a_decode_step(tmp_path: Path) -> None:
    path = tmp_path / "sglang.log"
    path.write_text(QUOTED["sgl-project/sglang#3909"][0])
    steps = read_source(path).steps
    assert steps is not None
    assert steps["seconds"].tolist() == pytest.approx([8 / 186.64])


def test_diagnoses_dead_engine_from_its_log(tmp_path: Path) -> None:
    path = find_scenario(Path("sglang-30743-chunk-oom"))
    result = run_scenario(load(path, [])["before"], path.parent, intervals=False)
    files = emit(tmp_path / "server", {"run": result}, ("sglang-log",))
    evidence = diagnose_stages.read_stage(files, tmp_path / "out")
    assert evidence.requests is None  # no request had an answer
    assert evidence.settings["schedule_conservativeness"].value == 0.02
    found = diagnose_stages.explain_stage(tmp_path / "out", UserSettings(), try_flags=False)
    assert found.explained, found.text
    assert found.cause == "engine died"


@pytest.mark.parametrize("version", ["0.5.23", "0.5.22", "0.5.15"])
def test_version_is_the_newest_with_the_logged_settings(tmp_path: Path, version: str) -> None:
    config = SglangConfig(variant=version)  # type: ignore[arg-type]
    document = {
        "name": "few",
        "workload": {"burst": {"num_prompts": 2, "prompt_tokens": 10, "output_tokens": 5}},
        "engine": {"name": "sglang", "variant": version},
        "profile": "unit-step",
    }
    scenario = next(iter(resolve_variants(YamlDocument(tmp_path / "few.yaml", document)).values()))
    record = run_scenario(scenario, tmp_path, intervals=False).record
    path = tmp_path / "sglang.log"
    path.write_text("".join(f"{line}\n" for line in sglang_log_lines(record, config)))
    setup = infer_setup(read_source(path), UserSettings())
    assert setup.engine["variant"] == version
    assert any("version of sglang is unknown" in line for line in setup.assumed)
