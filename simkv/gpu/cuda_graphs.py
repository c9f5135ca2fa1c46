"""Steps of fixed sizes over one static input buffer, captured as CUDA graphs.

On a CPU nothing can be captured and ``run`` calls the model on the same static buffer instead, so
the padded path is the one that the tests run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import torch

from simkv.gpu.batch_inputs import (
    StepSize,
    fill,
    input_views,
    packed_length,
)
from simkv.gpu.transformer import Transformer


class StepGraphs:
    """One graph for each of ``sizes``; all of them read the same buffer and share memory."""

    def __init__(self, model: Transformer, sizes: Collection[StepSize]) -> None:
        self.model = model
        self.sizes = frozenset(sizes)
        longest = max(map(packed_length, sizes), default=0)
        self.buffer = torch.zeros(longest, dtype=torch.int32, device=model.tokens.device)
        self._graphs: dict[StepSize, tuple[Any, torch.Tensor]] = {}
        if self.buffer.is_cuda:
            self._capture_all(sorted(sizes, reverse=True))

    def run(self, packed: torch.Tensor, size: StepSize) -> torch.Tensor:
        """Run a step of this size; the result is valid until the next one is enqueued."""
        self.buffer[: len(packed)].copy_(packed, non_blocking=True)
        if size in self._graphs:
            graph, sampled = self._graphs[size]
            graph.replay()
            return sampled
        return self.model.step(input_views(self.buffer, size), size)

    def _capture_all(self, sizes: list[StepSize]) -> None:
        """Largest first, so that the others fit into the memory of the first."""
        memory: Any = None
        stream = torch.cuda.Stream()
        for size in sizes:
            self.buffer[: packed_length(size)].copy_(padding(size, self.model.seats))
            fields = input_views(self.buffer, size)
            graph, sampled = capture(partial(self.model.step, fields, size), stream, memory)
            memory = memory or graph.pool()
            self._graphs[size] = (graph, sampled)


def capture(
    run: Callable[[], torch.Tensor], stream: Any, memory: Any = None
) -> tuple[Any, torch.Tensor]:
    """A CUDA graph of ``run`` and the tensor that it leaves its result in.

    It runs once before, so that kernels are compiled and algorithms picked. ``memory`` is the pool
    of an earlier graph that is never replayed at the same time; such graphs are captured on the
    same ``stream``, since memory that one stream has freed is not given to another.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, stream=stream):
            result = run()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, result


def padding(size: StepSize, scratch: int) -> torch.Tensor:
    """The packed inputs of a step of this size that has nothing to do."""
    packed = np.zeros(packed_length(size), dtype=np.int32)
    fill(input_views(packed, size), [], [], (), {}, scratch)
    return torch.from_numpy(packed)
