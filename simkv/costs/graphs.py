"""The batch sizes for which vLLM captures CUDA graphs; it pads smaller steps to the next one."""

from __future__ import annotations

#: Never more tokens than this in a graph (vLLM 0.11 to 0.33, vllm/config/vllm.py).
MOST = 512


def graph_sizes(max_num_seqs: int, most: int = MOST) -> list[int]:
    """Sizes (tokens) by default: 1, 2, 4, multiples of 8 below 256, multiples of 16 from there on.

    They reach twice ``max_num_seqs`` and not beyond ``most``. As resolved by vLLM 0.19.0 for
    ``max_num_seqs`` 256 (``cudagraph_capture_sizes`` in the record of a run).
    """
    limit = min(2 * max_num_seqs, most)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16)]
    return [size for size in sizes if size <= limit]
