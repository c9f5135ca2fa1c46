"""Tests of the capture and timing of graphs, with a fake device that counts calls."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import torch

from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.gpu import cuda_graphs, microbenchmark
from simkv.gpu.batch_inputs import StepSize
from simkv.gpu.campaign_plan import SMALL_LIMITS, Probe
from simkv.gpu.microbenchmark import Microbenchmark
from tests.gpu.random_scheduler import RandomServer


def test_graphs_that_share_memory_are_captured_on_one_stream(monkeypatch):
    streams, pools = [], []

    def capture(run, stream, memory=None):
        streams.append(stream)
        pools.append(memory)
        return SimpleNamespace(pool=lambda: "pool"), run()

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    made = RandomServer(0, MODEL_SHAPES["tiny"], block_size=4).runner.graphs
    made._capture_all([StepSize(4, 4, 0), StepSize(2, 2, 0), StepSize(1, 1, 0)])
    assert len(streams) == 3
    assert len(set(map(id, streams))) == 1
    assert pools == [None, "pool", "pool"]


def test_tensors_of_a_graph_are_kept_while_it_is_timed(monkeypatch):
    """A graph does not own its tensors: if a tensor is freed, another may use its memory before the
    next replay.
    """
    made = Microbenchmark(MODEL_SHAPES["tiny"], SMALL_LIMITS, "cpu")
    alive = []

    def capture(run, stream, memory=None):
        result = run()
        refs = [weakref.ref(run), weakref.ref(result)]

        def replay():
            gc.collect()
            alive.append(all(ref() is not None for ref in refs))

        return SimpleNamespace(replay=replay, pool=lambda: "pool"), result

    monkeypatch.setattr(microbenchmark, "capture", capture)
    monkeypatch.setattr(
        microbenchmark, "time_repeats", lambda run, repeats, on_gpu: [run() for _ in range(repeats)]
    )
    made.on_gpu, made._stream = True, object()
    for part in ("decode", "step"):
        made.time(Probe(part, (3, 4)), 2)
    assert alive == [True] * 4


def test_point_is_captured_once_and_reuses_its_blocks(monkeypatch):
    made = Microbenchmark(MODEL_SHAPES["tiny"], SMALL_LIMITS, "cpu")
    captured, memories, laid = [], [], []

    def capture(run, stream, memory=None):
        captured.append(run)
        memories.append(memory)
        return SimpleNamespace(
            replay=lambda: laid.append(made.model.tables[:2].clone()), pool=lambda: "pool"
        ), run()

    monkeypatch.setattr(microbenchmark, "capture", capture)
    monkeypatch.setattr(microbenchmark, "time_repeats", lambda run, repeats, on_gpu: run())
    made.on_gpu, made._stream = True, object()
    points = [Probe("decode", (40, 50)), Probe("decode", (60, 30))]
    for point in (*points, points[0]):
        made.time(point, 1)
    assert len(captured) == 2
    assert memories == [None, "pool"]
    first, other, again = laid
    assert torch.equal(first[:, :4], again[:, :4])
    assert not torch.equal(first[:, :4], other[:, :4])
    made.forget()
    made.time(points[0], 1)
    assert (len(captured), memories[-1]) == (3, None)
