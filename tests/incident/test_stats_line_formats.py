"""Tests of statistics lines, written by the code of vLLM and in the formats of its formatters.

``SIMKV_WHEELS`` names a directory with unpacked wheels, ``vllm-0.19.0/vllm/…``. Tests that use a
wheel are skipped without it. They load single files, because the whole package needs a GPU.
"""

from __future__ import annotations

import ast
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from simkv.incident.source_reader import read_source

WHEELS = Path(os.environ.get("SIMKV_WHEELS", "no-such-folder"))
VERSIONS = [f"0.{minor}.0" for minor in (11, 14, 19, 24, 27, 33)]


def written(version: str) -> str:
    """Return the message that ``LoggingStatLogger.log`` of this version logs."""
    path = WHEELS / f"vllm-{version}" / "vllm" / "v1" / "metrics" / "loggers.py"
    if not path.is_file():
        pytest.skip(f"no wheel of vLLM {version}; SIMKV_WHEELS names the folder of wheels")
    tree = ast.parse(path.read_text())
    found = next(
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "LoggingStatLogger"
    )
    wanted = [
        node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "log"
    ]
    lines: list[str] = []

    def info(text: str, *values: object) -> None:
        lines.append(text % values)

    space: dict[str, Any] = {
        "logger": SimpleNamespace(info=info, debug=info),
        "envs": SimpleNamespace(VLLM_COMPUTE_NANS_IN_LOGITS=False),
        "time": SimpleNamespace(monotonic=lambda: 1.0),
        "KV_FETCH_STAGES": (),
    }
    exec(compile(ast.Module(wanted, []), str(path), "exec"), space)
    silent = SimpleNamespace(log=lambda **_: None)
    cache = SimpleNamespace(hit_rate=0.25, empty=False)
    nothing = SimpleNamespace(hit_rate=0.0, empty=True)
    stats = SimpleNamespace(
        num_running_reqs=12,
        num_waiting_reqs=34,
        num_skipped_waiting_reqs=0,
        num_kv_fetch_reqs_by_stage={},
        kv_cache_usage=0.875,
    )
    logger = SimpleNamespace(
        engine_index=0,
        log_prefix="Engine 000: ",
        engine_is_idle=False,
        last_prompt_throughput=100.5,
        last_generation_throughput=50.5,
        num_prompt_tokens=0,
        num_generation_tokens=0,
        num_preemptions=7,
        num_corrupted_reqs=0,
        kv_cache_device="GPU",
        last_scheduler_stats=stats,
        prefix_caching_metrics=cache,
        connector_prefix_caching_metrics=nothing,
        mm_caching_metrics=nothing,
        spec_decoding_logging=silent,
        kv_connector_logging=silent,
        kv_transfer_logging=silent,
        ec_connector_logging=silent,
        cudagraph_logging=None,
        _update_stats=lambda: None,
        aggregate_scheduler_stats=lambda: None,
        _enable_perf_stats=lambda: False,
        _get_throughput=lambda *_: 50.5,
        _reset=lambda *_: None,
    )
    space["log"](logger)
    return lines[0]


@pytest.mark.parametrize("version", VERSIONS)
def test_stats_line_of_the_wheel(tmp_path: Path, version: str) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(f"(APIServer pid=1) INFO 03-17 15:38:10 [loggers.py:259] {written(version)}\n")
    found = read_source(path).series
    assert found is not None
    row = found.iloc[0]
    assert (row["running"], row["waiting"], row["usage"]) == (12, 34, 0.875)
    assert row["hit_rate"] == 0.25
    assert row["output_rate"] == 50.5
    assert row["preemptions"] == (7 if version != "0.11.0" else 0)


STATS = (
    "Engine 000: Avg prompt throughput: 100.5 tokens/s, Avg generation throughput: 50.5 tokens/s, "
    "Running: 12 reqs, Waiting: 34 reqs, GPU KV cache usage: 87.5%, Prefix cache hit rate: 25.0%"
)
AT = "03-17 15:38:10"
#: Formats of ``NewLineFormatter`` (old, new, and with paths at level DEBUG) and
#: ``ColoredFormatter`` in vllm/logging_utils/formatter.py, with invented values.
FORMATTED = {
    "old": f"INFO {AT} loggers.py:259] {STATS}",
    "new": f"INFO {AT} [loggers.py:259] {STATS}",
    "path": f"INFO {AT} [v1/metrics/loggers.py:259] {STATS}",
    "shortened path": f"INFO {AT} [v1/engine/.../metrics/loggers.py:259] {STATS}",
    "color": f"\x1b[32mINFO\x1b[0m \x1b[90m{AT}\x1b[0m \x1b[90m[loggers.py:259]\x1b[0m {STATS}",
    "second line": f"INFO {AT} [loggers.py:259] two lines\r\nINFO {AT} [loggers.py:259] {STATS}",
}


def assert_stats(path: Path, text: str) -> None:
    path.write_text(f"{text}\n")
    found = read_source(path).series
    assert found is not None
    row = found.iloc[0]
    assert (row["running"], row["waiting"], row["usage"], row["hit_rate"]) == (12, 34, 0.875, 0.25)


@pytest.mark.parametrize("form", FORMATTED)
def test_formats_of_the_formatters(tmp_path: Path, form: str) -> None:
    assert_stats(tmp_path / "vllm.log", FORMATTED[form])


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
@pytest.mark.parametrize("name", ["NewLineFormatter", "ColoredFormatter"])
@pytest.mark.parametrize("version", VERSIONS)
def test_formatters_of_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, name: str, level: str
) -> None:
    path = WHEELS / f"vllm-{version}" / "vllm" / "logging_utils" / "formatter.py"
    if not path.is_file():
        pytest.skip(f"no wheel of vLLM {version}; SIMKV_WHEELS names the directory of wheels")
    package = ModuleType("vllm")
    package.envs = SimpleNamespace(VLLM_LOGGING_LEVEL=level)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    space: dict[str, Any] = {"__file__": str(path), "__name__": "formatter"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    if name not in space:
        pytest.skip(f"vLLM {version} has no {name}")
    info = "fileinfo" if "fileinfo" in path.read_text() else "filename"
    written = space[name](
        f"%(levelname)s %(asctime)s [%({info})s:%(lineno)d] %(message)s", "%m-%d %H:%M:%S"
    )
    source = path.parents[1] / "v1" / "metrics" / "loggers.py"
    record = logging.LogRecord("vllm", logging.INFO, str(source), 259, STATS, None, None)
    assert_stats(tmp_path / "vllm.log", written.format(record))
