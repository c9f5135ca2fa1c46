"""Tests of step costs fitted to requests that ran in isolation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simkv.core.errors import InputError
from simkv.costs.cost_profile import StepCost
from simkv.costs.hardware.model_gpu_catalog import find_gpu, find_model
from simkv.costs.sources.single_request import (
    ModelTraits,
    compute_model_traits,
    read_isolated_requests,
)
from simkv.costs.sources.single_request_fit import (
    MIXED_DECODE_FACTOR,
    CostCoefficients,
    compute_non_attention_seconds,
    fit_cost_coefficients,
    fit_single_request_profile,
    make_cost_terms,
)
from simkv.costs.step_load import StepLoad, count_attention_pairs

SHAPE = ModelTraits(131072, 524288, 2048)
STEP, DECODE, TOKEN, PAIR, KV = 5e-3, 9e-3, 2e-5, 3e-9, 5e-8
PRICES = CostCoefficients(STEP, DECODE, TOKEN, PAIR, KV)
HEADER = "id,stage,prompt_tokens,output_tokens,queue_ms,prefill_ms,ttft_ms,e2e_ms\n"


def row(number: int, stage: str, prompt: int, output: int) -> str:
    full, rest = divmod(prompt, SHAPE.max_num_batched_tokens)
    chunks = np.array([float(SHAPE.max_num_batched_tokens)] * full + [float(rest)] * bool(rest))
    products = compute_non_attention_seconds(chunks, PRICES, SHAPE).sum()
    prefill = 1e3 * (products + count_attention_pairs(prompt, 0) * PAIR)
    steps = output - 1
    decode = 1e3 * steps * (DECODE + TOKEN + KV * (prompt + steps / 2))
    ttft = prefill + 2.5
    return f"{number},{stage},{prompt},{output},0.5,{prefill},{ttft},{ttft + decode}\n"


def table(folder: Path, count: int = 20) -> Path:
    prompts = [200 + 389 * (7 * i % count) for i in range(count)]
    rows = [row(i, "sync", prompt, 20 + 13 * i) for i, prompt in enumerate(prompts)]
    # The engine is not warmed up when it receives the first request.
    rows[0] = f"0,sync,{prompts[0]},20,0.5,999999,999999,9999999\n"
    rows += ["99,throughput,100,9,0,1,1,5\n"]
    path = folder / "requests.csv"
    path.write_text(HEADER + "".join(rows))
    return path


def test_fit_recovers_known_coefficients(tmp_path: Path) -> None:
    alone = read_isolated_requests(table(tmp_path))
    assert len(alone) == 19
    found = fit_cost_coefficients(alone, SHAPE, None)
    expected = (STEP, DECODE, TOKEN, PAIR, KV)
    fields = ("prefill_step", "decode_step", "token", "pair", "context")
    for name, price in zip(fields, expected, strict=True):
        assert getattr(found, name) == pytest.approx(price, rel=1e-3), name


def test_tokens_cost_the_same_in_prefills_and_decodes(tmp_path: Path) -> None:
    about = {"name": "x", "engine": "vLLM", "model": "m", "on": "g"}
    profile = fit_single_request_profile(
        read_isolated_requests(table(tmp_path)), SHAPE, None, **about
    )
    cost = StepCost(profile)
    one, two = (cost(StepLoad(0, 0, 0, n, 1000)) for n in (1, 2))
    assert two - one == pytest.approx(TOKEN, rel=1e-3)
    many = cost(StepLoad(1, 2000, 0, 0, 0, count_attention_pairs(2000, 0)))
    mixed = cost(StepLoad(1, 1990, 0, 10, 1000, count_attention_pairs(2000, 0)))
    assert mixed - many == pytest.approx(MIXED_DECODE_FACTOR * 1000 * KV, rel=1e-3)
    assert profile.front_s == pytest.approx(2e-3)
    assert profile.range["decode_seqs"] == (1, 1)
    assert profile.fit.held_out["decode"].p95 < 1e-6
    assert profile.fit.held_out["prefill"].p95 < 1e-6


def test_typical_values_of_the_gpu_resolve_ambiguous_fits(tmp_path: Path) -> None:
    gpu = find_gpu("H100")
    rows = [row(i, "sync", 1000, 50) for i in range(12)]  # all prompts have the same length
    path = tmp_path / "requests.csv"
    path.write_text(HEADER + "".join(rows))
    found = fit_cost_coefficients(read_isolated_requests(path), SHAPE, gpu)
    assert found.context == pytest.approx(131072 / (0.87 * 3.35e12), rel=0.01)
    assert found.pair == pytest.approx(524288 / (0.45 * 9.89e14), rel=0.01)


def test_short_chunks_cost_the_weights_and_long_chunks_hide_them() -> None:
    few, many = compute_non_attention_seconds(np.array([64.0, 8192.0]), PRICES, SHAPE)
    assert DECODE + TOKEN < few < 1.3 * (DECODE + TOKEN)  # the linear part alone is 6.3 ms
    assert many == pytest.approx(STEP + 8192 * TOKEN, rel=0.001)


def test_tabulated_curve_is_within_0_1_percent_of_the_formula() -> None:
    curve = make_cost_terms(PRICES, SHAPE)[0].table
    assert curve is not None
    tokens = np.arange(1.0, 16384.0)
    exact = compute_non_attention_seconds(tokens, PRICES, SHAPE)
    assert np.max(np.abs(np.interp(tokens, *zip(*curve, strict=True)) / exact - 1)) < 0.001


def test_typical_values_of_the_gpu_fix_the_token_cost_for_equal_chunks(
    tmp_path: Path,
) -> None:
    model, gpu = find_model("Llama-3.1-8B"), find_gpu("H100")
    shape = compute_model_traits(model, 64)
    rows = [f"{i},sync,{640 + 64 * i},50,0,{9.5 * (10 + i)},1,500\n" for i in range(12)]
    path = tmp_path / "requests.csv"
    path.write_text(HEADER + "".join(rows))
    found = fit_cost_coefficients(read_isolated_requests(path), shape, gpu)
    parameters = 8.03e9 - 2 * 128256 * 4096
    assert found.token == pytest.approx(2 * parameters / (0.8 * 9.89e14), rel=0.1)
    assert fit_cost_coefficients(read_isolated_requests(path), SHAPE, None).token != pytest.approx(
        found.token, rel=0.2
    )


def test_mixture_reads_only_the_selected_experts() -> None:
    shape = compute_model_traits(find_model("Qwen3-30B-A3B"), 2048)
    assert 0.9 < shape.expert_share < 1.0
    assert shape.chosen == 8 / 128
    prices = CostCoefficients(40e-3, 4e-3, 1e-5, 0.0, 0.0)
    one, eight, all_of = compute_non_attention_seconds(np.array([1.0, 8.0, 512.0]), prices, shape)
    assert one == pytest.approx(4.01e-3)
    activated = (1 - (1 - 1 / 16) ** 8 - 1 / 16) / (15 / 16)
    assert eight == pytest.approx(4.01e-3 + activated * (40e-3 - 4.01e-3) + 7e-5)
    assert all_of == pytest.approx(40e-3 + 511e-5)


def test_excludes_the_first_arrival_in_any_row_order(tmp_path: Path) -> None:
    path = table(tmp_path)
    head, *rows = path.read_text().splitlines()
    arrived = [f"{row},{5 * i}" for i, row in enumerate(rows)]
    path.write_text("\n".join([head + ",arrival_s", *reversed(arrived)]) + "\n")
    found = fit_cost_coefficients(read_isolated_requests(path), SHAPE, None)
    assert found.prefill_step == pytest.approx(STEP, rel=1e-3)


def test_only_fitted_rows_need_all_columns(tmp_path: Path) -> None:
    path = table(tmp_path)
    whole = read_isolated_requests(path)
    path.write_text(path.read_text().replace("99,throughput,100,9,0,1,", "99,throughput,100,9,,,"))
    assert read_isolated_requests(path).prefill.tolist() == whole.prefill.tolist()


def test_cache_hits_exclude_the_last_token_and_require_caching(
    tmp_path: Path,
) -> None:
    path = table(tmp_path)
    head, *rows = path.read_text().splitlines()
    shared = ["", *["99999"] * (len(rows) - 1)]
    lines = [f"{row},{n}" for row, n in zip(rows, shared, strict=True)]
    path.write_text("\n".join([head + ",shared_prefix_tokens", *lines]) + "\n")
    alone = read_isolated_requests(path)
    assert (alone.hits == (alone.prompt - 1) // 16 * 16).all()
    assert not read_isolated_requests(path, caching=False).hits.any()


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("2,sync,5646,46,0.5,", "2,sync,0,46,0.5,", r"csv:4: prompt_tokens: must be greater"),
        ("2,sync,5646,46,0.5,", "2,sync,5646,46,0.5,0,9,1\n#", r"csv:4: prefill_ms: must be"),
        ("2,sync,5646,46,0.5,", "2,sync,5646,46,0.5,5,9,1\n#", r"csv:4: e2e_ms: must be greater"),
        ("2,sync,5646,46,0.5,", "2,sync,5646,46,0.5,,9,1\n#", r"csv:4: prefill_ms: .* nothing"),
    ],
)
def test_reports_impossible_times(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    path = table(tmp_path)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(InputError, match=complaint):
        read_isolated_requests(path)


def test_rejects_tables_without_decodes(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(HEADER + "".join(row(i, "sync", 500 + i, 1) for i in range(12)))
    with pytest.raises(InputError, match="8 or more output tokens, found 0 of 11"):
        read_isolated_requests(path)


def test_rejects_too_few_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"in stage 'sync', not counting .*; found 5"):
        read_isolated_requests(table(tmp_path, 6))
    with pytest.raises(InputError, match=r"in stage 'quiet', not counting .*; found 0"):
        read_isolated_requests(table(tmp_path), "quiet")
