"""Tests of measured serving points: they are read, simulated, scored and fitted."""

import csv
import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from dev.serving_points.__main__ import fit as fit_rows
from dev.serving_points.constant_fit import (
    LADDERS,
    choose,
    fit,
    left_out,
    transfers,
    values_for,
)
from dev.serving_points.fit_samples import NONE, Residual
from dev.serving_points.fit_tables import left_out_table
from dev.serving_points.point_calibration import rules_of
from dev.serving_points.points_page import constants_table
from dev.serving_points.source_fit import WAYS, fit_sources, fit_widths, hold_out, left_out_ends
from simkv.cli import app
from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile
from simkv.costs.operators import error_sources
from simkv.costs.operators.calibration_rules import CostConstants
from simkv.costs.operators.configuration_kind import Configuration
from simkv.costs.operators.error_sources import ErrorSources, Measured, MeasuredPair
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.vllm.config import VllmConfig
from simkv.validation.serving_points import point_prediction
from simkv.validation.serving_points.client_lengths import sample_lengths
from simkv.validation.serving_points.closed_loop_replay import ClosedLoop, replay_point
from simkv.validation.serving_points.latency_gradients import FITTED_CONSTANTS
from simkv.validation.serving_points.launch_recipe import count_warm_up_requests
from simkv.validation.serving_points.measured_rows import Latency, MeasuredRow, read_rows
from simkv.validation.serving_points.point_prediction import (
    CLIENT_MS,
    Prediction,
    predict,
)
from simkv.validation.serving_points.point_scores import noise, score_group
from simkv.validation.serving_points.serving_point import nearest_variant, point_of
from tests.conftest import ROOT

HEAD = (
    "id,backend,backend_version,model,system,precision,isl,osl,concurrency,tp,dp,ep,"
    "protocol,measured_on,ttft_ms,tpot_ms,aic_ttft_ms,aic_tpot_ms"
)
LINE = (
    "a,vllm,0.10.2,meta-llama/Llama-3.1-70B,h200_sxm,fp8,1024,64,4,4,1,1,"
    "InferenceMAX,2025-10-29,90,12,60,11"
)


def write(folder: Path, *lines: str, head: str = HEAD) -> Path:
    path = folder / "rows.csv"
    path.write_text("\n".join((head, *lines)) + "\n", encoding="utf-8")
    return path


def one_row(tmp_path: Path) -> MeasuredRow:
    return read_rows(write(tmp_path, LINE))[0]


def steps_profile(**more: float) -> CostProfile:
    """Return a profile with 10 ms per step and 0.1 ms per prefill token."""
    terms = [
        {"name": "step", "feature": "steps", "seconds": 0.01},
        {"name": "prefill", "feature": "prefill_tokens", "table": [[0, 0], [1e6, 100.0]]},
        {"name": "decode", "feature": "decode_seqs", "table": [[0, 0], [1e3, 1.0]]},
    ]
    return CostProfile.model_validate(
        {
            "name": "steps",
            "engine": "vllm",
            "model": "m",
            "gpu": "g",
            "basis": "assumed",
            "terms": terms,
            "idle_pass_s": 1e-4,
            "range": {},
            "fit": {"points": 0},
            "source": [],
            **more,
        }
    )


VLLM = VllmConfig(
    variant="0.11.0",
    num_gpu_blocks=4096,
    max_num_seqs=64,
    max_num_batched_tokens=8192,
    enable_prefix_caching=False,
)

# ---------------------------------------------------------------------- reading


