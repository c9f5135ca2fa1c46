"""Tests of forward-pass metrics: reading, and the fit of a profile with planted costs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.costs.cost_profile import StepCost, load_profile
from simkv.costs.step_load import StepLoad, count_attention_pairs
from simkv.incident.forward_passes import fit_forward_passes, read_forward_passes
from tests.cli.test_cli import Simkv


def message(seconds: float, prefill: tuple[int, int, int], decode: tuple[int, int]) -> Any:
    """Return a message with prefill requests, tokens and earlier KV, and with decode requests and
    KV.
    """
    return {
        "version": 1,
        "worker_id": "w",
        "dp_rank": 0,
        "counter_id": 0,
        "wall_time": seconds,
        "scheduled_requests": {
            "num_prefill_requests": prefill[0],
            "sum_prefill_tokens": prefill[1],
            "var_prefill_length": 0.0,
            "sum_prefill_kv_tokens": prefill[2],
            "num_decode_requests": decode[0],
            "sum_decode_kv_tokens": decode[1],
            "var_decode_kv_tokens": 0.0,
        },
        "queued_requests": {"num_prefill_requests": 3},
    }


def planted(context: int, tokens: int, earlier: int, seqs: int) -> float:
    """Return the duration of a step: 6 ms, 5 us per sequence, 50 us per token, 1 ns per query-key
    pair, 20 ns per token of KV.
    """
    pairs = count_attention_pairs(tokens, earlier)
    if not tokens:
        return 6e-3 + 5e-6 * seqs + 2e-8 * context
    return 7e-3 + 5e-5 * (tokens + seqs) + 1e-9 * pairs + 2e-8 * context


def recording(path: Path, count: int = 800, flat: bool = False) -> Path:
    draw, lines = random.Random(1), []
    for number in range(count):
        seqs = draw.randint(1, 64)
        context = seqs * draw.randint(100, 8000)
        tokens = draw.choice((256, 512, 1024, 2048)) if number % 3 == 0 else 0
        earlier = draw.choice((0, 4096, 16384)) if tokens else 0
        seconds = planted(context, tokens, earlier, seqs) * draw.uniform(0.98, 1.02)
        one = message(seconds, (int(tokens > 0), tokens, earlier), (seqs, context))
        lines.append(one | one.pop("scheduled_requests") if flat else one)
        lines.append(message(0.0, (0, 0, 0), (0, 0)))  # heartbeat
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def test_messages_become_steps(tmp_path: Path) -> None:
    nested = read_forward_passes(recording(tmp_path / "a.jsonl"))
    flat = read_forward_passes(recording(tmp_path / "b.jsonl", flat=True))
    assert len(nested) == 800
    assert nested.equals(flat)
    array = tmp_path / "c.json"
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    array.write_text(f"[{','.join(lines)}]")
    assert read_forward_passes(array).equals(nested)


def test_fit_recovers_planted_costs(tmp_path: Path) -> None:
    steps = read_forward_passes(recording(tmp_path / "a.jsonl"))
    profile = fit_forward_passes(steps, engine="vllm", model="m", gpu="g")
    assert {kind: error.median < 0.03 for kind, error in profile.fit.held_out.items()} == {
        "decode": True,
        "prefill": True,
    }
    cost = StepCost(profile)
    decode = cost(StepLoad(0, 0, 0, 40, 160_000, 0, 40))
    assert decode == pytest.approx(planted(160_000, 0, 0, 40), rel=0.03)
    for earlier in (0, 16384):
        pairs = count_attention_pairs(1024, earlier)
        seconds = cost(StepLoad(1, 1024, earlier, 8, 16_000, pairs, 9))
        assert seconds == pytest.approx(planted(16_000, 1024, earlier, 8), rel=0.05)
    assert profile.range["decode_seqs"][1] == 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"wall_time": -1}, "a.jsonl:2: wall_time: expected a number from 0 to 1e.15, got -1"),
        ({"wall_time": True}, "wall_time: expected a number from 0 to 1e.15, got True"),
        ({"wall_time": 10**400}, "wall_time: expected a number from 0 to"),
        ({"version": 2}, "a.jsonl:2: version: expected 1, got 2"),
        ({"scheduled_requests": {}}, "scheduled_requests.num_prefill_requests: .* is missing"),
        ({"scheduled_requests": 3}, "scheduled_requests: expected an object"),
    ],
)
def test_invalid_messages_name_line_and_field(tmp_path: Path, change: Any, said: str) -> None:
    path, good = tmp_path / "a.jsonl", message(0.01, (0, 0, 0), (1, 10))
    path.write_text(f"{json.dumps(good)}\n{json.dumps(good | change)}\n")
    with pytest.raises(InputError, match=said):
        read_forward_passes(path)


def test_one_kind_of_step_is_not_enough(tmp_path: Path) -> None:
    steps = read_forward_passes(recording(tmp_path / "a.jsonl"))
    with pytest.raises(InputError, match="at least 12 steps with prefills, got 0"):
        fit_forward_passes(steps[steps["prefill_tokens"] == 0], engine="vllm")


def test_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simkv = Simkv(tmp_path, monkeypatch, capsys)
    recording(tmp_path / "a.jsonl")
    done = simkv("calibrate", "a.jsonl", "--gpu", "H100", "--model", "m")
    assert done.code == 0, done.err
    assert "Fitted to 800 steps." in done.out
    profile = load_profile("calibrated.json", tmp_path)
    assert (profile.gpu, profile.model) == ("H100", "m")
    (tmp_path / "other.json").write_text("{}")
    done = simkv("calibrate", "a.jsonl", "other.json")
    assert done.code == 2
    assert "other.json: contains no forward-pass metrics" in done.err
    done = simkv("calibrate", "a.jsonl", "--json")
    assert json.loads(done.out)["steps"] == 800
