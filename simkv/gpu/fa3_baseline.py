"""FlashAttention 3 from a vLLM wheel, as an optional baseline for simkv's kernels.

vLLM's wheels contain ``vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so``, which loads into the torch
version it was built for (vLLM 0.20 to 0.26: torch 2.11). Its operator is called by argument names
from torch, so that versions with other arguments work.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from simkv.core.errors import InputError
from simkv.gpu.batch_inputs import StepInputs, StepSize


class FlashAttention3:
    """Attention by the library at ``path``. Raises InputError if it cannot be loaded."""

    name = "FA3 of vLLM"

    def __init__(self, path: Path) -> None:
        try:
            torch.ops.load_library(str(path))
            self._forward = torch.ops._vllm_fa3_C.fwd.default
        except (OSError, AttributeError, RuntimeError) as error:
            raise InputError(f"--fa3 {path}: cannot be loaded: {error}") from error

    def attend(
        self,
        q: torch.Tensor,
        fields: StepInputs,
        size: StepSize,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
    ) -> torch.Tensor:
        """Compute ``cpu_ops.attend``, for steps with decodes only or with one prefill only."""
        rows = size.decodes if size.decodes else 1
        start = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
        if not size.decodes:
            start = fields.start[:2].contiguous()
        seats = fields.row_seat[:rows]
        out = torch.empty_like(q)
        given = {
            "q": q,
            "k": keys,
            "v": values,
            "out": out,
            "cu_seqlens_q": start,
            "seqused_k": fields.length[:rows],
            "max_seqlen_q": 1 if size.decodes else size.tokens,
            "max_seqlen_k": tables.shape[1] * keys.shape[1],
            "page_table": tables[seats],
            "block_table": tables[seats],
            "softmax_scale": 1.0 / math.sqrt(q.shape[2]),
            "is_causal": True,
            "causal": True,
            "window_size_left": -1,
            "window_size_right": -1,
            "is_rotary_interleaved": True,
            "cp_world_size": 1,
        }
        self._forward(*(_value(a, given) for a in self._forward._schema.arguments))
        return out


def _value(argument: Any, given: dict[str, Any]) -> Any:
    """Return the given value of an argument, its default, or an empty value of its type."""
    if argument.name in given:
        return given[argument.name]
    if argument.has_default_value():
        return argument.default_value
    kind = str(argument.type)
    nothing = {"int": 0, "SymInt": 0, "float": 0.0, "bool": False}
    return nothing.get(kind)
