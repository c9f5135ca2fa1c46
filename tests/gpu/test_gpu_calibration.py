"""Tests that campaigns can be resumed, and that the fit reproduces devices of a known form."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, StepCost
from simkv.costs.step_load import StepLoad
from simkv.gpu import campaign
from simkv.gpu.batch_inputs import StepSize
from simkv.gpu.campaign import Measurement, measure, read_samples
from simkv.gpu.campaign_plan import (
    SMALL_LIMITS,
    Limits,
    Probe,
    plan_campaign,
    sentinel,
)
from simkv.gpu.gpu_calibration import fit_host
from simkv.gpu.graph_buckets import step_size
from simkv.gpu.profile_fit import HostCosts, RealStep, fit_profile, fit_synchronous

HOST = HostCosts(1e-4, 1e-6, 5e-5)
LARGE = Limits()


@pytest.mark.parametrize(
    "limits", [SMALL_LIMITS, Limits(), Limits(decodes=64, kv_tokens=30_000)], ids=str
)
def test_plan_stays_within_its_limits_and_starts_with_all_parts(limits):
    points = plan_campaign(limits)
    assert len({point.key for point in points}) == len(points)
    assert {point.part for point in points[:12]} == {
        "rest", "decode", "mixed decode", "prefill", "step",
    }  # fmt: skip
    for point in [*points, sentinel(limits)]:
        tokens = sum(c + 1 for c in point.decodes) + sum(t + c for t, c in point.prefills)
        assert tokens <= limits.kv_tokens
        assert len(point.decodes) <= max(limits.decodes, 64)


class FakeBenchmark:
    """A benchmark without measurements: every point has the time given by ``truth``."""

    limits = SMALL_LIMITS
    on_gpu = False

    def __init__(self, truth=lambda point: 1.0):
        self.truth = truth
        self.timed: list[str] = []

    def forget(self) -> None:
        """Discard nothing."""

    def size(self, point: Probe) -> StepSize:
        return step_size(
            len(point.decodes),
            len(point.prefills),
            len(point.decodes) + sum(t for t, _ in point.prefills),
            SMALL_LIMITS.decodes,
        )

    def time(self, point: Probe, repeats: int) -> list[float]:
        self.timed.append(point.key)
        if point.part == "mixed decode":  # as in isolation
            point = Probe("decode", point.decodes)
        return [self.truth(point)] * repeats


def test_interrupted_campaign_resumes(tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole.csv", tmp_path / "parts.csv"
    points = plan_campaign(SMALL_LIMITS)
    stand = FakeBenchmark()
    clock = count()
    monkeypatch.setattr(campaign, "perf_counter", lambda: next(clock))
    expected = measure(stand, points, whole, 1e9)
    again = FakeBenchmark()
    lines = [0, 2]
    while lines[-1] > lines[-2]:
        measure(again, points, parts, 50.0)
        with parts.open("a") as file:
            file.write("step|cut sho")  # interrupted in the middle of a line
        lines.append(len(parts.read_text().splitlines()))
    measure(again, points, parts, 1e9)
    found = read_samples(parts)
    assert [(s.key, s.passed) for s in found] == [(s.key, s.passed) for s in expected]
    assert again.timed == stand.timed
    assert len(found) > 2 * len(points)


def test_fit_reproduces_its_own_form(tmp_path):
    """A device whose costs have the form of the profile is predicted exactly."""

    def truth(point: Probe) -> float:
        load, slots = point.load, FakeBenchmark().size(point).tokens
        rest = 1e-3 + slots * 1e-5 + 1e-4 * (slots > 100)
        decode = 2e-4 + 3e-8 * load.decode_context + 1e-6 * load.decode_seqs
        prefill = 1e-4 + 5e-9 * load.prefill_pairs + 2e-7 * load.prefill_tokens
        mixed = 3e-5 * bool(load.decode_seqs and load.prefill_seqs)
        whole = rest + mixed
        whole += decode * bool(load.decode_seqs) + prefill * bool(load.prefill_seqs)
        return {"rest": rest + mixed, "decode": decode, "prefill": prefill}.get(point.part, whole)

    samples = measure(
        FakeBenchmark(truth), plan_campaign(SMALL_LIMITS), tmp_path / "s.csv", 1e9, repeats=3
    )
    profile = fit_profile(samples, HOST, name="x", model="m", gpu="g", source=[])
    assert {"decode", "mixed", "prefill", "all"} <= profile.fit.held_out.keys()
    for error in profile.fit.held_out.values():
        assert error.p95 < 1e-6
    cost = StepCost(profile)
    host = HOST.step_s + 3 * HOST.sequence_s
    point = Probe("step", (70, 80, 90), ((40, 30),))
    assert cost(point.load) == pytest.approx(truth(point) + host, rel=1e-6)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_unmeasured_sizes_are_interpolated(tmp_path, share):
    """Products are padded to 128 tokens and run in waves of 1,024 tokens; no term describes this.

    Few sizes are measured above the largest graph; in a short campaign, few are also measured below
    it.
    """

    def truth(tokens: int) -> float:
        slots = step_size(0, 1, tokens, LARGE.decodes).tokens
        return 6e-3 + 2.3e-5 * slots + 4e-4 * ((-slots) % 1024) / 1024

    def stand(point: Probe) -> float:
        return truth(point.load.prefill_tokens + point.load.decode_seqs)

    points = plan_campaign(LARGE)
    parts = [[p for p in points if p.part == part] for part in ("rest", "decode", "prefill")]
    kept = [p for part in parts for p in part[: int(share * len(part))]]
    samples = measure(FakeBenchmark(stand), kept, tmp_path / "s.csv", 1e9, repeats=1, passes=1)
    profile = fit_profile(samples, HOST, name="x", model="m", gpu="g", source=[])
    rest = next(t for t in profile.terms if t.name == "all but attention, prefills")
    cost = StepCost(profile.model_copy(update={"terms": [rest]}))
    for tokens in (300, 1500, 2816, 2900, 3500, 4200, 5000, 6500, 8000, 8192):
        assert cost(StepLoad(1, tokens, 0, 0, 0)) == pytest.approx(truth(tokens), rel=0.03)


@pytest.mark.parametrize("saved", [3e-4, -3e-4], ids=["faster", "slower"])
def test_whole_steps_can_be_cheaper_than_their_parts(tmp_path, saved):
    """The reduction is about 3 % here, because launches of consecutive kernels overlap."""

    def truth(point: Probe) -> float:
        parts = {"rest": 8e-3, "decode": 1e-3, "prefill": 2e-3}
        load = point.load
        whole = parts["rest"] + 1e-3 * bool(load.decode_seqs) + 2e-3 * bool(load.prefill_seqs)
        return parts.get(point.part, whole - saved)

    samples = measure(
        FakeBenchmark(truth), plan_campaign(SMALL_LIMITS), tmp_path / "s.csv", 1e9, repeats=1
    )
    profile = fit_profile(samples, HOST, name="x", model="m", gpu="g", source=[])
    assert profile.fit.held_out["all"].points > 20
    assert profile.fit.held_out["all"].p95 < 2e-3
    real = [
        RealStep(load, 1.0, StepCost(profile)(load) - HOST.step_s - HOST.sequence_s * 4 - saved)
        for load in [StepLoad(0, 0, 0, 4, 300)] * 8
    ]
    served = fit_synchronous(profile, real, [])
    load = real[0].load
    assert StepCost(served)(load) == pytest.approx(StepCost(profile)(load) - saved, rel=1e-9)
    assert CostProfile.model_validate_json(served.model_dump_json()) == served
    absurd = [RealStep(load, 1.0, -1.0)] * 8
    with pytest.raises(ValueError, match="must take at least 1e-9 s"):
        fit_synchronous(profile, absurd, absurd)


def test_longest_decode_delays_the_step(tmp_path):
    """The device waits for the longest decode above some length, and splits decodes less beside
    prefills.
    """

    def attention(point: Probe, splits: int) -> float:
        return 1e-4 + max(2e-8 * sum(point.decodes), 1.5e-6 * max(point.decodes) / splits)

    def truth(point: Probe) -> float:
        if point.part == "rest":
            return 2e-3
        if point.part == "prefill":
            return 1e-3
        splits = 4 if point.prefills else 8
        own = attention(point, splits) if point.decodes else 0.0
        return own if "decode" in point.part else 2e-3 + own + 1e-3 * bool(point.prefills)

    class Waiting(FakeBenchmark):
        def time(self, point: Probe, repeats: int) -> list[float]:
            return [truth(point)] * repeats

    samples = measure(Waiting(), plan_campaign(LARGE), tmp_path / "s.csv", 1e9, repeats=1, passes=1)
    about = {"name": "x", "model": "m", "gpu": "g", "source": []}
    profile = fit_profile(samples, HOST, **about)
    cost, host = StepCost(profile), HOST.step_s + 32 * HOST.sequence_s
    assert cost.needs_decode_range
    even = StepLoad(0, 0, 0, 32, 32 * 1000, longest=1000)
    skewed = even._replace(longest=8000)
    longer = attention(Probe("decode", (8000, *[774] * 31)), 8)
    assert cost(skewed) - host == pytest.approx(2e-3 + longer, rel=0.15)
    assert cost(even) - host == pytest.approx(2e-3 + attention(Probe("", (1000,) * 32), 8), rel=0.1)
    beside = skewed._replace(prefill_seqs=1, prefill_tokens=500, prefill_pairs=125_250)
    assert cost(beside) - cost(skewed) > 1e-3 + 5e-4  # decodes are split less


def test_cost_of_serving_is_fitted(tmp_path):
    """Steps of a real run cost more than their parts; the error is measured on steps of another
    run.
    """
    samples = measure(
        FakeBenchmark(), plan_campaign(SMALL_LIMITS), tmp_path / "s.csv", 1e9, repeats=1
    )
    plain = StepCost(fit_profile(samples, HOST, name="x", model="m", gpu="g", source=[]))
    host = HOST._replace(prefill_s=2e-3)
    real = []
    for load in (
        StepLoad(0, 0, 0, 4, 300),
        StepLoad(1, 40, 0, 0, 0, 820),
        StepLoad(2, 30, 9, 3, 99, 700),
    ) * 8:
        more = 0.5 if load.prefill_seqs else 0.2
        device = plain(load) - HOST.step_s - HOST.sequence_s * load.decode_seqs + more
        real.append(RealStep(load, plain(load) + more + 2e-3 * bool(load.prefill_seqs), device))
    isolated = fit_profile(samples, host, name="x", model="m", gpu="g", source=[])
    profile = fit_synchronous(isolated, real, real[:9])
    assert profile.fit.held_out["all"].points == 9
    assert max(error.p95 for error in profile.fit.held_out.values()) < 1e-6
    assert "one real run" in profile.fit.note
    service = {
        t.name: t.pieces[0].base for t in profile.terms if t.name.startswith("service") and t.pieces
    }
    assert service == pytest.approx({"service, pure decode": 0.2, "service, prefill": 0.5})


def test_fit_needs_every_part(tmp_path):
    points = [point for point in plan_campaign(SMALL_LIMITS) if point.part != "decode"]
    samples = measure(FakeBenchmark(), points, tmp_path / "s.csv", 1e9, repeats=1)
    with pytest.raises(ValueError, match="part 'decode' was not measured"):
        fit_profile(samples, HOST, name="x", model="m", gpu="g", source=[])


def test_host_time_is_the_rest_of_the_step():
    passes = [
        SimpleNamespace(
            seconds=5e-3 + 2e-4 + 3e-6 * n,
            timing=SimpleNamespace(gpu_s=5e-3),
            load=StepLoad(0, 0, 0, n, 0),
        )
        for n in (1, 8, 64, 100)
    ]
    idle = SimpleNamespace(seconds=7e-5, timing=None, load=StepLoad(0, 0, 0, 0, 0))
    found = fit_host([*passes, idle])
    assert np.allclose(found, (2e-4, 3e-6, 7e-5, 0.0))


def test_rejects_a_budget_that_is_too_short(tmp_path):
    arguments = ["gpu", "calibrate", str(tmp_path / "c"), "--device", "cpu", "--model", "tiny"]
    with pytest.raises(InputError, match="use a longer --budget"):
        CliRunner().invoke(
            app, [*arguments, "--small", "--budget", "0.001s"], catch_exceptions=False
        )
    with pytest.raises(InputError, match="expected a time such as 90s"):
        CliRunner().invoke(app, [*arguments, "--budget", "8 minutes"], catch_exceptions=False)


def test_rejects_samples_of_another_format(tmp_path):
    path = tmp_path / "samples.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="not a measurement file of this version"):
        read_samples(path)


def test_samples_round_trip(tmp_path):
    path = tmp_path / "samples.csv"
    samples = measure(
        FakeBenchmark(lambda point: 1 / 3),
        plan_campaign(SMALL_LIMITS)[:2],
        path,
        1e9,
        repeats=1,
        passes=1,
    )
    assert samples == read_samples(path)
    assert all(isinstance(s, Measurement) and s.median_s == 1 / 3 for s in samples)
