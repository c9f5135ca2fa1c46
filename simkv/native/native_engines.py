"""Registry of the engines whose own scheduler code can be run."""

from __future__ import annotations

from collections.abc import Mapping

from simkv.native.driver_protocol import NativeEngine
from simkv.native.sglang.sglang_driver import NATIVE_SGLANG
from simkv.native.vllm.vllm_driver import NATIVE_VLLM

NATIVE_ENGINES: Mapping[str, NativeEngine] = {"vllm": NATIVE_VLLM, "sglang": NATIVE_SGLANG}
