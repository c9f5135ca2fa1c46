"""What it takes to have a LoRA adapter on the GPU before a step."""

from __future__ import annotations

from collections.abc import Sequence

from simkv.costs.load import Executor, Load


class LoadingAdapters:
    """An executor whose steps begin when their adapters are there.

    Each costs ``copy_s`` seconds to the GPU and, if it was not in host memory, ``read_s`` before.
    They are loaded one after the other in the engine's thread, as vLLM does (0.33.0,
    ``vllm/lora/worker_manager.py``, ``_apply_adapters``).
    """

    def __init__(self, inner: Executor, copy_s: float, read_s: float) -> None:
        self.inner = inner
        self._copy_s, self._read_s = copy_s, read_s
        self.wants_spread: bool = getattr(inner, "wants_spread", False)

    def run(self, load: Load) -> float:
        return (
            load.lora_copies * self._copy_s + load.lora_reads * self._read_s + self.inner.run(load)
        )

    def foresee(self, load: Load, steps: int) -> list[float]:
        return self.inner.foresee(load, steps)

    def ran(self, load: Load, seconds: Sequence[float]) -> None:
        self.inner.ran(load, seconds)

    def idle(self) -> float:
        return self.inner.idle()
