"""Number of draft tokens that the model accepts; schedulers cannot see it, as they cannot see
output lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from random import Random

#: Number of output positions sampled at a time.
SAMPLES_PER_CHUNK = 32


@dataclass(frozen=True, slots=True)
class DraftAcceptance:
    """Sample the number of accepted draft tokens of a request for each output position.

    If ``rates`` is a float, it is the probability that the model accepts a draft, given that it
    accepted all drafts before it. If ``rates`` is a tuple, it contains the fraction of accepted
    drafts for each draft position, in non-increasing order; drafts past the end of the tuple are
    never accepted. The result depends only on ``seed`` and the output position, not on the order of
    calls.
    """

    rates: float | tuple[float, ...]
    seed: int

    def accepted(self, place: int, drafts: int) -> int:
        """Return the number of accepted drafts, out of ``drafts``, after output token ``place``."""
        luck, count = _lucks(self.seed, place // SAMPLES_PER_CHUNK)[place % SAMPLES_PER_CHUNK], 0
        for chance in _chances(self.rates, drafts):
            if luck >= chance:
                break
            count += 1
        return count


@lru_cache(maxsize=2048)  # one entry per active request, each in one part of its output
def _lucks(seed: int, part: int) -> list[float]:
    """Return uniform random samples for ``SAMPLES_PER_CHUNK`` consecutive output positions."""
    dice = Random((seed << 32) + part)
    return [dice.random() for _ in range(SAMPLES_PER_CHUNK)]


@lru_cache
def _chances(rates: float | tuple[float, ...], drafts: int) -> tuple[float, ...]:
    """Return, for each draft, the probability that it and all drafts before it are accepted."""
    if isinstance(rates, tuple):
        return rates[:drafts]
    return tuple(rates ** (position + 1) for position in range(drafts))
