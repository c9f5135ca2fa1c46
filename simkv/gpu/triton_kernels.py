"""Triton kernels: paged attention for decodes and prefills, and three small fusions.

Loop sizes are read on the device, and grids depend only on the size of the step, so that each
launch can be part of a CUDA graph. One program handles all query heads that share a key-value head;
``PADDED`` is their number, rounded up to a tile. A kernel is built once per model size.
``UNSPECIALIZED`` lists arguments whose values must not cause another build. Softmax uses base 2:
``scale`` already contains the factor log2(e).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

#: Views into the packed inputs of a step, at offsets that depend on its size.
UNSPECIALIZED = ("row_seat", "length", "start", "position", "slot")


def _jit(kernel: Any) -> Any:
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    varying = [name for name in names if name in UNSPECIALIZED]
    numbers = [name for name in names if name == "rows"]
    return triton.jit(kernel, do_not_specialize=numbers, do_not_specialize_on_alignment=varying)


@triton.jit
def _tile(keys, values, q, table, t, there, seen, best, total, acc, scale,
          block_stride, token_stride, d,
          BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add the KV of tokens ``t`` to the running softmax of the rows of ``q``.

    With MASKED, ``there`` [tokens] marks the existing tokens, and ``seen`` [rows, tokens] marks the
    tokens visible to each row. Without MASKED, all tokens are visible.
    """
    if MASKED:
        block = tl.load(table + t // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        offset = block * block_stride + (t % BLOCK_SIZE) * token_stride
        k = tl.load(keys + offset[None, :] + d[:, None], mask=there[None, :], other=0.0)
        v = tl.load(values + offset[:, None] + d[None, :], mask=there[:, None], other=0.0)
    else:
        block = tl.load(table + t // BLOCK_SIZE).to(tl.int64)
        offset = block * block_stride + (t % BLOCK_SIZE) * token_stride
        k = tl.load(keys + offset[None, :] + d[:, None])
        v = tl.load(values + offset[:, None] + d[None, :])
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, axis=1))
    share = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(best - higher)
    total = total * shrink + tl.sum(share, axis=1)
    acc = acc * shrink[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
    return higher, total, acc


@_jit
def decode(q, out, partial, logsum, keys, values, tables, row_seat, length, scale,
           block_stride, token_stride, table_stride,
           HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr,
           BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """Process one split of one request for one KV head. The grid is (KV heads, rows, SPLITS).

    With one split, the result is written to ``out`` [T, H, D]. With several splits, the inputs of
    ``reduce`` are written: the normalized ``partial`` [rows, H, SPLITS, D], and ``logsum`` [rows,
    H, SPLITS], the base-2 logarithm of the softmax's sum.
    """
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(length + row)
    if n == 0:
        return
    g = tl.arange(0, PADDED)
    d = tl.arange(0, D)
    head = kv_head * GROUP + g
    inside = g < GROUP
    per_split = tl.cdiv(tl.cdiv(n, TILE), SPLITS) * TILE
    first = split * per_split
    last = tl.minimum(first + per_split, n)
    best = tl.full([PADDED], -1e30, tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    acc = tl.zeros([PADDED, D], tl.float32)
    at = (row * HEADS + head)[:, None] * D + d[None, :]
    queries = tl.load(q + at, mask=inside[:, None], other=0.0)
    table = tables + tl.load(row_seat + row).to(tl.int64) * table_stride
    keys += kv_head * D
    values += kv_head * D
    for start in range(first, last, TILE):
        t = start + tl.arange(0, TILE)
        there = t < last
        best, total, acc = _tile(
            keys, values, queries, table, t, there, there[None, :], best, total, acc, scale,
            block_stride, token_stride, d, BLOCK_SIZE, True,
        )  # fmt: skip
    if SPLITS == 1:
        tl.store(out + at, acc / total[:, None], mask=inside[:, None])
    else:
        to = (row * HEADS + head).to(tl.int64) * SPLITS + split
        if first < n:
            acc = acc / total[:, None]
            tl.store(partial + to[:, None] * D + d[None, :], acc, mask=inside[:, None])
            tl.store(logsum + to, best + tl.log2(total), mask=inside)
        else:
            tl.store(logsum + to, tl.full([PADDED], float("-inf"), tl.float32), mask=inside)


@_jit
def reduce(partial, logsum, out, length,
           HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """Combine the splits of ``decode``. The grid is (rows, H).

    Padding rows store nothing, because their slots belong to prefill tokens.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(length + row) == 0:
        return
    d = tl.arange(0, D)
    at = (row * HEADS + head).to(tl.int64) * SPLITS + tl.arange(0, SPLITS)
    weights = tl.load(logsum + at)
    there = weights > float("-inf")
    parts = tl.load(partial + at[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
    share = tl.exp2(weights - tl.max(weights, axis=0))
    found = tl.sum(parts * share[:, None], axis=0) / tl.sum(share, axis=0)
    tl.store(out + (row * HEADS + head) * D + d, found)


@_jit
def prefill(q, out, keys, values, tables, row_seat, length, start, rows, scale,
            block_stride, token_stride, table_stride,
            HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr,
            BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr):  # fmt: skip
    """Process ``QUERIES`` tokens of one sequence for one KV head.

    ``row_seat``, ``length`` and ``start`` contain the seat, the length and the first token slot of
    each prefilling request.
    """
    kv_head, program = tl.program_id(0), tl.program_id(1)
    origin = tl.load(start)
    row = 0
    high = rows
    while row + 1 < high:  # find the last row whose first program is this program or an earlier one
        middle = (row + high) // 2
        if (tl.load(start + middle) - origin) // QUERIES + middle <= program:
            row = middle
        else:
            high = middle
    begin = tl.load(start + row)
    count = tl.load(start + row + 1) - begin
    token = (program - (begin - origin) // QUERIES - row) * QUERIES
    if token >= count:
        return
    n = tl.load(length + row)
    m = tl.arange(0, QUERIES * PADDED)
    d = tl.arange(0, D)
    i = token + m // PADDED
    g = m % PADDED
    inside = (i < count) & (g < GROUP)
    at = ((begin + i) * HEADS + kv_head * GROUP + g)[:, None] * D + d[None, :]
    queries = tl.load(q + at, mask=inside[:, None], other=0.0)
    table = tables + tl.load(row_seat + row).to(tl.int64) * table_stride
    keys += kv_head * D
    values += kv_head * D
    best = tl.full([QUERIES * PADDED], -1e30, tl.float32)
    total = tl.zeros([QUERIES * PADDED], tl.float32)
    acc = tl.zeros([QUERIES * PADDED, D], tl.float32)
    position = n - count + i
    # end of the whole tiles that all queries can see
    everybody = (n - count + token + 1) // TILE * TILE
    for first in range(0, everybody, TILE):
        t = first + tl.arange(0, TILE)
        best, total, acc = _tile(
            keys, values, queries, table, t, t, t, best, total, acc, scale,
            block_stride, token_stride, d, BLOCK_SIZE, False,
        )  # fmt: skip
    for first in range(everybody, tl.minimum(n - count + token + QUERIES, n), TILE):
        t = first + tl.arange(0, TILE)
        seen = t[None, :] <= position[:, None]
        best, total, acc = _tile(
            keys, values, queries, table, t, t < n, seen, best, total, acc, scale,
            block_stride, token_stride, d, BLOCK_SIZE, True,
        )  # fmt: skip
    tl.store(out + at, acc / total[:, None], mask=inside[:, None])


@_jit
def add_norm(residual, x, weight, normed, width, eps,
             ADD: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Set ``residual += x`` and store the RMSNorm of ``residual``. The grid is (T,).

    Without ADD, ``residual`` is ``x``.
    """
    at = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, WIDTH)
    inside = column < width
    value = tl.load(x + at + column, mask=inside, other=0.0)
    if ADD:
        value += tl.load(residual + at + column, mask=inside, other=0.0)
        tl.store(residual + at + column, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    scaled = (wide * scale).to(value.dtype) * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(normed + at + column, scaled, mask=inside)


@_jit
def rotate_and_store(qkv, q, position, slot, cosine, sine, keys, values,
                     block_stride, token_stride,
                     HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
                     BLOCK_SIZE: tl.constexpr, ALL: tl.constexpr):  # fmt: skip
    """Rotate the queries and keys of a token, and store its keys and values. The grid is (T,).

    ALL is the total number of query, key and value heads, rounded up to a power of two.
    """
    token = tl.program_id(0)
    half = tl.arange(0, D // 2)
    head = tl.arange(0, ALL)[:, None]
    at = token.to(tl.int64) * (HEADS + 2 * KV_HEADS) * D + head * D + half[None, :]
    inside = head < HEADS + 2 * KV_HEADS
    left = tl.load(qkv + at, mask=inside, other=0.0)
    right = tl.load(qkv + at + D // 2, mask=inside, other=0.0)
    angle = tl.load(position + token) * (D // 2) + half
    cos = tl.load(cosine + angle)[None, :]
    sin = tl.load(sine + angle)[None, :]
    a = (left * cos - right * sin).to(left.dtype)
    b = (right * cos + left * sin).to(left.dtype)
    to = q + token.to(tl.int64) * HEADS * D + head * D + half[None, :]
    tl.store(to, a, mask=head < HEADS)
    tl.store(to + D // 2, b, mask=head < HEADS)
    place = tl.load(slot + token).to(tl.int64)
    place = (place // BLOCK_SIZE) * block_stride + (place % BLOCK_SIZE) * token_stride
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    to = keys + place + (head - HEADS) * D + half[None, :]
    tl.store(to, a, mask=is_key)
    tl.store(to + D // 2, b, mask=is_key)
    to = values + place + (head - HEADS - KV_HEADS) * D + half[None, :]
    is_value = inside & (head >= HEADS + KV_HEADS)
    tl.store(to, left, mask=is_value)
    tl.store(to + D // 2, right, mask=is_value)


@_jit
def silu_mul(x, out, width, WIDTH: tl.constexpr):
    """Compute SiLU of the first half of each row times its second half.

    The grid is (T, width / WIDTH).
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    gate = tl.load(x + token * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + token * 2 * width + width + column, mask=inside, other=0.0)
    value = (gate * tl.sigmoid(gate)).to(up.dtype) * up
    tl.store(out + token * width + column, value, mask=inside)


def count_builds() -> int:
    """Return the number of kernel builds in this process, for all devices."""
    launched = (decode, reduce, prefill, add_norm, rotate_and_store, silu_mul)
    return sum(len(cache[0]) for kernel in launched for cache in kernel.device_caches.values())
