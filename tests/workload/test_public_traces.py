"""Tests of known statistics of the public traces, compared exactly (skipped without the traces)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simkv.workload.trace_reader import Selection, TraceReader, read_trace
from simkv.workload.trace_statistics import TraceStatistics, inspect_trace


@pytest.fixture(scope="module")
def workloads(shared: Path) -> Path:
    folder = shared / "workloads"
    if not folder.is_dir():
        pytest.skip("the public traces are not here: no folder workloads/ in the shared data")
    return folder


def figures(path: Path, selection: Selection | None = None) -> dict[str, Any]:
    survey: TraceStatistics = inspect_trace(TraceReader(path, selection))
    return survey.figures()


LENGTHS = {
    # file: rows; prompt tokens: mean, p50, p99, max; output tokens: mean, p50, p99, max; rate
    "azure-2023-conv.csv.gz": (14176, 1195.1, 1015, 4121, 14050, 201.5, 115, 598, 1000, 5.907),
    "azure-2023-code.csv.gz": (7491, 2040.1, 1465, 7436, 7437, 27.6, 13, 248, 1899, 3.131),
    "mooncake-conversation.jsonl.gz": (
        *(7851, 12428.0, 7284, 89868, 124847),
        *(347.1, 356, 1168, 2000, 3.275),
    ),
    "mooncake-synthetic.jsonl.gz": (
        *(2597, 13190.7, 5824, 57634, 191374),
        *(183.9, 135, 776, 842, 3.821),
    ),
    "vidur-arxiv-lengths.csv.gz": (
        *(18838, 2580.3, 2716, 3935, 4046),
        *(295.4, 167, 3288, 4056, None),
    ),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_public_traces_have_known_rows_lengths_and_rates(workloads: Path, name: str) -> None:
    found = figures(workloads / name)
    told: list[float | None] = [found["requests"]]
    for lengths in (found["prompt_tokens"], found["output_tokens"]):
        told.append(round(lengths["mean"], 1))
        told += [round(lengths[key]) for key in ("p50", "p99", "max")]
    told.append(found["rate"] and round(found["rate"], 3))
    assert tuple(told) == LENGTHS[name]


@pytest.mark.parametrize(
    ("name", "hits", "blocks"),
    [
        ("mooncake-conversation.jsonl.gz", 68_181, 194_284),
        ("mooncake-synthetic.jsonl.gz", 29_303, 68_538),
    ],
)
def test_hit_rate_of_an_unlimited_prefix_cache(
    workloads: Path, name: str, hits: int, blocks: int
) -> None:
    found = figures(workloads / name)
    assert (found["hash_block_hits"], found["hash_blocks"]) == (hits, blocks)


def test_burstiness_of_the_azure_traces(workloads: Path) -> None:
    assert figures(workloads / "azure-2023-conv.csv.gz")["gap_cv"] == pytest.approx(1.1, abs=0.05)
    assert figures(workloads / "azure-2023-code.csv.gz")["gap_cv"] == pytest.approx(12, abs=1)


def test_azure_times_are_exact_to_their_ticks(workloads: Path) -> None:
    arrival = read_trace(workloads / "azure-2023-conv.csv.gz").rows.arrival
    assert arrival[:2].tolist() == [0.0, 4.314579]
    # 18:55:46.6452200 - 18:15:46.6805900
    assert arrival[-1] == 2399.96463


def test_the_rate_of_servegens_clients(workloads: Path) -> None:
    found = figures(workloads / "servegen-deepseek-r1.tar.gz")
    assert found["requests"] / 43_200 == pytest.approx(13.041, abs=0.0005)
    small = figures(workloads / "servegen-m-small.tar.gz", Selection(start=36_000, duration=600))
    assert small["requests"] == pytest.approx(600 * 277.7, rel=0.5)
    assert small["sessions"] == 6


@pytest.mark.parametrize(
    "name", ["azure-2024-code.csv", "burstgpt-v1.csv", "mooncake-toolagent.jsonl"]
)
def test_samples_of_other_formats(workloads: Path, name: str) -> None:
    trace = read_trace(workloads / "format-samples" / name)
    told = [(r.prompt_tokens, r.output_tokens, r.arrival) for r in trace.requests()]
    assert (
        told
        == {
            "azure-2024-code.csv": [(2162, 5, 0.0)],
            "burstgpt-v1.csv": [(472, 18, 5.0), (1087, 230, 45.0), (417, 276, 118.0)],
            "mooncake-toolagent.jsonl": [(6758, 500, 0.0), (7322, 490, 0.0)],
        }[name]
    )


def test_recorded_cases_have_the_requests_that_their_records_count(shared: Path) -> None:
    cases = sorted((shared / "ground-truth").glob("*/case.json"))
    if not cases:
        pytest.skip("the recorded cases are not here: no ground-truth/ in the shared data")
    for case in cases:
        told = json.loads(case.read_text())["workload"]
        trace = read_trace(case.parent / "requests.csv")
        captured = case.parent / "original" / "requests.jsonl.gz"
        for rows in [trace.rows, *([read_trace(captured).rows] if captured.is_file() else [])]:
            assert len(rows) == told["requests"]
            assert rows.prompt_tokens.sum() == told["prompt_tokens_total"]
            assert rows.output_tokens.sum() == told["output_tokens_total"]


def test_shared_blocks_of_recorded_prompts(shared: Path) -> None:
    """For each request, the number of leading blocks that occurred before equals the number in the
    recorded case.
    """
    import csv

    folder = shared / "ground-truth" / "lss-rtx4090-llama3.1-8b"
    if not folder.is_dir():
        pytest.skip("this recorded case is not here")
    with (folder / "requests.csv").open() as file:
        told = sum(int(row["prefix_hit_blocks_inf"]) for row in csv.DictReader(file))
    found = inspect_trace(TraceReader(folder / "requests.csv")).figures()
    assert found["full_block_hits"] == found["hash_block_hits"] == told
