"""The first look at a device: rates that are counted right, and an anchor that is called right."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain, cycle, pairwise
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.gpu import cpu_ops, machine_info
from simkv.gpu import kernel_benchmark as bench_module
from simkv.gpu.batch_runner import Runner
from simkv.gpu.campaign_plan import Probe
from simkv.gpu.fa3_baseline import FlashAttention3
from simkv.gpu.kernel_benchmark import (
    SMALL_SIZES,
    bench,
    compare_attention,
    fastest,
    time_tiles,
)
from simkv.gpu.microbenchmark import Microbenchmark, WithAttention
from simkv.gpu.triton_tile_configs import (
    DECODES,
    PREFILLS_LARGE,
    Tiles,
    choose_tiles,
)

TINY = MODEL_SHAPES["tiny"]


def test_on_a_cpu(tmp_path):
    arguments = ["gpu", "bench", "--device", "cpu", "--model", "tiny", "--small", "--repeats", "2"]
    out = tmp_path / "b.json"
    done = CliRunner().invoke(app, [*arguments, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    rows = {row["what"]: row for row in json.loads(out.read_text())}
    assert len(rows) == 3 + 2 * 3 + 2
    assert all(row["value"] > 0 for row in rows.values())
    assert rows["decode attention, 8 x 128, block layout"]["unit"] == "GB/s"
    assert "% of" in done.output
    # Nothing is faster than the device.
    assert rows["prefill attention, 128, block layout"]["value"] < rows["matrix product"]["value"]


def test_rates_are_counted_by_hand(monkeypatch):
    """With every point taking one second the rates are bytes and FLOPs; it warms up before."""
    warmed = []
    monkeypatch.setattr(Runner, "warm_up", lambda self, seconds: warmed.append(seconds))
    monkeypatch.setattr(Microbenchmark, "time", lambda self, point, repeats: [1.0])
    rows = {row.what: row for row in bench(TINY, SMALL_SIZES, "cpu", warm_up=3.0)}
    assert warmed == [3.0]
    moved = 8 * 128 * 2 * 2 * 2 * 16 * 4  # rows, context, K and V, layers, heads, dim, bytes
    assert rows["decode attention, 8 x 128, layer layout"].value == pytest.approx(moved / 1e9)
    flops = 4 * (128 * 129 / 2) * 2 * 4 * 16
    assert rows["prefill attention, 128, block layout"].value == pytest.approx(flops / 1e12)


class Library:
    """Stands for vLLM's operator: takes its arguments in their order, and computes it densely."""

    names = ("q", "k", "v", "k_new", "out", "cu_seqlens_q", "seqused_k", "max_seqlen_q")
    names += ("page_table", "softmax_scale", "is_causal", "softcap", "num_splits")

    def __init__(self):
        self._schema = SimpleNamespace(arguments=[self.argument(name) for name in self.names])

    @staticmethod
    def argument(name):
        kind = {"softcap": "float", "num_splits": "int"}.get(name, "Optional[Tensor]")
        return SimpleNamespace(name=name, type=kind, has_default_value=lambda: False)

    def __call__(self, *values):
        given = dict(zip(self.names, values, strict=True))
        assert given["k_new"] is None
        assert (given["softcap"], given["num_splits"]) == (0.0, 0)
        start = given["cu_seqlens_q"].tolist()
        for row, (a, b) in enumerate(pairwise(start)):
            length, table = int(given["seqused_k"][row]), given["page_table"][row]
            given["out"][a:b] = cpu_ops._prefill(
                given["q"][a:b], length, table, given["k"], given["v"]
            )


@pytest.fixture
def anchor():
    made = FlashAttention3.__new__(FlashAttention3)
    made._forward = Library()
    return made


@pytest.mark.parametrize(
    "point", [Probe("decode", (40,) * 8), Probe("prefill", (), ((100, 0),))], ids=lambda p: p.part
)
def test_the_anchor_is_called_right(point, anchor):
    made = Microbenchmark(TINY, SMALL_SIZES, "cpu")
    assert made.difference(point, cpu_ops, WithAttention(cpu_ops, anchor.attend)) < 1e-6
    wrong = SimpleNamespace(attend=lambda *args: torch.roll(cpu_ops.attend(*args), 1, 0))
    assert made.difference(point, cpu_ops, wrong) > 0.1


def test_the_anchor_stands_beside_ours(anchor):
    rows = {row.what: row for row in compare_attention(anchor, TINY, SMALL_SIZES, "cpu", repeats=1)}
    assert rows["FA3 of vLLM: difference to ours, decode"].value < 1e-6
    assert rows["FA3 of vLLM: prefill attention"].value > 0


def test_a_library_that_is_none_does_not_cost_the_rest(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Microbenchmark, "time", lambda self, point, repeats: [1.0])
    (tmp_path / "x.so").write_text("no library")
    with pytest.raises(InputError, match="cannot be loaded"):
        FlashAttention3(tmp_path / "x.so")
    arguments = ["gpu", "bench", "--device", "cpu", "--model", "tiny", "--small"]
    out = tmp_path / "b.json"
    arguments += ["--out", str(out), "--fa3", str(tmp_path / "x.so")]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 2
    assert "cannot be loaded" in done.stderr
    assert len(json.loads(out.read_text())) == 3 + 2 * 3 + 2


def test_the_fastest_tiles_are_found(monkeypatch):
    """On a device that is the faster the larger tiles are and the more stages they have."""
    assert list(time_tiles(TINY, SMALL_SIZES, "cpu")) == []
    shape = replace(TINY, heads=2, kv_heads=1, head_dim=64)
    made = Microbenchmark(shape, SMALL_SIZES, "cpu")
    made.on_gpu = True
    made.runner.pool.data = made.runner.pool.data.bfloat16()

    def time(point, repeats):
        given = choose_tiles(point.part, 64, 2, arch=90)
        return [20.0 - given.tile / 10 - given.stages]

    monkeypatch.setattr(made, "time", time)
    monkeypatch.setattr(bench_module, "Microbenchmark", lambda *_: made)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    readings = list(time_tiles(shape, SMALL_SIZES, "cpu"))
    assert len(readings) == len(DECODES) + len(PREFILLS_LARGE)
    assert fastest(readings, 64) == {
        "decode 64": Tiles(64, 16, 4, 5),
        "prefill 64": Tiles(64, 128, 8, 5),
    }


def test_repeats_end_when_they_tell_nothing_more(monkeypatch):
    def taking(*seconds):
        """How many repeats are made if they take so long, in turn."""
        turns = cycle(seconds)
        clock = chain(
            [0.0], *(([now, now + s] for now, s in ((10.0 * i, next(turns)) for i in range(100))))
        )
        next(clock)
        monkeypatch.setattr(machine_info, "read_timer", lambda: next(clock))
        return len(machine_info.time_repeats(lambda: None, 20, on_gpu=False))

    assert taking(1e-3) == 5  # all the same
    assert taking(1e-3, 1.2e-3, 0.7e-3) == 20
    assert taking(6e-3, 4e-3, 5e-3) == 10  # 50 ms in all
    assert taking(0.1, 0.2, 0.3) == 5
