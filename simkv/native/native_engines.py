"""Registry of the engines whose own scheduler code can be run."""

from __future__ import annotations

from collections.abc import Mapping

from simkv.native.driver_protocol import NativeEngine
from simkv.native.sglang.sglang_driver import NATIVE_SGLANG
from simkv.native.trtllm.trtllm_driver import NATIVE_TRTLLM
from simkv.native.vllm.vllm_driver import NATIVE_VLLM

NATIVE_ENGINES: Mapping[str, NativeEngine] = {
    "vllm": NATIVE_VLLM,
    "sglang": NATIVE_SGLANG,
    "trtllm": NATIVE_TRTLLM,
}

#: Why the code of other engines cannot be run.
NOT_RUN: Mapping[str, str] = {
    "fastdeploy": "its scheduler shares state with threads and a cache manager of Paddle, which "
    "have no stubs",
    "mistralrs": "its scheduler is compiled Rust code",
}


def describe_unsupported(engine: str) -> str:
    """State why the code of an engine cannot be run, and list the engines whose code can be run."""
    why = f": {NOT_RUN[engine]}" if engine in NOT_RUN else ""
    engines = ", ".join(NATIVE_ENGINES)
    return f"the code of {engine} cannot be run{why}; expected an engine of {engines}"
