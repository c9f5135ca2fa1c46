"""Tests of the benchmarks of a device: rates computed by hand, torch's attention, tiles and
repeats.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain, cycle

import pytest
import torch
from typer.testing import CliRunner

from simkv.cli import app
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.gpu import cpu_ops, machine_info
from simkv.gpu import kernel_benchmark as bench_module
from simkv.gpu.batch_runner import Runner
from simkv.gpu.kernel_benchmark import (
    SIZES,
    SMALL_SIZES,
    bench,
    compare_attention,
    fastest,
    sizes_for,
    time_tiles,
)
from simkv.gpu.microbenchmark import Microbenchmark
from simkv.gpu.triton_tile_configs import (
    DECODES,
    PREFILLS_HOPPER,
    Tiles,
    choose_tiles,
)
from simkv.gpu.varlen_baseline import VarlenAttention, find_varlen

TINY = MODEL_SHAPES["tiny"]


def test_on_a_cpu(tmp_path):
    arguments = ["gpu", "bench", "--device", "cpu", "--model", "tiny", "--small", "--repeats", "2"]
    out = tmp_path / "b.json"
    done = CliRunner().invoke(app, [*arguments, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    rows = {row["what"]: row for row in json.loads(out.read_text())}
    assert len(rows) == 3 + 3 + 2
    assert all(row["value"] > 0 for row in rows.values())
    assert rows["decode attention, 8 x 128"]["unit"] == "GB/s"
    assert "% of" in done.output
    # No kernel exceeds the ceilings.
    assert rows["prefill attention, 128"]["value"] < rows["matrix product"]["value"]


def test_rates_equal_rates_computed_by_hand(monkeypatch):
    """If every point takes one second, the rates are bytes and FLOPs."""
    warmed = []
    monkeypatch.setattr(Runner, "warm_up", lambda self, seconds: warmed.append(seconds))
    monkeypatch.setattr(Microbenchmark, "time", lambda self, point, repeats: [1.0])
    rows = {row.what: row for row in bench(TINY, SMALL_SIZES, "cpu", warm_up=3.0)}
    assert warmed == [3.0]
    # rows, context, K and V, layers, heads, head dimension, bytes
    moved = 8 * 128 * 2 * 2 * 2 * 16 * 4
    assert rows["decode attention, 8 x 128"].value == pytest.approx(moved / 1e9)
    flops = 4 * (128 * 129 / 2) * 2 * 4 * 16
    assert rows["prefill attention, 128"].value == pytest.approx(flops / 1e12)


def dense_attention(q, k, v, ends, _, tokens, __, *, window_size):
    """Compute causal attention of one sequence, with the signature of torch's ``varlen_attn``."""
    assert (ends.tolist(), window_size) == ([0, tokens], (-1, 0))
    assert k.shape == v.shape == q.shape
    table = torch.zeros(1, dtype=torch.int32)
    return cpu_ops._prefill(q, tokens, table, k[None], v[None])


def test_attention_of_torch_is_called_with_contiguous_keys_and_values():
    made = Microbenchmark(TINY, SMALL_SIZES, "cpu")
    rows = list(compare_attention(made, VarlenAttention(dense_attention), repeats=1))
    assert [row.unit for row in rows] == ["TFLOP/s", "relative"]
    assert rows[0].value > 0
    assert rows[1].value < 1e-6
    assert made.model.ops is cpu_ops
    wrong = VarlenAttention(lambda *args, window_size: torch.roll(args[0], 1, 0))
    assert list(compare_attention(made, wrong, repeats=1))[1].value > 0.1


def test_older_torch_has_a_flag_instead_of_a_window():
    def flagged(q, k, v, a, b, c, d, is_causal=False):
        return q

    assert VarlenAttention(flagged)._options == {"is_causal": True}
    assert find_varlen() is None or callable(find_varlen())


def test_rows_follow_the_pool():
    assert sizes_for(SIZES.kv_tokens) == SIZES
    small = sizes_for(40_000)
    assert (small.decodes, small.kv_tokens) == (7, 40_000)
    assert sizes_for(1000).decodes == 1


def test_finds_the_fastest_tiles(monkeypatch):
    """The device is faster with larger tiles and more stages."""
    assert list(time_tiles(TINY, SMALL_SIZES, "cpu")) == []
    shape = replace(TINY, heads=2, kv_heads=1, head_dim=64)
    made = Microbenchmark(shape, SMALL_SIZES, "cpu")
    made.on_gpu = True
    made.runner.pool.blocks = made.runner.pool.blocks.bfloat16()

    def time(point, repeats):
        given = choose_tiles(point.part, 64, 2, arch=90)
        return [20.0 - given.tile / 10 - given.stages]

    monkeypatch.setattr(made, "time", time)
    monkeypatch.setattr(bench_module, "Microbenchmark", lambda *_: made)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    readings = list(time_tiles(shape, SMALL_SIZES, "cpu"))
    assert len(readings) == len(DECODES) + len(PREFILLS_HOPPER)
    assert fastest(readings, 64) == {
        "decode 64": Tiles(64, 16, 4, 5),
        "prefill 64": Tiles(64, 128, 8, 5),
    }


def test_number_of_repeats_follows_their_scatter(monkeypatch):
    def taking(*seconds):
        """Return the number of repeats if their durations are these values (s) in turn."""
        turns = cycle(seconds)
        clock = chain(
            [0.0], *(([now, now + s] for now, s in ((10.0 * i, next(turns)) for i in range(100))))
        )
        next(clock)
        monkeypatch.setattr(machine_info, "read_timer", lambda: next(clock))
        return len(machine_info.time_repeats(lambda: None, 20, on_gpu=False))

    assert taking(1e-3) == 5  # all equal
    assert taking(1e-3, 1.2e-3, 0.7e-3) == 20
    assert taking(6e-3, 4e-3, 5e-3) == 10  # 50 ms in total
    assert taking(0.1, 0.2, 0.3) == 5
