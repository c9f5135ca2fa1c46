"""CUDA graph sizes, as vLLM resolves them."""

from __future__ import annotations

from simkv.costs.graphs import graph_sizes
from simkv.costs.load import Load
from simkv.costs.profile import feature_of


def test_sizes_as_recorded_from_vllm_0_19() -> None:
    sizes = graph_sizes(256)
    assert sizes[:6] == [1, 2, 4, 8, 16, 24]
    assert (248 in sizes, 264 in sizes, 272 in sizes, sizes[-1], len(sizes)) == (
        True,
        False,
        True,
        512,
        51,
    )
    assert graph_sizes(128)[-1] == 256
    assert graph_sizes(3) == [1, 2, 4]


def test_a_step_is_padded_to_the_next_size_and_a_larger_one_is_not() -> None:
    sizes = graph_sizes(8)
    assert [feature_of(Load(0, 0, 0, n, 0), "slots", sizes) for n in (1, 3, 9, 16, 17)] == [
        1,
        4,
        16,
        16,
        17,
    ]
    assert feature_of(Load(0, 0, 0, 3, 0), "slots") == 3
