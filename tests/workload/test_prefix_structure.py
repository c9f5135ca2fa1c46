"""Tests of tokens shared by prompts: groups, hash ids and segments."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from simkv.core.block_keys import TokenContent
from simkv.core.errors import InputError
from simkv.core.request import Request, Segment
from simkv.costs.cost_profile import load_profile
from simkv.metrics.run_metrics import request_rows, step_rows
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.workload.workload_section import Workload, generate_requests
from tests.core.shared_prefixes import common_prefix
from tests.laws.test_leaping import assert_same, record


def requests(workload: dict[str, Any]) -> list[Request]:
    return generate_requests(Workload.model_validate(workload), None)


def listed(**fields: Any) -> dict[str, Any]:
    return {"prompt_tokens": 100, "output_tokens": 5, **fields}


def shared(a: Request, b: Request) -> int:
    return common_prefix(TokenContent(a), TokenContent(b), min(a.prompt_tokens, b.prompt_tokens))


def test_hash_ids_identify_the_blocks_of_a_prompt() -> None:
    rows = [
        listed(prompt_tokens=1100, hash_ids=[7, 8, 9]),
        listed(prompt_tokens=1500, hash_ids=[7, 8, 10]),
        listed(prompt_tokens=512, hash_ids=[7]),
        listed(prompt_tokens=600, hash_ids=[11, 8]),
    ]
    a, b, c, d = requests({"requests": rows})
    assert a.segments == (Segment("h7", 0, 512), Segment("h8", 0, 512), Segment("h9", 0, 76))
    assert [shared(a, b), shared(a, c), shared(a, d)] == [1024, 512, 0]


def test_hash_block_size_is_configurable() -> None:
    rows = [
        listed(hash_ids=[1, 2, 3], hash_block_size=40),
        listed(hash_ids=[1], hash_block_size=100),
    ]
    a, b = requests({"requests": rows})
    assert a.segments == (Segment("h1", 0, 40), Segment("h2", 0, 40), Segment("h3", 0, 20))
    assert shared(a, b) == 40


def test_segments_can_continue_an_earlier_conversation() -> None:
    rows = [
        listed(segments=[["system", 0, 60], ["u0", 0, 40]]),
        listed(
            prompt_tokens=125,
            segments=[["system", 0, 60], ["u0", 0, 40], ["o0", 0, 5], ["q", 0, 20]],
        ),
    ]
    first, second = requests({"requests": rows})
    assert shared(first, second) == 100
    said = TokenContent(first).slices(0, 105)
    assert TokenContent(second).slices(0, 105) == said


def test_shared_prefix_is_at_most_the_prompt() -> None:
    a, b, c = requests(
        {
            "requests": [
                listed(prefix_group="x", prefix_tokens=80),
                listed(prefix_group="x", prefix_tokens=80, prompt_tokens=50),
                listed(prefix_group="y", prefix_tokens=80),
            ]
        }
    )
    assert [shared(a, b), shared(a, c)] == [50, 0]


def arrivals(**fields: Any) -> dict[str, Any]:
    drawn = {"distribution": "uniform", "low": 50, "high": 500}
    whole = {"num_prompts": 400, "request_rate": 5, "prompt_tokens": drawn, "output_tokens": 5}
    return {"arrivals": {**whole, "prefix_tokens": 40, "seed": 3, **fields}}


def groups(found: list[Request]) -> list[str]:
    return [request.segments[0].stream for request in found]


def test_arrivals_sample_one_of_the_prefixes() -> None:
    found = groups(requests(arrivals(prefix_groups=4)))
    assert set(found) == {"g0", "g1", "g2", "g3"}
    assert all(70 <= found.count(group) <= 130 for group in set(found))


def test_first_prefix_is_most_frequent_with_zipf() -> None:
    found = groups(requests(arrivals(prefix_groups=4, prefix_zipf=2.0)))
    counts = [found.count(f"g{i}") for i in range(4)]  # expected: 281, 70, 31 and 18 of 400
    assert 250 <= counts[0] <= 310
    assert 50 <= counts[1] <= 95
    assert counts[1] > counts[2] > counts[3] > 0


def test_prefixes_leave_arrivals_and_lengths_unchanged() -> None:
    plain = requests(arrivals(prefix_tokens=0))
    for fields in ({"prefix_groups": 9}, {"prefix_groups": 2, "prefix_zipf": 1.0}):
        drawn = requests(arrivals(**fields))
        assert [(r.arrival, r.prompt_tokens) for r in drawn] == [
            (r.arrival, r.prompt_tokens) for r in plain
        ]
    assert plain[0].segments == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("prefix_group: x", "prefix_group and prefix_tokens must be set together"),
        ("prefix_tokens: 3", "prefix_group and prefix_tokens must be set together"),
        ("hash_ids: [1, 2]", "100 tokens require 1 blocks of 512; found 2 ids"),
        ("hash_ids: [1], segments: [[x, 0, 100]]", "set at most one of prefix_group, hash_ids"),
        ("segments: [[x, 0, 99]]", "must add up to prompt_tokens (100), got 99"),
        ("segments: [[x, 5, 5], [y, 0, 100]]", "0 <= start < end"),
        ("segments: [[x, 0]]", "segments.0.2: "),
        ("segments: [[3, 0, 100]]", "YAML reads 3 as a number; put it in quotes"),
        ("hash_ids: [a]", "should be a whole number; found 'a'"),
    ],
)
def test_rejects_inconsistent_prompts(tmp_path: Path, fields: str, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "name: x\nprofile: unit-step\nengine: {name: vllm}\nworkload:\n  requests:\n"
        "    - {prompt_tokens: 100, output_tokens: 5}\n"
        f"    - {{prompt_tokens: 100, output_tokens: 5, {fields}}}\n"
    )
    with pytest.raises(InputError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}:7: workload.requests.1")
    assert message in str(error.value)


def test_sampled_prefixes_require_a_length(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prefix_groups requires prefix_tokens"):
        requests(arrivals(prefix_groups=3, prefix_tokens=0))
    with pytest.raises(ValueError, match="cannot be combined with prefix_group"):
        requests(arrivals(prefix_groups=3, prefix_group="x"))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "mistralrs"])
def test_computes_only_uncached_tokens(engine: str) -> None:
    """The second turn of a conversation computes its new tokens and at most one block in
    addition.
    """
    knobs = {"mistralrs": {"prefix_caching": True}, "sglang": {"max_total_num_tokens": 4096}}
    rows = [
        listed(prompt_tokens=320, output_tokens=64, segments=[["u0", 0, 320]]),
        listed(
            prompt_tokens=400,
            arrival=100,
            segments=[["u0", 0, 320], ["o0", 0, 64], ["u1", 0, 16]],
        ),
    ]
    scenario = Scenario.model_validate(
        {
            "name": "x",
            "workload": {"requests": rows},
            "engine": {"name": engine, **knobs.get(engine, {})},
            "profile": "unit-step",
        }
    )
    run, _ = record(scenario, load_profile("unit-step"), leaping=True)
    prefills = [n for n in run.steps.prefill_tokens if n]
    assert prefills[0] == 320
    assert prefills[1] <= 80 - 48  # 383 of the 384 tokens of the first turn, in whole blocks


def conversation(seed: int) -> list[dict[str, Any]]:
    """Return up to six requests; most continue an earlier request, some before it has ended."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for i in range(rng.randint(2, 6)):
        pieces: list[list[Any]] = []
        if i and rng.random() < 0.8:
            earlier = rng.randrange(i)
            pieces += rows[earlier]["segments"]
            pieces.append([f"o{earlier}", 0, rng.randint(1, rows[earlier]["output_tokens"])])
        pieces.append([f"u{i}", 0, rng.randint(1, 12)])
        rows.append(
            {
                "arrival": rng.choice([0.0, 0.0, 1.0, 3.0, 9.0, 20.0]),
                "prompt_tokens": sum(end - start for _, start, end in pieces),
                "output_tokens": rng.randint(1, 60),
                "segments": pieces,
            }
        )
    return rows


