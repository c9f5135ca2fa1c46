"""Model operations in vectorized torch, for tests on any device.

In shapes, T is the number of token slots, H is the number of query heads, K is the number of
key-value heads, and D is the head dimension. ``keys`` and ``values`` are one layer of the pool with
shape [block, token, K, D]. ``tables`` has the shape [request, index of the block in the sequence].
``cuda_ops`` has the same functions as Triton kernels.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from simkv.gpu.batch_inputs import StepInputs, StepSize


def add_norm(
    residual: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``residual + x`` and its RMSNorm, both [T, hidden]."""
    residual = x if residual is None else residual + x
    wide = residual.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return residual, (wide * scale).to(residual.dtype) * weight


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return SiLU of the first half of the columns times the second half."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotate_and_store(
    qkv: torch.Tensor,
    position: torch.Tensor,
    slot: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys by their positions, and store keys and values in their slots.

    ``qkv`` is [T, (H + 2 K) D]. ``cosine`` and ``sine`` are [positions, D / 2]. Return the queries,
    [T, H, D].
    """
    block_size, kv_heads, dim = keys.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q, k, v = qkv.view(len(qkv), -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    cos, sin = cosine[position].unsqueeze(1), sine[position].unsqueeze(1)
    block, offset = slot // block_size, slot % block_size
    keys[block, offset] = _rotate(k, cos, sin)
    values[block, offset] = v
    return _rotate(q, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.float().chunk(2, dim=-1)
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    return turned.to(x.dtype)


def attend(
    q: torch.Tensor,
    fields: StepInputs,
    size: StepSize,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
) -> torch.Tensor:
    """Return the causal attention of every token over its own sequence, [T, H, D].

    The values of padding slots are undefined.
    """
    out = torch.zeros_like(q)
    row = fields.length[: size.decodes].nonzero()[:, 0]
    if len(row):
        found = _decode(q[row], fields.length[row], tables[fields.row_seat[row]], keys, values)
        out[row] = found
    start = fields.start.tolist()
    length = fields.length[size.decodes :].tolist()
    seats = fields.row_seat[size.decodes :].tolist()
    for row in range(size.prefills):
        a, b = start[row], start[row + 1]
        if a < b:
            out[a:b] = _prefill(q[a:b], length[row], tables[seats[row]], keys, values)
    return out


def _decode(
    q: torch.Tensor,
    length: torch.Tensor,
    tables: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Return the attention of one query per request, [requests, H, D]."""
    block_size = keys.shape[1]
    index = torch.arange(-(-max(int(length.max()), 1) // block_size), device=q.device)
    # Values beyond a row's length are undefined, because blocks may be missing or contain NaN.
    blocks = torch.where(index * block_size < length[:, None], tables[:, : len(index)], 0)
    k, v = (x[blocks].flatten(1, 2) for x in (keys, values))
    seen = torch.arange(k.shape[1], device=q.device) < length[:, None]
    k, v = (torch.where(seen[:, :, None, None], x, 0) for x in (k, v))
    return functional.scaled_dot_product_attention(
        q.unsqueeze(2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=seen[:, None, None, :],
        enable_gqa=True,
    ).squeeze(2)


def _prefill(
    q: torch.Tensor, length: int, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Return the attention of the last tokens of a sequence of ``length`` tokens, [tokens, H,
    D].
    """
    blocks = table[: -(-length // keys.shape[1])]
    k, v = (x[blocks].flatten(0, 1)[:length].transpose(0, 1) for x in (keys, values))
    at = torch.arange(length - len(q), length, device=q.device)
    seen = torch.arange(length, device=q.device) <= at[:, None]
    return functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=seen, enable_gqa=True
    )[0].transpose(0, 1)
