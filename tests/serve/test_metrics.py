"""Tests that metrics have the names, types, labels and buckets that the engine's wheel
registers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from simkv.metrics.prometheus_metrics import FOLDER
from tests.serve.running_server import Served, scenario, serving

SGLANG = """\
name: served
engine: {name: sglang, max_total_num_tokens: 4000}
profile: assumed-costs.json
"""
ENGINES = {"vllm": scenario(blocks=300), "sglang": SGLANG}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module", params=ENGINES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Served]]:
    folder = tmp_path_factory.mktemp("served")
    with serving(
        folder, ENGINES[request.param], "--served-model-name", "m", "--speed", "10"
    ) as server:
        for tokens in (5, 3):
            prompt = {"prompt": list(range(100)), "max_tokens": tokens, "stream": tokens == 5}
            assert server.post("/v1/completions", prompt).status_code == 200
        yield request.param, server


def value(text: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples with these labels."""
    samples = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert samples, name
    return sum(samples)


def test_metrics_match_engine(served: tuple[str, Served]) -> None:
    engine, server = served
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    data = json.loads((FOLDER / f"{engine}.json").read_text())
    assert re.fullmatch(rf"PyPI {engine}==\S+, .*", data["source"])
    for row in data["metrics"]:
        name = row["name"].removesuffix("_total") if row["type"] == "counter" else row["name"]
        family = families.pop(name)
        assert family.type == row["type"], name
        labels = {*data["labels"][row["of"]], *row["labels"]}
        if "model_name" in row["labels"]:  # the list contains every label
            labels = set(row["labels"])
        assert family.samples, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == labels, name
        bounds = [s.labels["le"] for s in family.samples if "le" in s.labels]
        if row.get("buckets"):
            assert [*map(float, row["buckets"]), float("inf")] == sorted({*map(float, bounds)})
    own = {name for name in families if name.startswith("simkv:")}
    assert {name for name in families if name not in own} <= {"vllm:cache_config_info"}
    assert own >= {"simkv:clock_lag_seconds", "simkv:speed"}


def test_metric_values_match_run(served: tuple[str, Served]) -> None:
    engine, server = served
    text = server.get("/metrics").text
    names = {
        "vllm": ("generation_tokens_total", "prompt_tokens_total", "num_requests_running"),
        "sglang": ("generation_tokens_total", "prompt_tokens_total", "num_running_reqs"),
    }
    tokens, prompts, running = (f"{engine}:{name}" for name in names[engine])
    assert value(text, tokens, model_name="m") == 8
    assert value(text, prompts) == 200
    assert value(text, running) == 0
    assert value(text, f"{engine}:time_to_first_token_seconds_count") == 2
    ttfts = value(text, f"{engine}:time_to_first_token_seconds_sum")
    cached = {"vllm": 96, "sglang": 99}[engine]  # full blocks; all tokens except the last
    assert ttfts == pytest.approx(2 * 0.01 + (200 - cached) * 1e-4, rel=1e-6)
    assert value(text, f"{engine}:inter_token_latency_seconds_count") == 6
    assert value(text, f"{engine}:inter_token_latency_seconds_sum") == pytest.approx(0.06)
    assert value(text, "simkv:speed") == 10
    assert value(text, "simkv:clock_lag_seconds_count") > 0
    if engine == "sglang":
        assert value(text, tokens, is_streaming="true") == 5
        assert value(text, "sglang:cached_tokens_total", cache_source="device") == cached
    else:
        assert value(text, "vllm:prefix_cache_hits_total") == cached
        assert value(text, "vllm:request_success_total", finished_reason="length") == 2
        assert value(text, "vllm:cache_config_info", num_gpu_blocks="300", engine="0") == 1
        assert value(text, "vllm:iteration_tokens_total_sum") == 200 - cached + 6
