"""Tests of Prometheus metrics: query_range answers and plain scrapes, resets and gaps, and requests
sampled from sums.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from simkv.core.errors import InputError
from simkv.incident.emit.emitted_files import emit
from simkv.incident.emit.prometheus_writer import scrape_requests
from simkv.incident.evidence import Evidence
from simkv.incident.source_reader import read_source, read_sources
from simkv.incident.workload_ensemble import BURST_SHARES, interval, sample_workload
from simkv.metrics.prometheus_metrics import list_engine_metrics
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.yaml_document import YamlDocument
from tests.incident.test_diagnose import HERE

BEGIN = 1.7e9


def served(count: int = 200) -> pd.DataFrame:
    """Return requests that arrived one after another within ten minutes."""
    luck = np.random.default_rng(1)
    prompts, outputs = luck.integers(20, 3000, count), luck.integers(2, 400, count)
    queue = luck.exponential(300.0, count)
    first, whole = queue + 0.1 * prompts, queue + 0.1 * prompts + 20.0 * (outputs - 1)
    return pd.DataFrame(
        {
            "t_s": BEGIN + np.sort(luck.random(count) * 600),
            "prompt_tokens": prompts,
            "output_tokens": outputs,
            "queue_ms": queue,
            "prefill_ms": 0.1 * prompts,
            "ttft_ms": first,
            "tpot_ms": 20.0,
            "e2e_ms": whole,
        }
    )


def metrics(tmp_path: Path) -> Evidence:
    path = tmp_path / "metrics.json"
    path.write_text(scrape_requests(served()))
    return read_source(path)


def test_sums_of_a_query_range(tmp_path: Path) -> None:
    found = metrics(tmp_path)
    told = served()
    assert found.engine == "vllm"
    assert sum(found.histograms["output_tokens"]["count"]) == len(told)
    assert sum(found.histograms["e2e"]["sum"]) == pytest.approx(told["e2e_ms"].sum() / 1e3)
    assert found.series is not None
    assert found.series["running"].max() > 0


@pytest.mark.parametrize("seed", range(len(BURST_SHARES)))
def test_every_member_agrees_with_the_sums(tmp_path: Path, seed: int) -> None:
    found, told = metrics(tmp_path), served()
    assert found.series is not None
    member = sample_workload(found.histograms, found.series, seed)
    assert len(member) == len(told)
    for name in ("prompt_tokens", "output_tokens"):
        assert member[name].sum() == pytest.approx(told[name].sum(), rel=0.01)
        shares = [np.quantile(table[name], (0.25, 0.5, 0.75)) for table in (member, told)]
        assert shares[0] == pytest.approx(shares[1], rel=0.25)
    assert member["e2e_ms"].mean() == pytest.approx(told["e2e_ms"].mean(), rel=1e-6)
    assert member["t_s"].is_monotonic_increasing
    other = sample_workload(found.histograms, found.series, seed + len(BURST_SHARES))
    assert not member["prompt_tokens"].equals(other["prompt_tokens"])


def test_latencies_are_means_of_requests_that_end_in_the_interval(tmp_path: Path) -> None:
    """The mean inter-token latency of the interval also includes other requests."""
    told = served().sort_values("t_s", ignore_index=True)
    slow = np.linspace(20.0, 300.0, len(told))  # later requests have longer inter-token latencies
    took = told["ttft_ms"] + slow * (told["output_tokens"] - 1)
    told = told.assign(tpot_ms=slow, e2e_ms=took)
    path = tmp_path / "metrics.json"
    path.write_text(scrape_requests(told))
    found = read_source(path)
    assert found.series is not None
    member = sample_workload(found.histograms, found.series, 0)
    assert member["e2e_ms"].mean() == pytest.approx(told["e2e_ms"].mean(), rel=1e-6)


def emitted(engine: dict[str, object], tmp_path: Path) -> tuple[RunResult, Path]:
    """Return a run and the metrics that its server would have exported."""
    load = {"num_prompts": 40, "request_rate": 4.0, "prompt_tokens": 300, "output_tokens": 900}
    document = {"name": "run", "workload": {"arrivals": load}, "engine": engine}
    document["profile"] = "assumed-costs.json"
    scenario = next(iter(resolve_variants(YamlDocument(HERE / "run.yaml", document)).values()))
    result = run_scenario(scenario, HERE, intervals=False)
    return result, emit(tmp_path, {"run": result}, ("prometheus",))[0]


@pytest.mark.parametrize(
    "engine",
    [
        {"name": "vllm", "variant": "0.33.0", "num_gpu_blocks": 300, "max_model_len": 2048},
        {"name": "sglang", "max_total_num_tokens": 4800},
    ],
    ids=["vllm", "sglang"],
)
def test_exported_metrics_have_the_names_of_the_wheel(
    tmp_path: Path, engine: dict[str, object]
) -> None:
    result, path = emitted(engine, tmp_path)
    name = str(engine["name"])
    rows = {row.name: row for row in list_engine_metrics(name)}
    known = {f"{one}{end}" for one in rows for end in ("", "_total", "_count", "_sum", "_bucket")}
    for series in json.loads(path.read_text())["data"]["result"]:
        labels = series["metric"]
        assert labels["__name__"] in known or labels["__name__"].endswith(":cache_config_info")
    found = read_source(path)
    assert found.engine == name
    lives = result.record.requests.values()
    assert sum(found.histograms["output"]) == sum(life.tokens for life in lives)
    assert sum(found.histograms["ttft"]["count"]) == len(lives)
    took = sum((life.last_token or 0.0) - life.request.arrival for life in lives)
    assert sum(found.histograms["e2e"]["sum"]) == pytest.approx(took)
    assert len(found.histograms["e2e"]["le"]) == len(rows[E2E[name]].buckets or ()) + 1
    assert found.series is not None
    assert found.series["usage"].max() > 0.5
    assert found.series["waiting"].max() > 0
    assert sum(found.histograms["preemptions"]) == result.summary["preemptions"]
    told = {key: known.value for key, known in found.settings.items()}
    assert told == SIZES[name]


E2E = {
    "vllm": "vllm:e2e_request_latency_seconds",
    "sglang": "sglang:e2e_request_latency_seconds",
}
SIZES = {
    "vllm": {"block_size": 16, "num_gpu_blocks": 300},
    "sglang": {"max_total_num_tokens": 4800, "page_size": 1},
}


def test_release_with_other_names_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"vllm 0.9.2, whose metrics have other names; expected 0.11"
    ):
        emitted({"name": "vllm", "variant": "0.9.2"}, tmp_path)
    with pytest.raises(InputError, match="run is fastdeploy; expected vllm or sglang"):
        emitted({"name": "fastdeploy"}, tmp_path)


SGLANG_SCRAPE = """sglang:num_running_reqs{{engine_type="unified",model_name="m",tp_rank="0"}} 3.0
sglang:num_queue_reqs{{engine_type="unified",model_name="m",tp_rank="0"}} 7.0
sglang:token_usage{{engine_type="unified",model_name="m",tp_rank="0"}} 0.25
sglang:max_total_num_tokens{{engine_type="unified",model_name="m",tp_rank="0"}} 90000.0
sglang:prompt_tokens_total{{model_name="m",is_streaming="true"}} {tokens}
sglang:cached_tokens_total{{model_name="m",cache_source="device"}} {cached}
sglang:num_retracted_requests_total{{model_name="m"}} {retracted}
sglang:time_to_first_token_seconds_count{{model_name="m",is_streaming="true"}} {count}
sglang:time_to_first_token_seconds_sum{{model_name="m",is_streaming="true"}} {seconds}
"""


def test_plain_scrapes_of_sglang(tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(
        "".join(
            f"# scraped {BEGIN + 15 * i}\n"
            + SGLANG_SCRAPE.format(
                tokens=100 * i, cached=25 * i, retracted=i, count=i, seconds=0.5 * i
            )
            for i in range(4)
        )
    )
    found = read_source(path)
    assert found.engine == "sglang"
    assert found.series is not None
    last = found.series.iloc[-1]
    assert (last["running"], last["waiting"], last["usage"]) == (3, 7, 0.25)
    assert (last["hit_rate"], last["preemptions"]) == (0.25, 1)
    assert found.histograms["ttft"]["sum"] == [0, 0.5, 0.5, 0.5]
    assert found.settings["max_total_num_tokens"].value == 90000


SCRAPE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} 2.0
vllm:gpu_cache_usage_perc{{engine="0",model_name="m"}} 0.5
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
"""


