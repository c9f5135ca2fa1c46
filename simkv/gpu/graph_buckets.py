"""Padded sizes of steps; each size has one CUDA graph and one entry in the cost table."""

from __future__ import annotations

from simkv.gpu.batch_inputs import StepSize

#: Maximum number of prefills in a step that is captured as a graph; a step with more prefills runs
#: eagerly.
PREFILL_ROWS = 16
#: Largest token count for which a graph is captured; above it, the GPU takes much longer than
#: Python.
GRAPH_TOKENS = 2816


def decode_bucket(count: int) -> int:
    """Return the number of row slots for ``count`` decodes: 1, 2, 4, 8, then multiples of 16."""
    if count <= 8:
        return next(size for size in (1, 2, 4, 8) if count <= size)
    return -(-count // 16) * 16


def token_bucket(count: int) -> int:
    """Return the number of token slots for a step with prefills.

    The number is a multiple of 32 up to 256, and a multiple of 128 above.
    """
    unit = 32 if count <= 256 else 128
    return -(-count // unit) * unit


def step_size(decodes: int, prefills: int, tokens: int, most_decodes: int) -> StepSize:
    """Return the padded size of a step with the given numbers of decodes, prefills and tokens.

    All steps with prefills and the same number of token slots have the same size, so that few CUDA
    graphs suffice.
    """
    if not prefills:
        rows = decode_bucket(decodes)
        return StepSize(rows, rows, 0)
    slots = token_bucket(tokens)
    rows = min(most_decodes, slots) if decodes else 0
    return StepSize(slots, rows, PREFILL_ROWS if prefills <= PREFILL_ROWS else prefills)


def graph_sizes(most_decodes: int, most_tokens: int) -> list[StepSize]:
    """Return all sizes to capture as CUDA graphs, the largest first."""
    decodes = {step_size(n, 0, n, most_decodes) for n in range(1, most_decodes + 1)}
    tokens = range(2, min(most_tokens, GRAPH_TOKENS) + 1)
    prefills = {step_size(0, 1, n, most_decodes) for n in tokens}
    mixed = {step_size(1, 1, n, most_decodes) for n in tokens}
    return sorted(decodes | prefills | mixed, reverse=True)
