"""Tests of the execution settings that cost models read, derived from an engine's config."""

from __future__ import annotations

from typing import Any

import pytest

from simkv.costs.cost_terms import compute_feature
from simkv.costs.hardware.execution_settings_lookup import find_execution_settings
from simkv.costs.step_load import StepLoad
from simkv.schedulers.engine_registry import ENGINES
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.execution_settings import graph_sizes


def test_default_graph_sizes_match_vllm_0_19() -> None:
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


def test_pads_steps_to_the_next_graph_size_up_to_the_largest() -> None:
    sizes = graph_sizes(8)
    assert [
        compute_feature(StepLoad(0, 0, 0, n, 0), "slots", sizes) for n in (1, 3, 9, 16, 17)
    ] == [
        1,
        4,
        16,
        16,
        17,
    ]
    assert compute_feature(StepLoad(0, 0, 0, 3, 0), "slots") == 3


@pytest.mark.parametrize(
    ("knobs", "mode", "most", "share"),
    [
        ({"variant": "0.33.0"}, "full and piecewise", 512, 0.92),
        ({"variant": "0.19.0"}, "full and piecewise", 512, 0.9),
        ({"variant": "0.11.0", "cudagraph_mode": "NONE"}, "eager", None, 0.9),
        ({"max_num_seqs": 16, "max_num_batched_tokens": 24}, "full and piecewise", 24, 0.92),
        ({"max_cudagraph_capture_size": 1024}, "full and piecewise", 1024, 0.92),
        ({"cudagraph_mode": "FULL_DECODE_ONLY"}, "full decode only", 512, 0.92),
        ({"gpu_memory_utilization": 0.5}, "full and piecewise", 512, 0.5),
    ],
)
def test_vllm_settings_depend_on_config_and_release(
    knobs: dict[str, Any], mode: str, most: int | None, share: float
) -> None:
    setting = find_execution_settings(VllmConfig(**knobs))
    assert (setting.graph_mode, setting.memory_share) == (mode, share)
    assert (setting.graph_sizes[-1] if setting.graph_sizes else None) == most
    assert setting.asynchronous == (knobs.get("variant") != "0.11.0")


def test_every_engine_derives_execution_settings() -> None:
    for name, spec in ENGINES.items():
        setting = find_execution_settings(spec.config())
        assert (setting.engine, setting.max_num_batched_tokens > 0) == (name, True)
    sglang = find_execution_settings(
        SglangConfig(max_running_requests=64, disable_overlap_schedule=True)
    )
    assert (sglang.graph_sizes[-1], sglang.asynchronous) == (64, False)
