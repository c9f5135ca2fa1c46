"""How long copies of KV between two kinds of memory take."""

from __future__ import annotations


class OffloadLink:
    """One copy after the other each way, beside the steps and each other: between GPU and host
    memory as vLLM 0.33.0 has it (``SingleDirectionOffloadingHandler`` in
    ``vllm/v1/kv_offload/cpu/gpu_worker.py``), between that and a disk as many threads share it.

    ``bandwidth`` is in bytes per second towards the GPU, ``back`` the other way, the same if left
    out; ``latency`` (s) comes with each copy. None was calibrated, nor that steps become slower
    while copies share the GPU's memory with them.
    """

    def __init__(
        self, bytes_per_token: float, bandwidth: float, latency: float, back: float | None = None
    ) -> None:
        self.latency = latency
        self._load = bytes_per_token / bandwidth
        self._store = bytes_per_token / (back or bandwidth)
        self._loaded = self._stored = 0.0

    def load(self, tokens: int, start: float) -> float:
        """When the KV of so many tokens is nearer to the GPU that sets out at ``start`` (s)."""
        self._loaded = max(self._loaded, start) + (self.latency + tokens * self._load)
        return self._loaded

    def store(self, tokens: int, start: float) -> float:
        """When the KV of so many tokens is farther from it that sets out at ``start`` (s)."""
        self._stored = max(self._stored, start) + (self.latency + tokens * self._store)
        return self._stored
