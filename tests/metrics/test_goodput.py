"""Tests of goodput as defined by ``vllm bench serve``."""

from __future__ import annotations

import pytest

import simkv
from simkv.core.errors import InputError
from simkv.core.outcome import Outcome
from simkv.metrics.goodput import goodput, is_good
from simkv.scenario.goodput_limits import parse_goodput_limits

#: Three concurrent requests: one request emits a single token, and the client of another leaves.
CONTENTS = {
    "name": "three",
    "workload": {
        "requests": [
            {"arrival": 0.0, "prompt_tokens": 100, "output_tokens": 10},
            {"arrival": 0.0, "prompt_tokens": 100, "output_tokens": 1},
            {"arrival": 0.0, "prompt_tokens": 100, "output_tokens": 100, "timeout": 20.0},
        ]
    },
    "engine": {"name": "vllm", "num_gpu_blocks": 128, "max_model_len": 1000},
    "profile": "unit-step",
}


def test_parses_limits() -> None:
    assert parse_goodput_limits(["ttft:500", "tpot:50", "e2el:2e3"]) == {
        "ttft": 500.0,
        "tpot": 50.0,
        "e2el": 2000.0,
    }


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("tft:500", "did you mean 'ttft'"),
        ("itl:5", "expected NAME:MILLISECONDS"),
        ("ttft", "found nothing"),
        ("ttft:-1", "expected non-negative milliseconds"),
        ("ttft:nan", "expected non-negative milliseconds"),
        ("ttft:inf", "expected non-negative milliseconds"),
        ("ttft:x", "found x"),
    ],
)
def test_rejects_invalid_limits(word: str, what: str) -> None:
    with pytest.raises(InputError, match=f"--goodput {word}: .*{what}"):
        parse_goodput_limits([word])


def test_rejects_duplicate_limits() -> None:
    with pytest.raises(InputError, match="given twice"):
        parse_goodput_limits(["ttft:1", "ttft:2"])


def test_each_limit_is_inclusive() -> None:
    record = simkv.run(CONTENTS).results["run"].record
    first, single, given_up = record.requests.values()
    assert given_up.outcome is Outcome.TIMED_OUT
    # Steps of the unit profile take 1 s: the first token comes at 1 s, one more each second.
    assert is_good(first, {"ttft": 1000.0, "tpot": 1000.0, "e2el": 10_000.0})
    assert not is_good(first, {"ttft": 999.0})
    assert not is_good(first, {"tpot": 999.0})
    assert not is_good(first, {"e2el": 9999.0})
    assert is_good(single, {"tpot": 0.0})
    assert not is_good(given_up, {"ttft": 1e9})


def test_goodput_is_per_second_and_share() -> None:
    record = simkv.run(CONTENTS).results["run"].record
    found = goodput(record, {"ttft": 1000.0, "tpot": 1000.0})
    assert found == {"good": 2, "goodput": 2 / 20.0, "goodput_share": 2 / 3}
    assert goodput(record, {"tpot": 0.0})["good"] == 1
