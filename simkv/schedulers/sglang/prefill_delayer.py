"""``--enable-prefill-delayer``: delay prompts until more of them can be prefilled together.

Source: ``managers/prefill_delayer.py`` of the wheels. The negotiation between ranks of
data-parallel attention is not modelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.loop_state import LoopState

#: Number of recent prefills whose sizes are stored.
REMEMBERED_ATTEMPTS = 16
#: Default maximum delay due to a short queue, in milliseconds.
DEFAULT_MAX_DELAY_MS = 5000.0


class PrefillDelayer:
    """Delay of prompts until more of them can be prefilled together.

    - Prompts wait if fewer slots are free than the largest recent prefill used.
    - Prompts wait if the queue is short compared with the running requests.
    - Prompts never wait while the used fraction of the KV pool is below the low watermark.
    - Prompts never wait for more than ``max_delay_passes`` passes.
    """

    # Prompts do not wait the first time that one of the conditions holds. ``sizes`` are the sizes
    # of recent prefills; ``passes`` is the number of delayed passes since the time ``since`` (s).

    def __init__(self, state: LoopState) -> None:
        self.state, self.config = state, state.config
        self.sizes: deque[int] = deque([0], REMEMBERED_ATTEMPTS)
        self.passes, self.since = 0, 0.0
        self.delays = False
        self._allows: bool | None = None
        self._attempted = self._waiting = 0
        self._usage = 0.0

    def begin(self) -> None:
        """Begin a pass."""
        state = self.state
        self._allows, self._attempted = None, 0
        self._waiting = len(state.waiting)
        pool = self.config.max_total_num_tokens
        self._usage = (pool - state.memory.room) / pool

    def allows(self, running: int) -> bool:
        """Return whether this pass may prefill prompts.

        ``running`` is the number of running requests.
        """
        free = self.config.rows - running
        self._attempted = max(self._attempted, min(max(self._waiting, 1), max(free, 1)))
        if self._allows is None:
            self._allows = not self._must_wait(running)
            if self._allows:
                self.passes = 0
        return self._allows

    def end(self, taken: int, prompts: int) -> None:
        """End the pass.

        - ``taken``: number of requests in the batch.
        - ``prompts``: number of requests that compute prompts.
        """
        if self._allows is None:  # there was no request to delay
            self.passes = 0
        if self.state.rules.bounds_delays:
            if size := taken or self._attempted:
                self.sizes.append(size)
        else:
            self.sizes = deque([max(*self.sizes, prompts)], REMEMBERED_ATTEMPTS)

    def _must_wait(self, running: int) -> bool:
        config = self.config
        low = config.prefill_delayer_token_usage_low_watermark
        if low is not None and self._usage < low:
            return False
        few_rows = config.rows - running < max(self.sizes)
        if not (few_rows or self._queue_is_short(running)):
            return False
        if not self.delays:
            self.delays = True
            return False
        most = config.prefill_delayer_max_delay_passes
        if self.state.rules.bounds_delays and self.passes >= most - 1:
            return False
        self.since = self.since if self.passes else self.state.now
        self.passes += 1
        return True

    def _queue_is_short(self, running: int) -> bool:
        """Return whether prompts wait because the queue is short; False after the maximum delay."""
        config, share = self.config, self.config.prefill_delayer_queue_min_ratio
        if share is None or not running:
            return False
        most = max(self.sizes)
        if config.prefill_max_requests is not None and self.state.rules.bounds_delays:
            most = config.prefill_max_requests
        if self._waiting >= min(int(running * share), most):
            return False
        return not (self.passes and self._waited >= _longest(config))

    @property
    def _waited(self) -> float:
        """Current delay in milliseconds."""
        return (self.state.now - self.since) * 1000.0

    def fingerprint(self) -> Hashable:
        """Return the state that determines the next pass."""
        late = bool(self.passes) and self._waited >= _longest(self.config)
        return self.delays, self.passes, late, tuple(self.sizes)


def _longest(config: SglangConfig) -> float:
    longest = config.prefill_delayer_max_delay_ms
    return DEFAULT_MAX_DELAY_MS if longest is None else longest
