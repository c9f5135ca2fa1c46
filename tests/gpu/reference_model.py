"""Reference for the paged engine: attention and the whole model, dense, in float64.

It uses none of the engine's operations, only the same weights.
"""

from __future__ import annotations

import numpy as np
import torch

from simkv.costs.hardware.model_shape import ModelShape
from simkv.gpu.transformer import Weights


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the causal attention of the last ``len(q)`` tokens of a sequence over all ``len(k)``
    tokens.

    ``q`` [n, heads, d]; ``k``, ``v`` [length, kv_heads, d]; all float64.
    """
    n, heads, dim = q.shape
    length, kv_heads = k.shape[:2]
    k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
    future = np.arange(length) > np.arange(length - n, length)[:, None]
    scores[:, future] = -np.inf
    share = np.exp(scores - scores.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", share, v)


def logits(shape: ModelShape, weights: Weights, tokens: list[int]) -> torch.Tensor:
    """Return the logits after every token of one sequence, [len(tokens), vocab], in float64."""
    ids = torch.tensor(tokens)
    x = _wide(weights.embedding)[ids]
    for layer in weights.layers:
        h = _norm(x, layer.norm, shape.norm_eps)
        qkv = h @ _wide(layer.qkv).T
        if layer.qkv_bias is not None:
            qkv = qkv + _wide(layer.qkv_bias)
        x = x + _attend(shape, qkv) @ _wide(layer.out).T
        h = _norm(x, layer.mlp_norm, shape.norm_eps)
        gate, up = (h @ _wide(layer.gate_up).T).chunk(2, dim=-1)
        x = x + (gate * torch.sigmoid(gate) * up) @ _wide(layer.down).T
    return _norm(x, weights.norm, shape.norm_eps) @ _wide(weights.head).T


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().double()


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * _wide(weight)


def _attend(shape: ModelShape, qkv: torch.Tensor) -> torch.Tensor:
    length, dim = len(qkv), shape.head_dim
    heads = qkv.view(length, -1, dim)
    q = _turn(shape, heads[:, : shape.heads])
    k = _turn(shape, heads[:, shape.heads : shape.heads + shape.kv_heads])
    v = heads[:, shape.heads + shape.kv_heads :]
    k, v = (x.repeat_interleave(shape.group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    share = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", share, v).reshape(length, -1)


def _turn(shape: ModelShape, x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with rotary positions as a complex product; dimension ``i`` pairs with ``i +
    head_dim / 2``.
    """
    half = shape.head_dim // 2
    frequency = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(len(x), dtype=torch.float64)[:, None] * frequency
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def greedy(shape: ModelShape, weights: Weights, prompt: list[int], count: int) -> list[int]:
    """Return the first ``count`` tokens that greedy decoding emits after ``prompt``."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(shape, weights, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