def test_plain_scrapes_resets_and_gaps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    values = [(0, 100), (15, 400), (30, 50), (45, 80), (300, 90)]
    path.write_text(
        "".join(
            f"# scraped {BEGIN + at}\n" + SCRAPE.format(running=3, tokens=tokens)
            for at, tokens in values
        )
    )
    found = read_source(path)
    assert found.histograms["output"] == [0, 300, 50, 30, 10]  # the first value is not an increase
    assert found.series is not None
    assert found.series["usage"].tolist() == [0.5] * 5
    assert any("1 counters were reset" in note for note in found.notes)
    assert any("1 gaps" in note for note in found.notes)


def test_scrapes_without_a_time_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(SCRAPE.format(running=1, tokens=5))
    with pytest.raises(InputError, match=r"metrics.txt:3: the time of this scrape is missing"):
        read_source(path)
    path.write_text(json.dumps(json.loads(scrape_requests(served()))["data"]) + "}")
    with pytest.raises(InputError, match=r"metrics\.txt"):
        read_source(path)


def test_interval_covers_spread_and_bias_of_members() -> None:
    low, high = interval([1.0, 1.1, 0.9])
    wider = interval([1.0, 1.1, 0.9], observed=2.0)
    assert low == pytest.approx(1 - 0.19)
    assert high == pytest.approx(1 + 0.19)
    assert wider[1] > 2.0 > high


@pytest.mark.parametrize("form", ["text", "JSON"])
def test_scrapes_before_and_after_in_two_files(tmp_path: Path, form: str) -> None:
    paths = []
    for name, at, total in (("before", 1_700_000_000, 100), ("after", 1_700_000_060, 700)):
        values = {
            "vllm:num_requests_running": 2,
            "vllm:num_requests_waiting": 0,
            "vllm:generation_tokens_total": total,
        }
        path = tmp_path / f"{name}.txt"
        if form == "text":
            path.write_text("".join(f"{key}{{}} {value}\n" for key, value in values.items()))
            os.utime(path, (at, at))
        else:
            result = [
                {"metric": {"__name__": key}, "value": [at, str(value)]}
                for key, value in values.items()
            ]
            document = {"status": "success", "data": {"resultType": "vector", "result": result}}
            path.write_text(json.dumps(document))
        paths.append(path)
    (found,) = read_sources(paths)
    assert found.series is not None
    assert found.series["output_rate"].iloc[-1] == 10
