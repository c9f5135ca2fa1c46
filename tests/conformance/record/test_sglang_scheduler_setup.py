"""Tests of the settings that SGLang's own scheduler reads while it is recorded."""

from __future__ import annotations

from dataclasses import fields

from simkv.native.sglang.sglang_scheduler_setup import _set
from simkv.native.sglang.sglang_stubs import SETTINGS, STUB_ATTRIBUTES
from simkv.schedulers.sglang.config import SglangConfig


def test_every_setting_is_set_where_the_scheduler_reads_it() -> None:
    config = SglangConfig(
        schedule_policy="shortest-prefill-first", allow_auto_truncate=True, max_loras_per_batch=3
    )
    _set(config)
    for knob in fields(config):
        assert getattr(SETTINGS, knob.name) == getattr(config, knob.name), knob.name
    assert STUB_ATTRIBUTES["runtime_context"]["__getattr__"]("get_schedule")() is SETTINGS
    assert STUB_ATTRIBUTES["server_args"]["get_global_server_args"]() is SETTINGS
