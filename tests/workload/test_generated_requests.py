"""Tests of arrival processes, lengths and sessions: they are as in vLLM's benchmark, and
independent.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from simkv.core.request import Request, Segment
from simkv.workload.generated_requests import ArrivalProcess, make_random_stream
from simkv.workload.generated_sessions import Sessions
from simkv.workload.length_distributions import (
    LengthDistribution,
    TimeDistribution,
    sample_lengths,
    sample_times,
)
from simkv.workload.workload_section import Workload, build_clients, generate_requests

ARRIVALS: dict[str, Any] = {
    "num_prompts": 2000,
    "request_rate": 5.0,
    "prompt_tokens": {"distribution": "lognormal", "mean": 300},
    "output_tokens": {"distribution": "uniform", "low": 1, "high": 100},
}


def drawn(**changes: Any) -> list[Request]:
    return generate_requests(Workload.model_validate({"arrivals": {**ARRIVALS, **changes}}), None)


def times(**pace: Any) -> np.ndarray:
    return ArrivalProcess.model_validate(pace).times(make_random_stream(3, 0), 4000)


def cv(arrivals: np.ndarray) -> float:
    gaps = np.diff(arrivals)
    return float(gaps.std() / gaps.mean())


def test_last_arrival_is_at_n_over_rate_as_in_vllm() -> None:
    for burstiness in (0.2, 1.0, 7.0, math.inf):
        assert times(request_rate=8.0, burstiness=burstiness)[-1] == pytest.approx(4000 / 8)
    assert times(request_rate=8.0, rescale=False)[-1] != pytest.approx(500, rel=1e-9)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_gamma_gaps(burstiness: float) -> None:
    assert cv(times(request_rate=2.0, burstiness=burstiness)) == pytest.approx(
        1 / math.sqrt(burstiness), rel=0.1
    )


def test_infinite_burstiness_or_rate_gives_constant_gaps_or_one_burst() -> None:
    constant = times(request_rate=4.0, burstiness=math.inf)
    assert constant[:3].tolist() == [0.25, 0.5, 0.75]
    assert times(request_rate=math.inf).tolist() == [0.0] * 4000


def test_weibull_gaps_have_the_weibull_deviation() -> None:
    shape = 0.5
    mean, square = math.gamma(1 + 1 / shape), math.gamma(1 + 2 / shape)
    found = times(request_rate=2.0, burstiness=shape, gaps="weibull", rescale=False)
    assert cv(found) == pytest.approx(math.sqrt(square / mean**2 - 1), rel=0.15)
    assert found[-1] == pytest.approx(2000, rel=0.1)


@pytest.mark.parametrize(
    ("strategy", "rate_at"),
    [("linear", lambda p: 2 + 18 * p), ("exponential", lambda p: 2 * 10**p)],
)
def test_ramp_depends_on_the_request_number(strategy: str, rate_at: Any) -> None:
    found = times(
        ramp_up_strategy=strategy, ramp_up_start_rps=2, ramp_up_end_rps=20, burstiness=math.inf
    )
    progress = np.arange(4000) / 3999
    assert np.diff(found).tolist() == pytest.approx((1 / rate_at(progress))[1:].tolist())


def test_diurnal_rate_varies_over_the_period() -> None:
    found = times(request_rate=10.0, diurnal={"period": 100.0, "amplitude": 0.8})
    assert found[-1] == pytest.approx(400, abs=1)
    by_quarter = np.histogram(found % 100, bins=4, range=(0, 100))[0]
    # The mean of 1 + 0.8 sin over a quarter is 1 +- 1.6 / pi.
    assert by_quarter[:2].sum() / by_quarter.sum() == pytest.approx(0.5 + 0.8 / math.pi, abs=0.02)
    assert (np.diff(found) >= 0).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "missing; set request_rate or ramp_up_strategy"),
        ({"request_rate": 1.0, "ramp_up_strategy": "linear"}, "cannot be combined"),
        ({"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0}, "requires ramp_up_start_rps"),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 3.0, "ramp_up_end_rps": 2.0},
            "must not exceed the end",
        ),
        ({"request_rate": 1.0, "ramp_up_end_rps": 2.0}, "require ramp_up_strategy"),
        ({"request_rate": math.inf, "diurnal": {"amplitude": 0.5}}, "finite"),
        ({"request_rate": -1.0}, "request_rate\n.*greater than"),
        ({"request_rate": math.nan}, "request_rate\n.*greater than"),
        ({"request_rate": 1.0, "burstiness": 0.0}, "burstiness\n.*greater than"),
    ],
)
def test_rejects_invalid_arrival_processes(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ArrivalProcess.model_validate(wrong)


def test_changing_one_setting_leaves_other_samples_unchanged() -> None:
    base = drawn()
    faster = drawn(request_rate=9.0, burstiness=0.3)
    longer = drawn(prompt_tokens={"distribution": "zipf", "high": 999})
    grouped = drawn(prefix_groups=4, prefix_tokens=64)
    assert [r.prompt_tokens for r in faster] == [r.prompt_tokens for r in base]
    assert [r.output_tokens for r in longer] == [r.output_tokens for r in base]
    assert [r.arrival for r in longer] == [r.arrival for r in base] == [r.arrival for r in grouped]
    assert [r.prompt_tokens for r in longer] != [r.prompt_tokens for r in base]
    assert drawn() == base
    assert drawn(seed=1)[0] != base[0]


def lengths(spec: Any, count: int = 20_000) -> np.ndarray:
    length = TypeAdapter(LengthDistribution).validate_python(spec)
    return np.array(sample_lengths(length, make_random_stream(0, 1), count))


def test_lengths_have_their_distributions() -> None:
    assert set(lengths(7, 10)) == {7}
    uniform = lengths({"distribution": "uniform", "low": 3, "high": 5})
    assert (uniform.min(), uniform.max()) == (3, 5)
    vllm = lengths({"distribution": "random", "len": 9, "range_ratio": 0.5})
    assert (vllm.min(), vllm.max()) == (4, 14)
    assert lengths({"distribution": "random", "len": 9}, 5).tolist() == [9] * 5
    lognormal = lengths({"distribution": "lognormal", "mean": 500, "sigma": 0.5})
    assert lognormal.mean() == pytest.approx(500, rel=0.02)
    zipf = lengths({"distribution": "zipf", "low": 10, "high": 13, "exponent": 2.0})
    weights = 1 / np.arange(1, 5) ** 2.0
    shares = [(zipf == value).mean() for value in range(10, 14)]
    assert shares == pytest.approx((weights / weights.sum()).tolist(), abs=0.02)


def test_empirical_lengths_come_from_a_trace(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("prompt_tokens,output_tokens\n5,1\n7,2\n7,9\n")
    form = {
        **ARRIVALS,
        "prompt_tokens": {"distribution": "empirical", "trace": "l.csv"},
        "output_tokens": {"distribution": "empirical", "trace": "l.csv"},
    }
    workload = Workload.model_validate({"arrivals": form}, context={"folder": tmp_path})
    found = generate_requests(workload, None)
    assert {r.output_tokens for r in found} == {1, 2, 9}
    assert np.mean([r.prompt_tokens == 7 for r in found]) == pytest.approx(2 / 3, abs=0.05)
    form["output_tokens"] = {"distribution": "empirical", "trace": "l.csv", "of": "prompt_tokens"}
    workload = Workload.model_validate({"arrivals": form}, context={"folder": tmp_path})
    assert {r.output_tokens for r in generate_requests(workload, None)} == {5, 7}


def test_think_times_have_their_distributions() -> None:
    def mean(spec: Any) -> float:
        time = TypeAdapter(TimeDistribution).validate_python(spec)
        return float(np.mean(sample_times(time, make_random_stream(0, 2), 20_000)))

    assert mean(2.5) == mean(2.5)
    assert mean({"distribution": "exponential", "mean": 4}) == pytest.approx(4, rel=0.05)
    assert mean({"distribution": "uniform", "low": 1, "high": 2}) == pytest.approx(1.5, rel=0.01)
    assert mean({"distribution": "lognormal", "mean": 8}) == pytest.approx(8, rel=0.05)


def test_bursts_repeat_at_intervals() -> None:
    form = {"num_prompts": 3, "prompt_tokens": 5, "output_tokens": 2, "interval": 0.1}
    workload = Workload.model_validate({"burst": {**form, "bursts": 2, "every": 10.0}})
    found = generate_requests(workload, None)
    assert workload.size == 6
    assert [r.arrival for r in found] == pytest.approx([0, 0.1, 0.2, 10, 10.1, 10.2])


SESSIONS: dict[str, Any] = {
    "num_sessions": 30,
    "request_rate": 2.0,
    "turns": {"distribution": "uniform", "low": 1, "high": 5},
    "prompt_tokens": {"distribution": "uniform", "low": 1, "high": 90},
    "output_tokens": {"distribution": "uniform", "low": 1, "high": 90},
    "think_time": {"distribution": "exponential", "mean": 3.0},
    "prefix_group": "system",
    "prefix_tokens": 48,
}


def conversations(**changes: Any) -> tuple[list[Request], dict[int, tuple[int, float]]]:
    return Sessions.model_validate({**SESSIONS, **changes}).requests(None)


def test_turn_repeats_previous_turns_and_adds_new_tokens() -> None:
    requests, after = conversations()
    assert [r.id for r in requests] == list(range(len(requests)))
    assert len(requests) == Workload.model_validate({"sessions": SESSIONS}).size
    for request in requests:
        assert sum(s.end - s.start for s in request.segments) == request.prompt_tokens
        assert request.segments[-1].stream == f"u{request.id}"
        if request.id in after:
            before = requests[after[request.id].before[0]]
            answer = Segment(f"o{before.id}", 0, before.output_tokens)
            assert request.segments[:-1] == (*before.segments, answer)
        else:
            assert request.segments[:-1] == (Segment("gsystem", 0, 48),)
    assert len(requests) - len(after) == 30


def test_later_turns_have_their_earliest_possible_arrivals() -> None:
    requests, after = conversations()
    for number, ((before,), think, *_) in after.items():
        assert requests[number].arrival == pytest.approx(requests[before].arrival + think)
    arrivals = [r.arrival for r in requests]
    assert arrivals == sorted(arrivals)


def test_session_settings_have_separate_random_streams() -> None:
    def starts(of: tuple[list[Request], dict[int, tuple[int, float]]]) -> list[float]:
        return [r.arrival for r in of[0] if r.id not in of[1]]

    def first_outputs(of: tuple[list[Request], dict[int, tuple[int, float]]]) -> list[int]:
        return [r.output_tokens for r in of[0] if r.id not in of[1]]

    base, longer, calmer = conversations(), conversations(turns=7), conversations(think_time=1.0)
    assert starts(base) == starts(longer) == starts(calmer)
    assert first_outputs(base) == first_outputs(longer) == first_outputs(calmer)


def test_session_ends_before_it_exceeds_max_model_len() -> None:
    requests, _ = conversations(turns=50, max_model_len=1000)
    assert max(r.prompt_tokens + r.output_tokens for r in requests) <= 1000
    assert 30 < len(requests) < 30 * 50


def test_rejects_too_many_turns() -> None:
    with pytest.raises(ValidationError, match="at most 1,000 per session"):
        Sessions.model_validate({**SESSIONS, "turns": 1001})
    with pytest.raises(ValidationError, match="10,000,000 in total"):
        Sessions.model_validate({**SESSIONS, "turns": 1000, "num_sessions": 10_001})


def test_requests_of_a_session_have_the_common_fields() -> None:
    workload = Workload.model_validate(
        {"sessions": {**SESSIONS, "max_tokens": 40, "ignore_eos": True, "priority": 2}}
    )
    sent = build_clients(workload, 9.0).requests
    assert {(r.max_tokens, r.ignore_eos, r.priority, r.timeout) for r in sent} == {
        (40, True, 2, 9.0)
    }
    assert max(r.output_tokens for r in sent) == 40