def test_row_is_read_with_other_predictions(tmp_path: Path) -> None:
    row = one_row(tmp_path)
    assert (row.isl, row.concurrency, row.tp, row.version) == (1024, 4, 4, "0.10.2")
    assert row.measured == Latency(90, 12)
    assert row.anchors == {"aic": Latency(60, 11)}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (",1024,", ",many,", "line 2: isl: must be an integer from 1 to .*'many'"),
        (",4,4,1,", ",0,4,1,", "line 2: concurrency: must be an integer .*'0'"),
        ("a,vllm", "a,trtllm", "line 2: backend: unknown backend 'trtllm'"),
        ("2025-10-29", "29.10.", "line 2: measured_on: must be a date such as"),
        (",90,12,", ",90,,", "line 2: tpot_ms: is empty although the other latency"),
        (",90,12,", ",-1,12,", "line 2: ttft_ms: must be milliseconds greater than 0, got '-1'"),
        ("meta-llama/Llama-3.1-70B", "", "line 2: model: is empty"),
        (",60,11", ",60", "line 2: number of fields differs"),
    ],
)
def test_invalid_rows_are_reported_by_line_and_field(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in LINE
    with pytest.raises(InputError, match=said):
        read_rows(write(tmp_path, LINE.replace(old, new, 1)))


def test_invalid_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 3: id: duplicate 'a', also in line 2"):
        read_rows(write(tmp_path, LINE, LINE))
    with pytest.raises(InputError, match="line 1: missing column tp"):
        read_rows(write(tmp_path, LINE, head=HEAD.replace(",tp,", ",tpp,")))
    with pytest.raises(InputError, match="contains no rows"):
        read_rows(write(tmp_path))
    with pytest.raises(InputError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")


# ---------------------------------------------------------------------- the simulated configuration


def test_lengths_equal_lengths_of_the_client() -> None:
    np.random.seed(0)
    prompts = np.random.randint(819, 1025, size=40)
    answers = np.random.randint(6553, 8193, size=40)
    assert sample_lengths(40, 1024, 8192) == tuple(
        zip(prompts.tolist(), answers.tolist(), strict=True)
    )


def test_date_determines_the_warm_up(tmp_path: Path) -> None:
    row = one_row(tmp_path)
    assert row.measured_on is not None
    assert count_warm_up_requests(row) == 1
    assert count_warm_up_requests(replace(row, measured_on=row.measured_on.replace(year=2026))) == 8
    assert count_warm_up_requests(replace(row, protocol="unknown")) == 0


def test_missing_release_is_replaced_by_the_nearest() -> None:
    assert nearest_variant("vllm", "0.11.0") == ("0.11.0", 0)
    assert nearest_variant("vllm", "0.11.2") == ("0.11.2", 0)
    assert nearest_variant("vllm", "0.33.1")[0] == "0.33.0"
    assert nearest_variant("sglang", "0.5.9") == ("0.5.15", 6)


def test_a_point_has_the_flags_of_its_script(tmp_path: Path) -> None:
    row = one_row(tmp_path)
    point = point_of(row)
    assert point.engine.max_num_batched_tokens == 8192
    assert point.engine.max_num_seqs == row.concurrency
    assert (point.hardware.kv, point.hardware.weights) == ("fp8", "fp8")
    assert point.load == ClosedLoop(1024, 64, 4, 40)
    b200 = point_of(replace(row, system="b200_sxm"))
    assert b200.engine.max_num_seqs == 512
    assert b200.setting.graph_mode == "full decode only"
    deepseek = replace(
        row, backend="sglang", model="deepseek-ai/DeepSeek-R1", system="b200_sxm", tp=8, version=""
    )
    slow = point_of(replace(deepseek, precision="fp4", concurrency=32)).engine
    assert (slow.scheduler_recv_interval, slow.chunked_prefill_size) == (30, 16384)
    assert point_of(replace(deepseek, precision="fp4")).engine.scheduler_recv_interval == 10


def test_rows_without_recipe_are_rejected_by_name(tmp_path: Path) -> None:
    row = one_row(tmp_path)
    with pytest.raises(InputError, match="precision: no launch recipe"):
        point_of(replace(row, precision="int2"))
    with pytest.raises(InputError, match="no-such-model"):
        point_of(replace(row, model="no-such-model"))


# ---------------------------------------------------------------------- replaying


def test_single_request_takes_the_time_of_its_steps() -> None:
    load = ClosedLoop(100, 11, 1, 10)
    found = replay_point(VLLM, steps_profile(), load)
    assert found.latency is not None
    prompts = [prompt for prompt, _ in sample_lengths(10, 100, 11)]
    assert found.latency.ttft == pytest.approx(10 + 0.1 * sum(prompts) / 10)
    assert found.latency.tpot == pytest.approx(11)


@pytest.mark.parametrize(
    "engine", [VLLM, SglangConfig(max_total_num_tokens=65536, disable_radix_cache=True)]
)
def test_warm_up_changes_nothing_without_cached_prefix(
    engine: VllmConfig | SglangConfig,
) -> None:
    cold, warm = (
        replay_point(engine, steps_profile(), ClosedLoop(256, 64, 8, 80, warm_up=n)).latency
        for n in (0, 16)
    )
    assert cold is not None
    assert warm is not None
    assert warm == pytest.approx(cold, rel=1e-9)


def test_cached_prompts_cost_no_prefill() -> None:
    cached = replace(VLLM, enable_prefix_caching=True)
    load = ClosedLoop(256, 16, 4, 40)
    new = replay_point(VLLM, steps_profile(), load).latency
    hit = replay_point(cached, steps_profile(), replace(load, fresh=4, warm_up=1)).latency
    assert new is not None
    assert hit is not None
    assert hit.ttft < 0.6 * new.ttft


def test_leaping_changes_nothing() -> None:
    load = ClosedLoop(256, 64, 8, 80)
    leapt = replay_point(VLLM, steps_profile(), load).latency
    stepped = replay_point(VLLM, steps_profile(), load, leaping=False).latency
    assert leapt == pytest.approx(stepped, rel=1e-9)


def test_slopes_are_differences_of_runs() -> None:
    """Each constant is changed a little, and the run is repeated."""
    load = ClosedLoop(300, 60, 8, 80)

    def changed(prefill: float = 1.0, decode: float = 1.0, **seconds: float) -> CostProfile:
        terms = []
        for term in steps_profile().terms:
            for when, scale in (("prefill", prefill), ("pure decode", decode)):
                table = term.table and [(x, y * scale) for x, y in term.table]
                terms.append(term.model_copy(update={"when": when, "table": table}))
        for name, feature, when in (
            ("prefill_step_s", "steps", "prefill"),
            ("step_s", "steps", "any"),
            ("seq_s", "decode_seqs", "any"),
            ("seq_s", "prefill_seqs", "any"),
        ):
            new = {"name": name, "feature": feature, "when": when, "seconds": seconds.get(name, 0)}
            terms.append(type(steps_profile().terms[0]).model_validate(new))
        return steps_profile().model_copy(update={"terms": terms})

    base = replay_point(VLLM, changed(), load)
    assert base.latency is not None
    assert base.moved is not None
    for column, name in enumerate(FITTED_CONSTANTS[:-1]):
        step = 1e-4 if name in ("prefill", "decode") else 1e-6
        start = 1.0 if name in ("prefill", "decode") else 0.0
        moved = replay_point(VLLM, changed(**{name: start + step}), load).latency
        assert moved is not None
        slope = (np.array(moved) - np.array(base.latency)) / step
        assert slope == pytest.approx(base.moved[:, column], rel=2e-2, abs=1e-3), name


# ---------------------------------------------------------------------- scores


def test_measurement_counts_once_and_failed_point_has_full_error(tmp_path: Path) -> None:
    row = one_row(tmp_path)
    a = replace(row, id="a", measurement="m", measured=Latency(100, 10))
    b = replace(a, id="b")
    c = replace(row, id="c", measurement="n", measured=Latency(100, 10))
    d = replace(row, id="d", measurement="o", measured=Latency(100, 10))
    low, high = Latency(80, 8), Latency(109, 12)
    found = score_group(
        "g",
        [
            Prediction(a, Latency(110, 10), low, high),
            Prediction(b, Latency(110, 10), low, high),
            Prediction(c, Latency(70, 13), Latency(60, 11), Latency(90, 14)),
            Prediction(d, None),
        ],
    )
    assert (found.rows, found.measurements) == (4, 3)
    assert found.answered == pytest.approx(2 / 3)
    ttft = found.errors["ttft"]
    assert ttft.mape == pytest.approx((0.1 + 0.3) / 2)
    assert ttft.strict == pytest.approx((0.1 + 0.3 + 1) / 3)
    assert ttft.coverage == pytest.approx(1 / 2)
    scores = [0.29, 0.3 + 20 * 0.1]
    assert ttft.interval_score == pytest.approx(np.mean(scores))
    assert ttft.anchors["aic"] == (pytest.approx(0.4), pytest.approx(0.4))


def test_noise_is_between_measurements_of_one_configuration(tmp_path: Path) -> None:
    row = one_row(tmp_path)
    others = [
        replace(row, id="b", measurement="b", measured=Latency(110, 12)),
        replace(row, id="c", measurement="c", version="0.11.0", measured=Latency(90, 6)),
        replace(row, id="d", measurement="d", concurrency=8),
    ]
    same, another = sorted(noise([row, *others]), key=lambda n: n.name, reverse=True)
    assert (same.name, same.pairs) == ("vllm, same release", 1)
    assert same.ttft == pytest.approx(20 / 100)
    assert (another.name, another.pairs) == ("vllm, another release", 2)


# ---------------------------------------------------------------------- fitting


def made_samples(scale: float, kind: Configuration, count: int, first: int) -> list[Residual]:
    """Return points whose decodes take ``scale`` times as long as predicted."""
    found = []
    for i in range(first, first + count):
        prefill, decode, both = 20.0 + i, 8.0 + i % 5, 0.1 * (i % 3)
        slopes = np.zeros((2, len(FITTED_CONSTANTS)))
        slopes[0, :2] = prefill, decode
        slopes[1, :2] = both, decode
        at = slopes[:, 0] + slopes[:, 1]
        real = slopes[:, 0] + slopes[:, 1] * scale
        found.append(Residual(kind, str(i), (i,), real, at, slopes, NONE, source=str(i % 2)))
    return found


PAIRS = LADDERS["and pair, six each"]
HOPPER = Configuration("vllm", "hopper", "H100", "m1", "gqa", "none", "fp8")
OTHER = replace(HOPPER, gpu="H200", model="m2")
BLACKWELL = replace(HOPPER, family="blackwell", gpu="B200")
BLACKWELL_MOE = replace(BLACKWELL, model="m3", experts="fp8")


def test_fit_finds_the_constants_of_the_points() -> None:
    samples = made_samples(1.3, HOPPER, 40, 0) + made_samples(0.9, BLACKWELL, 40, 100)
    found = fit(samples, PAIRS)
    decode = FITTED_CONSTANTS.index("decode")
    assert values_for(HOPPER, found, PAIRS)[decode] == pytest.approx(1.3, abs=0.02)
    assert values_for(BLACKWELL, found, PAIRS)[decode] == pytest.approx(0.9, abs=0.02)
    unknown = replace(HOPPER, backend="sglang")
    assert values_for(unknown, found, PAIRS) is NONE


def test_narrow_constants_are_used_only_if_they_help() -> None:
    one = made_samples(1.2, HOPPER, 30, 0) + made_samples(1.2, OTHER, 30, 50)
    assert choose(one).chosen == "engine"
    two = one + made_samples(0.8, BLACKWELL, 30, 100)
    assert choose(two).chosen == "and GPU family"


def test_constants_of_a_class_must_help_held_out_models_and_sources() -> None:
    alike = made_samples(1.2, HOPPER, 30, 0) + made_samples(1.2, OTHER, 30, 50)
    opposed = made_samples(1.2, HOPPER, 30, 0) + made_samples(0.8, OTHER, 30, 50)
    engine = LADDERS["engine"]
    assert transfers(alike, engine)
    assert not transfers(opposed, engine)
    assert not transfers([replace(sample, source="one") for sample in alike], engine)
    assert transfers(opposed, LADDERS["pair, two each"])


def test_a_level_changes_only_what_it_may() -> None:
    samples = made_samples(1.3, HOPPER, 40, 0) + made_samples(0.9, BLACKWELL, 40, 100)
    ladder = LADDERS["and GPU family"]
    found = fit(samples, ladder)
    wide, own = values_for(HOPPER, found, ladder[:1]), values_for(HOPPER, found, ladder)
    assert own[FITTED_CONSTANTS.index("decode")] > wide[FITTED_CONSTANTS.index("decode")] + 0.1
    for name in FITTED_CONSTANTS[2:]:
        assert own[FITTED_CONSTANTS.index(name)] == wide[FITTED_CONSTANTS.index(name)]


def noisy_samples(size: float, kind: Configuration, count: int, seed: int) -> list[Residual]:
    """Points whose latencies differ from the prediction by a random factor of this size."""
    draws = np.exp(np.random.default_rng(seed).normal(0, size, (count, 2)))
    made = made_samples(1.0, kind, count, 1000 * seed)
    return [replace(s, real=s.at * draw) for s, draw in zip(made, draws, strict=True)]


def test_widths_of_the_sources_contain_ninety_of_a_hundred() -> None:
    samples = noisy_samples(0.1, HOPPER, 200, 1) + noisy_samples(0.3, BLACKWELL_MOE, 200, 2)
    found = hold_out(samples, LADDERS["none"], ["configuration"])
    widths = fit_widths(found)
    # The 95 % quantile of a normal distribution lies 1.645 standard deviations above the mean.
    assert widths["costs of vllm dense"] == pytest.approx(np.full((2, 2), 0.1645), rel=0.25)
    assert widths["costs of vllm moe"] == pytest.approx(np.full((2, 2), 0.4935), rel=0.25)
    ends = left_out_ends(samples, found, found.of("configuration"), WAYS["configuration"])
    inside = (ends[:, :, 0] <= found.logs) & (found.logs <= ends[:, :, 1])
    assert 0.85 < inside.mean() < 0.95


def test_a_model_that_was_not_measured_has_a_source_of_its_own() -> None:
    """Constants of two pairs repair their errors; a left-out pair keeps its error."""
    samples = made_samples(1.3, HOPPER, 60, 0) + made_samples(0.7, OTHER, 60, 100)
    found = hold_out(samples, LADDERS["pair, two each"], ["configuration", "model"])
    assert set(found.factors) == {"costs of vllm dense", "model"}
    widths = fit_widths(found)
    assert widths["costs of vllm dense"].max() < 0.05
    assert widths["model"][1] == pytest.approx([math.log(1 / 0.7), math.log(1.3)], rel=0.2)
    sources = fit_sources(samples, found, {}).find(OTHER, "", kernels=False)
    assert [source.name for source in sources] == ["costs", "server"]
    assert not fit_sources(samples, found, {}).find(
        replace(OTHER, backend="sglang"), "", kernels=False
    )


def test_held_out_model_does_not_use_its_own_measurements() -> None:
    one, two = made_samples(1.3, HOPPER, 30, 0), made_samples(0.9, OTHER, 30, 100)
    one = [replace(s, source="a") for s in one]
    two = [replace(s, source="b" if i % 2 else "a") for i, s in enumerate(two)]
    by_model = left_out(one + two, PAIRS, WAYS["model"])[:, 1]
    assert np.median(by_model[:30]) == pytest.approx(np.log(1.3 / 0.9), abs=0.03)
    assert np.median(by_model[30:]) == pytest.approx(np.log(0.9 / 1.3), abs=0.03)
    by_source = left_out(one + two, PAIRS, WAYS["source"])[:, 1]
    assert np.abs(by_source[30:]).max() < 0.05


# ---------------------------------------------------------------------- the command


def test_predictions_need_neither_measurements_nor_extra_tables(tmp_path: Path) -> None:
    head = HEAD.replace(",ttft_ms,tpot_ms,aic_ttft_ms,aic_tpot_ms", "")
    line = LINE.rsplit(",", 4)[0]
    bad = line.replace("a,", "b,", 1).replace("Llama-3.1-70B", "no-such-model")
    rows, out = write(tmp_path, line, bad, head=head), tmp_path / "out"
    done = CliRunner().invoke(
        app, ["validate", "silicon", str(rows), "--out", str(out), "--jobs", "1"]
    )
    assert done.exit_code == 0, done.output
    assert "1 of 2 rows have a prediction" in done.output
    with (out / "points.csv").open(encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert (first["id"], first["answered"], second["answered"]) == ("a", "yes", "no")
    assert float(first["ttft_ms"]) > CLIENT_MS
    assert "no-such-model" in second["why"]
    assert second["ttft_ms"] == ""
    assert sorted(path.name for path in out.iterdir()) == ["points.csv"]


def know(monkeypatch: pytest.MonkeyPatch, kind: Configuration, **provenance: object) -> None:
    """Replace the packaged sources of error; one pair is measured in release 0.10.2."""
    widths = {
        f"costs of {kind.class_name}": ((-0.1, 0.2), (0.0, 0.1)),
        "release": ((-0.02, 0.02), (-0.02, 0.02)),
        "host of vllm": ((-0.3, 0.3), (-0.3, 0.3)),
        "server": ((-0.5, 0.5), (-0.5, 0.5)),
    }
    pairs = {kind: MeasuredPair(("0.10.2", "0.10.2"))}
    found = ErrorSources(Measured(pairs), widths, (0.4, 0.4), provenance)
    monkeypatch.setattr(error_sources, "packaged_sources", lambda: found)
    # Without operator tables, costs are estimated from the data sheet.
    none = dict.fromkeys(error_sources.STEP_KINDS, (0.0, 0.0))
    monkeypatch.setattr(error_sources, "error_ends", lambda _: none)
    monkeypatch.setattr(point_prediction, "packaged_sources", lambda: found)


def test_equal_configurations_come_out_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = replace(one_row(tmp_path), source="export")
    rows = [row, replace(row, id="b", measured=None), replace(row, id="c", concurrency=8)]
    know(monkeypatch, point_of(row).kind, exports=["export"])
    first, second, third = predict(rows, lambda _: CostConstants(), jobs=1)
    assert first.latency == second.latency
    assert first.latency != third.latency
    assert first.latency is not None
    assert first.high is not None
    assert first.high.ttft == pytest.approx(first.latency.ttft * math.exp(0.2))
    assert "sources of error: costs" in first.why


def test_a_fit_needs_measured_columns(tmp_path: Path) -> None:
    head = HEAD.replace(",ttft_ms,tpot_ms,aic_ttft_ms,aic_tpot_ms", "")
    rows = write(tmp_path, LINE.rsplit(",", 4)[0], head=head)
    with pytest.raises(InputError, match="a fit needs the columns ttft_ms and tpot_ms"):
        fit_rows(rows, tmp_path)


def test_rules_return_constants_by_kind_and_none_for_other_families() -> None:
    samples = made_samples(1.3, HOPPER, 30, 0) + made_samples(0.9, BLACKWELL, 30, 100)
    name = "and pair, six each"
    fitted = replace(choose(samples), chosen=name, values=fit(samples, PAIRS))
    rules = rules_of(samples, fitted, "made up")
    for kind in (HOPPER, BLACKWELL, replace(HOPPER, family="ada", gpu="L40S")):
        found = CostConstants()
        for rule in rules:
            if all(getattr(kind, k) == v for k, v in rule["kind"].items()):
                found = found.joined(CostConstants(**rule["constants"]))
        expected = values_for(kind, fitted.values, PAIRS) if kind.family != "ada" else NONE
        for name, value in zip(FITTED_CONSTANTS, expected, strict=True):
            assert getattr(found, name) == pytest.approx(value, abs=1e-4)


def test_other_releases_and_exports_widen_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = replace(one_row(tmp_path), source="export")
    far = replace(near, id="b", version="0.14.0")
    other = replace(near, id="c", source="another export")
    know(monkeypatch, point_of(near).kind, exports=["export"])
    found = predict([near, far, other], lambda _: CostConstants(), jobs=1)
    ends = (0.1, math.hypot(0.1, 0.02 * math.sqrt(4)), math.hypot(0.1, 0.3))
    for one, end in zip(found, ends, strict=True):
        assert one.latency is not None
        assert one.high is not None
        assert one.high.tpot == pytest.approx(one.latency.tpot * math.exp(end))


def test_page_has_the_packaged_constants() -> None:
    rules = json.loads((ROOT / "simkv/costs/operators/constants.json").read_text())
    assert constants_table(rules) in (ROOT / "docs/silicon.md").read_text()
    changed = rules[0] | {"constants": {"prefill": 1.5, "step_s": 0.002}}
    row = constants_table([changed]).splitlines()[-1]
    assert row.startswith(f"| {', '.join(rules[0]['kind'].values())} | 1.5 |")
    assert "| 2 |" in row


def test_tables_of_a_fit_have_errors_of_held_out_points() -> None:
    samples = made_samples(1.3, HOPPER, 4, 0)
    table = left_out_table("left out", samples, np.full((4, 2), np.log(1.25)))
    console = Console(width=120, record=True, file=StringIO())
    console.print(table)
    text = console.export_text()
    assert "20.0" in text
    assert "-20.0" in text
