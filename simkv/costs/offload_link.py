"""Duration of KV copies between two kinds of memory."""

from __future__ import annotations


class OffloadLink:
    """Link that copies KV in both directions, concurrently with steps.

    Copies in one direction run one after another, and the directions are independent: between GPU
    and host memory as in vLLM 0.33.0 (``SingleDirectionOffloadingHandler`` in
    ``vllm/v1/kv_offload/cpu/gpu_worker.py``), between host memory and disk as shared by many
    threads.

    ``bandwidth`` is in bytes per second towards the GPU, ``back`` in the other direction (default:
    the same); ``latency`` (s) applies to each copy. The values are not calibrated, and the slowdown
    of steps by copies is not modeled.
    """

    def __init__(
        self, bytes_per_token: float, bandwidth: float, latency: float, back: float | None = None
    ) -> None:
        self.latency = latency
        self._load = bytes_per_token / bandwidth
        self._store = bytes_per_token / (back or bandwidth)
        self._loaded = self._stored = 0.0

    def load(self, tokens: int, start: float) -> float:
        """Return the end time (s) of a copy of ``tokens`` to the GPU, begun at ``start``."""
        self._loaded = max(self._loaded, start) + (self.latency + tokens * self._load)
        return self._loaded

    def store(self, tokens: int, start: float) -> float:
        """Return the end time (s) of a copy of ``tokens`` off the GPU, begun at ``start``."""
        self._stored = max(self._stored, start) + (self.latency + tokens * self._store)
        return self._stored
