"""FlashAttention of torch (``torch.nn.attention.varlen``) as a baseline for prefill attention.

``varlen`` attention reads contiguous keys and values, so the blocks are gathered before the
measurement. Compared steps have one prefill and no earlier context.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from simkv.gpu.batch_inputs import StepInputs, StepSize


def find_varlen() -> Callable[..., Any] | None:
    """Return torch's ``varlen_attn``, or None if this version of torch does not have it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    found: Callable[..., Any] = varlen_attn
    return found


class VarlenAttention:
    """Attention by ``varlen_attn`` for one prefill, with the signature of ``cpu_ops.attend``."""

    name = "torch varlen_attn"

    def __init__(self, attention: Callable[..., Any]) -> None:
        self._attention = attention
        known = inspect.signature(attention).parameters
        # torch 2.11 has a window instead of a flag, and aligns the window to the end of the
        # sequence.
        self._options: dict[str, Any] = (
            {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
        )
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None

    def attend(
        self,
        q: torch.Tensor,
        fields: StepInputs,
        size: StepSize,  # noqa: ARG002
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
    ) -> torch.Tensor:
        """Compute ``cpu_ops.attend`` for a step of one prefill that fills all token slots.

        The keys and values of the first call are reused for prefills of the same length, so that
        gathering is not timed.
        """
        tokens, heads = q.shape[:2]
        if self._gathered is None or self._gathered[0].shape[:2] != (tokens, heads):
            blocks = tables.index_select(0, fields.row_seat[:1])[0, : -(-tokens // keys.shape[1])]
            k, v = (_per_head(x[blocks].flatten(0, 1)[:tokens], heads) for x in (keys, values))
            self._gathered = k, v
        ends = torch.arange(0, tokens + 1, tokens, dtype=torch.int32, device=q.device)
        found: torch.Tensor = self._attention(
            q, *self._gathered, ends, ends, tokens, tokens, **self._options
        )
        return found


def _per_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat the KV heads of x (tokens, KV heads, head size) to the number of query heads."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)
