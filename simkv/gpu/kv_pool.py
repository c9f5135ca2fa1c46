"""The KV cache: one preallocated tensor of blocks on the device.

    pool = KVPool(MODEL_SHAPES["tiny"], 64, 16, "cpu", torch.float32)
    keys, values = pool.layer(0)        # views [blocks, block_size, kv_heads, head_dim]

Blocks are numbered as in simkv's block pools: from 1, with 0 as the null block for padding.
"""

from __future__ import annotations

import torch

from simkv.costs.hardware.model_shape import ModelShape


class KVPool:
    """Keys and values of ``num_blocks`` blocks and the null block. A block has ``block_size``
    tokens.

    The tensor has the shape [block, layer, 2, token, kv head, head dim]. The null block is zero;
    the initial content of the other blocks is undefined.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        block = (block_size, shape.kv_heads, shape.head_dim)
        size = (num_blocks + 1, shape.layers, 2, *block)
        self.blocks = torch.empty(size, device=device, dtype=dtype)
        self.blocks[0].zero_()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer, as views [block, token, kv head, head dim]."""
        return self.blocks[:, index, 0], self.blocks[:, index, 1]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return int(self.blocks[0].numel() * self.blocks.element_size())
