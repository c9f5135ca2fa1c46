"""Duration of KV copies between two kinds of memory."""

from __future__ import annotations


class OffloadLink:
    """Link that copies KV between two kinds of memory, in both directions, while engine steps run.

    Copies in one direction run one after another, as in vLLM 0.33.0
    (``SingleDirectionOffloadingHandler`` in ``vllm/v1/kv_offload/cpu/gpu_worker.py``).
    ``bandwidth`` is in bytes per second towards the GPU, and ``back`` in the other direction.
    ``latency`` is the additional time per copy in seconds. The values are not calibrated.
    """

    def __init__(
        self, bytes_per_token: float, bandwidth: float, latency: float, back: float | None = None
    ) -> None:
        self.latency = latency
        self._load = bytes_per_token / bandwidth
        self._store = bytes_per_token / (back or bandwidth)
        self._loaded = self._stored = 0.0

    def load(self, tokens: int, start: float) -> float:
        """Schedule a transfer of ``tokens`` tokens to the GPU.

        The transfer starts at ``start`` (s) or after the previous transfer to the GPU. Return its
        end time (s).
        """
        self._loaded = max(self._loaded, start) + (self.latency + tokens * self._load)
        return self._loaded

    def store(self, tokens: int, start: float) -> float:
        """Schedule a transfer of ``tokens`` tokens from the GPU.

        The transfer starts at ``start`` (s) or after the previous transfer from the GPU. Return its
        end time (s).
        """
        self._stored = max(self._stored, start) + (self.latency + tokens * self._store)
        return self._stored
