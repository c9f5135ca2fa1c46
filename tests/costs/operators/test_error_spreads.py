"""Error spreads of composed profiles."""

from __future__ import annotations

import math

import pytest

from simkv.core.execution_settings import ExecutionSettings
from simkv.costs.cost_profile import load_profile
from simkv.costs.hardware.interconnect import Interconnect
from simkv.costs.hardware.model_gpu_catalog import find_architecture, find_gpu
from simkv.costs.hardware.replica_hardware import make_hardware
from simkv.costs.operators import error_spreads
from simkv.costs.operators.error_spreads import (
    ErrorSpread,
    ErrorSpreads,
    add_spread_error,
    classify_configuration,
    describe_spread,
)
from simkv.costs.operators.profile_resolution import estimate_from_data_sheet
from simkv.costs.operators.roofline import estimate_errors

HARDWARE = make_hardware(find_gpu("H100"), find_architecture("Llama-3.1-8B"), weights="fp8")
SPREAD = ErrorSpread((-0.1, 0.2), (-0.05, 0.05), 30, (0.04, 0.02), releases=("0.10.2", "0.12.0"))


def setting(release: str) -> ExecutionSettings:
    return ExecutionSettings("vllm", release, 8192, 256)


def known(monkeypatch: pytest.MonkeyPatch, level: int, seen: bool) -> None:
    name = classify_configuration(HARDWARE, setting("0.12.0")).levels()[level]
    found = ErrorSpreads({name: SPREAD}, {}, {}) if seen else ErrorSpreads({}, {name: SPREAD}, {})
    monkeypatch.setattr(error_spreads, "packaged_spreads", lambda: found)


def test_distinguishes_calibrated_from_unmeasured_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = load_profile("unit-step")
    known(monkeypatch, 0, seen=True)
    fit = add_spread_error(profile, HARDWARE, setting("0.12.0")).fit
    assert "calibrated for this model on this GPU" in fit.note
    assert "widened" not in fit.note
    assert fit.held_out["prefill"].p95 == pytest.approx(max(math.exp(0.1) - 1, 1 - math.exp(-0.2)))
    for level, words in ((1, "on this GPU"), (2, "hopper GPUs"), (3, "dense models on hopper")):
        known(monkeypatch, level, seen=False)
        note = add_spread_error(profile, HARDWARE, setting("0.11.0")).fit.note
        assert "no measurement of this model on this GPU" in note
        assert words in note


def test_releases_beyond_the_measured_range_widen_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = load_profile("unit-step")
    known(monkeypatch, 0, seen=True)
    widths = []
    for release, beyond in (("0.12.0", 0), ("0.15.0", 3), ("0.9.2", 1), ("0.33.0", 21)):
        fit = add_spread_error(profile, HARDWARE, setting(release)).fit
        assert (
            f"is {beyond} releases away from the measured ones (0.10.2 to 0.12.0)" in fit.note
        ) == bool(beyond)
        widths.append(fit.held_out["decode"].p95)
    step = [math.exp(0.05 + 0.02 * n) - 1 for n in (0, 3, 1, 10)]
    assert widths == pytest.approx(step)


def test_data_sheet_estimates_add_their_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known(monkeypatch, 3, seen=False)
    composed = add_spread_error(load_profile("unit-step"), HARDWARE, setting("0.12.0")).fit
    guess = estimate_from_data_sheet(HARDWARE, setting("0.12.0"))
    fit = add_spread_error(guess, HARDWARE, setting("0.12.0")).fit
    assert fit.note == f"{guess.fit.note}; combined with the error of whole steps: {composed.note}"
    for step, error in guess.fit.held_out.items():
        both = math.hypot(error.p95, composed.held_out[step].p95)
        assert fit.held_out[step].p95 == pytest.approx(both)
        assert both > max(error.p95, composed.held_out[step].p95)
    said = describe_spread(HARDWARE, setting("0.12.0"), guess.fit.held_out)
    assert said.startswith(f"prefill {100 * fit.held_out['prefill'].p95:.0f} %, decode ")
    monkeypatch.setattr(error_spreads, "packaged_spreads", lambda: ErrorSpreads({}, {}, {}))
    assert add_spread_error(guess, HARDWARE, setting("0.12.0")) is guess


def test_unknown_link_widens_the_error_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, model = find_gpu("H100"), find_architecture("Llama-3.1-8B")
    other = Interconnect("PCIe", gpu.pcie)
    monkeypatch.setattr(
        error_spreads,
        "packaged_spreads",
        lambda: ErrorSpreads({}, {"vllm, hopper, dense": SPREAD}, {}),
    )

    def errors(tp: int, link: Interconnect | None) -> tuple[float, str, str]:
        hardware = make_hardware(gpu, model, weights="fp8", tp=tp, interconnect=link)
        fit = add_spread_error(load_profile("unit-step"), hardware, setting("0.12.0")).fit
        return fit.held_out["decode"].p95, fit.note, describe_spread(hardware, setting("0.12.0"))

    known_link, unknown, single = errors(2, None), errors(2, other), errors(1, other)
    own = estimate_errors()["decode"].p95
    assert unknown[0] == pytest.approx(math.hypot(known_link[0], own))
    assert "link unknown: no measurement of 2 NVIDIA H100" in unknown[1]
    assert f"decode {100 * unknown[0]:.0f} %" in unknown[2]
    for narrow in (known_link, single):
        assert narrow[0] == pytest.approx(math.exp(0.05) - 1)
        assert "link unknown" not in narrow[1]


def test_error_description_names_its_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, 0, seen=True)
    assert (
        describe_spread(HARDWARE, setting("0.12.0")) == "prefill 18 %, decode 5 % (calibrated pair)"
    )
    known(monkeypatch, 3, seen=False)
    assert "(dense models on hopper GPUs)" in describe_spread(HARDWARE, setting("0.12.0"))
    monkeypatch.setattr(error_spreads, "packaged_spreads", lambda: ErrorSpreads({}, {}, {}))
    assert describe_spread(HARDWARE, setting("0.12.0")) == ""


def test_profile_without_similar_measurements_has_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_spreads, "packaged_spreads", lambda: ErrorSpreads({}, {}, {}))
    profile = load_profile("unit-step")
    assert add_spread_error(profile, HARDWARE, setting("0.12.0")) is profile
