"""Sources of error of composed profiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from simkv.core.execution_settings import ExecutionSettings
from simkv.costs.cost_profile import CostTerm, ErrorSource, FitQuality, load_profile
from simkv.costs.hardware.interconnect import Interconnect
from simkv.costs.hardware.model_gpu_catalog import find_architecture, find_gpu
from simkv.costs.hardware.replica_hardware import make_hardware
from simkv.costs.operators import error_sources
from simkv.costs.operators.configuration_kind import classify_configuration
from simkv.costs.operators.error_sources import (
    ErrorSources,
    Measured,
    MeasuredPair,
    add_error_sources,
    describe_error,
    find_kernel_source,
    find_release_range,
    packaged_sources,
    read_sources,
)
from simkv.costs.operators.profile_resolution import estimate_from_data_sheet
from simkv.costs.operators.roofline import estimate_errors

GPU, MODEL = find_gpu("H100"), find_architecture("Llama-3.1-8B")
HARDWARE = make_hardware(GPU, MODEL, weights="fp8")
#: Ends for TTFT and TPOT by source.
WIDTHS = {
    "costs of vllm dense": ((-0.1, 0.2), (-0.05, 0.05)),
    "model": ((-0.3, 0.4), (-0.2, 0.2)),
    "kernels": ((0.0, 0.5), (0.0, 0.4)),
    "release": ((-0.02, 0.02), (-0.02, 0.02)),
    "host of vllm": ((-0.03, 0.03), (-0.03, 0.03)),
    "server": ((0.0, 0.1), (0.0, 0.1)),
}
Know = Callable[..., ErrorSources]


def setting(release: str = "0.12.0") -> ExecutionSettings:
    return ExecutionSettings("vllm", release, 8192, 256)


@pytest.fixture
def know(monkeypatch: pytest.MonkeyPatch) -> Know:
    """Replace the packaged sources; one pair is measured, that of HARDWARE by default."""

    def replace(hardware=HARDWARE, scale=(1.0, 1.0)) -> ErrorSources:
        kind = classify_configuration(hardware, setting())
        pairs = {kind: MeasuredPair(("0.10.2", "0.12.0"), scale)}
        found = ErrorSources(Measured(pairs), WIDTHS, (0.4, 0.3), {})
        monkeypatch.setattr(error_sources, "packaged_sources", lambda: found)
        return found

    return replace


def fit_of(hardware=HARDWARE, release: str = "0.12.0", **fit: object) -> FitQuality:
    profile = load_profile("unit-step")
    profile = profile.model_copy(update={"fit": profile.fit.model_copy(update=fit)})
    return add_error_sources(profile, hardware, setting(release)).fit


def names(fit: FitQuality) -> list[str]:
    return [source.name for source in fit.sources]


def test_each_source_applies_where_its_condition_holds(know: Know) -> None:
    know()
    assert names(fit_of()) == ["costs", "server", "host"]
    assert names(fit_of(release="0.13.0")) == ["costs", "release", "server", "host"]
    assert names(fit_of(unmeasured_kernels=["marlin"])) == ["costs", "kernels", "server", "host"]
    other = make_hardware(find_gpu("H200"), MODEL, weights="fp8")
    assert names(fit_of(other)) == ["costs", "model", "server"]
    know(make_hardware(GPU, MODEL, weights="bf16"))
    assert names(fit_of()) == ["costs", "model", "server"]


def test_squares_of_the_sources_add_up_on_each_side(know: Know) -> None:
    know()
    fit = fit_of(make_hardware(find_gpu("H200"), MODEL, weights="fp8"))
    decode = fit.held_out["decode"]
    new = math.sqrt(1 + 1 / 1)  # one model was measured
    low, high = new * math.hypot(0.05, 0.2), math.hypot(new * 0.05, new * 0.2, 0.1)
    assert decode.p95 == pytest.approx(max(math.exp(low) - 1, 1 - math.exp(-high)), abs=1e-4)
    assert decode.median == pytest.approx(0.3 * (low + high) / 2, abs=1e-4)
    assert decode.bias == pytest.approx(math.exp((low - high) / 2) - 1, abs=1e-4)
    assert "model -35 to +76 % (prefill), -25 to +33 % (decode)" in fit.note


def test_a_measured_pair_has_the_scale_of_its_own_errors(know: Know) -> None:
    know(scale=(2.0, 0.5))
    costs = fit_of().sources[0]
    assert costs.ends["prefill"] == pytest.approx((-0.2, 0.4))
    assert costs.ends["mixed"] == costs.ends["prefill"]
    assert costs.ends["decode"] == pytest.approx((-0.025, 0.025))


def test_releases_widen_the_interval_with_the_root_of_their_number(know: Know) -> None:
    know()
    for release, beyond in (("0.11.0", 0), ("0.15.0", 3), ("0.9.2", 1), ("0.33.0", 10)):
        found = {source.name: source.ends["decode"] for source in fit_of(release=release).sources}
        width = found.get("release", (0.0, 0.0))[1]
        assert width == pytest.approx(0.02 * math.sqrt(beyond), abs=1e-4)
    assert find_release_range(["0.9.2", "", "0.10.0"]) == ("0.9.2", "0.10.0")
    assert find_release_range([""]) == ("", "")


def test_data_sheet_estimates_add_their_own_error(know: Know) -> None:
    know()
    guess = estimate_from_data_sheet(HARDWARE, setting())
    fit = add_error_sources(guess, HARDWARE, setting()).fit
    assert names(fit)[-1] == "data sheet"
    assert fit.note.startswith(guess.fit.note)
    assert fit.held_out["decode"].p95 > max(
        guess.fit.held_out["decode"].p95, fit_of().held_out["decode"].p95
    )
    said = describe_error(HARDWARE, setting(), data_sheet=True)
    assert said.startswith(f"prefill {100 * fit.held_out['prefill'].p95:.0f} %, decode ")


def test_unknown_link_widens_the_error_of_several_gpus(know: Know) -> None:
    know()
    other = Interconnect("PCIe", GPU.pcie)
    pair = make_hardware(GPU, MODEL, weights="fp8", tp=2, interconnect=other)
    link = next(source for source in fit_of(pair).sources if source.name == "link")
    assert link.ends["decode"][0] == pytest.approx(-math.log1p(estimate_errors()["decode"].p95))
    assert "link" not in names(fit_of(make_hardware(GPU, MODEL, weights="fp8", tp=2)))
    assert "link" not in names(fit_of(make_hardware(GPU, MODEL, weights="fp8", interconnect=other)))


def test_spread_over_kernels_widens_unmeasured_pairs_only(know: Know) -> None:
    known = know()
    found = estimate_from_data_sheet(HARDWARE, setting())
    ends = {"prefill": (-0.5, 0.7), "decode": (-0.1, 0.2), "mixed": (-0.5, 0.7)}
    spread = [ErrorSource(name="kernels", ends=ends)]
    fit = FitQuality(points=9, sources=spread)
    profile = found.model_copy(update={"fit": fit})

    def names(hardware) -> dict[str, dict[str, tuple[float, float]]]:
        sources = add_error_sources(profile, hardware, setting()).fit.sources
        return {source.name: source.ends for source in sources}

    assert classify_configuration(HARDWARE, setting()) in known.measured.pairs
    assert "kernels" not in names(HARDWARE)
    assert names(make_hardware(GPU, MODEL, weights="bf16"))["kernels"] == ends


def test_expert_spread_counts_by_the_share_of_the_experts() -> None:
    profile = load_profile("h100-llama-3-8b")
    experts = CostTerm(name="experts", feature="tokens", table=[(1.0, 0.05), (1e5, 0.05)])
    mixed = profile.model_copy(update={"terms": [*profile.terms, experts]})
    assert find_kernel_source(mixed, (-0.05, 0.05)) == []
    (source,) = find_kernel_source(mixed, (-math.log(2), math.log(2)))
    for low, high in source.ends.values():
        assert -math.log(2) < low < -0.1
        assert 0.1 < high < math.log(2)


def test_description_names_what_was_not_measured(know: Know) -> None:
    know()
    assert describe_error(HARDWARE, setting()).endswith("(measured pair)")
    other = make_hardware(find_gpu("H200"), MODEL, weights="fp8")
    assert describe_error(other, setting("0.14.0")).endswith("(not measured: model, release)")


def test_an_engine_without_measurements_has_no_error(know: Know) -> None:
    know()
    profile = load_profile("unit-step")
    trtllm = ExecutionSettings("trtllm", "1.0.0", 8192, 256)
    assert add_error_sources(profile, HARDWARE, trtllm) is profile
    assert describe_error(HARDWARE, trtllm) == ""


def test_packaged_sources_survive_a_file(tmp_path: Path) -> None:
    import json

    path = tmp_path / "sources.json"
    path.write_text(json.dumps(packaged_sources().to_json()))
    assert read_sources(path) == packaged_sources()
    for ttft, tpot in packaged_sources().widths.values():
        assert ttft[0] <= 0 <= ttft[1]
        assert tpot[0] <= 0 <= tpot[1]
