"""Time one fixed step between other work, to detect changes of the device."""

from __future__ import annotations

from functools import partial
from statistics import median

import numpy as np
import torch

from simkv.core.scheduler_protocol import BatchRow, blocks_for
from simkv.gpu.batch_inputs import fill, input_views, packed_length
from simkv.gpu.batch_runner import Runner
from simkv.gpu.graph_buckets import step_size
from simkv.gpu.machine_info import time_repeats

#: Number of decodes and their context length, limited by the runner's maximum.
ROWS, CONTEXT = 64, 512
REPEATS = 20


def time_sentinel(runner: Runner) -> float:
    """Return the median device time of a fixed step, in seconds.

    The runner must be idle, because the step writes to the KV pool.
    """
    config = runner.config
    context = min(CONTEXT, config.max_len - 2)
    rows = [BatchRow(i, 1, context) for i in range(min(ROWS, config.max_decodes, config.seats))]
    size = step_size(len(rows), 0, len(rows), config.max_decodes)
    packed = np.zeros(packed_length(size), dtype=np.int32)
    seats = {row.id: row.id for row in rows}
    fill(input_views(packed, size), rows, [], (), seats, config.seats)
    width = blocks_for(context + 1, config.block_size)
    blocks = np.arange(len(rows) * width, dtype=np.int32) % config.num_blocks + 1
    laid = runner.model.tables[: len(rows), :width]
    laid.copy_(torch.from_numpy(blocks.reshape(len(rows), width)))
    step = partial(runner.enqueue, torch.from_numpy(packed), size)
    return median(time_repeats(step, REPEATS, on_gpu=runner.on_gpu))
