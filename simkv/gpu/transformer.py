"""A decoder-only transformer with random weights, and a forward pass over flat inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from simkv.costs.hardware.model_shape import ModelShape
from simkv.gpu import cpu_ops
from simkv.gpu.batch_inputs import StepInputs, StepSize
from simkv.gpu.kv_pool import KVPool


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer. Matrices are [out, in], as ``linear`` expects them."""

    norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Weights:
    """Weights of a model. ``head`` may be the embedding itself."""

    embedding: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: torch.Tensor


def random_weights(
    shape: ModelShape, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> Weights:
    """Return normally distributed random weights. On one kind of device, they depend only on the
    seed.

    The scale keeps activations near 1 in every layer.
    """
    random = torch.Generator(device).manual_seed(seed)

    def draw(rows: int, columns: int, scale: float | None = None) -> torch.Tensor:
        tensor = torch.empty(rows, columns, device=device, dtype=dtype)
        return tensor.normal_(0.0, scale or columns**-0.5, generator=random)

    def norm() -> torch.Tensor:
        return 1.0 + draw(1, shape.hidden, 0.1)[0]

    def layer() -> LayerWeights:
        return LayerWeights(
            norm=norm(),
            qkv=draw(shape.qkv_width, shape.hidden),
            qkv_bias=draw(1, shape.qkv_width, 0.1)[0] if shape.qkv_bias else None,
            out=draw(shape.hidden, shape.heads * shape.head_dim),
            mlp_norm=norm(),
            gate_up=draw(2 * shape.intermediate, shape.hidden),
            down=draw(shape.hidden, shape.intermediate),
        )

    embedding = draw(shape.vocab, shape.hidden)
    layers = [layer() for _ in range(shape.layers)]
    head = embedding if shape.tied else draw(shape.vocab, shape.hidden)
    return Weights(embedding, layers, norm(), head)


def rotary_tables(
    shape: ModelShape, positions: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, [positions, head_dim / 2] in float32."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * shape.rope_theta**-half
    return angles.cos().float().to(device), angles.sin().float().to(device)


class Transformer:
    """Weights and the device state that a step reads and writes.

    ``tokens`` [request, position] contains prompts and sampled tokens. ``tables`` [request, index]
    contains the block tables. Each tensor has one additional row for padding.
    """

    def __init__(
        self, shape: ModelShape, weights: Weights, pool: KVPool, *, seats: int, max_len: int
    ) -> None:
        device = pool.blocks.device
        self.shape = shape
        self.weights = weights
        self.pool = pool
        self.seats = seats
        self.max_len = max_len
        self.tokens = torch.zeros(seats + 1, max_len, dtype=torch.int32, device=device)
        width = -(-max_len // pool.block_size)
        self.tables = torch.zeros(seats + 1, width, dtype=torch.int32, device=device)
        self.cosine, self.sine = rotary_tables(shape, max_len, device)
        self.ops: Any = cpu_ops
        if device.type == "cuda":
            from simkv.gpu import cuda_ops

            self.ops = cuda_ops

    def step(self, fields: StepInputs, size: StepSize) -> torch.Tensor:
        """Run one step with greedy sampling and return one token per row slot, int32 of shape
        [rows].

        Emitted tokens are also written to ``tokens``. The step can be captured as a CUDA graph.
        """
        x, residual = self.layers(fields, size)
        decodes = torch.arange(size.decodes, device=x.device)
        last = torch.cat((decodes, fields.start[1:] - 1))
        sampled = self.logits(x[last], residual[last]).argmax(-1).int()
        self.tokens[fields.out_seat, fields.out_position] = sampled
        return sampled

    def layers(self, fields: StepInputs, size: StepSize) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all layers. Return the last output and the residual stream, both [T, hidden]."""
        ops, weights, shape = self.ops, self.weights, self.shape
        seat, position, block_size = fields.seat, fields.position, self.pool.block_size
        slot = self.tables[seat, position // block_size].long() * block_size
        slot += position % block_size
        x = weights.embedding[self.tokens[seat, position]]
        residual = None
        for index, layer in enumerate(weights.layers):
            keys, values = self.pool.layer(index)
            residual, x = ops.add_norm(residual, x, layer.norm, shape.norm_eps)
            qkv = functional.linear(x, layer.qkv, layer.qkv_bias)
            q = ops.rotate_and_store(qkv, position, slot, self.cosine, self.sine, keys, values)
            x = ops.attend(q, fields, size, keys, values, self.tables)
            x = functional.linear(x.flatten(1), layer.out)
            residual, x = ops.add_norm(residual, x, layer.mlp_norm, shape.norm_eps)
            x = ops.silu_mul(functional.linear(x, layer.gate_up))
            x = functional.linear(x, layer.down)
        return x, residual

    def logits(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token, [rows, vocab], from the last token of each
        request.
        """
        _, x = self.ops.add_norm(residual, x, self.weights.norm, self.shape.norm_eps)
        return functional.linear(x, self.weights.head)
