"""A model to time any part of a step, with a KV cache that contains random numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from simkv.core.scheduler_protocol import BatchRow, blocks_for
from simkv.costs.hardware.model_shape import ModelShape
from simkv.gpu.batch_inputs import (
    StepInputs,
    StepSize,
    fill,
    input_views,
    packed_length,
)
from simkv.gpu.batch_runner import Runner, RunnerConfig
from simkv.gpu.campaign_plan import Limits, Probe
from simkv.gpu.cuda_graphs import capture
from simkv.gpu.graph_buckets import step_size
from simkv.gpu.machine_info import time_repeats


class CapturedProbe(NamedTuple):
    """CUDA graph of a step or a part of a step.

    ``write_tables`` writes the block tables of the step. ``held`` contains other tensors that the
    graph uses.
    """

    graph: Any
    write_tables: Callable[[], None]
    held: tuple[Any, ...]


class Microbenchmark:
    """A model for timing single steps or parts of steps. Its KV cache contains random numbers.

    Captured graphs are stored until ``forget`` is called.
    """

    def __init__(self, shape: ModelShape, limits: Limits, device: str) -> None:
        self.limits = limits
        config = RunnerConfig(
            num_blocks=limits.kv_tokens // limits.block_size,
            block_size=limits.block_size,
            seats=limits.decodes + 64,
            max_len=limits.context + limits.tokens + 8,
            max_decodes=limits.decodes,
            graph_tokens=0,
        )
        self.runner = Runner(shape, config, device)
        self.model = self.runner.model
        # The cache contains no zeros, because a device can be faster on zeros.
        for block in self.runner.pool.blocks.split(256):
            block.normal_()
        vocab = (self.model.seats + 1, self.model.max_len)
        self.model.tokens.copy_(torch.randint(0, shape.vocab, vocab, dtype=torch.int32))
        self.on_gpu = self.runner.on_gpu
        self._stream = torch.cuda.Stream() if self.on_gpu else None
        self._random = np.random.default_rng(0)
        self.forget()

    def forget(self) -> None:
        """Discard captured graphs and free their memory."""
        self._captured: dict[Probe, CapturedProbe] = {}

    def time(self, point: Probe, repeats: int) -> list[float]:
        """Return the durations in seconds of at most ``repeats`` runs. A first run is discarded."""
        if not self.on_gpu:
            run, lay = self._run(point)
            lay()
            return time_repeats(run, repeats, on_gpu=self.on_gpu)
        if point not in self._captured:
            self._captured[point] = self._capture(point)
        found = self._captured[point]
        found.write_tables()
        return time_repeats(found.graph.replay, repeats, on_gpu=True)

    def _capture(self, point: Probe) -> CapturedProbe:
        """Capture a graph in the memory of the first graph. Graphs are never replayed
        concurrently.
        """
        run, lay = self._run(point)
        lay()
        others = next(iter(self._captured.values()), None)
        graph, result = capture(run, self._stream, others.graph.pool() if others else None)
        return CapturedProbe(graph, lay, (run, result))

    def difference(self, point: Probe, ops: Any, others: Any) -> float:
        """Return the relative difference between the outputs of two implementations of
        attention.
        """
        size = self.size(point)
        fields, lay = self._fields(point, size)
        lay()
        q = self._queries(size)
        keys, values = self.runner.pool.layer(0)
        count = len(point.decodes) + sum(tokens for tokens, _ in point.prefills)
        a, b = (
            o.attend(q, fields, size, keys, values, self.model.tables)[:count].float()
            for o in (ops, others)
        )
        return float((a - b).norm() / a.norm())

    def size(self, point: Probe) -> StepSize:
        """Return the padded size of the step ``point``."""
        tokens = len(point.decodes) + sum(t for t, _ in point.prefills)
        return step_size(
            len(point.decodes), len(point.prefills), tokens, self.runner.config.max_decodes
        )

    def _run(self, point: Probe) -> tuple[Callable[[], Any], Callable[[], None]]:
        """Return the function to time, and a function to call before each run."""
        size = self.size(point)
        fields, lay = self._fields(point, size)
        if point.part == "step":
            return partial(self.model.step, fields, size), lay
        if point.part == "rest":
            return partial(self._without_attention, fields, size), lay
        return partial(self._attention_only, self._queries(size), fields, size), lay

    def _queries(self, size: StepSize) -> torch.Tensor:
        shape, pool = self.model.shape, self.runner.pool.blocks
        return torch.randn(
            size.tokens, shape.heads, shape.head_dim, device=pool.device, dtype=pool.dtype
        )

    def _fields(self, point: Probe, size: StepSize) -> tuple[StepInputs, Callable[[], None]]:
        """Return the inputs of a step, and a function that writes its random block tables."""
        decodes = [BatchRow(i, 1, context) for i, context in enumerate(point.decodes)]
        prefills = [
            BatchRow(i, tokens, context)
            for i, (tokens, context) in enumerate(point.prefills, len(decodes))
        ]
        rows = (*decodes, *prefills)
        counts = [blocks_for(row.context + row.tokens, self.limits.block_size) for row in rows]
        free = self._random.permutation(np.arange(1, self.runner.pool.num_blocks + 1))
        tables = torch.zeros(len(rows), max(counts), dtype=torch.int32)
        for row, begin, count in zip(rows, accumulate(counts, initial=0), counts, strict=False):
            tables[row.id, :count] = torch.from_numpy(free[begin : begin + count].astype(np.int32))
        laid = self.model.tables[: len(rows), : max(counts)]
        packed = np.zeros(packed_length(size), dtype=np.int32)
        seats = {row.id: row.id for row in rows}
        fill(input_views(packed, size), decodes, prefills, seats, seats, self.model.seats)
        fields = input_views(torch.from_numpy(packed).to(self.runner.device), size)
        return fields, lambda: _copy(tables, laid)

    def _without_attention(self, fields: StepInputs, size: StepSize) -> torch.Tensor:
        ops = self.model.ops
        self.model.ops = WithAttention(ops, lambda q, *_: q)
        try:
            return self.model.step(fields, size)
        finally:
            self.model.ops = ops

    def _attention_only(self, q: torch.Tensor, fields: StepInputs, size: StepSize) -> torch.Tensor:
        out = q
        for index in range(self.model.shape.layers):
            keys, values = self.runner.pool.layer(index)
            out = self.model.ops.attend(q, fields, size, keys, values, self.model.tables)
        return out


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


class WithAttention:
    """The operations of a model, with the function ``attend`` replaced."""

    def __init__(self, ops: Any, attend: Callable[..., torch.Tensor]) -> None:
        self._ops = ops
        self.attend = attend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)
