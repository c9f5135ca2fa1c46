"""Tests of command-line options of engine settings."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from simkv.core.engine_flags import Flag, sources
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.vllm.config import VllmConfig


@pytest.mark.parametrize(
    ("config", "field", "value", "argument"),
    [
        (VllmConfig, "max_num_seqs", 256, "--max-num-seqs 256"),
        (VllmConfig, "enable_prefix_caching", False, "--no-enable-prefix-caching"),
        (SglangConfig, "disable_radix_cache", False, "without --disable-radix-cache"),
        (VllmConfig, "num_speculative_tokens", 0, "without --speculative-config"),
        (VllmConfig, "num_cpu_blocks", 0, "without --kv-offloading-size"),
        (VllmConfig, "num_cpu_blocks", 90, "num_cpu_blocks=90 (--kv-offloading-size in GiB)"),
        (VllmConfig, "kv_connector", None, "without --kv-transfer-config"),
        (VllmConfig, "secondary_tiers", (), "secondary_tiers=[] in --kv-transfer-config"),
    ],
)
def test_argument_of_a_setting(config: type[Any], field: str, value: Any, argument: str) -> None:
    flag = sources(config)[field]
    assert isinstance(flag, Flag)
    assert flag.to_argument(field, value, negatable=config is VllmConfig) == argument


@pytest.mark.parametrize(
    ("field", "value", "parsed"),
    [
        ("num_speculative_tokens", 3, {"num_speculative_tokens": 3}),
        ("speculative_method", "ngram", {"method": "ngram"}),
        ("eviction_policy", "lru", {"kv_connector_extra_config": {"eviction_policy": "lru"}}),
        ("cudagraph_mode", "PIECEWISE", {"cudagraph_mode": "PIECEWISE"}),
    ],
)
def test_setting_in_a_json_option_can_be_typed(
    field: str, value: Any, parsed: dict[str, Any]
) -> None:
    flag = sources(VllmConfig)[field]
    assert isinstance(flag, Flag)
    name, text = shlex.split(flag.to_argument(field, value, negatable=True))
    assert name == flag.name
    assert json.loads(text) == parsed
