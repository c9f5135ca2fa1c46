"""Steps of fixed sizes that read one static input buffer and are captured as CUDA graphs.

On a CPU, which has no graphs, ``run`` calls the model on the same buffer, so that tests cover the
padding.
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
    """One CUDA graph per step size in ``sizes``. All graphs read the same input buffer and share
    memory.
    """

    def __init__(self, model: Transformer, sizes: Collection[StepSize]) -> None:
        self.model = model
        self.sizes = frozenset(sizes)
        longest = max(map(packed_length, sizes), default=0)
        self.buffer = torch.zeros(longest, dtype=torch.int32, device=model.tokens.device)
        self._graphs: dict[StepSize, tuple[Any, torch.Tensor]] = {}
        if self.buffer.is_cuda:
            self._capture_all(sorted(sizes, reverse=True))

    def run(
        self, packed: torch.Tensor, size: StepSize, begin: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        """Run a step of the given size. The result is valid until the next step is enqueued.

        ``begin`` is called after the copy of the inputs is enqueued, and before the model.
        """
        self.buffer[: len(packed)].copy_(packed, non_blocking=True)
        begin()
        if size in self._graphs:
            graph, sampled = self._graphs[size]
            graph.replay()
            return sampled
        return self.model.step(input_views(self.buffer, size), size)

    def _capture_all(self, sizes: list[StepSize]) -> None:
        """Capture the graphs, the largest first, so that the others fit into its memory."""
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
    """Capture ``run`` as a CUDA graph. Return the graph and its output tensor.

    ``run`` is called once before the capture, so that kernels are compiled. ``memory`` is the
    memory pool of an earlier graph that was captured on ``stream`` and is never replayed at the
    same time.
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
    """Return the packed inputs of an empty step of the given size."""
    packed = np.zeros(packed_length(size), dtype=np.int32)
    fill(input_views(packed, size), [], [], (), {}, scratch)
    return torch.from_numpy(packed)