@pytest.mark.parametrize(
    "engine",
    [
        {"name": "vllm", "block_size": 2, "num_gpu_blocks": 200, "max_model_len": 398},
        {"name": "vllm", "block_size": 2, "num_gpu_blocks": 61, "startup_check": False},
        {
            "name": "vllm",
            "variant": "0.33.0-skip-blocked",
            "block_size": 2,
            "num_gpu_blocks": 81,
            "startup_check": False,
        },
        {
            "name": "sglang",
            "variant": "0.5.23-lpm-aging",
            "lpm_aging_tokens_per_pass": 3,
            "schedule_policy": "lpm",
            "max_total_num_tokens": 300,
            "max_running_requests": 2,
        },
        {"name": "mistralrs", "block_size": 2, "num_gpu_blocks": 120, "prefix_caching": True},
    ],
    ids=["vllm", "vllm-tight", "vllm-skip", "sglang-aging", "mistralrs"],
)
def test_leaping_does_not_change_conversations(engine: dict[str, Any]) -> None:
    """Decodes fill blocks that other requests wait for; a leap must not skip the moment when a
    block becomes full.
    """
    profile = load_profile("unit-step")
    for seed in range(25):
        scenario = Scenario.model_validate(
            {
                "name": "x",
                "workload": {"requests": conversation(seed)},
                "engine": engine,
                "profile": "unit-step",
            }
        )
        (leaping, _), (stepping, _) = (
            record(scenario, profile, leaping=yes) for yes in (True, False)
        )
        assert_same(request_rows("", leaping), request_rows("", stepping), f"{seed} requests")
        assert_same(step_rows("", leaping), step_rows("", stepping), f"{seed} steps")
