"""The KV cache: one preallocated tensor of blocks on the device, and blocks in host memory.

    pool = KVPool(MODELS["tiny"], num_blocks=64, block_size=16, device="cpu", dtype=torch.float32)
    keys, values = pool.layer(0)        # views [blocks, block_size, kv_heads, head_dim]
    host = HostBlocks(pool, 8)
    swap_out(pool, [3, 4, 9], host, [0, 1, 2])
    swap_in(pool, [7, 8, 5], host, [0, 1, 2])

Blocks are numbered as simkv's block pools number them: from 1, with 0 as the null block, where
padding goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from simkv.costs.hardware.shapes import ModelShape

Layout = Literal["block", "layer"]


class KVPool:
    """Keys and values of ``num_blocks`` blocks of ``block_size`` tokens, and of the null block.

    With the ``block`` layout the tensor is [block, layer, 2, token, kv head, head dim], so that a
    block is one contiguous piece and swapping it one copy; with ``layer`` it is
    [layer, 2, block, token, kv head, head dim]. Its contents start undefined, the null block zero.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        dtype: torch.dtype,
        layout: Layout = "block",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layout = layout
        block = (block_size, shape.kv_heads, shape.head_dim)
        size = (
            (num_blocks + 1, shape.layers, 2, *block)
            if layout == "block"
            else (shape.layers, 2, num_blocks + 1, *block)
        )
        self.data = torch.empty(size, device=device, dtype=dtype)
        #: The same tensor with the block as its first dimension, whatever the layout.
        self.blocks = self.data if layout == "block" else self.data.permute(2, 0, 1, 3, 4, 5)
        self.blocks[0].zero_()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, as views [block, token, kv head, head dim]."""
        return self.blocks[:, index, 0], self.blocks[:, index, 1]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return int(self.blocks[0].numel() * self.data.element_size())


class HostBlocks:
    """Room for ``num_blocks`` blocks in host memory; pinned if the pool is on a GPU."""

    def __init__(self, pool: KVPool, num_blocks: int) -> None:
        self.data = torch.empty(
            (num_blocks, *pool.blocks.shape[1:]),
            dtype=pool.data.dtype,
            pin_memory=pool.data.is_cuda and num_blocks > 0,
        )


def swap_out(pool: KVPool, blocks: Sequence[int], host: HostBlocks, places: Sequence[int]) -> None:
    """Copy device ``blocks`` to host ``places``, in stream order and without waiting for it."""
    for block, place, count in runs(blocks, places):
        source = pool.blocks[block : block + count]
        host.data[place : place + count].copy_(source, non_blocking=True)


def swap_in(pool: KVPool, blocks: Sequence[int], host: HostBlocks, places: Sequence[int]) -> None:
    """Copy host ``places`` to device ``blocks``, in stream order and without waiting for it."""
    for block, place, count in runs(blocks, places):
        source = host.data[place : place + count]
        pool.blocks[block : block + count].copy_(source, non_blocking=True)


class SwapSpace:
    """Where the KV of swapped requests lies in ``num_blocks`` blocks of host memory."""

    def __init__(self, pool: KVPool, num_blocks: int) -> None:
        self._pool = pool
        self._host = HostBlocks(pool, num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._places: dict[int, list[int]] = {}

    def clear(self) -> None:
        """Forget all requests."""
        for request_id in list(self._places):
            self.forget(request_id)

    def out(self, request_id: int, blocks: Sequence[int]) -> None:
        """Copy a request's ``blocks`` to the host. Raises RuntimeError if there is no room."""
        if len(blocks) > len(self._free):
            raise RuntimeError(f"{len(blocks)} blocks to swap out, room for {len(self._free)}")
        places = self._places[request_id] = [self._free.pop() for _ in blocks]
        swap_out(self._pool, blocks, self._host, places)

    def back(self, request_id: int, blocks: Sequence[int]) -> None:
        """Copy a request's KV from the host to ``blocks``, as many as went out."""
        swap_in(self._pool, blocks, self._host, self._places[request_id])
        self.forget(request_id)

    def forget(self, request_id: int) -> None:
        """The request's KV is no longer needed on the host."""
        self._free += reversed(self._places.pop(request_id, ()))


def runs(left: Sequence[int], right: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Pairs of numbers as (left, right, count), where both go on by one: one copy each."""
    start = 0
    for end in range(1, len(left) + 1):
        length = end - start
        if (
            end == len(left)
            or left[end] != left[start] + length
            or right[end] != right[start] + length
        ):
            yield left[start], right[start], length
            start = end
