"""Tests of the requests of a scenario: listed, in a burst, or sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simkv.core.request import Segment
from simkv.workload.workload_section import Workload, generate_requests


def workload(**form: Any) -> Workload:
    return Workload.model_validate(form)


def drawn(count: int = 2000, **fields: Any) -> Workload:
    plain = {"num_prompts": count, "request_rate": 2.0, "prompt_tokens": 5, "output_tokens": 3}
    return workload(arrivals={**plain, **fields})


def arrivals(found: Workload) -> np.ndarray:
    return np.array([request.arrival for request in generate_requests(found, None)])


# Listed


def test_listed_requests_are_numbered_in_their_order() -> None:
    rows = [
        {"prompt_tokens": 5, "output_tokens": 3, "arrival": 2.0, "timeout": 7.0, "priority": 1},
        {"prompt_tokens": 6, "output_tokens": 4, "has_images": True, "ignore_eos": True},
    ]
    a, b = generate_requests(workload(requests=rows), 9.0)
    assert (a.id, a.arrival, a.prompt_tokens, a.output_tokens, a.max_tokens) == (0, 2.0, 5, 3, 3)
    assert (a.timeout, a.priority, a.has_images, a.ignore_eos) == (7.0, 1, False, False)
    assert (b.id, b.arrival, b.timeout, b.has_images, b.ignore_eos) == (1, 0.0, 9.0, True, True)


@pytest.mark.parametrize(("output", "most", "emitted"), [(5, 8, 5), (5, 5, 5), (8, 5, 5)])
def test_no_request_emits_more_than_max_tokens(output: int, most: int, emitted: int) -> None:
    row = {"prompt_tokens": 1, "output_tokens": output, "max_tokens": most}
    (request,) = generate_requests(workload(requests=[row]), None)
    assert (request.output_tokens, request.max_tokens) == (emitted, most)


def test_requests_of_a_prefix_group_begin_with_the_same_tokens() -> None:
    row = {"output_tokens": 1, "prefix_group": "a", "prefix_tokens": 4}
    a, b = generate_requests(
        workload(requests=[{**row, "prompt_tokens": 6}, {**row, "prompt_tokens": 3}]), None
    )
    assert a.segments == (Segment("ga", 0, 4), Segment("u0", 0, 2))
    assert sum(s.end - s.start for s in b.segments) == 3
    assert b.segments[0] == Segment("ga", 0, 3)


# Burst


def test_burst_has_equal_requests_at_intervals() -> None:
    shape = {"num_prompts": 3, "prompt_tokens": 5, "output_tokens": 2, "interval": 0.1}
    requests = generate_requests(workload(burst=shape), None)
    assert [(r.id, r.arrival) for r in requests] == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert {(r.prompt_tokens, r.output_tokens, r.timeout) for r in requests} == {(5, 2, None)}


# Arrivals


def test_arrivals_are_in_order_and_have_the_rate() -> None:
    times = arrivals(drawn(rescale=False))
    assert list(times) == sorted(times)
    assert times[0] >= 0.0
    assert times[-1] / 2000 == pytest.approx(0.5, rel=0.1)


def test_scaled_arrivals_end_exactly_at_count_over_rate() -> None:
    assert arrivals(drawn(100))[-1] == pytest.approx(50.0)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (16.0, 0.25)])
def test_gap_deviation_is_one_over_root_of_burstiness(burstiness: float, variation: float) -> None:
    gaps = np.diff(arrivals(drawn(8000, burstiness=burstiness)))
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.15)


def test_infinite_rate_sends_all_requests_at_once() -> None:
    assert set(arrivals(drawn(50, request_rate=float("inf")))) == {0.0}


def test_requests_depend_only_on_the_seed() -> None:
    lengths = {"distribution": "uniform", "low": 1, "high": 1000}
    first = generate_requests(drawn(50, prompt_tokens=lengths, seed=7), None)
    assert generate_requests(drawn(50, prompt_tokens=lengths, seed=7), None) == first
    other = generate_requests(drawn(50, prompt_tokens=lengths, seed=8), None)
    assert [r.arrival for r in other] != [r.arrival for r in first]
    assert [r.prompt_tokens for r in other] != [r.prompt_tokens for r in first]


def test_changing_one_setting_leaves_other_samples_unchanged() -> None:
    lengths = {"distribution": "uniform", "low": 1, "high": 1000}
    plain = generate_requests(drawn(50, prompt_tokens=lengths, output_tokens=lengths), None)
    fixed = generate_requests(drawn(50, prompt_tokens=5, output_tokens=lengths), None)
    slow = generate_requests(
        drawn(50, prompt_tokens=lengths, output_tokens=lengths, request_rate=1.0), None
    )
    assert [r.arrival for r in plain] == [r.arrival for r in fixed]
    assert [r.output_tokens for r in plain] == [r.output_tokens for r in fixed]
    assert [2 * r.arrival for r in plain] == pytest.approx([r.arrival for r in slow])
    assert [r.prompt_tokens for r in plain] == [r.prompt_tokens for r in slow]
    assert [r.prompt_tokens for r in plain] != [r.output_tokens for r in plain]


def test_uniform_lengths_reach_both_ends() -> None:
    lengths = {"distribution": "uniform", "low": 3, "high": 6}
    found = [r.prompt_tokens for r in generate_requests(drawn(prompt_tokens=lengths), None)]
    assert set(found) == {3, 4, 5, 6}
    assert np.mean(found) == pytest.approx(4.5, abs=0.1)


def test_lognormal_lengths_have_the_mean_and_maximum() -> None:
    lengths: dict[str, Any] = {"distribution": "lognormal", "mean": 200.0, "sigma": 0.5}
    found = [r.prompt_tokens for r in generate_requests(drawn(8000, prompt_tokens=lengths), None)]
    assert np.mean(found) == pytest.approx(200, rel=0.05)
    assert np.log(found).std() == pytest.approx(0.5, rel=0.05)
    cut = {**lengths, "max": 150}
    found = [r.prompt_tokens for r in generate_requests(drawn(prompt_tokens=cut), None)]
    assert max(found) == 150
    assert min(found) >= 1


# Invalid workloads


@pytest.mark.parametrize(
    ("form", "complaint"),
    [
        ({}, "exactly one of"),
        ({"requests": []}, "at least 1 item"),
        ({"requests": [{"prompt_tokens": 1}]}, "output_tokens"),
        ({"requests": [{"prompt_tokens": 0, "output_tokens": 1}]}, "greater than 0"),
        ({"requests": [{"prompt_tokens": 10**9, "output_tokens": 1}]}, "less than or equal"),
        ({"requests": [{"prompt_tokens": 1, "output_tokens": 1, "arrival": -1.0}]}, "greater than"),
        ({"requests": [{"prompt_tokens": 1, "output_tokens": 1, "timeout": 0}]}, "greater than 0"),
        (
            {"requests": [{"prompt_tokens": 1, "output_tokens": 1, "timeout": float("inf")}]},
            "finite",
        ),
        ({"requests": [{"prompt_tokens": 1, "output_tokens": 1, "prefix_group": "a"}]}, "prefix"),
        ({"burst": {"num_prompts": 0, "prompt_tokens": 1, "output_tokens": 1}}, "greater than 0"),
        (
            {"burst": {"num_prompts": 10**9, "prompt_tokens": 1, "output_tokens": 1}},
            "less than or equal",
        ),
        (
            {
                "burst": {
                    "num_prompts": 1,
                    "prompt_tokens": 1,
                    "output_tokens": 1,
                    "interval": 1e300,
                }
            },
            "less than or equal",
        ),
    ],
)
def test_rejects_invalid_workloads(form: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        workload(**form)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"request_rate": 0.0}, "greater than"),
        ({"request_rate": 1e-300}, "greater than"),
        ({"request_rate": float("nan")}, "greater than"),
        ({"burstiness": 0.0}, "greater than"),
        ({"gaps": "weibull", "burstiness": 0.001}, "burstiness: must be at least 0.01"),
        ({"seed": -1}, "greater than or equal to 0"),
        ({"seed": 1.5}, "valid integer"),
        ({"prompt_tokens": {"distribution": "uniform", "low": 5, "high": 3}}, "low"),
        ({"prompt_tokens": {"distribution": "unifrom", "low": 1, "high": 3}}, "unifrom"),
        ({"prompt_tokens": {"distribution": "lognormal", "mean": float("inf")}}, "mean"),
        ({"prompt_tokens": 1.5}, "prompt_tokens"),
    ],
)
def test_rejects_invalid_arrivals(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        drawn(**fields)
