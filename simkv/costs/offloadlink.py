"""How long copies of KV between GPU and host memory take."""

from __future__ import annotations


class OffloadLink:
    """One copy after the other each way, beside the steps and each other (vLLM 0.33.0,
    ``SingleDirectionOffloadingHandler`` in ``vllm/v1/kv_offload/cpu/gpu_worker.py``).

    ``bandwidth`` is in bytes per second each way, ``latency`` (s) comes with each copy. Neither was
    calibrated, nor that steps become slower while copies share the GPU's memory with them.
    """

    def __init__(self, bytes_per_token: float, bandwidth: float, latency: float) -> None:
        self._per_token = bytes_per_token / bandwidth
        self._latency = latency
        self._to_gpu = self._to_host = 0.0

    def load(self, tokens: int, start: float) -> float:
        """When the KV of so many tokens is on the GPU that sets out at ``start`` (s)."""
        self._to_gpu = max(self._to_gpu, start) + self._seconds(tokens)
        return self._to_gpu

    def store(self, tokens: int, start: float) -> float:
        """When the KV of so many tokens is in host memory that sets out at ``start`` (s)."""
        self._to_host = max(self._to_host, start) + self._seconds(tokens)
        return self._to_host

    def _seconds(self, tokens: int) -> float:
        return self._latency + tokens * self._per_token
