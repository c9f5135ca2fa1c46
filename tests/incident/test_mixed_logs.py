"""Tests of logs with more than one version, server, engine or clock, with colour codes, or with
gaps.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from simkv.core.errors import InputError
from simkv.incident.evidence import Evidence, StatedSetting
from simkv.incident.source_join import join
from simkv.incident.source_reader import read_source

STATS = (
    "{who}INFO 03-17 15:{minute:02d}:{second:02d} [loggers.py:259] Engine 000: Avg prompt "
    "throughput: 10.0 tokens/s, Avg generation throughput: 20.0 tokens/s, Running: {running} reqs, "
    "Waiting: 0 reqs, GPU KV cache usage: 9.3%, Prefix cache hit rate: 0.0%"
)
BATCH = (
    "[2026-04-05 20:02:51 DP{rank} TP0] Decode batch, #running-req: {running}, #token: 62531, "
    "token usage: 0.12, gen throughput (token/s): 186.64, #queue-req: 0"
)


def stats(second: int, running: int = 1, who: str = "(APIServer pid=11) ") -> str:
    """Return a statistics line of vLLM."""
    return STATS.format(who=who, minute=30 + second // 60, second=second % 60, running=running)


def log(tmp_path: Path, lines: list[str]) -> Evidence:
    """Return the evidence from a log with these lines."""
    path = tmp_path / "server.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return read_source(path)


@pytest.mark.parametrize("who", ["(APIServer pid={}) ", "vllm-{}  | (APIServer pid=1) "])
def test_two_servers_at_once_are_rejected(tmp_path: Path, who: str) -> None:
    both = [stats(second, who=who.format(second // 10 % 2)) for second in range(0, 60, 10)]
    with pytest.raises(
        InputError,
        match=r"server.log:3: this line belongs to .*one server. Split "
        r"the log",
    ):
        log(tmp_path, both)


def test_restarted_server_is_one_server(tmp_path: Path) -> None:
    lines = [
        stats(second, who=f"(APIServer pid={1 + second // 30}) ") for second in range(0, 60, 10)
    ]
    found = log(tmp_path, lines).series
    assert found is not None
    assert len(found) == 6


def test_lines_of_two_engines_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has statistics lines of both vLLM and SGLang"):
        log(tmp_path, [stats(0), BATCH.format(rank=0, running=1)])


def test_colored_ranks_of_sglang(tmp_path: Path) -> None:
    lines = [f"sglang-1  | \x1b[36m{BATCH.format(rank=n, running=n)}\x1b[0m" for n in (0, 1, 0, 1)]
    found = log(tmp_path, lines).series
    assert found is not None
    assert found["engine"].tolist() == [0, 1, 0, 1]
    assert found["running"].tolist() == [0, 1, 0, 1]


def test_gap_is_reported(tmp_path: Path) -> None:
    whole = [*range(0, 60, 10), *range(120, 160, 10)]
    notes = log(tmp_path, [stats(second) for second in whole]).notes
    assert any("1 gaps between its statistics lines" in note for note in notes)
    idle = log(tmp_path, [stats(second, running=int(second != 50)) for second in whole])
    assert not any("gaps" in note for note in idle.notes)


def test_two_versions_are_reported(tmp_path: Path) -> None:
    parts = [
        Evidence(name, engine="vllm", settings={"version": StatedSetting(version, f"{name}:1")})
        for name, version in (("a.log", "0.19.0"), ("b.log", "0.20.0"))
    ]
    both = join(parts)
    assert both.settings["version"].value == "0.19.0"
    assert any("0.19.0 in a.log:1 but 0.20.0 in b.log:1" in note for note in both.notes)


@pytest.mark.parametrize("skew", [-3700.5, 0.0, 42.25])
def test_clock_of_a_client_is_aligned_by_request_ids(skew: float) -> None:
    names = [f"cmpl-{n}" for n in range(9)]
    at = 1.7e9 + pd.Series(range(9), dtype=float)
    server = pd.DataFrame({"request": names, "t_s": at, "e2e_ms": 500.0, "queue_ms": 1.0})
    server["output_tokens"] = 5
    came = pd.DataFrame({"request": names[::-1], "t_s": at[::-1].to_numpy() + skew})
    both = join([Evidence("spans", requests=server), Evidence("log", arrivals=came)])
    assert both.arrivals is not None
    assert both.arrivals["t_s"].to_numpy() == pytest.approx(at.to_numpy(), abs=1e-6)
    assert any("clock was shifted" in note for note in both.notes) == (skew != 0.0)
